"""Trials: short trainings of copies, which leave the run unchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.seed import isolate_rng

from revzoo.training.classifier import Classifier
from revzoo.training.optim.optimizers import build_optimizer

# options of a run's trainer that affect a step or its device
KEPT = (
    "accelerator",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)


class Trial(Classifier):
    """A copy of a classifier, without the callbacks and the schedule of a run."""

    def __init__(self, original: Classifier) -> None:
        for name in ("training_step", "loss"):
            if getattr(type(original), name) is not getattr(Classifier, name):
                raise TypeError(
                    f"{type(original).__name__} overrides {name}, which trials do not run: "
                    f"expected Classifier's own {name}; set optim.lr and data.batch_size by hand"
                )
        layout = bool(original.hparams["channels_last"])
        super().__init__(copy.deepcopy(original.model), optim=original.optim, channels_last=layout)

    # no FiniteLoss, RunState and so on: the searches look at the loss themselves
    def configure_callbacks(self) -> list[pl.Callback]:
        return []

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.model, self.optim)


@contextmanager
def trial_trainer(options: Mapping[str, Any], *, max_steps: int) -> Iterator[pl.Trainer]:
    """A trainer on one device that does not validate, log or save; restores the random states.

    Args:
        options: of the run's trainer; only the options in :data:`KEPT` apply.
        max_steps: optimiser steps.
    """
    with isolate_rng():
        yield pl.Trainer(
            # as in configs/trainer/auto.yaml
            **{"accelerator": "auto", **{n: options[n] for n in KEPT if n in options}},
            devices=1,
            max_steps=max_steps,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
