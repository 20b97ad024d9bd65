"""The figures of a trained model on a split of data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from revzoo._checks import check_choice, check_count, check_names
from revzoo.cli.config.build import apply_precision, build_data
from revzoo.cli.config.checks import check_data, check_precision, check_trainer, device_kind
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.run.folder import CONFIG_FILE, errors_naming, recorded_config
from revzoo.data import DataError
from revzoo.training.callbacks.progress import Progress
from revzoo.training.checkpoint.files import PlainCheckpointIO
from revzoo.training.checkpoint.restore import Restored, restore
from revzoo.training.distributed import is_first_process
from revzoo.training.metrics import in_order
from revzoo.training.tuning.out_of_memory import memory_errors

log = logging.getLogger(__name__)

SPLITS = ("test", "val")
KEYS = ("ckpt", "split", "batch_size", "data", "precision", "trainer")


def evaluate(config: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a checkpoint on a split: ``test/loss``, ``test/acc`` and so on.

    Args:
        config: ``configs/eval.yaml``, composed, as plain containers; ``data`` may be missing.

    Raises:
        ValueError: for a configuration that cannot be run.
        CheckpointError, WeightsError: if the checkpoint or the weights cannot be used.
        DataError: if the data cannot, or have other classes than the checkpoint.
        NoMemoryError: if so many images at once do not fit.
    """
    check_eval(config)
    if is_first_process():
        log.info("reading %s", config["ckpt"])
    restored = restore(config["ckpt"])
    data_config = config.get("data")
    if data_config:
        check_data(data_config)
    else:
        data_config = recorded_data(config["ckpt"])
        with errors_naming(run_of(config["ckpt"]) / CONFIG_FILE):
            check_data(data_config)
    if config["batch_size"] is not None:
        data_config = {**data_config, "eval_batch_size": config["batch_size"]}
    apply_precision(config["precision"])
    data = build_data(data_config)
    data.prepare_data()
    testing = config["split"] == "test"
    if not data.has(config["split"]):
        if testing:
            raise DataError("the data have no test split: evaluate split=val")
        check_held_back(config["ckpt"], data_config)
    data.load_state_dict(restored.data_state)
    if is_first_process():
        place = f" in {data_config['root']}" if "root" in data_config else ""
        split = {"test": "test", "val": "validation"}[config["split"]]
        log.info("reading the %s images of %s%s", split, type(data).__name__, place)
    data.setup("test" if testing else "validate")
    _check_images(restored, in_chans=data.in_chans)
    restored.module.lay_out(channels_last=config["precision"]["channels_last"])
    trainer = pl.Trainer(
        **config["trainer"],
        precision=config["precision"]["trainer"],
        plugins=[PlainCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        callbacks=[Progress()],
        enable_model_summary=False,
    )
    run = trainer.test if testing else trainer.validate
    with memory_errors(trainer, restored.module, data, eval_option="batch_size"):
        (figures,) = run(restored.module, datamodule=data, verbose=False)
    return in_order({name: float(value) for name, value in figures.items()})


def check_eval(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that cannot be run, before any data is touched.

    Raises:
        ConfigError: with what was got and what is expected.
    """
    check_names(config, KEYS, where="config")
    if config["ckpt"] in (None, "", "???"):
        raise ConfigError(
            "ckpt is needed: give ckpt=RUN_DIR/checkpoints/best.ckpt, or weights such as "
            "ckpt=revnet38.cifar10"
        )
    check_choice("split", config["split"], SPLITS)
    if config["batch_size"] is not None:
        check_count("batch_size", config["batch_size"])
    check_trainer(config["trainer"])
    check_precision(config["precision"], device_kind(config["trainer"]["accelerator"]))


def recorded_data(checkpoint: str) -> dict[str, Any]:
    """The data section of the run that a checkpoint lies in.

    Raises:
        ConfigError: if it does not lie in a run's folder.
    """
    data = run_data(checkpoint)
    if data is None:
        raise ConfigError(
            f"{checkpoint} does not lie in the folder of a run, so its data are not known: give "
            "data=NAME, such as data=cifar10, or data=imagefolder data.root=DIR"
        )
    return data


def run_of(checkpoint: str) -> Path:
    """The folder of the run that a checkpoint lies in, if it lies in one."""
    return Path(checkpoint).absolute().parent.parent


def run_data(checkpoint: str) -> dict[str, Any] | None:
    """As :func:`recorded_data`; None for a checkpoint that does not lie in a run's folder.

    Raises:
        ConfigError: the run's configuration names no data.
    """
    run_dir = run_of(checkpoint)
    if not (run_dir / CONFIG_FILE).is_file():
        return None
    data = recorded_config(run_dir).get("data")
    if not isinstance(data, dict):
        raise ConfigError(f"{run_dir / CONFIG_FILE} names no data: give data=NAME")
    return data


def check_held_back(checkpoint: str, data: Mapping[str, Any]) -> None:
    """Refuse another part of the training images than the run has held back for its validation.

    Weights that do not lie in the folder of a run do not say which that was: then it is a warning.

    Raises:
        ConfigError: naming the options that differ.
    """
    trained = run_data(checkpoint)
    if trained is None:
        if is_first_process():
            log.warning(
                "%s does not say which images were held back from its training: those evaluated "
                "may be among the others",
                checkpoint,
            )
        return
    same = all(data.get(key) == trained.get(key) for key in ("_target_", "root"))
    differing = [k for k in ("val_fraction", "split_seed") if data.get(k) != trained.get(k)]
    if same and differing:
        was, given = (
            " ".join(f"data.{key}={of.get(key)}" for key in differing) for of in (trained, data)
        )
        raise ConfigError(
            f"the run held back its validation images with {was}; with {given} some of them were "
            f"trained on: give {was}"
        )


def _check_images(restored: Restored, *, in_chans: int) -> None:
    if in_chans != restored.in_chans:
        raise DataError(
            f"the model takes images of {restored.in_chans} channels, the data have "
            f"{in_chans}: set data.in_chans={restored.in_chans}, or give the data it was trained on"
        )
