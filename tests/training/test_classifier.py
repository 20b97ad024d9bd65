from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from small_task import TINY, TinyNet, halves, loader, trainer
from small_weights import OPTIONS, small, write_entry
from torch import nn
from torch.nn import functional

from revzoo.data import Digits
from revzoo.training import Classifier, OptimSpec
from revzoo.training.checkpoint.files import PlainCheckpointIO
from revzoo.weights.errors import EntryError
from revzoo.weights.table import WeightsTable

CONSTANT = {"lr": 0.05, "schedule": {"name": "constant"}}


def test_training_learns_and_logs(tmp_path: Path) -> None:
    module = Classifier(TINY, optim=CONSTANT)
    runner = trainer(tmp_path, max_epochs=8)
    runner.fit(module, loader(128), loader(64, seed=1))
    figures = runner.callback_metrics
    assert {"train/loss", "train/acc", "train/loss_step", "val/loss", "val/acc"} <= set(figures)
    assert not [name for name in figures if name.endswith("acc5")]
    assert figures["val/acc"] > 0.9


def test_logged_figures_equal_the_models(tmp_path: Path) -> None:
    module = Classifier(TinyNet())
    (result,) = trainer(tmp_path).test(module, loader(40), verbose=False)
    images, labels = halves(40).tensors
    with torch.no_grad():
        logits = module.eval()(images)
    assert result["test/loss"] == pytest.approx(float(functional.cross_entropy(logits, labels)))
    assert result["test/acc"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))


def test_top5_above_five_classes(tmp_path: Path) -> None:
    module = Classifier(TinyNet(num_classes=6))
    (result,) = trainer(tmp_path).test(module, loader(40), verbose=False)
    images, labels = halves(40).tensors
    with torch.no_grad():
        best = module.eval()(images).topk(5).indices
    assert result["test/acc5"] == pytest.approx(float((best == labels[:, None]).sum() / 40))
    assert (
        "test/acc5"
        not in trainer(tmp_path).test(Classifier(TinyNet(5)), loader(), verbose=False)[0]
    )


def test_model_and_data_must_have_the_same_number_of_classes(tmp_path: Path) -> None:
    module = Classifier({**TINY, "num_classes": 5, "in_chans": 1})
    for run in (trainer(tmp_path).fit, trainer(tmp_path).test):
        with pytest.raises(ValueError, match=r"num_classes=5, the data have 10 .* num_classes=10"):
            run(module, datamodule=Digits())


def test_only_the_training_loss_is_smoothed_and_weighted() -> None:
    batch = tuple(halves(16).tensors)
    module = Classifier(TinyNet(), optim={"label_smoothing": 0.5, "class_weights": [1, 3]})
    logged: dict[str, Any] = {}
    module.log = lambda name, value, **_: logged.__setitem__(name, value)  # type: ignore[method-assign]
    with torch.no_grad():
        smoothed = module.training_step(batch, 0)
        # the statistics of the batch in both calls
        logits = module(batch[0])
        module.eval().validation_step(batch, 0)
    options: Any = {"weight": torch.tensor([1.0, 3.0]), "label_smoothing": 0.5}
    expected = functional.cross_entropy(logits, batch[1], reduction="sum", **options) / 16
    with torch.no_grad():
        logits = module(batch[0])
    torch.testing.assert_close(smoothed, expected)
    val_loss = logged["val/loss"].compute()
    torch.testing.assert_close(val_loss, functional.cross_entropy(logits, batch[1]))
    assert smoothed != val_loss


def test_labels_may_be_class_probabilities(tmp_path: Path) -> None:
    def figures(labels: torch.Tensor) -> dict[str, Any]:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(images, labels)
        batches = torch.utils.data.DataLoader(data, batch_size=16)
        runner = trainer(tmp_path)
        runner.fit(Classifier(TINY, optim={**CONSTANT, "label_smoothing": 0.1}), batches, batches)
        return dict(runner.callback_metrics)

    images, labels = halves().tensors
    hard, shares = figures(labels), figures(functional.one_hot(labels).float())
    assert hard.keys() == shares.keys()
    assert {k: float(v) for k, v in shares.items()} == pytest.approx(
        {k: float(v) for k, v in hard.items()}, rel=1e-5
    )


def test_an_overridden_loss_is_trained_and_evaluated(tmp_path: Path) -> None:
    class Squares(Classifier):
        def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (logits.softmax(1)[:, 1] - labels).square().mean()

    module = Squares(TinyNet(), optim=CONSTANT)
    runner = trainer(tmp_path, max_epochs=1)
    runner.fit(module, loader(), loader())
    figures = {name: float(value) for name, value in runner.callback_metrics.items()}
    # a mean of squares of differences of probabilities; cross-entropy starts at 0.7
    assert 0 < figures["train/loss"] < 0.4
    (tested,) = runner.test(module, loader(), verbose=False)
    images, labels = halves().tensors
    with torch.no_grad():
        expected = float(module.loss(module.eval()(images), labels))
    assert figures["val/loss"] == pytest.approx(expected)
    assert tested["test/loss"] == pytest.approx(expected)


