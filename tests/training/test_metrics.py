from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer
from torch import Tensor
from torch.nn import functional

from revzoo.training import Classifier
from revzoo.training.metrics import BalancedAccuracy


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
    metric = BalancedAccuracy(num_classes=4, average=None, validate_args=False)
    metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 2]))
    assert float(metric.compute()) == pytest.approx(0.75)
