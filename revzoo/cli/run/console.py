"""The first and last lines of a run on the terminal and in its log, and their format."""

from __future__ import annotations

import logging
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from revzoo._checks import number_of
from revzoo.cli.config import quoted_if_needed
from revzoo.cli.terminal import (
    command_line,
    folded,
    folded_command,
    one_record,
    short_path,
    tensorboard_line,
)
from revzoo.data import ImageData
from revzoo.data.loaders import left_out
from revzoo.models.network import ImageNetwork
from revzoo.models.wrapped import weights_address
from revzoo.training.callbacks.checkpoints import (
    BestCheckpoint,
    best_checkpoint_path,
    best_figures,
)
from revzoo.training.callbacks.progress_bar import clock
from revzoo.training.class_table import FILE as CLASS_FILE
from revzoo.training.class_table import class_table, lines_of, log_text
from revzoo.training.class_table import write as write_classes
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import callbacks_of, epochs_of_run
from revzoo.training.metrics import in_order
from revzoo.weights.source import CHECKPOINTS, LAST

log = logging.getLogger(__name__)

PRECISION_NAMES = {
    "32-true": "float32",
    "64-true": "float64",
    "16-mixed": "float16 autocast",
    "bf16-mixed": "bfloat16 autocast",
}  # by the Trainer's names
OUTPUTS = {"multilabel": "label", "regression": "target"}  # of tasks without classes
UNEQUAL = 2  # images of the largest class over the smallest; ImageNet (1,300 / 732) counts as equal
LEFT_OUT_SHARE = 0.05  # of the training images; an epoch may leave so many out without a warning


