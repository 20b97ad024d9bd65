"""Private training through Lightning: steps, budget, resuming, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, TinyNet, loader, trainer

from revzoo.data import Digits
from revzoo.data.order import PoissonSampler, hash_seed
from revzoo.private.callback import PrivateTraining, noise_seed
from revzoo.training import Classifier, build_callbacks
from revzoo.training.checkpoint.files import PlainCheckpointIO, read_checkpoint
from revzoo.weights.source import LAST

pytest.importorskip("opacus")

NET = {**TINY, "num_classes": 10, "norm": "group"}
BATCHES = 4


class Stop(pl.Callback):
    """Ends a training by an exception after some steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def fit(
    folder: Path,
    *,
    memory: str = "exact",
    resume: bool = False,
    extra: tuple[pl.Callback, ...] = (),
    data: Digits | None = None,
    net: dict[str, Any] = NET,
    private: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Classifier, PrivateTraining, dict[str, float]]:
    pl.seed_everything(5 if resume else 0, workers=True, verbose=False)
    names = {"last_checkpoint": {}, "private": {"epsilon": 8.0, **(private or {})}}
    callbacks = build_callbacks(names, run_dir=folder)
    options = {"max_epochs": 2, "limit_train_batches": BATCHES, **options}
    runner = trainer(
        folder,
        enable_checkpointing=True,
        callbacks=[*callbacks, *extra],
        plugins=[PlainCheckpointIO()],
        **options,
    )
    module = Classifier(
        {**net, "memory": memory},
        optim={"lr": 0.5, "momentum": 0.9, "weight_decay": 0.0, **(optim or {})},
    )
    path = folder / "checkpoints" / LAST if resume else None
    data = data or Digits(batch_size=32)
    runner.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    (callback,) = [c for c in callbacks if isinstance(c, PrivateTraining)]
    return module, callback, {k: float(v) for k, v in runner.callback_metrics.items()}


def weights(module: Classifier) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.model.named_parameters()}


def test_a_run_spends_its_budget_and_no_more(tmp_path: Path) -> None:
    data = Digits(batch_size=32)
    module, callback, figures = fit(tmp_path, data=data)
    assert 7 < figures["private/epsilon"] <= 8
    assert figures["private/epsilon"] == pytest.approx(callback.spent())
    ((sigma, q, steps),) = callback._accountant.history
    assert (q, steps) == (32 / data.train_count, 2 * BATCHES)
    assert sigma == callback.noise_multiplier
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.model.modules())


def test_invert_and_exact_train_as_store_does(tmp_path: Path) -> None:
    expected = weights(fit(tmp_path / "store", memory="store")[0])
    for memory in ("invert", "exact", "recompute"):
        found = weights(fit(tmp_path / memory, memory=memory)[0])
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    """Weights bit for bit, the accountant's history, epsilon; stopped within an epoch."""
    whole, accounted, figures = fit(tmp_path / "whole")
    with pytest.raises(SystemExit):
        fit(tmp_path / "stopped", extra=(Stop(6),))
    state = read_checkpoint(tmp_path / "stopped" / "checkpoints" / LAST)
    kept = next(v for k, v in state["callbacks"].items() if "Private" in k)
    assert kept["history"][0][2] in (BATCHES, 6)
    again, continued, after = fit(tmp_path / "stopped", resume=True)
    assert continued._accountant.history == accounted._accountant.history
    assert after["private/epsilon"] == figures["private/epsilon"]
    for name, value in weights(again).items():
        assert torch.equal(value, weights(whole)[name]), name


def test_other_options_do_not_resume(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match="resume with the same options"):
        fit(tmp_path, resume=True, private={"max_grad_norm": 2.0})


def test_a_resumed_run_does_not_exceed_the_budget(tmp_path: Path) -> None:
    """Its noise is the noise of the first run, which suits as many steps of the same rate."""
    with pytest.raises(SystemExit):
        fit(tmp_path, extra=(Stop(BATCHES + 1),))
    with pytest.raises(
        ValueError, match=r"more steps with the noise of the checkpoint would spend"
    ):
        fit(tmp_path, resume=True, max_epochs=3)


def test_a_resumed_run_keeps_its_noise(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1, private={"noise_multiplier": 1.0})
    with pytest.raises(ValueError, match="resume with the same options"):
        fit(tmp_path, resume=True, private={"noise_multiplier": 2.0})


