"""``python train.py tuner=lr`` and ``tuner=batch_size``: find a value before, or instead of, a run.

A search trains copies (:mod:`revzoo.training.tuning.trial`). Then everything is built anew, so the
run that follows equals one without a tuner, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from revzoo._checks import check_names, check_number, did_you_mean
from revzoo.cli.config.build import apply_precision, build_data, build_module
from revzoo.cli.config.errors import ConfigError
from revzoo.training.callbacks.finetune import Finetuning
from revzoo.training.tuning.batch_size_finder import BatchSize, find_batch_size
from revzoo.training.tuning.lr_finder import LRCurve, check_sweep, find_lr
from revzoo.training.tuning.out_of_memory import memory_of

log = logging.getLogger(__name__)

SECTION = "tuner"
AFTERWARDS = ("stop", "train", "use")
GIB = 2**30


@dataclass(frozen=True)
class Kind:
    """A value that can be searched for.

    Attributes:
        section, key: where a configuration has it.
        options: of the search, besides ``kind`` and ``then``.
        to_the_end: whether the value has to do in every epoch, with all that fine-tuning unfreezes,
            and not in the first alone.
    """

    section: str
    key: str
    options: tuple[str, ...]
    search: Callable[..., tuple[float | int | None, list[Path]]]
    to_the_end: bool


def tune(config: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Search for what ``config["tuner"]`` asks for; leaves the results in ``run_dir``.

    Returns:
        The configuration of the run that follows, without a tuner: the value that was found is in
        it with ``then=use``.

    Raises:
        ValueError: nothing was found, and it was to be used.
    """
    options = dict(config[SECTION])
    kind, then = KINDS[options.pop("kind")], options.pop("then")
    apply_precision(config["precision"])
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    data = build_data(config["data"])
    data.prepare_data()
    data.setup("fit")
    module = build_module(config, data)
    if config["callbacks"].get("finetuning") is not None:
        finetuning = Finetuning(**config["callbacks"]["finetuning"])
        epoch = max(finetuning.unfreeze, default=0) if kind.to_the_end else 0
        finetuning.freeze(module.model, epoch=epoch)
    run_dir.mkdir(parents=True, exist_ok=True)
    trainer = {**config["trainer"], "precision": config["precision"]["trainer"]}
    value, files = kind.search(module, data, trainer=trainer, folder=run_dir, **options)
    log.info("written: %s", ", ".join(map(str, files)))
    following = {name: section for name, section in config.items() if name != SECTION}
    name = f"{kind.section}.{kind.key}"
    if then != "use":
        if value is not None:
            log.info("to train with it: %s=%s, or tuner.then=use", name, value)
        return following
    if value is None:
        raise ValueError(f"no {name} was found to use: look at {run_dir}, and give one")
    return {**following, kind.section: {**config[kind.section], kind.key: value}}


def search_lr(
    module: Any, data: Any, *, trainer: Mapping[str, Any], folder: Path, **options: Any
) -> tuple[float | None, list[Path]]:
    """The rate that a sweep suggests, and the files that show it."""
    curve: LRCurve = find_lr(module, data, trainer=trainer, **options)
    span = f"{curve.rates[0]:.2g} to {curve.rates[-1]:.2g}, {len(curve.rates)} steps"
    if curve.suggestion is None:
        log.warning("optim.lr: the loss does not fall anywhere (%s)", span)
        return None, curve.write(folder)
    value = float(f"{curve.suggestion:.3g}")
    log.info("optim.lr: the loss falls fastest at %g (%s)", value, span)
    return value, curve.write(folder)


def search_batch_size(
    module: Any, data: Any, *, trainer: Mapping[str, Any], folder: Path, **options: Any
) -> tuple[int, list[Path]]:
    """The largest batch that fits, and the file that says what each memory mode would take."""
    found: BatchSize = find_batch_size(module, data, trainer=trainer, **options)
    for mode, each in found.per_image.items():
        log.info("memory=%s: counted %d bytes an image, %d fit", mode, each, found.largest[mode])
    room = f"{found.room / GIB:.2f} GiB" if found.room is not None else "what the GPU gives"
    taken = f"{found.taken / GIB:.2f} GiB" if found.taken is not None else "unknown"
    message = "data.batch_size: %d fit in memory=%s, limited by %s; the process grew by %s of %s"
    log.info(message, found.batch_size, memory_of(module), found.limited_by, taken, room)
    return found.batch_size, found.write(folder)


KINDS = {
    "lr": Kind("optim", "lr", ("min_lr", "max_lr", "steps"), search_lr, to_the_end=False),
    "batch_size": Kind(
        "data", "batch_size", ("max_bytes", "max_size"), search_batch_size, to_the_end=True
    ),
}


def check_tuner(config: Mapping[str, Any]) -> None:
    """Refuse a search that cannot be made.

    Raises:
        ConfigError: with what to change.
    """
    options = dict(config[SECTION])
    kind, then = options.pop("kind", None), options.pop("then", None)
    if kind not in KINDS:
        raise ConfigError(
            f"tuner.kind={kind}: expected one of {', '.join(KINDS)}"
            + did_you_mean(str(kind), KINDS)
        )
    if then not in AFTERWARDS:
        raise ConfigError(
            f"tuner.then={then}: expected stop, train (as configured) or use (what was found)"
            + did_you_mean(str(then), AFTERWARDS)
        )
    check_names(options, KINDS[kind].options, where=SECTION)
    if kind == "lr":
        check_sweep(**options)
    else:
        check_number("tuner.max_size", options["max_size"], low=2, open_high=True)
        if options["max_bytes"] is not None:
            check_number("tuner.max_bytes", options["max_bytes"], open_low=True, open_high=True)
    trainer = config["trainer"]
    if (trainer.get("devices", 1), trainer.get("strategy", "auto")) != (1, "auto"):
        raise ConfigError(
            f"tuner={kind} searches on one device: give trainer.devices=1 trainer.strategy=auto, "
            "then train on several with what was found (batch sizes are per process)"
        )
