"""Evaluate a trained model.

  revzoo eval RUN_DIR

RUN_DIR, also written ckpt=RUN_DIR, is the folder of a run, for its best checkpoint; or a
checkpoint, such as RUN_DIR/checkpoints/last.ckpt. It may also be weights: a name (revzoo eval
revnet38.cifar10 data=cifar10), a safetensors file or a folder of save_pretrained. Weights do not
name their data, so data= is needed.

By default it evaluates the run's data, from its config.yaml; data.root=DIR and data.table=FILE say
where they are now.
Other data must have the same classes (data=imagefolder data.root=DIR); they are normalised with the
checkpoint's mean and deviation. Prints one line per figure, and a table of each class to standard
error. The memory mode does not matter: an evaluation keeps no activations. bits=null evaluates a
network of reversible blocks as the plain network. tta=flip takes the mean over an image and its
mirror image. surface_distances=true also measures, for masks, the distances between the borders of
prediction and mask: the mean (assd) and the 95th percentile (hd95), in mm for volumes. --csv FILE
writes the figures, with a row for each class.

Keys, in the grammar of revzoo train: ckpt, split=val, batch_size, bits, tta, surface_distances,
csv, data, precision, trainer.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from revzoo._files import check_writable
from revzoo.cli.commands._models import trained
from revzoo.cli.terminal import (
    ConfigError,
    FoldedFormat,
    override_argument,
    show_written,
    status_of,
)
from revzoo.weights.source import resolve_source

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options: dict[str, Any] = {"nargs": "*", "type": override_argument, "metavar": "KEY=VALUE"}
    parser.add_argument("overrides", **options, help="such as ckpt=PATH")


def run(args: argparse.Namespace) -> None:
    """Evaluate, and print the figures."""
    from revzoo.cli.config import EVAL, compose
    from revzoo.cli.run.folder import take_paths

    # on standard error: standard output has only the figures
    handler = logging.StreamHandler()
    handler.setFormatter(FoldedFormat())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    given = with_key(args.overrides)
    _check_keys(given)
    others, paths = take_paths(given)
    names_data = any(override.startswith("data=") for override in others)
    overrides = given if names_data else others
    # refuse wrong keys and names before importing torch
    config = compose(overrides, EVAL).config
    config["ckpt"] = resolve_source(str(config["ckpt"]))
    with status_of("loading torch and Lightning"):
        from revzoo.training.lightning_compat import is_first_process, quiet

    with quiet():
        figures = evaluate(config, paths={} if names_data else paths)
    # the figures are means over all processes
    if is_first_process():
        sys.stdout.write("".join(f"{name} {value:.4f}\n" for name, value in figures.items()))


def with_key(overrides: Sequence[str]) -> list[str]:
    """The overrides, with ``ckpt=`` before a word without a key, the first one."""
    from revzoo.cli.config import quoted_if_needed

    words = [word for word in overrides if "=" not in word and not word.startswith("~")]
    if not words or any(override.startswith("ckpt=") for override in overrides):
        return list(overrides)
    return [f"ckpt={quoted_if_needed(o)}" if o is words[0] else o for o in overrides]


def _check_keys(overrides: Iterable[str]) -> None:
    """Refuse overrides that only revzoo train takes; Hydra would suggest nothing."""
    from revzoo.cli.schema import CONFIGS, EVALUATION

    for override in overrides:
        section = override.lstrip("+").partition("=")[0].partition(".")[0]
        if (CONFIGS / section).is_dir() and section not in EVALUATION.options:
            keys = ", ".join(EVALUATION.options)
            why = "; the checkpoint contains the model, and bits=null makes its blocks plain"
            raise ConfigError(
                f"{override}: expected one of the keys of an evaluation, {keys}"
                + (why if section == "model" else "")
            )


def evaluate(
    config: Mapping[str, Any], *, paths: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Evaluate a checkpoint on a split; return ``test/loss``, ``test/acc`` and so on.

    Args:
        config: ``configs/eval.yaml``, composed, as plain containers; ``data`` may be missing.
        paths: ``data.root`` and ``data.table``, if they are not where the run recorded them.
    """
    from revzoo.cli.config import check_machine
    from revzoo.cli.run.build import apply_precision, build_data, make_trainer, measure_surfaces
    from revzoo.cli.run.console import place_of
    from revzoo.data import DataError
    from revzoo.training.callbacks.progress_bar import Progress
    from revzoo.training.class_table import class_table, lines_of, write
    from revzoo.training.lightning_compat import is_first_process
    from revzoo.training.memory import memory_errors
    from revzoo.training.metrics import in_order

    check_machine(config)
    target = Path(config["csv"]).expanduser() if config.get("csv") else None
    check_writable(target)
    if is_first_process():
        log.info("reading %s", config["ckpt"])
    restored = trained(config["ckpt"], config["bits"])
    restored.module.tta = config.get("tta")
    if config.get("surface_distances"):
        measure_surfaces(restored.module)
    data_config = _data_section(config, paths or {})
    apply_precision(config["precision"])
    task = restored.data_state.get("task")
    # a table's columns may serve several tasks: the checkpoint says for which it was trained
    data = build_data(data_config, task if "task" in data_config else None)
    data.prepare_data()
    testing = config["split"] == "test"
    if not data.has(config["split"]):
        if testing:
            raise DataError("the data have no test split: use split=val")
        if config.get("data"):  # before the images are read; the run's own data fit
            check_held_back(config["ckpt"], data_config)
    # before `setup`, which would measure mean and deviation of these images
    data.load_state_dict(restored.data_state)
    if is_first_process():
        place = f" in {place}" if (place := place_of(data_config)) else ""
        split = "test" if testing else "validation"
        log.info("reading the %s images of %s%s", split, type(data).__name__, place)
    data.setup("test" if testing else "validate")
    if data.in_chans != restored.in_chans:
        raise DataError(
            f"the model takes images of {restored.in_chans} channels, the data have "
            f"{data.in_chans}: set data.in_chans={restored.in_chans}, or use its training data"
        )
    # this run's precision section, not the checkpoint's: the layout changes speed and rounding
    restored.module.lay_out(channels_last=config["precision"]["channels_last"])
    # no logs and no checkpoints
    options = {**config["trainer"], "logger": False, "enable_checkpointing": False}
    precision = config["precision"]["trainer"]
    trainer = make_trainer(**options, precision=precision, callbacks=[Progress()])
    run = trainer.test if testing else trainer.validate
    with memory_errors(trainer, restored.module, data, eval_option="batch_size"):
        (figures,) = run(restored.module, datamodule=data, verbose=False)
    table = class_table(restored.module.metrics_of(config["split"]), data.num_classes)
    figures = in_order({name: float(value) for name, value in figures.items()})
    if is_first_process():
        for line in lines_of(table, data.classes) if table else ():
            log.info("%s", line)
        if target is not None:
            of_all = {name.partition("/")[2]: value for name, value in figures.items()}
            write(table, data.classes, target, of_all)
            show_written(target)
    return figures


