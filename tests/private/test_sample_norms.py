"""The gradient noise scale and the hardest images, against a loop over samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, halves, loader, trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from revzoo import AdditiveCoupling
from revzoo.private import sample_norms
from revzoo.private.sample_norms import GradientNoiseScale, HardSamples
from revzoo.training import Classifier, build_callbacks

NET = {**TINY, "norm": "group"}


def change(module: Classifier, what: str) -> None:
    """Make one step drift at its first replay, or recompute it."""
    step = [m for m in module.modules() if isinstance(m, AdditiveCoupling)][-2]
    if what == "drift":
        step.drift_limit = 0.0  # any rounding exceeds it
    else:
        step.memory = what


def module() -> Classifier:
    torch.manual_seed(0)
    return Classifier(NET, optim={"lr": 0.1, "label_smoothing": 0.0})


def looped(net: Any, images: Any, labels: Any) -> torch.Tensor:
    """The gradients of the samples, flat ``(B, parameters)``."""
    rows = []
    for i in range(len(images)):
        loss = functional.cross_entropy(net(images[i : i + 1]), labels[i : i + 1])
        grads = torch.autograd.grad(loss, list(net.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def test_the_noise_scale_is_the_papers(tmp_path: Path) -> None:
    """The trace of the covariance over the squared mean, both unbiased, of the first batch."""
    images, labels = next(iter(loader()))
    g = looped(module().model, images, labels).double()
    trace = g.var(0).sum()
    square = g.mean(0).square().sum() - trace / len(g)
    (callback,) = build_callbacks(
        {"gradient_noise_scale": {"decay": 0.0, "every_n_steps": 1}}, run_dir=tmp_path
    )
    runner = trainer(tmp_path, callbacks=[callback], max_epochs=1, limit_train_batches=1)
    runner.fit(module(), loader())
    assert float(runner.callback_metrics["gradients/noise_scale"]) == pytest.approx(
        float(trace / square), rel=1e-3
    )
    norm = float(runner.callback_metrics["gradients/norm"])
    assert norm == pytest.approx(float(g.mean(0).norm()), rel=1e-4)


def test_averages_come_before_the_quotient() -> None:
    callback, logged = GradientNoiseScale(decay=0.5), {}

    class Log:
        model = torch.nn.Linear(1, 1)

        def log(self, name: str, value: float, **options: Any) -> None:
            logged[name] = value

    runner: Any = type("Runner", (), {"world_size": 1})
    expected = []
    for mean, whole in ((5.0, 2.0), (9.0, 3.0)):
        for p in Log.model.parameters():
            p.grad = torch.full_like(p, (whole / 2) ** 0.5)
        callback.read(runner, Log(), torch.full((4,), mean), None)
        expected.append((4 * (mean - whole) / 3, (4 * whole - mean) / 3))
    (t1, s1), (t2, s2) = expected
    assert logged["gradients/noise_scale"] == pytest.approx((t1 / 2 + t2) / (s1 / 2 + s2))
    other = GradientNoiseScale(decay=0.5)
    other.load_state_dict(callback.state_dict())
    assert other.state_dict() == callback.state_dict()


def test_the_picture_has_the_largest_gradients_of_the_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sample_norms, "images_figure", lambda *a: shown.append(a))
    monkeypatch.setattr(sample_norms, "add_figure", lambda trainer, tag, draw, step: draw())
    data = halves(32)
    norms = looped(module().model, *data.tensors).norm(dim=1)
    (callback,) = build_callbacks({"hard_samples": {"count": 4}}, run_dir=tmp_path)
    runner = trainer(tmp_path, callbacks=[callback], max_epochs=1)
    still = Classifier(NET, optim={"lr": 1e-9, "label_smoothing": 0.0, "weight_decay": 0.0})
    still.model.load_state_dict(module().model.state_dict())
    runner.fit(still, DataLoader(data, batch_size=16))
    ((images, captions),) = shown
    words = [caption.split() for caption in captions]  # a class, "norm", a number
    assert len(images) == 4
    hardest = norms.topk(4)
    assert [float(norm) for _, _, norm in words] == pytest.approx(hardest.values.tolist(), rel=0.01)
    labels = data.tensors[1][hardest.indices]
    assert [name for name, _, _ in words] == [str(int(label)) for label in labels]
    assert not any(m._forward_hooks for m in still.model.modules())


@pytest.mark.parametrize("kind", [GradientNoiseScale, HardSamples])
def test_training_is_the_same_with_it(tmp_path: Path, kind: Any) -> None:
    def weights(callbacks: list[pl.Callback]) -> list[torch.Tensor]:
        net = module()
        trainer(tmp_path, callbacks=callbacks, max_epochs=1).fit(net, loader())
        return list(net.model.parameters())

    measured = weights([kind(every_n_steps=3)])
    assert all(map(torch.equal, measured, weights([])))


def test_every_second_step_is_measured_as_in_the_drift_callback(tmp_path: Path) -> None:
    """The first step was measured, too, and the second was not."""
    steps: list[int] = []

    class Seen(sample_norms.ReadsNorms):
        def read(self, trainer: Any, module: Any, squares: Tensor, batch: Any) -> None:
            steps.append(trainer.global_step)

    trainer(tmp_path, callbacks=[Seen(every_n_steps=2)], max_steps=4).fit(module(), loader())
    assert steps == [1, 3]


def test_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='norm="group"'):
        trainer(tmp_path, callbacks=[HardSamples()]).fit(Classifier(TINY), loader())
    with pytest.raises(ValueError, match="accumulate_grad_batches=2"):
        trainer(tmp_path, callbacks=[HardSamples()], accumulate_grad_batches=2).fit(
            module(), loader()
        )


def test_scaled_gradients_are_refused() -> None:
    """The norms were too large by the scale of the loss."""
    runner: Any = SimpleNamespace(callbacks=[], accumulate_grad_batches=1, precision="16-mixed")
    with pytest.raises(ValueError, match="precision=fp16, whose gradients are scaled"):
        GradientNoiseScale().on_fit_start(runner, module())


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_a_measurement_leaves_the_mode_of_the_model(tmp_path: Path) -> None:
    """A model in evaluation mode was trained."""
    frozen = module()
    frozen.model.eval()
    runner = trainer(tmp_path, callbacks=[GradientNoiseScale()], max_steps=1)
    runner.fit(frozen, loader())
    assert not any(m.training for m in frozen.model.modules())


def test_a_repeated_step_is_counted_once(tmp_path: Path) -> None:
    """After a drift, the norms of the failed pass stayed in the sum."""
    seen: dict[str, list[Tensor]] = {}

    class Seen(HardSamples):
        def read(self, trainer: Any, module: Any, squares: Tensor, batch: Any) -> None:
            seen.setdefault(self.what, []).append(squares)

    for what in ("drift", "recompute"):
        callback = Seen(every_n_steps=1)
        callback.what = what
        torch.manual_seed(0)
        deep = Classifier({**NET, "units": [2, 2, 2], "memory": "invert"}, optim={"lr": 0.05})
        change(deep, what)
        trainer(tmp_path, callbacks=[callback], max_steps=2).fit(deep, loader())
    for found, expected in zip(*seen.values(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4)
