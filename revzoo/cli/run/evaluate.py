"""Evaluates a trained model on a split of data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from revzoo.cli.check import check, check_machine
from revzoo.cli.run.build import apply_precision, build_data, make_trainer
from revzoo.cli.run.folder import CONFIG_FILE, errors_naming, moved, recorded_config, run_of
from revzoo.cli.schema import EVALUATION
from revzoo.cli.terminal import ConfigError
from revzoo.data import DataError
from revzoo.training.callbacks.progress_bar import Progress
from revzoo.training.checkpoint.restore import Restored, restore
from revzoo.training.distributed import is_first_process
from revzoo.training.metrics import in_order
from revzoo.training.tuning.out_of_memory import memory_errors

log = logging.getLogger(__name__)


def evaluate(config: Mapping[str, Any], *, root: str | None = None) -> dict[str, float]:
    """Evaluate a checkpoint on a split; return ``test/loss``, ``test/acc`` and so on.

    Args:
        config: ``configs/eval.yaml``, composed, as plain containers; ``data`` may be missing.
        root: the folder of the run's data, if it is not where the run recorded it.

    Raises:
        ValueError: the configuration is wrong.
        CheckpointError, WeightsError: the checkpoint or the weights cannot be used.
        DataError: the data cannot be used, or their classes differ from the checkpoint.
        NoMemoryError: a batch does not fit into memory.
    """
    check_machine(config)
    if is_first_process():
        log.info("reading %s", config["ckpt"])
    restored = restore(config["ckpt"], bits=config["bits"])
    data_config = _data_section(config, root)
    apply_precision(config["precision"])
    data = build_data(data_config)
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
        place = f" in {data_config['root']}" if "root" in data_config else ""
        split = {"test": "test", "val": "validation"}[config["split"]]
        log.info("reading the %s images of %s%s", split, type(data).__name__, place)
    data.setup("test" if testing else "validate")
    _check_images(restored, in_chans=data.in_chans)
    # this run's precision section, not the checkpoint's: the layout changes speed and rounding
    restored.module.lay_out(channels_last=config["precision"]["channels_last"])
    trainer = make_trainer(
        **config["trainer"],
        precision=config["precision"]["trainer"],
        # an evaluation writes no files
        logger=False,
        enable_checkpointing=False,
        callbacks=[Progress()],
    )
    run = trainer.test if testing else trainer.validate
    with memory_errors(trainer, restored.module, data, eval_option="batch_size"):
        (figures,) = run(restored.module, datamodule=data, verbose=False)
    return in_order({name: float(value) for name, value in figures.items()})


def _data_section(config: Mapping[str, Any], root: str | None) -> Mapping[str, Any]:
    """The data section, checked: of the command, else of the run that made the checkpoint."""
    data = config.get("data")
    if not data:
        if (recorded := run_data(config["ckpt"])) is None:
            raise ConfigError(
                f"{config['ckpt']} is not in the folder of a run, so its data are unknown: give "
                "data=NAME, such as data=cifar10, or data=imagefolder data.root=DIR"
            )
        data = moved(recorded, root)
        # the section comes from a file that the user has not named
        with errors_naming(run_of(config["ckpt"]) / CONFIG_FILE):
            check({**config, "data": data}, EVALUATION)
    size = config["batch_size"]
    return data if size is None else {**data, "eval_batch_size": size}


def run_data(checkpoint: str) -> dict[str, Any] | None:
    """The data section of the run whose folder contains a checkpoint; None outside of a run.

    Raises:
        ConfigError: the run's configuration does not name its data.
    """
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

    Raises:
        ConfigError: naming the options that differ.
    """
    trained = run_data(checkpoint)
    if trained is None:
        if is_first_process():
            log.warning(
                "%s has no record of its validation split: some of the evaluated images may have "
                "been training images",
                checkpoint,
            )
        return
    # images of another data set were not training images
    same = _place(data) == _place(trained)
    differing = [k for k in ("val_fraction", "split_seed") if data.get(k) != trained.get(k)]
    if same and differing:
        expected, got = (
            " ".join(f"data.{key}={d.get(key)}" for key in differing) for d in (trained, data)
        )
        raise ConfigError(
            f"{got} would evaluate training images: the run's validation split has {expected}; "
            f"give {expected}"
        )


def _place(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """The kind of a data set and its folder; one folder has many spellings."""
    root = data.get("root")
    if isinstance(root, str):
        with suppress(RuntimeError, ValueError):  # no such home; a NUL
            root = Path(root).expanduser().resolve()
    return data.get("_target_"), root


def _check_images(restored: Restored, *, in_chans: int) -> None:
    if in_chans != restored.in_chans:
        raise DataError(
            f"the model takes images of {restored.in_chans} channels, the data have "
            f"{in_chans}: set data.in_chans={restored.in_chans}, or use its training data"
        )
