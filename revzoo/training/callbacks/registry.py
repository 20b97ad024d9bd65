"""The table of callbacks by name. A configuration holds names, never import paths.

Each factory takes the run's folder and, as keywords, the options of the configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateMonitor

from revzoo._checks import check_count, check_names, check_number, check_types, keyword_names
from revzoo.training.callbacks.batch_norm import BatchNormMomentum
from revzoo.training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from revzoo.training.callbacks.compile import CompiledBranches
from revzoo.training.callbacks.confusion import ConfusionMatrix
from revzoo.training.callbacks.drift import DriftLogger
from revzoo.training.callbacks.early_stopping import EarlyStopping
from revzoo.training.callbacks.ema import AveragedWeights
from revzoo.training.callbacks.epoch_log import EpochLog
from revzoo.training.callbacks.finetune import Finetuning, Unfreeze
from revzoo.training.callbacks.finite import FiniteLoss
from revzoo.training.callbacks.footprint import Footprint
from revzoo.training.callbacks.graceful_stop import GracefulStop
from revzoo.training.callbacks.pictures import Reconstructions, Samples
from revzoo.training.callbacks.private import PrivateTraining
from revzoo.training.callbacks.progress import Progress
from revzoo.training.callbacks.sample_gradients import GradientNoiseScale, HardSamples
from revzoo.training.callbacks.side_bits import AnnealedBits
from revzoo.training.checkpoint.files import BEST, CHECKPOINTS

log = logging.getLogger(__name__)

CONFUSION_FILE = "confusion.csv"


def best_checkpoint(run_dir: Path, *, monitor: str = "val/acc", mode: str = "max") -> pl.Callback:
    """``checkpoints/best.ckpt``: the weights of the validation with the best ``monitor``."""
    return BestCheckpoint(
        dirpath=run_dir / CHECKPOINTS,
        filename=BEST.removesuffix(".ckpt"),
        monitor=monitor,
        mode=mode,
        auto_insert_metric_name=False,
        enable_version_counter=False,  # each run has its own folder
    )


def last_checkpoint(run_dir: Path, *, minutes: float = 10.0) -> pl.Callback:
    """``checkpoints/last.ckpt``: the state to resume from; a kill costs at most ``minutes``."""
    return LastCheckpoint(run_dir / CHECKPOINTS, minutes=minutes)


def learning_rate(run_dir: Path) -> pl.Callback:
    """The learning rate of every logged step."""
    return LearningRateMonitor(logging_interval="step")


def progress_bar(run_dir: Path, *, refresh_rate: int = 1, log_seconds: float = 30.0) -> pl.Callback:
    """A bar on a terminal; a log line every ``log_seconds`` elsewhere."""
    return Progress(refresh_rate=refresh_rate, log_seconds=log_seconds)


def footprint(run_dir: Path) -> pl.Callback:
    """Peak memory and throughput."""
    return Footprint()


def epoch_log(run_dir: Path) -> pl.Callback:
    """One log line per epoch."""
    return EpochLog()


def drift(run_dir: Path, *, every_n_steps: int = 100) -> pl.Callback:
    """Relative error of reconstructed activations, per step of the model."""
    return DriftLogger(every_n_steps=every_n_steps)


def samples(run_dir: Path, *, count: int = 16, every_n_epochs: int = 5) -> pl.Callback:
    """Validation images with true and predicted class, in TensorBoard."""
    return Samples(count=count, every_n_epochs=every_n_epochs)


def reconstructions(run_dir: Path, *, count: int = 8, every_n_epochs: int = 5) -> pl.Callback:
    """Validation images as an i-RevNet reconstructs them, in TensorBoard."""
    return Reconstructions(count=count, every_n_epochs=every_n_epochs)


def confusion(run_dir: Path, *, every_n_epochs: int = 5) -> pl.Callback:
    """The confusion matrix of the validation, in TensorBoard and as ``confusion.csv``."""
    return ConfusionMatrix(run_dir / CONFUSION_FILE, every_n_epochs=every_n_epochs)


def early_stopping(
    run_dir: Path, *, monitor: str = "val/acc", mode: str = "max", patience: int = 10
) -> pl.Callback:
    """Stop after ``patience`` validations without a better ``monitor``."""
    check_count("callbacks.early_stopping.patience", patience)
    return EarlyStopping(monitor=monitor, mode=mode, patience=patience)


def ema(run_dir: Path, *, decay: float = 0.999, warmup: bool = True) -> pl.Callback:
    """Validate, test and save an exponential moving average of the weights.

    ``last.ckpt`` keeps both, to resume from.
    """
    check_number("callbacks.ema.decay", decay, high=1, open_high=True)
    return AveragedWeights(decay=decay, warmup=warmup)


def side_bits(run_dir: Path, *, epochs: int, most: int = 8) -> pl.Callback:
    """More bits of reversible blocks over the last epochs."""
    return AnnealedBits(epochs=epochs, most=most)


def batch_norm(
    run_dir: Path, *, momentum: float | None = None, warmup: bool = True, recalibrate: int = 0
) -> pl.Callback:
    """BatchNorm's momentum, with a warm-up; None keeps each BatchNorm's momentum."""
    if momentum is not None:
        check_number("callbacks.batch_norm.momentum", momentum, high=1, open_low=True)
    return BatchNormMomentum(momentum=momentum, warmup=warmup, recalibrate=recalibrate)


def finetuning(run_dir: Path, *, unfreeze: Unfreeze = None) -> pl.Callback:
    """Train only the classifier first; ``unfreeze`` lists the epochs that add more parts."""
    return Finetuning(unfreeze=unfreeze)


def compiled_branches(run_dir: Path, *, backend: str = "inductor") -> pl.Callback:
    """Compile the residual functions during training."""
    return CompiledBranches(backend=backend)


def private(
    run_dir: Path,
    *,
    epsilon: float = 8.0,
    delta: float = 1e-5,
    max_grad_norm: float = 1.0,
    noise_multiplier: float | None = None,
    accountant: str = "rdp",
) -> pl.Callback:
    """Differentially private training; needs ``pip install 'revzoo[opacus]'``."""
    return PrivateTraining(
        epsilon=epsilon,
        delta=delta,
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise_multiplier,
        accountant=accountant,
    )


def gradient_noise_scale(
    run_dir: Path, *, every_n_steps: int = 10, decay: float = 0.9
) -> pl.Callback:
    """The batch size up to which larger batches pay, from norms of samples' gradients."""
    return GradientNoiseScale(every_n_steps=every_n_steps, decay=decay)


