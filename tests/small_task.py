"""A task small enough for many short trainings: is the left or the right half brighter?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TINY = {
    "name": "revnet38",
    "num_classes": 2,
    "in_chans": 1,
    "units": [1, 1, 1],
    "stem_width": 4,
    "widths": [4, 4, 4],
}


class TinyNet(nn.Module):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1))


class Fails(pl.Callback):
    """Ends a training by an exception after its first batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise RuntimeError("on purpose")


class Recorder(pl.LightningModule):
    """A linear classifier of the digits that keeps the batches that reach each loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.batches: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def _keep(self, name: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.batches.setdefault(name, []).append(batch)
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch: Any) -> Tensor:
        return self._keep("train", batch)

    def validation_step(self, batch: Any) -> None:
        self._keep("val", batch)

    def test_step(self, batch: Any) -> None:
        self._keep("test", batch)

    def predict_step(self, batch: Any) -> Tensor:
        return self._keep("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def halves(count: int = 64, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    images = torch.randn(count, 1, 8, 8, generator=generator)
    images[labels == 0, :, :, :4] += 1
    images[labels == 1, :, :, 4:] += 1
    return TensorDataset(images, labels)


def loader(count: int = 64, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(halves(count, seed), batch_size=16)


def trainer(run_dir: Path | None = None, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(default_root_dir=run_dir, **{**defaults, **options})
