"""The progress of a run: a bar on a terminal, a log line every half minute elsewhere, and a line
per epoch.

    epoch 3/30 ██████████▌        212/352  1204 img/s  loss 0.733  acc 0.931  4:12 left
    epoch 3/30  loss 0.733, val 0.150  acc 0.931, val 0.979  298 img/s

Why not Lightning's bars: they need 120 columns or more, and draw into log files too. Figures are
means over the epoch so far, from the first process. The time left is for the whole run, validation
included. If the run plans its memory and the terminal is wide, the bar begins with the most that
tensors took on the GPU, the plan's peak and its limit: ``memory 17.1 MiB, planned 17.3 MiB, limit
15.7 GiB``. On a CPU, where libraries take more than tensors, it shows the last two.
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from tqdm import tqdm

from revzoo._checks import check_count, check_number
from revzoo.profiling.units import in_units
from revzoo.training.callbacks.registry import TimesEpochs
from revzoo.training.lightning_compat import batches_of_epoch, batches_of_run, is_fitting
from revzoo.training.memory import peak_bytes
from revzoo.training.metrics import so_far

log = logging.getLogger(__name__)

LONGEST, SHORTEST = 30, 8  # columns of the bar, without its texts
REDRAW_SECONDS = 0.2  # least time between two drawings; more often costs time without use


class Progress(TimesEpochs, ProgressBar):
    """Draws the bar on a terminal, or logs a line every ``log_seconds``.

    Args:
        refresh_rate: batches between two drawings; at most five drawings a second.
        log_seconds: seconds between two log lines, if standard output is not a terminal.

    Attributes:
        planned, limit: bytes that the plan of a training step takes and may take; None without.
    """

    planned: int | None = None
    limit: int | None = None

    def __init__(self, *, refresh_rate: int = 1, log_seconds: float = 30.0) -> None:
        super().__init__()
        check_count("refresh_rate", refresh_rate)
        check_number("log_seconds", log_seconds, open_low=True)
        self.refresh_rate, self.log_seconds = refresh_rate, log_seconds
        self._enabled = True
        self._bar: tqdm[Any] | None = None
        self._shown = self._begun = 0.0
        self._batches = 0  # before this session

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._shown = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._begun = self._shown = time.perf_counter()
        self._batches = batches_of_run(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, i)
        # in a log file, the line of the epoch follows its last batch
        ended = batches_of_epoch(trainer) >= self.total_train_batches
        if self._due(i + 1) and (sys.stdout.isatty() or not ended):
            rate = per_second(self.images / self.seconds(pl_module))
            words = [*self._memory(pl_module), rate, *_figures(pl_module), *self._left(trainer)]
            done, head = batches_of_epoch(trainer), f"epoch {epoch_of(trainer)}"
            self._show(head, done, self.total_train_batches, words)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, i: int, loader: int = 0
    ) -> None:
        fitting = is_fitting(trainer)
        head = f"epoch {epoch_of(trainer)} validation" if fitting else "validation"
        # the sanity check runs a few batches only
        totals = trainer.num_sanity_val_batches if trainer.sanity_checking else None
        self._evaluated(head, i, (totals or trainer.num_val_batches)[loader])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not is_fitting(trainer):
            self._close()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, i: int, loader: int = 0
    ) -> None:
        self._evaluated("test", i, trainer.num_test_batches[loader])

    def _evaluated(self, head: str, batch_idx: int, total: float) -> None:
        if self._due(batch_idx + 1):
            self._show(head, batch_idx + 1, total, [])

    def _due(self, batch: int) -> bool:
        drawn = sys.stdout.isatty()
        waited = time.perf_counter() - self._shown
        if waited < (REDRAW_SECONDS if drawn else self.log_seconds):
            return False
        return self._enabled and (not drawn or batch % self.refresh_rate == 0)

    def _show(self, head: str, done: int, total: float, words: Sequence[str]) -> None:
        self._shown = time.perf_counter()
        count = f"{done}/{total:.0f}" if math.isfinite(total) else str(done)
        if not sys.stdout.isatty():
            log.info("%s", ", ".join([f"{head}, batch {count}", *words]))
            return
        if self._bar is None:
            # tqdm draws a new bar at once, as "0it" if the format is empty
            self._bar = tqdm(bar_format=" ", file=sys.stdout, leave=False)
        self._bar.total, self._bar.n = total if math.isfinite(total) else None, done
        columns, shown = shutil.get_terminal_size().columns - 1, [count, *words]
        # on a narrow terminal, the first words go first
        while len(shown) > 1 and len("  ".join([head, *shown])) + SHORTEST > columns:
            del shown[1]
        text = "  ".join(shown)
        self._bar.ncols = min(columns, len(f"{head}  {text}") + LONGEST)
        self._bar.bar_format = f"{head} {{bar}} {text}"
        self._bar.refresh()

    def _close(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    # Lightning passes arguments to these hooks, which they ignore
    on_train_end = on_test_end = teardown = on_exception = _close

    def _memory(self, module: LightningModule) -> list[str]:
        """The peak of the device, the plan's and its limit, if the run has a plan."""
        if self.planned is None:
            return []
        in_use = peak_bytes(module.device) if module.device.type == "cuda" else None
        sizes = {"memory": in_use, "planned": self.planned, "limit": self.limit}
        return [", ".join(f"{k} {in_units(n)}" for k, n in sizes.items() if n is not None)]

    def _left(self, trainer: Trainer) -> list[str]:
        """The time until the run ends, if it can be estimated."""
        seen = batches_of_run(trainer)
        done, left = seen - self._batches, batches_in_all(trainer) - seen
        if done < 3 or not math.isfinite(left):  # the first steps are not typical: they warm up
            return []
        return [f"{clock((time.perf_counter() - self._begun) / done * left)} left"]


