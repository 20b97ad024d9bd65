from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer
from torch import Tensor
from torch.nn import functional

from revzoo.cli.schema import MONITORED
from revzoo.training import Classifier, MultilabelClassifier, Regressor
from revzoo.training.figure_names import higher_is_better
from revzoo.training.metrics import AUROC, Rate, by_split, classification_figures
from revzoo.training.tasks.registry import TASKS


class Counting(Classifier):
    """Counts the calls of ``log`` by name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[str] = []

    def log(self, name: str, *args: Any, **options: Any) -> None:
        self.asked.append(name)
        super().log(name, *args, **options)


class Gather(pl.Callback):
    """Records the losses of each epoch's steps, and the figures at its end."""

    def __init__(self) -> None:
        self.losses: list[list[float]] = []
        self.figures: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.losses.append([])

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses[-1].append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.figures.append(float(trainer.callback_metrics["train/loss"]))


def test_each_epoch_logs_the_mean_of_its_steps_once(tmp_path: Path) -> None:
    module, gather = Counting(TinyNet(), optim={"lr": 0.05}), Gather()
    trainer(tmp_path, max_epochs=3, callbacks=[gather]).fit(module, loader(64))
    assert [len(losses) for losses in gather.losses] == [4, 4, 4]
    assert gather.figures == pytest.approx([sum(losses) / 4 for losses in gather.losses])
    assert module.asked.count("train/loss") == module.asked.count("train/acc") == 3


