"""The table of callbacks by name. A configuration holds names, never import paths.

A row is a class or a function. Its keyword-only parameters are the options of the configuration. If
it has a positional parameter, it gets the run's folder there.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateMonitor

from revzoo._checks import (
    check_names,
    check_registered,
    check_types,
    in_section,
    keyword_names,
)

CONFUSION_FILE = "confusion.csv"


class LazyTable(UserDict[str, Any]):
    """A table whose values may be written as ``module:name``, to be imported on first use.

    A run uses a few rows; importing all of them takes time and, for some, a library.
    """

    def __getitem__(self, name: str) -> Any:
        if isinstance(row := self.data[name], str):
            row = self.data[name] = resolve_name(row)
        return row


def learning_rate() -> pl.Callback:
    """The learning rate of every logged step."""
    return LearningRateMonitor(logging_interval="step")


def confusion(run_dir: Path, *, every_n_epochs: int = 5) -> pl.Callback:
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
        "footprint": f"{HERE}.footprint:Footprint",
        "epoch_log": f"{HERE}.progress_bar:EpochLog",
        "drift": f"{HERE}.drift:DriftLogger",
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


def build_callbacks(
    specs: Mapping[str, Mapping[str, Any] | None], *, run_dir: Path
) -> list[pl.Callback]:
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


def _build(name: str, options: Mapping[str, Any], run_dir: Path) -> pl.Callback:
    factory, where = CALLBACKS[name], f"callbacks.{name}"
    if not isinstance(options, Mapping):
        raise ValueError(f"{where}={options!r}: expected a mapping of options or null")
    check_names(options, keyword_names(factory), where=where)
    # type hints of a class belong to its constructor
    constructor = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    check_types(options, get_type_hints(constructor), where=where)
    # see above: only a callback that writes files has a positional parameter
    parameters = signature(factory).parameters.values()
    takes_folder = any(p.kind is not p.KEYWORD_ONLY for p in parameters)
    try:
        return factory(*[run_dir] * takes_folder, **options)
    except ValueError as error:
        raise in_section(where, error) from error