def test_rate_follows_the_schedule_every_step(tmp_path: Path) -> None:
    class Rates(pl.Callback):
        seen: list[float] = []  # noqa: RUF012

        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates = Rates()
    spec = OptimSpec(lr=1e-3, schedule={"name": "step", "milestones": [0.5, 0.75]})
    trainer(tmp_path, max_epochs=2, callbacks=[rates]).fit(
        Classifier(TinyNet(), optim=spec), loader()
    )
    assert rates.seen == pytest.approx([1e-3] * 4 + [1e-4] * 2 + [1e-5] * 2)


@pytest.mark.parametrize("memory", ["recompute", "invert"])
def test_memory_modes_train_alike(tmp_path: Path, memory: str) -> None:
    def losses(mode: str) -> list[float]:
        torch.manual_seed(0)
        logger = CSVLogger(tmp_path, name=mode)
        module = Classifier({**TINY, "memory": mode}, optim=CONSTANT)
        trainer(tmp_path, logger=logger, precision="64-true").fit(module, loader_float64())
        with Path(logger.log_dir, "metrics.csv").open() as file:
            return [
                float(r["train/loss_step"]) for r in csv.DictReader(file) if r["train/loss_step"]
            ]

    stored = losses("store")
    assert len(stored) == 8
    assert losses(memory) == pytest.approx(stored, abs=1e-6)  # logged in float32


@pytest.mark.parametrize("batches", [1, 2])
def test_the_loss_is_logged_in_every_nth_step_and_the_last(tmp_path: Path, batches: int) -> None:
    losses: list[float] = []

    class Losing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    logger, options = CSVLogger(tmp_path), {"accumulate_grad_batches": batches, "max_steps": 8}
    runner = trainer(tmp_path, logger=logger, log_every_n_steps=3, max_epochs=-1, **options)
    runner.fit(Losing(TINY, optim=CONSTANT), loader(512))
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss_step"]]
    expected = losses[batches - 1 :: batches]
    assert {int(r["step"]): float(r["train/loss_step"]) for r in rows} == pytest.approx(
        {step: expected[step] for step in (2, 5, 7)}
    )


def loader_float64() -> Any:
    images, labels = halves().tensors
    data = torch.utils.data.TensorDataset(images.double(), labels)
    return torch.utils.data.DataLoader(data, batch_size=16)


def test_checkpoint_loads_as_weights_only(tmp_path: Path) -> None:
    keep = ModelCheckpoint(dirpath=tmp_path, filename="best", monitor="val/acc", mode="max")
    module = Classifier(TINY, optim=CONSTANT)
    runner = trainer(tmp_path, enable_checkpointing=True, callbacks=[keep], max_epochs=1)
    runner.fit(module, loader(), loader())
    saved = torch.load(keep.best_model_path, weights_only=True)
    assert saved["hyper_parameters"]["model"] == TINY
    loaded = Classifier.load_from_checkpoint(keep.best_model_path, weights_only=True)
    assert loaded.optim == module.optim
    images = halves().tensors[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(images), module.eval()(images))


def test_the_folder_of_a_run_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    """It was called a damaged checkpoint."""
    module, runner = Classifier(TINY), trainer(tmp_path, enable_checkpointing=True, max_epochs=1)
    runner.fit(module, loader())
    runner.save_checkpoint(tmp_path / "checkpoints" / "best.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path)
    assert torch.equal(loaded.model.norm.running_mean, module.model.norm.running_mean)


def test_a_checkpoint_needs_no_pretrained_weights(tmp_path: Path) -> None:
    write_entry(tmp_path)
    start = {"pretrained": True, "table": WeightsTable(tmp_path), "num_classes": 2}
    module = Classifier({"name": "revnet38.small", **start})
    assert torch.equal(module.model.state_dict()["norm.running_var"], small().norm.running_var)
    spec = module.hparams["model"]
    shape = json.loads(json.dumps(OPTIONS))
    assert spec == {**shape, "name": "revnet38", "num_classes": 2, "in_chans": 3}
    Classifier(spec).load_state_dict(module.state_dict())


def test_prediction_is_probabilities(tmp_path: Path) -> None:
    module = Classifier(TinyNet(3))
    batches = trainer(tmp_path).predict(module, loader(20))
    assert batches is not None
    probabilities = torch.cat(batches)  # type: ignore[arg-type]
    assert probabilities.shape == (20, 3)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(20))