def _data_section(config: Mapping[str, Any], paths: Mapping[str, str]) -> Mapping[str, Any]:
    """The data section, checked: of the command, else of the run that made the checkpoint."""
    from revzoo.cli.config import check
    from revzoo.cli.run.folder import CONFIG_FILE, errors_naming, moved, run_of
    from revzoo.cli.schema import EVALUATION

    data = config.get("data")
    if not data:
        if (recorded := run_data(config["ckpt"])) is None:
            raise ConfigError(
                f"{config['ckpt']} is not in the folder of a run, so its data are unknown: give "
                "data=NAME, such as data=cifar10, or data=imagefolder data.root=DIR"
            )
        data = moved(recorded, paths)
        # the section comes from a file that the user has not named
        with errors_naming(run_of(config["ckpt"]) / CONFIG_FILE):
            check({**config, "data": data}, EVALUATION)
    size = config["batch_size"]
    return data if size is None else {**data, "eval_batch_size": size}


def run_data(checkpoint: str) -> dict[str, Any] | None:
    """The data section of the run whose folder contains a checkpoint; None outside of a run."""
    from revzoo.cli.run.folder import CONFIG_FILE, recorded_config, run_of

    run_dir = run_of(checkpoint)
    if not (run_dir / CONFIG_FILE).is_file():
        return None
    data = recorded_config(run_dir).get("data")
    if not isinstance(data, dict):
        raise ConfigError(f"{run_dir / CONFIG_FILE} does not name its data: give data=NAME")
    return data


def check_held_back(checkpoint: str, data: Mapping[str, Any]) -> None:
    """Check that the split is the run's validation split; another one has training images.

    For weights outside the folder of a run the split is unknown: this logs a warning.
    """
    from revzoo.training.lightning_compat import is_first_process

    recorded = run_data(checkpoint)
    if recorded is None:
        if is_first_process():
            log.warning(
                "%s has no record of its validation split: some of the evaluated images may have "
                "been training images",
                checkpoint,
            )
        return
    # images of another data set were not training images
    same = _place(data) == _place(recorded)
    held_back = ("val_fraction", "split_seed", "folds", "fold", "group_column")
    differing = [k for k in held_back if k in recorded and data.get(k) != recorded[k]]
    if same and differing:
        expected, got = (
            " ".join(f"data.{key}={d.get(key)}" for key in differing) for d in (recorded, data)
        )
        raise ConfigError(
            f"{got} would evaluate training images: the run's validation split has {expected}; "
            f"give {expected}"
        )


def _place(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """The kind of a data set, and its table or folder; one folder has many spellings."""
    root = data.get("table") or data.get("root")
    return data.get("_target_"), root and os.path.realpath(Path(root).expanduser())
