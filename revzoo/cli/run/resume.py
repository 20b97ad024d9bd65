"""Resumes a run: ``revzoo train --resume RUN_DIR``.

The run's ``config.yaml`` determines its results: on the CPU, a resumed run ends with the same
weights and figures as an uninterrupted run, bit for bit. The memory mode may change and, with
``--allow-precision-change``, the precision. Changes are written to ``config.yaml``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from revzoo.cli.run.build import data_name, model_spec
from revzoo.cli.run.console import shorten_log
from revzoo.cli.run.lock import locked
from revzoo.cli.run.record import CONFIG_FILE, LOG_FILE
from revzoo.cli.run.train import Saved, train
from revzoo.cli.terminal import user_errors
from revzoo.data.registry import DATA
from revzoo.models.registry import WEIGHTS_ARGUMENTS
from revzoo.training.callbacks.registry import build_callbacks
from revzoo.training.checkpoint.files import CheckpointError, has_saved, read_last
from revzoo.training.checkpoint.hyperparameters import check_hyperparameters
from revzoo.training.checkpoint.restore import check_complete
from revzoo.training.distributed import is_first_process
from revzoo.training.optim.optimizers import OptimSpec
from revzoo.weights.source import BEST, CHECKPOINTS, LAST

log = logging.getLogger(__name__)


def resume(
    run_dir: Path, config: Mapping[str, Any], overrides: Sequence[str] = ()
) -> dict[str, float]:
    """Continue a run in its folder.

    Args:
        run_dir: the run's folder.
        config: from :func:`revzoo.cli.run.record.resumed_config`.
        overrides: of the command line, for the record.

    Returns:
        The figures of the run.

    Raises:
        SystemExit: the run cannot resume; the message says why.
    """
    # messages and records name the path, and the process may change its folder
    run_dir = run_dir.absolute()
    with locked(run_dir), logged_to(run_dir):
        arguments = ["--resume", str(run_dir), *overrides]
        # under the lock: it may rename a damaged file
        checkpoint = last_state(run_dir, config)
        return train(config, run_dir=run_dir, overrides=arguments, resume=checkpoint)


def last_state(run_dir: Path, config: Mapping[str, Any]) -> Saved | None:
    """The checkpoint to resume from; None if the run has saved none.

    Raises:
        SystemExit: all checkpoints are damaged or another run's.
    """
    if not has_saved(run_dir / CHECKPOINTS):
        if is_first_process():
            log.warning("%s has no %s: the run starts from the beginning", run_dir, LAST)
            best = run_dir / CHECKPOINTS / BEST
            if best.is_file():  # someone has removed only last.ckpt
                log.warning("%s is now %s", best, best.replace(best.with_name(f"{BEST}.earlier")))
        return None
    with user_errors():
        check = partial(check_fits, config, run_dir=run_dir)
        path, state = read_last(run_dir / CHECKPOINTS, check)
    # the rest is freed: it may hold gigabytes
    return Saved(path, state["global_step"], state[data_name(config)])


def check_fits(
    config: Mapping[str, Any], state: Mapping[str, Any], path: Path, *, run_dir: Path
) -> None:
    """Check that the checkpoint ``path`` fits the run's configuration.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged.
        CheckpointError: it comes from another run, or its hyperparameters are refused.
    """
    # before check_complete, which builds the model that they describe
    check_hyperparameters(state.get("hyper_parameters"))
    callbacks = build_callbacks(config["callbacks"], run_dir=run_dir)
    try:
        check_same_run(config, state, path, run_dir)
        check_complete(state, str(path), data=data_name(config), callbacks=callbacks)
    except ValueError as error:  # options of another version
        raise CheckpointError(f"{path}: {error}") from None


def check_same_run(
    config: Mapping[str, Any], state: Mapping[str, Any], path: Path, run_dir: Path
) -> None:
    """Check that the checkpoint ``path`` has the model and the recipe of the configuration.

    Raises:
        CheckpointError: naming the section that differs.
    """
    hyper = state["hyper_parameters"]
    model = hyper["model"]
    # these come from the data, which are compared by themselves
    same_size = {name: model.get(name) for name in ("num_classes", "in_chans")}
    spec = model_spec(config, **same_size)
    # a checkpoint contains the weights and does not record the source of the initial ones
    others = {*WEIGHTS_ARGUMENTS, "memory"}
    if config["callbacks"].get("side_bits"):
        others.add("reversible_bits")  # the callback raises them, so a checkpoint may have more
    spec = {key: value for key, value in spec.items() if key not in others}
    # revnet38.cifar10 names weights of revnet38
    spec["name"] = spec["name"].partition(".")[0]
    # OptimSpec adds the defaults of options that are newer than the checkpoint
    expected: dict[str, Any] = {"model": spec, "optim": OptimSpec.of(config["optim"]).plain()}
    optim = OptimSpec.of(hyper.get("optim")).plain()
    saved: dict[str, Any] = {"model": {key: model.get(key) for key in spec}, "optim": optim}
    if names := [kind.__name__ for kind in DATA.values() if kind.__name__ in state]:
        expected["data"], saved["data"] = data_name(config), ", ".join(names)
    for section, options in expected.items():
        if options != saved[section]:
            raise CheckpointError(
                f"{run_dir / CONFIG_FILE} and {path} differ in {section}: {options} and "
                f"{saved[section]}; restore the configuration with which the run started"
            )


@contextmanager
def logged_to(run_dir: Path) -> Iterator[None]:
    """Log to the terminal and to the run's log file, as Hydra does for a new run."""
    handlers: tuple[logging.Handler, ...] = (
        logging.StreamHandler(sys.stdout),
        # names of files may hold any bytes
        logging.FileHandler(run_dir / LOG_FILE, errors="backslashreplace"),
    )
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    shorten_log()
    try:
        yield
    finally:
        # in a notebook, more runs may follow in this process
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