def test_channels_last_changes_the_layout_only() -> None:
    spec = {**TINY, "in_chans": 3}
    torch.manual_seed(0)
    plain = Classifier(spec).eval()
    torch.manual_seed(0)
    last = Classifier(spec, channels_last=True).eval()
    seen: list[torch.Tensor] = []
    last.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    images = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(last(images), plain(images))
    convs = [m.weight for m in last.modules() if isinstance(m, nn.Conv2d)]
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in convs)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_loss_is_accumulated_in_float32_or_better(tmp_path: Path, precision: Any) -> None:
    dtypes: list[torch.dtype] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            dtypes.append(outputs["loss"].dtype)

    double = precision == "64-true"
    runner = trainer(tmp_path, precision=precision, max_epochs=1, callbacks=[Watch()])
    runner.fit(Classifier(TINY, optim=CONSTANT), loader_float64() if double else loader())
    assert set(dtypes) == {torch.float64 if double else torch.float32}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_classes": 2}, "model.name is missing"),
        ({"name": "revnet39"}, "revnet38"),
        (nn.Linear(2, 2), "Linear.num_classes is None"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classifier(model)


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    trainer(tmp_path, max_epochs=1).fit(Classifier(TINY), loader())
    assert capsys.readouterr().out == ""


def test_byte_images_are_refused() -> None:
    data = Digits()
    data.setup("fit")
    images, _ = next(iter(data.train_dataloader()))
    with pytest.raises(ValueError, match=r"torch\.uint8: expected normalised .* data\.transform"):
        Classifier({**TINY, "in_chans": 1})(images)


def test_only_a_constant_rate_needs_no_end(tmp_path: Path) -> None:
    def stop(runner: pl.Trainer, *_: Any) -> None:
        runner.should_stop = runner.global_step > 4  # a time of 1 s was too short on a busy machine

    endless = {"max_epochs": -1, "callbacks": [LambdaCallback(on_train_batch_end=stop)]}
    with pytest.raises(ValueError, match='or use the schedule "constant"'):
        trainer(tmp_path, **endless).fit(Classifier(TINY), loader())
    runner = trainer(tmp_path, **endless)
    runner.fit(Classifier(TINY, optim=CONSTANT), loader())
    assert runner.global_step > 4


def test_a_trained_network_is_saved_with_the_facts_of_its_data(tmp_path: Path) -> None:
    """A fine-tuned model, saved with `save_pretrained`, had the mean, deviation and classes of
    its pretraining (accuracy 0.95 in training, 0.41 evaluated)."""
    write_entry(tmp_path, classes=tuple("abcde"))
    spec = {"name": "revnet38", "pretrained": True, "table": WeightsTable(tmp_path)}
    module = Classifier({**spec, "num_classes": 10, "in_chans": 1}, optim=CONSTANT)
    data = Digits(batch_size=32)
    runner = trainer(tmp_path, max_steps=1, plugins=[PlainCheckpointIO()])
    runner.fit(module, datamodule=data)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "a.ckpt")
    for trained in (module, loaded):
        network: Any = trained.model
        entry = network.save_pretrained(tmp_path / "net")
        assert entry.classes == tuple(data.classes)
        assert entry.input_size == (1, 8, 8)
        assert entry.crop_pct == 1.0
        images = torch.rand(4, 1, 8, 8)
        scaled = (images - torch.tensor(entry.mean)[0]) / torch.tensor(entry.std)[0]
        expected = data.transform((images * data.pixel_max), training=False)
        torch.testing.assert_close(scaled, expected)
    network = module.model
    trainer(tmp_path, max_steps=1).fit(module, loader(16))
    with pytest.raises(
        EntryError, match=r"classes=\.\.\., mean=\.\.\., std=\.\.\. of its training"
    ):
        network.save_pretrained(tmp_path / "net")  # trained on unknown data


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_classes, self.head = 2, nn.Linear(64, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1))


class Stream(torch.utils.data.IterableDataset[Any]):
    """Batches without a length, so the last one shows only when it is there."""

    def __iter__(self) -> Any:
        yield from loader(96)


@pytest.mark.parametrize(
    ("group", "steps", "streams"),
    [(4, 4, False), (64, 2, False), (3, 4, False), (4, 4, True), (1, 12, True)],
)
def test_an_optimiser_step_divides_by_its_own_batches(
    group: int, steps: int, streams: bool, tmp_path: Path
) -> None:
    """Lightning divides by ``accumulate_grad_batches``, though an epoch's last group is shorter."""
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    batches: list[Any] = []

    def collect(runner: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batches.append(batch)

    def compare(runner: Any, module: Any, optimizer: Any) -> None:
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        batches.clear()
        weight = module.model.head.weight
        loss = functional.cross_entropy(module.model(images), labels)
        found.append(weight.grad.clone())
        expected.extend(torch.autograd.grad(loss, weight))

    watch = LambdaCallback(on_train_batch_start=collect, on_before_optimizer_step=compare)
    runner = trainer(tmp_path, callbacks=[watch], accumulate_grad_batches=group)
    data = torch.utils.data.DataLoader(Stream(), batch_size=None) if streams else loader(96)
    runner.fit(Classifier(Linear(), optim=CONSTANT), data)
    assert len(found) == steps
    torch.testing.assert_close(found, expected)