def test_metrics_that_a_custom_step_does_not_update_are_not_logged(tmp_path: Path) -> None:
    class Own(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return functional.cross_entropy(self(batch[0]), batch[1])

    runner = trainer(tmp_path, max_epochs=1)
    runner.fit(Own(TinyNet()), loader(), loader())
    assert "train/loss" not in runner.callback_metrics
    assert "val/loss" in runner.callback_metrics


def test_balanced_accuracy_is_the_mean_of_the_recalls(tmp_path: Path) -> None:
    """Of 40 and 14 images 36 and 7 are right: 0.9 and 0.5."""

    class Fixed(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return functional.one_hot(images[:, 0, 0, 0].long(), 2).float()

    labels = torch.tensor([0] * 40 + [1] * 14)
    predicted = torch.tensor([0] * 36 + [1] * 4 + [1] * 7 + [0] * 7)
    images = predicted.float().view(-1, 1, 1, 1)
    data = torch.utils.data.TensorDataset(images, labels)
    batches = torch.utils.data.DataLoader(data, batch_size=16)
    for split, run in (("val", trainer(tmp_path).validate), ("test", trainer(tmp_path).test)):
        (figures,) = run(Fixed(TinyNet()), batches, verbose=False)
        assert figures[f"{split}/balanced_acc"] == pytest.approx(0.7)
        assert figures[f"{split}/acc"] == pytest.approx(43 / 54)


def test_a_class_without_images_does_not_count() -> None:
    """torchmetrics' macro accuracy is 1/3: the second class counts as 0, taken for one image."""
    metric = Rate("recall", 4)
    metric.update(functional.one_hot(torch.tensor([0, 1, 2]), 4), torch.tensor([0, 0, 2]))
    assert float(metric.compute()) == pytest.approx(0.75)


def ranked(scores: Tensor, true: Tensor) -> tuple[float, float]:
    """AUROC and average precision, from pairs and ranks."""
    own, others = scores[true], scores[~true]
    pairs = own[:, None] - others[None]
    auroc = ((pairs > 0) + 0.5 * (pairs == 0)).float().mean()
    precision = [float(true[scores >= s].float().mean()) for s in own]
    return float(auroc), sum(precision) / len(precision)


@pytest.mark.parametrize("classes", [2, 4])
def test_figures_of_classes_are_those_of_their_formulas(classes: int) -> None:
    labels = torch.randint(classes, (200,))
    logits = torch.randn(200, classes) + 1.5 * functional.one_hot(labels, classes)
    metrics = by_split(partial(classification_figures, classes))["val_metrics"]
    for part in range(4):
        batch = slice(50 * part, 50 * part + 50)
        metrics.update(value=torch.zeros(50), preds=logits[batch], target=labels[batch])
    figures = {name: float(value) for name, value in metrics.compute().items()}
    p, found = logits.softmax(1), logits.argmax(1)
    rows = []
    for c in range(classes):
        own, taken = labels == c, found == c
        auroc, ap = ranked((p[:, c] / (1 - p[:, c])).log(), own)
        f1 = 2 * (own & taken).sum() / (own.sum() + taken.sum())
        sensitivity = (own & taken).sum() / own.sum()
        rows.append(
            (auroc, ap, float(f1), float(sensitivity), float((~own & ~taken).sum() / (~own).sum()))
        )
    mean = [sum(column) / classes for column in zip(*rows, strict=True)]
    if classes == 2:  # the figures of the second class
        mean[1], mean[3:] = rows[1][1], rows[1][3:]
    names = ("auroc", "ap", "f1", "sensitivity", "specificity")
    tolerance = {"auroc": 3e-3, "ap": 1e-2}  # of the bins
    for name, expected in zip(names, mean, strict=True):
        assert figures[f"val/{name}"] == pytest.approx(expected, abs=tolerance.get(name, 1e-6)), (
            name
        )
    gap = 0.0
    shares = p.amax(1)
    for low in range(15):
        inside = (shares * 15).long().clamp(max=14) == low
        if inside.any():
            right = (found == labels)[inside].float().mean()
            gap += float(inside.float().mean() * (right - shares[inside].mean()).abs())
    assert figures["val/ece"] == pytest.approx(gap, abs=1e-6)
    assert figures["val/acc"] == pytest.approx(float((found == labels).float().mean()))


def test_figures_of_labels_are_those_of_each() -> None:
    labels, logits = (torch.rand(100, 3) > 0.6).float(), torch.randn(100, 3)
    module = MultilabelClassifier(TinyNet(3))
    metrics = module.metrics_of("val")
    metrics.update(value=torch.zeros(100), **module.measured(logits, labels))
    figures = metrics.compute()
    rows = [ranked(logits[:, k], labels[:, k] > 0) for k in range(3)]
    assert float(figures["val/auroc"]) == pytest.approx(sum(r[0] for r in rows) / 3, abs=3e-3)
    assert metrics["ap"].values.tolist() == pytest.approx([r[1] for r in rows], abs=1e-2)
    right = (logits > 0) == (labels > 0)
    assert float(figures["val/acc"]) == pytest.approx(float(right.float().mean()))
    own = [float(right[labels[:, k] > 0, k].float().mean()) for k in range(3)]
    assert float(figures["val/sensitivity"]) == pytest.approx(sum(own) / 3)


def test_rare_classes_are_ranked_below_a_probability_of_1_in_200() -> None:
    """Thresholds evenly spaced in the probability see one value."""
    metric = AUROC(1, labels=True)
    metric.update(torch.linspace(-9, -7, 40)[:, None], (torch.arange(40) >= 20)[:, None].float())
    assert float(metric.compute()) == 1


def test_errors_are_in_the_unit_of_the_target() -> None:
    module = Regressor(TinyNet(2))
    module.standardise({"mean": [2000.0, 0.0], "std": [10.0, 2.0]})
    true = torch.randn(300, 2) * torch.tensor([10.0, 2]) + torch.tensor([2000.0, 0])
    found = true + torch.randn(300, 2)
    logits = (found - module.target_mean) / module.target_std
    metrics = module.metrics_of("val")
    for part in (slice(100), slice(100, 300)):
        metrics.update(value=torch.zeros(1), **module.measured(logits[part], true[part]))
    figures, error = metrics.compute(), found - true
    assert float(figures["val/mae"]) == pytest.approx(float(error.abs().mean()), rel=1e-3)
    rmse = error.square().mean(0).sqrt()
    assert metrics["rmse"].values.tolist() == pytest.approx(rmse.tolist(), rel=1e-3)
    r2 = 1 - error.square().sum(0) / (true - true.mean(0)).square().sum(0)
    assert metrics["r2"].values.tolist() == pytest.approx(r2.tolist(), abs=1e-4)


def test_the_names_say_which_figures_are_better_if_low() -> None:
    for kind in TASKS.values():
        for split in ("train", "val"):
            for name, metric in kind(TinyNet(6)).metrics_of(split).items(keep_base=True):
                if name != "loss":
                    assert higher_is_better(name) == metric.higher_is_better, name
                assert f"{split}/{name}" in MONITORED


def test_logits_of_nan_do_not_end_a_run() -> None:
    metrics = by_split(partial(classification_figures, 3))["val_metrics"]
    nan = torch.full((4, 3), torch.nan)
    metrics.update(value=torch.zeros(4), preds=nan, target=torch.tensor([0, 1, 2, 2]))
    assert metrics.compute()["val/acc"] == 0.25
