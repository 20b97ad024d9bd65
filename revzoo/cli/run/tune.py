"""``revzoo train tuner=lr`` or ``tuner=batch_size``: search for a value before a run, or instead.

The search leaves the module as it is. The run that follows builds all its parts again, so it equals
a run without a tuner, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from revzoo._files import json_bytes, write_atomically
from revzoo.cli.run.build import build_data, build_module, for_task
from revzoo.training.callbacks.finetuning import Finetuning
from revzoo.training.tuning import BatchSize, LRCurve, find_batch_size, find_lr

log = logging.getLogger(__name__)


def tune(config: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Search for the value that ``config["tuner"]`` names, and write the results to ``run_dir``.

    Returns the configuration of the run that follows, without a tuner; with ``then=use`` it has the
    suggested value.
    """
    options = dict(config["tuner"])
    kind, then = options.pop("kind"), options.pop("then")
    section, key, search = KINDS[kind]
    data = build_data(config["data"], config.get("task"))
    data.prepare_data()
    data.setup("fit")
    module = build_module(for_task(config, data.task), **data.shape)
    module.balance(data)
    if config["callbacks"].get("finetuning") is not None:
        finetuning = Finetuning(**config["callbacks"]["finetuning"])
        # a batch must fit with every part that is ever unfrozen; the last entry unfreezes most
        epoch = max(finetuning.unfreeze, default=0) if kind == "batch_size" else 0
        finetuning.freeze(module.model, epoch=epoch)
    # the first file of the run, if it is only a search
    run_dir.mkdir(parents=True, exist_ok=True)
    trainer = {**config["trainer"], "precision": config["precision"]["trainer"]}
    name = f"{section}.{key}"
    log.info("searching for %s", name)
    value, files = search(module, data, trainer=trainer, folder=run_dir, **options)
    log.info("wrote %s", ", ".join(map(str, files)))
    following = {name: section for name, section in config.items() if name != "tuner"}
    if then != "use":
        if value is not None:
            log.info("to train with it: %s=%s, or tuner.then=use", name, value)
        return following
    if value is None:
        raise ValueError(f"the search suggests no {name}: see {run_dir}, and set it by hand")
    return {**following, section: {**config[section], key: value}}


def search_lr(
    module: Any, data: Any, *, folder: Path, **options: Any
) -> tuple[float | None, list[Path]]:
    """The learning rate that a sweep suggests, and the files with its curve."""
    curve: LRCurve = find_lr(module, data, **options)
    span = f"{curve.rates[0]:.2g} to {curve.rates[-1]:.2g}, {len(curve.rates)} steps"
    if curve.suggestion is None:
        log.warning("optim.lr: the loss does not fall at any rate (%s)", span)
        return None, curve.write(folder)
    # more digits would suggest a precision that the test does not have
    value = float(f"{curve.suggestion:.3g}")
    log.info("optim.lr: the loss falls fastest at %g (%s)", value, span)
    return value, curve.write(folder)


def search_batch_size(
    module: Any, data: Any, *, folder: Path, **options: Any
) -> tuple[int, list[Path]]:
    """The largest batch that fits, and its file."""
    result: BatchSize = find_batch_size(module, data, **options)
    message = "data.batch_size: %d fit in memory=%s, limited by %s"
    log.info(message, result.batch_size, module.memory_mode, result.limited_by)
    path = folder / "batch_size_finder.json"
    write_atomically(path, json_bytes(result._asdict()))
    return result.batch_size, [path]


KINDS: Mapping[str, tuple[str, str, Callable[..., tuple[float | None, list[Path]]]]] = {
    "lr": ("optim", "lr", search_lr),
    "batch_size": ("data", "batch_size", search_batch_size),
}
