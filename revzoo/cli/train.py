"""Train a model: ``revzoo-train model=revnet38 data=cifar10``, ``python -m revzoo.cli.train``.

The command line is checked first, then the whole configuration, then the data are read: what
cannot be run is refused in one or two lines, with status 1, and leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import hydra
import pytorch_lightning as pl
import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from tqdm.contrib.logging import logging_redirect_tqdm

from revzoo.cli.build import apply_precision, build_data, build_trainer, model_spec
from revzoo.cli.checks import check_config
from revzoo.cli.overrides import (
    CONFIG_MODULE,
    CONFIG_NAME,
    HYDRA_VERSION,
    check_sweep,
    compose_checked,
)
from revzoo.cli.summary import describe_run, write_config, write_summary
from revzoo.core.guard import DriftError
from revzoo.data import DataError, ImageData
from revzoo.training import Classifier
from revzoo.training.callbacks import best_checkpoint_path
from revzoo.weights.errors import WeightsError

log = logging.getLogger(__name__)

# while a run is being prepared
TOLD = (ValueError, DataError, MisconfigurationException, WeightsError)
TOLD_IN_TRAINING = (FloatingPointError, DataError, DriftError)
EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # sets held in memory are loaded fastest without any
    ".*LeafSpec.*is deprecated.*",  # by torch 2.15; Lightning 2.6 uses it
    "You requested to overfit",  # debug=overfit means it
)


@contextmanager
def told_plainly(kinds: tuple[type[Exception], ...] = TOLD) -> Iterator[None]:
    """End the program with an error's message alone, where the message says what to do.

    With ``HYDRA_FULL_ERROR=1`` in the environment the error passes, traceback and all.
    """
    try:
        yield
    except kinds as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"revzoo: {error}")


def check_command_line(arguments: Sequence[str], *, config_dir: Path | None = None) -> None:
    """Refuse a command line that cannot be run, before Hydra makes a folder for the run.

    Args:
        arguments: the command line without the program's name.
        config_dir: folder of the configurations; None for the installed ones.

    Raises:
        SystemExit: with a message that names the nearest valid key or option.
    """
    args = get_args_parser().parse_args(list(arguments))
    own_config = args.config_path or args.config_name or args.config_dir
    if own_config or args.help or args.hydra_help or args.info or args.shell_completion:
        return  # other configurations or no run: the configuration is checked when it is used
    with told_plainly():
        if args.multirun:
            check_sweep(args.overrides, config_dir=config_dir)
        else:
            check_config(to_plain(compose_checked(args.overrides, config_dir=config_dir)))


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, every reference resolved.

    Missing values stay ``"???"`` for the checks to name.
    """
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def run(cfg: DictConfig) -> dict[str, float]:
    """Train in the folder that Hydra has made for this run; returns the final figures."""
    return train(to_plain(cfg), run_dir=Path(HydraConfig.get().runtime.output_dir))


def train(config: Mapping[str, Any], *, run_dir: Path) -> dict[str, float]:
    """Train, then test the best checkpoint; leaves configuration, logs and figures in ``run_dir``.

    Args:
        config: a composed configuration as plain containers.
        run_dir: the run's folder.

    Returns:
        The last figures of training and validation, and those of the test.

    Raises:
        SystemExit: if the configuration or the data cannot be used; the message says why.
    """
    with quiet(), told_plainly():
        check_config(config)
        apply_precision(config["precision"])
        pl.seed_everything(config["seed"], workers=True, verbose=False)
        trainer = build_trainer(config, run_dir=run_dir)
        data = build_data(config["data"])
        data.prepare_data()
        data.setup("fit")
        module = build_module(config, data)
    if trainer.is_global_zero:
        write_config(config, run_dir)
        data_name = type(data).__name__
        log.info("%s on %s, seed %d", config["model"]["name"], data_name, config["seed"])
    return fit_and_test(trainer, module, data, run_dir=run_dir, test=config["test"])


def build_module(config: Mapping[str, Any], data: ImageData) -> Classifier:
    """The Lightning module for data that are set up, tried on one black image.

    Raises:
        ValueError: from the model, if images of this size do not pass through it.
    """
    spec = model_spec(config, num_classes=data.num_classes, in_chans=data.in_chans)
    channels_last = config["precision"]["channels_last"]
    module = Classifier(spec, optim=config["optim"], channels_last=channels_last)
    with torch.no_grad():
        module.eval()(torch.zeros(1, data.in_chans, data.image_size, data.image_size))
    module.train()
    return module


def fit_and_test(
    trainer: pl.Trainer, module: Classifier, data: ImageData, *, run_dir: Path, test: bool
) -> dict[str, float]:
    """Train, test the best checkpoint (the last weights, if none was kept), write the summary."""
    start = time.perf_counter()
    with quiet(), redirected_log(trainer), told_plainly(TOLD_IN_TRAINING):
        trainer.fit(module, datamodule=data)
    seconds = time.perf_counter() - start
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if test and data.has_test and trainer.state.finished:
        figures |= test_best(trainer, module, data)
    if trainer.is_global_zero:
        summary = describe_run(trainer, module, seconds=seconds, figures=figures)
        write_summary(summary, run_dir)
        log.info("%.1f s of training; run folder %s", seconds, run_dir)
    return figures


def test_best(trainer: pl.Trainer, module: Classifier, data: ImageData) -> dict[str, float]:
    """The figures of the test split, with the best checkpoint's weights."""
    best = best_checkpoint_path(trainer)
    with quiet(), told_plainly(TOLD_IN_TRAINING):
        results = trainer.test(
            module, datamodule=data, ckpt_path=best, weights_only=True, verbose=False
        )
    figures = {name: float(value) for name, value in results[0].items()}
    told = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
    log.info("%s (%s)", told, "best checkpoint" if best else "last weights")
    return figures


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's greetings, and the warnings of :data:`EXPECTED_WARNINGS`."""
    greeter = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    level = greeter.level
    greeter.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        greeter.setLevel(level)


def redirected_log(trainer: pl.Trainer) -> AbstractContextManager[Any]:
    """Keep log lines and the progress bar apart, where there is a bar."""
    return logging_redirect_tqdm() if trainer.progress_bar_callback else nullcontext()


def main() -> None:
    """The console script, with the installed configurations."""
    check_command_line(sys.argv[1:])
    hydra.main(
        version_base=HYDRA_VERSION,
        config_path=f"pkg://{CONFIG_MODULE}",
        config_name=CONFIG_NAME,
    )(run)()


if __name__ == "__main__":
    main()
