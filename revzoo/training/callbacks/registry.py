"""Callbacks: the table of their names, and the base classes that they share.

A configuration holds names, never import paths. A row of the table is a class or a function. Its
keyword-only parameters are the options of the configuration. If it has a positional parameter, it
gets the run's folder there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import LearningRateMonitor
from torch import nn

from revzoo._checks import (
    check_names,
    check_registered,
    check_types,
    in_section,
    keyword_names,
)
from revzoo.training.lightning_compat import is_fitting

CONFUSION_FILE = "confusion.csv"


class LazyTable(UserDict[str, Any]):
    """A table whose values may be written as ``module:name``, to be imported on first use."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(row := self.data[name], str):
            row = self.data[name] = resolve_name(row)
        return row


def learning_rate() -> Callback:
    """The learning rate of every logged step."""
    return LearningRateMonitor(logging_interval="step")


def confusion(run_dir: Path, *, every_n_epochs: int = 5) -> Callback:
    """The confusion matrix of the validation, in TensorBoard and as ``confusion.csv``."""
    from revzoo.training.callbacks.pictures import ConfusionMatrix

    return ConfusionMatrix(run_dir / CONFUSION_FILE, every_n_epochs=every_n_epochs)


HERE = "revzoo.training.callbacks"
# runs call the hooks in this order; Lightning moves callbacks that save to the end
CALLBACKS = LazyTable(
    {
        "best_checkpoint": f"{HERE}.checkpoints:BestCheckpoint",
        "last_checkpoint": f"{HERE}.checkpoints:LastCheckpoint",
        "learning_rate": learning_rate,
        "progress_bar": f"{HERE}.progress_bar:Progress",
        "footprint": f"{HERE}.figures:Footprint",
        "epoch_log": f"{HERE}.progress_bar:EpochLog",
        "drift": f"{HERE}.figures:DriftLogger",
        "ema": f"{HERE}.ema:AveragedWeights",
        "samples": f"{HERE}.pictures:Samples",
        "reconstructions": f"{HERE}.pictures:Reconstructions",
        "confusion": confusion,
        "early_stopping": f"{HERE}.early_stopping:EarlyStopping",
        "batch_norm": f"{HERE}.batch_norm:BatchNormMomentum",
        "side_bits": f"{HERE}.side_bits:AnnealedBits",
        "finetuning": f"{HERE}.finetuning:Finetuning",
        "compiled_branches": f"{HERE}.compiled_branches:CompiledBranches",
        "private": "revzoo.private.callback:PrivateTraining",
        "gradient_noise_scale": "revzoo.private.sample_norms:GradientNoiseScale",
        "hard_samples": "revzoo.private.sample_norms:HardSamples",
    }
)


def register_callback(name: str, factory: Callable[..., Callback]) -> None:
    """Add a callback, which ``callbacks.NAME={...}`` selects; it runs after the package's own.

    Args:
        name: a new name.
        factory: a class or function whose keyword-only parameters are the options; a positional
            parameter gets the run's folder.

    Raises:
        TypeError: ``name`` is not a string, or ``factory`` is not callable.
        ValueError: the name is taken.

    Example:
        >>> from pathlib import Path
        >>> import pytorch_lightning as pl
        >>> def timer(run_dir: Path, *, hours: int = 1) -> pl.Callback:
        ...     return pl.callbacks.Timer(duration={"hours": hours})
        >>> revzoo.register_callback("timer", timer)  # then: 'callbacks.timer={hours: 2}'
    """
    check_registered("callback", name, factory, CALLBACKS)
    CALLBACKS[name] = factory


def build_callbacks(
    specs: Mapping[str, Mapping[str, Any] | None], *, run_dir: Path
) -> list[Callback]:
    """The callbacks that ``specs`` names, with their options; None removes one.

    Raises:
        ValueError: for a name or option that does not exist, naming the nearest; or for a value
            that the callback refuses.
    """
    check_names(specs, list(CALLBACKS), where="callbacks")
    ordered = {name: specs[name] for name in CALLBACKS if name in specs}
    return [
        _build(name, options, run_dir) for name, options in ordered.items() if options is not None
    ]


def _build(name: str, options: Mapping[str, Any], run_dir: Path) -> Callback:
    factory, where = CALLBACKS[name], f"callbacks.{name}"
    if not isinstance(options, Mapping):
        raise ValueError(f"{where}={options!r}: expected a mapping of options or null")
    check_names(options, keyword_names(factory), where=where)
    constructor = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    check_types(options, get_type_hints(constructor), where=where)
    parameters = signature(factory).parameters.values()
    takes_folder = any(p.kind is not p.KEYWORD_ONLY for p in parameters)
    try:
        return factory(*[run_dir] * takes_folder, **options)
    except ValueError as error:
        raise in_section(where, error) from error


class ChecksModel(Callback, ABC):
    """A callback with a requirement on the network, which a run checks before it begins."""

    @abstractmethod
    def check_model(self, network: nn.Module) -> None:
        """Raise a ValueError if the network does not fit; called again when training starts."""


class MeasuresSteps(Callback, ABC):
    """A callback that collects figures during a training step."""

    @abstractmethod
    def restart(self) -> None:
        """Forget the figures of a step that failed: it is computed again."""


def is_nth_step(trainer: Trainer, every_n_steps: int) -> bool:
    """Whether the next optimiser step is the n-th, the 2n-th and so on (``every_n_steps``)."""
    return (trainer.global_step + 1) % every_n_steps == 0


class FollowsEpochs(Callback, ABC):
    """Prepares each epoch."""

    @abstractmethod
    def begin_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the epoch, or the rest of it."""

    # Lightning skips on_train_epoch_start if a run resumes inside an epoch
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin_epoch(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin_epoch(trainer, pl_module)


class TimesEpochs(FollowsEpochs):
    """Counts the images and the seconds of an epoch, or its rest, without its validations."""

    images = 0  # of all processes
    _began = _paused = 0.0

    def now(self, pl_module: LightningModule) -> float:
        return time.perf_counter()

    def seconds(self, pl_module: LightningModule) -> float:
        return self.now(pl_module) - self._began

    def begin_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.images, self._began = 0, self.now(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += len(batch[0]) * trainer.world_size

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = self.now(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began += self.now(pl_module) - self._paused


class RestoresAfterFit(Callback, ABC):
    """Restores the module after ``fit``. Lightning calls ``teardown`` only if no error occurred."""

    @abstractmethod
    def undo(self, pl_module: LightningModule) -> None:
        """Restore ``pl_module``; called once or twice, possibly before the first change."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.undo(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # an exception in a test has nothing to restore: fit has ended by then
        if is_fitting(trainer):
            self.undo(pl_module)