class LogFormat(logging.Formatter):
    """``08:01:30 message``, with the level above INFO; in files with the date, in whole lines."""

    def __init__(self, *, date: bool) -> None:
        self.fold = not date
        super().__init__("%(asctime)s", "%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")

    # Formatter.format appends tracebacks to this
    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        line = f"{record.asctime} {level}{one_record(record.message)}"
        if not self.fold:
            return line
        fold = folded_command if getattr(record, "command", False) else folded
        return fold(line, indent=len(record.asctime) + 10)


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Log to the terminal and to a run's log file."""
    # names of files may hold any bytes
    file = logging.FileHandler(path, errors="backslashreplace")
    handlers: tuple[logging.Handler, ...] = (logging.StreamHandler(sys.stdout), file)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(LogFormat(date=handler is file))
        # logging would print a traceback for each line that a full disk refuses
        handler.handleError = partial(_drop_unwritable, handler)  # type: ignore[method-assign]
        root.addHandler(handler)
    try:
        yield
    finally:
        # in a notebook, more runs may follow in this process
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def _drop_unwritable(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Report the error of a handler, unless the disk or the terminal refused the line."""
    if not isinstance(sys.exc_info()[1], OSError):
        type(handler).handleError(handler, record)


@contextmanager
def logged_warnings() -> Iterator[None]:
    """Log each warning once, as one line without the place in the source.

    Python repeats a warning whenever the filters have changed, and Lightning changes them.
    """
    logged: set[str] = set()

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        text = " ".join(str(message).split())
        if text not in logged:
            logged.add(text)
            log.warning("%s", text)

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def log_opening(
    config: Mapping[str, Any],
    trainer: pl.Trainer,
    module: Classifier,
    data: ImageData,
    run_dir: Path,
    *,
    resumed: Path | None = None,
) -> None:
    """Log the model, the data, the memory mode, the device, the recipe and the folder."""
    count = sum(p.numel() for p in module.model.parameters())
    weights = short_path(resumed) if resumed else _weights(config["model"], module.model)
    start = f", from {weights}" if weights else ""
    reversible = ""
    if bits := config["model"].get("reversible_bits"):
        from revzoo.layers.make_reversible import reversible_blocks  # few models are converted

        rows = reversible_blocks(module.model)
        used = sorted({row.bits for row in rows})
        ends = " to ".join(map(str, dict.fromkeys([*used[:1], *used[-1:]])))
        chosen = ", chosen on random images" if bits == "auto" else ""
        reversible = f", {len(rows)} blocks reversible" + f" with {ends} bits{chosen}" * bool(rows)
    root = f" {place}" if (place := place_of(config["data"])) else ""
    shape = "x".join(map(str, (data.in_chans, *data.sizes)))
    noun = OUTPUTS.get(data.task)
    outputs = number_of(data.num_classes, noun) if noun else f"{data.num_classes} classes"
    length = _length(trainer, config["trainer"].get("max_time")) + " in all" * (resumed is not None)
    rate = f"{config['optim']['name']} with lr {config['optim']['lr']:g}"
    memory, device = module.memory_mode, trainer.strategy.root_device
    # a plan says more than a mode such as auto
    if plan := config["memory"].get("plan"):
        from revzoo.profiling.plan import count_modes  # few modes need the profiler

        memory = f"{config['memory']['mode']} ({count_modes(list(plan.values()))})"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    name = f"{trainer.world_size} x {name}" if trainer.world_size > 1 else name
    precision = config["precision"]
    numbers = "TensorFloat-32" if precision["tf32"] else PRECISION_NAMES[precision["trainer"]]
    threads = number_of(torch.get_num_threads(), "thread")
    lines = [
        ("model", f"{config['model']['name']}, {count:,} parameters{start}{reversible}"),
        *(("", line) for line in (_saved(module, data) if bits else ())),
        ("data", f"{type(data).__name__}{root}, {outputs}, images of {shape}"),
        ("", f"{data.train_count:,} to train, {data.val_count:,} to validate"),
        *(("", note) for note in (*data.notes, *_notes(config, trainer, data))),
        ("memory", memory),
        ("device", f"{name}, {numbers}, {threads}"),
        ("train", f"{length}, {_step(trainer, data)}, {rate}, seed {config['seed']}"),
        ("folder", str(short_path(run_dir))),
    ]
    for key, text in lines:
        log.info("%-8s %s", key, text)
    if device.type == "cpu" and _emulates_bfloat16(config["precision"]):
        log.warning(
            "this CPU has no bfloat16 and emulates it, several times slower than float32: use "
            "precision=fp32"
        )


def _saved(module: Classifier, data: ImageData) -> Iterator[str]:
    """What reversible blocks save: a line for each list of blocks, and one for the network."""
    from revzoo.profiling.conversion import conversion  # few runs need the profiler

    # two images: BatchNorm refuses one image of one pixel
    shape = (2, data.in_chans, *data.sizes)
    report = conversion(module.model, shape)
    yield from map(str, report.rows)
    yield report.sentence("model.reversible_runs=checkpoint")


def _emulates_bfloat16(precision: Mapping[str, Any]) -> bool:
    """Whether the precision is bfloat16 and this CPU is known not to compute in it."""
    # not in all versions of torch
    found: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    names = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")  # the last two of ARM
    known = [found[name] for name in names if name in found]
    return precision["trainer"] == "bf16-mixed" and bool(known) and not any(known)


def _weights(spec: Mapping[str, Any], model: nn.Module) -> str:
    """The name or the file of the weights that a run starts from; empty for random ones."""
    if file := spec.get("checkpoint_path"):  # it replaces the listed weights
        return str(file)
    # a library's weights have no entry
    entry = model.entry if isinstance(model, ImageNetwork) else None
    if not spec.get("pretrained"):
        return ""
    return entry.name if entry else weights_address(spec["name"]).rpartition("/")[2]


def _step(trainer: pl.Trainer, data: ImageData) -> str:
    """The images of all processes for one update of the weights; an epoch's last one may be less.

    A step ends with the epoch, however many batches are to be accumulated.
    """
    any_trainer: Any = trainer  # Lightning declares no type for its limits
    images = data.batch_size * trainer.world_size
    batches = data.train_count // images
    limit = any_trainer.limit_train_batches  # a number of batches, or a share of them
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    group = max(1, min(trainer.accumulate_grad_batches, batches))
    text = f"{number_of(group * images, 'image')} per step"
    rest = batches % group
    return f"{text} ({rest * images:,} in the last of an epoch)" if rest else text


def _notes(config: Mapping[str, Any], trainer: pl.Trainer, data: ImageData) -> Iterator[str]:
    """Whether epochs leave out many images, or the validation images cannot have all classes."""
    count = left_out(data.batch_size, data.train_count, trainer.world_size)
    # Poisson batches leave out no images
    if count > LEFT_OUT_SHARE * data.train_count and config["callbacks"].get("private") is None:
        yield (
            f"each epoch leaves out {count:,} ({100 * count / data.train_count:.0f} %), an "
            "incomplete batch; a smaller data.batch_size leaves out fewer"
        )
    if 0 < data.val_count < data.num_classes and data.task == "classification":
        yield (
            "fewer images to validate than classes, so accuracy is coarse: raise data.val_fraction"
        )


def _length(trainer: pl.Trainer, max_time: object) -> str:
    """The end of the run: ``"30 epochs or 2,000 steps"``, whichever comes first."""
    limits = {"epoch": trainer.max_epochs or -1, "step": trainer.max_steps}  # -1 for no limit
    texts = [number_of(count, kind) for kind, count in limits.items() if count > 0]
    return " or ".join(texts) or f"{max_time} of time"


def place_of(data: Mapping[str, Any]) -> str:
    """Where the section ``data`` has its files, for the terminal; empty if nowhere."""
    place = data.get("table") or data.get("root")
    if not isinstance(place, str):  # plugins may mean something else
        return ""
    return place if "://" in place else str(short_path(place))


def log_result(
    trainer: pl.Trainer,
    figures: Mapping[str, float],
    data: ImageData,
    run_dir: Path,
    *,
    seconds: float,
) -> None:
    """Log the figures, and the commands that a user wants next.

    Figures are those of the module's ``console`` and the monitored one. The balanced accuracy
    appears only if a class has more than twice the training images of another.
    """
    epochs = number_of(epochs_of_run(trainer), "epoch")
    steps = number_of(trainer.global_step, "step")
    log.info("%-8s %s, %s in %s", "trained", epochs, steps, clock(seconds))
    best = best_checkpoint_path(trainer)  # None: the figures belong to the last weights
    validated = best_figures(trainer) if best else {}
    shown = {**figures, **validated}
    printed = set(getattr(trainer.lightning_module, "console", ()))
    if data.task == "classification":
        counts = torch.bincount(data.train_labels, minlength=data.num_classes)
        if counts.max() <= UNEQUAL * counts.min():
            printed.discard("balanced_acc")
    savers = callbacks_of(trainer, BestCheckpoint)
    printed |= {str(saver.monitor).rpartition("/")[2] for saver in savers}
    shown = {k: v for k, v in shown.items() if k.rpartition("/")[2] in printed}
    for split, is_best in {"val": bool(validated), "test": bool(best)}.items():
        weights = "best checkpoint" if is_best else "last"
        of_split = in_order({k: v for k, v in shown.items() if k.startswith(f"{split}/")})
        # a line has 80 columns: "balanced" for balanced_acc
        names = [name.partition("/")[2].removesuffix("_acc") for name in of_split]
        texts = [f"{n} {value:.4f}" for n, value in zip(names, of_split.values(), strict=True)]
        if texts:
            log.info("%-8s %s (%s)", split, ", ".join(texts), weights)
    commands: dict[str, str] = {}
    if any(isinstance(logger, pl.loggers.TensorBoardLogger) for logger in trainer.loggers):
        commands["curves"] = tensorboard_line(short_path(run_dir))
    last = run_dir / CHECKPOINTS / LAST
    if best or last.exists():
        # the folder stands for its best checkpoint
        run = short_path(run_dir if best else last)
        masks = " --masks DIR" if data.task == "segmentation" else ""
        commands["predict"] = f"{command_line('predict', run)} IMAGES{masks}"
        # revzoo eval takes the test split by default
        words = [] if data.has("test") else ["split=val"]
        commands["evaluate"] = command_line("eval", f"ckpt={quoted_if_needed(run)}", *words)
    for name, command in commands.items():
        log.info("%-8s %s", name, command, extra={"command": True})


def log_classes(
    trainer: pl.Trainer, module: Classifier, split: str, classes: Sequence[str], run_dir: Path
) -> None:
    """Log the figures of each class; write them to ``per_class.csv`` and TensorBoard."""
    if not (table := class_table(module.metrics_of(split), len(classes))):
        return
    path = run_dir / CLASS_FILE
    try:
        write_classes(table, classes, path)
    except OSError as error:
        log.error("cannot write %s (%s)", path, error.strerror)
    log_text(table, classes, trainer.loggers, trainer.global_step)
    weights = ", last weights" if split == "val" else ""
    log.info("%-8s figures of each in %s%s, also in %s", "classes", split, weights, path.name)
    for line in lines_of(table, classes):
        log.info("%s", line)


def log_finished(trainer: pl.Trainer, run_dir: Path, checkpoint: Path) -> None:
    """Log that a resumed run had nothing left to train, and how to train on."""
    epochs, steps = trainer.max_epochs or -1, trainer.max_steps  # -1 for no limit
    if 0 < steps <= trainer.global_step:
        end, key = f"step {steps:,} of {steps:,}", "trainer.max_steps"
    else:
        end, key = f"epoch {epochs_of_run(trainer)} of {epochs}", "trainer.max_epochs"
    if epochs_of_run(trainer) < epochs and steps < 1:  # early stopping has ended it
        weights = shlex.quote(f"+model.checkpoint_path={quoted_if_needed(short_path(checkpoint))}")
        remedy = f"from its weights, add {weights} hydra.run.dir=DIR to the command that started it"
    else:
        remedy = command_line("train", "--resume", short_path(run_dir), f"{key}=N")
    log.info("the run was finished (%s): nothing was trained. To train on: %s", end, remedy)
