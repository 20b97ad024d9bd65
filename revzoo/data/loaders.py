"""How the loaders of training images, and of those that are evaluated, are made."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from revzoo.data.errors import DataError
from revzoo.data.images import Batch, ImageSet, as_is
from revzoo.data.order import EpochSampler, SteadyLoader, TrainLoader
from revzoo.data.workers import available_cpus

_MOST_WORKERS = 8


def train_loader(
    images: ImageSet, *, batch_size: int, workers: int | None, seed: int, trainer: pl.Trainer | None
) -> TrainLoader:
    """This process's share of the images, in an order of its own in each epoch.

    Args:
        images: of training.
        batch_size: images per step and process; an incomplete last batch is dropped.
        workers: as in ``ImageData``.
        seed: with the epoch, what decides the order.
        trainer: what the loader is for; None for a loop of one's own, in one process.

    Raises:
        DataError: there are fewer images than in a batch.
    """
    processes, rank = (1, 0) if trainer is None else (trainer.world_size, trainer.global_rank)
    check_batch_size(batch_size, len(images), processes)
    any_trainer: Any = trainer
    overfits = trainer is not None and any_trainer.overfit_batches  # the same few in every epoch
    sampler = EpochSampler(len(images), seed=seed, processes=processes, rank=rank)
    loader = TrainLoader(
        **_options(images, batch_size, workers),
        sampler=None if overfits else sampler,
        drop_last=True,
    )
    if trainer is not None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        loader.first_batch = lambda: progress.current.ready
    return loader


def check_batch_size(batch_size: int, images: int, processes: int) -> None:
    """Refuse batches larger than what each process has of the training images.

    Raises:
        DataError: naming the largest that would do.
    """
    share = images // processes
    if share < batch_size:
        raise DataError(
            f"batch_size={batch_size} is more than the {share} training images of each "
            f"process: set data.batch_size to at most {share}"
        )


def eval_loader(images: ImageSet, *, batch_size: int, workers: int | None) -> DataLoader[Batch]:
    """All images, in their order."""
    return SteadyLoader(**_options(images, batch_size, workers))


def _options(images: ImageSet, batch_size: int, workers: int | None) -> dict[str, Any]:
    if workers is None:
        workers = 0 if images.in_memory else min(_MOST_WORKERS, available_cpus())
    return {
        "dataset": images,  # a Dataset by protocol: __len__ and __getitems__
        "batch_size": batch_size,
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "pin_memory": torch.cuda.is_available(),
        "collate_fn": as_is,
        "generator": torch.Generator(),  # seeds workers: the global one is the model's
    }