class EpochLog(Callback):
    """Logs the figures of every epoch at level INFO: a curve in the log file."""

    _validated_in: int | None = None  # the epoch

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_in = None if trainer.sanity_checking else trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        figures = trainer.callback_metrics  # reduces over all processes, so each must call it
        if not trainer.is_global_zero:
            return
        parts, validated = [], self._validated_in == trainer.current_epoch
        monitored = str(getattr(pl_module, "monitor", "val/loss")).rpartition("/")[2]
        for name in dict.fromkeys([*_shown(pl_module), monitored]):
            # callback_metrics keeps an earlier validation's figures; the line must not repeat them
            word = "val" if f"train/{name}" in figures else f"val {name}"
            pairs = [(name, f"train/{name}")] + [(word, f"val/{name}")] * validated
            texts = [f"{word} {float(figures[key]):.3f}" for word, key in pairs if key in figures]
            parts.append(", ".join(texts))
        if (rate := figures.get("footprint/images_per_second")) is not None:
            parts.append(per_second(float(rate)))
        log.info("epoch %s  %s", epoch_of(trainer), "  ".join(filter(None, parts)))


def epoch_of(trainer: Trainer) -> str:
    """The number of the epoch, counted from 1, and of all epochs: ``3/30``."""
    number, per_epoch = trainer.current_epoch + 1, trainer.num_training_batches
    total = batches_in_all(trainer) / per_epoch if per_epoch else math.inf
    # 0 if an epoch never ends
    return f"{number}/{math.ceil(total)}" if 0 < total < math.inf else str(number)


def batches_in_all(trainer: Trainer) -> float:
    """Training batches of the whole run; infinity if unknown."""
    per_epoch, group = trainer.num_training_batches, trainer.accumulate_grad_batches
    if not 0 < per_epoch < math.inf:
        return trainer.max_steps * group if trainer.max_steps > 0 else math.inf
    limits = [math.inf]
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        limits.append(trainer.max_epochs * per_epoch)
    if trainer.max_steps > 0:
        # the last step of an epoch may sum fewer batches
        epochs, more = divmod(trainer.max_steps, math.ceil(per_epoch / group))
        limits.append(epochs * per_epoch + more * group)
    return min(limits)


def per_second(images: float) -> str:
    """``298 img/s``; with a decimal below 10."""
    return f"{images:.{int(images < 10)}f} img/s"


def clock(seconds: float) -> str:
    """Seconds as ``4:12``, ``1:04:12`` or ``49:04:12``."""
    return str(tqdm.format_interval(round(seconds))).removeprefix("0")


def _figures(module: LightningModule) -> list[str]:
    """Two figures of the epoch so far, of a :class:`~revzoo.training.Classifier`."""
    metrics = getattr(module, "metrics_of", None)
    figures = so_far(metrics("train")) if metrics else {}
    keys = {name: f"train/{name}" for name in _shown(module)}
    return [f"{name} {figures[key]:.3f}" for name, key in keys.items() if key in figures]


def _shown(module: LightningModule) -> tuple[str, ...]:
    """The loss, and the accuracy or the error."""
    figures: tuple[str, ...] = getattr(module, "console", ("loss", "acc"))
    return figures[:2]
