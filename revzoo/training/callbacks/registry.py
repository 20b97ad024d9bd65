"""The table of callbacks by name. A configuration holds names, never import paths.

A row is a class or a function. Its keyword-only parameters are the options of the configuration. If
it has a positional parameter, it gets the run's folder there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateMonitor

from revzoo._checks import check_count, check_registered, check_types, in_section, keyword_names
from revzoo.training.callbacks.batch_norm import BatchNormMomentum
from revzoo.training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from revzoo.training.callbacks.compiled_branches import CompiledBranches
from revzoo.training.callbacks.drift import DriftLogger
from revzoo.training.callbacks.early_stopping import EarlyStopping
from revzoo.training.callbacks.ema import AveragedWeights
from revzoo.training.callbacks.epoch_log import EpochLog
from revzoo.training.callbacks.finetuning import Finetuning
from revzoo.training.callbacks.finite import FiniteLoss
from revzoo.training.callbacks.footprint import Footprint
from revzoo.training.callbacks.options import check_options
from revzoo.training.callbacks.pictures import ConfusionMatrix, Reconstructions, Samples
from revzoo.training.callbacks.private import PrivateTraining
from revzoo.training.callbacks.progress_bar import Progress
from revzoo.training.callbacks.sample_norms import GradientNoiseScale, HardSamples
from revzoo.training.callbacks.side_bits import AnnealedBits
from revzoo.training.resume.graceful_stop import GracefulStop
from revzoo.weights.run_files import BEST, CHECKPOINTS

log = logging.getLogger(__name__)

CONFUSION_FILE = "confusion.csv"


def direction(figure: str) -> str:
    """``"min"`` for a loss, ``"max"`` for an accuracy."""
    return "min" if figure.endswith("loss") else "max"


def best_checkpoint(
    run_dir: Path, *, monitor: str = "val/acc", mode: str | None = None
) -> pl.Callback:
    """``checkpoints/best.ckpt``: the weights of the validation with the best ``monitor``."""
    return BestCheckpoint(
        dirpath=run_dir / CHECKPOINTS,
        filename=BEST.removesuffix(".ckpt"),
        monitor=monitor,
        mode=mode or direction(monitor),
        auto_insert_metric_name=False,
        enable_version_counter=False,  # each run has its own folder
    )


def learning_rate() -> pl.Callback:
    """The learning rate of every logged step."""
    return LearningRateMonitor(logging_interval="step")


def confusion(run_dir: Path, *, every_n_epochs: int = 5) -> pl.Callback:
    """The confusion matrix of the validation, in TensorBoard and as ``confusion.csv``."""
    return ConfusionMatrix(run_dir / CONFUSION_FILE, every_n_epochs=every_n_epochs)


def early_stopping(
    *, monitor: str = "val/acc", mode: str | None = None, patience: int = 10
) -> pl.Callback:
    """Stop after ``patience`` validations without a better ``monitor``."""
    check_count("patience", patience)
    return EarlyStopping(monitor=monitor, mode=mode or direction(monitor), patience=patience)


# runs call the hooks in this order; Lightning moves callbacks that save to the end
CALLBACKS: dict[str, Callable[..., pl.Callback]] = {
    "best_checkpoint": best_checkpoint,
    "last_checkpoint": LastCheckpoint,
    "learning_rate": learning_rate,
    "progress_bar": Progress,
    "footprint": Footprint,
    "epoch_log": EpochLog,
    "drift": DriftLogger,
    "ema": AveragedWeights,
    "samples": Samples,
    "reconstructions": Reconstructions,
    "confusion": confusion,
    "early_stopping": early_stopping,
    "batch_norm": BatchNormMomentum,
    "side_bits": AnnealedBits,
    "finetuning": Finetuning,
    "compiled_branches": CompiledBranches,
    "private": PrivateTraining,
    "gradient_noise_scale": GradientNoiseScale,
    "hard_samples": HardSamples,
}

# (first, later, why): all constraints on the order of callbacks; a test checks them
ORDER: tuple[tuple[type[pl.Callback], type[pl.Callback], str], ...] = (
    (Footprint, EpochLog, "the log line shows the figures that Footprint logs"),
    (GracefulStop, LastCheckpoint, "all processes agree on a stop before they save"),
    (FiniteLoss, LastCheckpoint, "a loss that is not finite ends the run before the save"),
    (Footprint, LastCheckpoint, "a checkpoint at the end of an epoch has the epoch's figures"),
    (BestCheckpoint, LastCheckpoint, "last.ckpt holds the path of the best checkpoint"),
)


def register_callback(name: str, factory: Callable[..., pl.Callback]) -> None:
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


def check_callbacks(specs: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Check the names and options of callbacks.

    Raises:
        ValueError: for a name or option that does not exist, naming the nearest.
    """
    check_options(specs, {name: keyword_names(factory) for name, factory in CALLBACKS.items()})
    for name, options in specs.items():
        factory = CALLBACKS[name]
        # type hints of a class belong to its constructor
        constructor = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
        check_types(options or {}, get_type_hints(constructor), where=f"callbacks.{name}")


def build_callbacks(
    specs: Mapping[str, Mapping[str, Any] | None], *, run_dir: Path
) -> list[pl.Callback]:
    """The callbacks that ``specs`` names, with their options; None removes one.

    Raises:
        ValueError: for a name or option that does not exist, naming the nearest; or for a value
            that the callback refuses.
    """
    check_callbacks(specs)
    ordered = {name: specs[name] for name in CALLBACKS if name in specs}  # see ORDER
    return [
        _build(name, options, run_dir) for name, options in ordered.items() if options is not None
    ]


def _build(name: str, options: Mapping[str, Any], run_dir: Path) -> pl.Callback:
    factory = CALLBACKS[name]
    parameters = signature(factory).parameters.values()
    # see above: only a callback that writes files has a positional parameter
    takes_folder = any(p.kind is not p.KEYWORD_ONLY for p in parameters)
    try:
        return factory(*[run_dir] * takes_folder, **options)
    except ValueError as error:
        raise in_section(f"callbacks.{name}", error) from error