def test_a_step_is_the_clipped_sum_and_the_noise(tmp_path: Path) -> None:
    """With a rate of 1 and no noise, against gradients of a loop; with noise, its scale."""

    class Gradients(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.found = {n: p.grad.clone() for n, p in module.model.named_parameters()}
            raise KeyboardInterrupt

    def gradients(noise: float) -> dict[str, torch.Tensor]:
        kept = Gradients()
        with pytest.raises(SystemExit):
            fit(tmp_path, extra=(kept,), private={"noise_multiplier": noise, "max_grad_norm": 0.1})
        return kept.found

    without, with_noise = gradients(0.0), gradients(2.0)
    norm = math.sqrt(sum(float(g.square().sum()) for g in without.values()))
    assert 0 < norm <= 0.1 * 1.5  # a batch of more than 32 images may exceed it
    noise = torch.cat([(with_noise[n] - g).flatten() for n, g in without.items()])
    assert float(noise.std()) == pytest.approx(2.0 * 0.1 / 32, rel=0.1)
    assert abs(float(noise.mean())) < 0.1 * float(noise.std())


def test_an_empty_batch_takes_a_step_of_noise_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """With new noise in each step."""

    class Gradients(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found.append(module.model.fc.weight.grad.clone())

    found: list[torch.Tensor] = []
    monkeypatch.setattr(PoissonSampler, "batch", lambda self, epoch, index: [])
    for noise in (0.0, 2.0):
        private = {"noise_multiplier": noise, "max_grad_norm": 0.1}
        _, callback, _ = fit(tmp_path, private=private, max_epochs=1, extra=(Gradients(),))
        assert callback._accountant.history[0][2] == BATCHES
    without, with_noise = torch.stack(found[:BATCHES]), torch.stack(found[BATCHES:])
    assert not without.any()
    assert float(with_noise.std()) == pytest.approx(2.0 * 0.1 / 32, rel=0.2)
    assert len(with_noise.flatten(1)[:, 0].unique()) == BATCHES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"net": {**NET, "norm": "batch"}}, 'norm="group"'),
        ({"data": Digits(batch_size=32, augment={"mixup": 0.2})}, "mixup"),
        ({"optim": {"class_weights": "balanced"}}, "Give a list of numbers"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"precision": "bf16-mixed"}, "bf16-mixed"),
        ({"max_epochs": -1, "max_steps": -1}, "schedule|without an end"),
        ({"private": {"delta": 0.01}}, "delta=0.01 for 1"),
        ({"private": {"epsilon": 0.0}}, "epsilon=0.0"),
        ({"private": {"accountant": "gdp"}}, "callbacks.private.accountant=gdp"),
    ],
)
def test_what_breaks_the_guarantee_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, **options)


def test_plain_loaders_are_refused(tmp_path: Path) -> None:
    (callback,) = build_callbacks({"private": {}}, run_dir=tmp_path)
    runner = trainer(tmp_path, callbacks=[callback])
    with pytest.raises(ValueError, match="a data module of"):
        runner.fit(Classifier(TinyNet()), loader(), loader())


def test_noise_shares_no_seed_with_batches_and_augmentation() -> None:
    """The noise of step n had the seed of batch 1 of epoch n."""
    numbers = range(12)
    batches = {hash_seed(7, epoch, index) for epoch in numbers for index in numbers}
    augmented = {
        hash_seed(7, epoch, i, rank) for epoch in numbers for i in numbers for rank in (0, 1)
    }
    assert not {noise_seed(7, step) for step in numbers} & (batches | augmented)


def test_the_data_draw_ordinary_batches_again_after_training(tmp_path: Path) -> None:
    data = Digits(batch_size=32)
    fit(tmp_path, data=data, max_epochs=1)
    assert not data.poisson


def test_a_model_in_evaluation_mode_is_refused(tmp_path: Path) -> None:
    """It was switched to training mode, frozen parts included."""
    module = Classifier({**NET, "memory": "exact"})
    module.model.eval()
    (callback,) = build_callbacks({"private": {"epsilon": 8.0}}, run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"training mode: call model\.train"):
        trainer(tmp_path, callbacks=[callback]).fit(module, datamodule=Digits(batch_size=32))