def hard_samples(run_dir: Path, *, count: int = 16, every_n_steps: int = 1) -> pl.Callback:
    """The training images with the largest gradients of each epoch, in TensorBoard."""
    return HardSamples(count=count, every_n_steps=every_n_steps)


CALLBACKS: dict[str, Callable[..., pl.Callback]] = {
    builder.__name__: builder
    for builder in (
        best_checkpoint,
        last_checkpoint,
        learning_rate,
        progress_bar,
        footprint,
        epoch_log,
        drift,
        ema,
        samples,
        reconstructions,
        confusion,
        early_stopping,
        batch_norm,
        side_bits,
        finetuning,
        compiled_branches,
        private,
        gradient_noise_scale,
        hard_samples,
    )
}


# (first, later, why): all constraints on the order of callbacks; a test checks them
ORDER: tuple[tuple[type[pl.Callback], type[pl.Callback], str], ...] = (
    (Footprint, EpochLog, "the log line shows the figures that Footprint logs"),
    (AveragedWeights, Samples, "the last pictures show the average, then in the module"),
    (AveragedWeights, Reconstructions, "as for samples"),
    (GracefulStop, LastCheckpoint, "all processes agree on a stop before they save"),
    (FiniteLoss, LastCheckpoint, "a loss that is not finite ends the run before the save"),
    (Footprint, LastCheckpoint, "a checkpoint at the end of an epoch has the epoch's figures"),
    (BestCheckpoint, LastCheckpoint, "last.ckpt holds the path of the best checkpoint"),
)


def register_callback(name: str, factory: Callable[..., pl.Callback]) -> None:
    """Add a callback, which ``callbacks.NAME={...}`` selects; it runs after the package's.

    Args:
        name: a name that no callback has.
        factory: takes the run's folder and, as keyword-only parameters, the options.

    Raises:
        ValueError: the name is taken.

    Example:
        >>> from pathlib import Path
        >>> import pytorch_lightning as pl
        >>> def timer(run_dir: Path, *, hours: int = 1) -> pl.Callback:
        ...     return pl.callbacks.Timer(duration={"hours": hours})
        >>> revzoo.register_callback("timer", timer)  # then: 'callbacks.timer={hours: 2}'
    """
    if name in CALLBACKS:
        raise ValueError(
            f"a callback {name!r} exists already: choose another name than {', '.join(CALLBACKS)}"
        )
    CALLBACKS[name] = factory


def check_callbacks(specs: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Check the names and options of callbacks.

    Raises:
        ValueError: for a name or option that does not exist, naming the nearest.
    """
    check_names(specs, list(CALLBACKS), where="callbacks")
    for name, options in specs.items():
        if not isinstance(options, Mapping | None):
            raise ValueError(
                f"callbacks.{name}={options!r}: expected options in braces and quotes, "
                f"'callbacks.{name}={{OPTION: VALUE}}'; {{}} uses the defaults, null removes the "
                "callback"
            )
        place = f"callbacks.{name}"
        check_names(options or {}, keyword_names(CALLBACKS[name]), where=place)
        check_types(options or {}, get_type_hints(CALLBACKS[name]), where=place)


def build_callbacks(
    specs: Mapping[str, Mapping[str, Any] | None], *, run_dir: Path
) -> list[pl.Callback]:
    """The callbacks that ``specs`` names, with their options; None removes one.

    Raises:
        ValueError: for a name or option that does not exist, naming the nearest.
    """
    check_callbacks(specs)
    ordered = {name: specs[name] for name in CALLBACKS if name in specs}  # see ORDER
    return [
        CALLBACKS[name](run_dir, **options)
        for name, options in ordered.items()
        if options is not None
    ]


def best_checkpoint_path(trainer: pl.Trainer) -> Path | None:
    """The best checkpoint of a trainer's run; None if there is none, or its file is missing."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, BestCheckpoint) and callback.best_model_path:
            path = Path(callback.best_model_path)
            if path.is_file():
                return path
            log.error("%s is missing: using the last weights instead", path)
    return None
