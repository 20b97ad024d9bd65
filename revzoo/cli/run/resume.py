"""Continues a run: ``revzoo train --resume RUN_DIR``.

``config.yaml`` of the run fixes what it computes; resumed on the CPU it ends with the weights and
figures of a run that was never stopped, bit for bit. Two things may change: the memory mode, which
does not change what is computed, and, with ``--allow-precision-change``, the precision. A change is
written to ``config.yaml``, for the next time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from revzoo.cli.commands.train import check_changes
from revzoo.cli.config.build import data_name, model_spec
from revzoo.cli.config.checks import check_config
from revzoo.cli.config.compose import compose_checked, to_plain
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.plugins import check_imports
from revzoo.cli.run.errors import user_errors
from revzoo.cli.run.folder import CONFIG_FILE, LOG_FILE, check_files, errors_naming, recorded_config
from revzoo.cli.run.lock import locked
from revzoo.cli.run.train import train
from revzoo.data.registry import DATA
from revzoo.training.callbacks.registry import build_callbacks
from revzoo.training.checkpoint.files import CHECKPOINTS, CheckpointError, has_saved, read_last
from revzoo.training.checkpoint.hyperparameters import WEIGHTS, check_hyperparameters
from revzoo.training.checkpoint.validate import check_contents, check_parts
from revzoo.training.distributed import is_first_process
from revzoo.training.optim.optimizers import OptimSpec

log = logging.getLogger(__name__)

LOG_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # as Hydra's


def resume(
    run_dir: Path, overrides: Sequence[str] = (), *, allow_precision_change: bool = False
) -> dict[str, float]:
    """Continue a run in its folder.

    Args:
        run_dir: the run's folder.
        overrides: ``memory=MODE`` and ``precision=NAME``.
        allow_precision_change: whether the precision may change the figures.

    Returns:
        The figures of the run.

    Raises:
        SystemExit: the run cannot be resumed, or not with these changes; the message says why.
    """
    run_dir = run_dir.absolute()
    path = run_dir / CONFIG_FILE
    with user_errors():
        check_files(run_dir)
        check_imports(run_dir)
        config = recorded_config(run_dir)
        with errors_naming(path):
            check_config(config)
        if overrides:
            config |= _changes(config, overrides, allow_precision_change=allow_precision_change)
            check_config(config)
    with locked(run_dir), logged_to(run_dir):
        arguments = ["--resume", str(run_dir), *overrides]
        checkpoint = last_state(run_dir, config)
        return train(config, run_dir=run_dir, overrides=arguments, resume=checkpoint)


def last_state(run_dir: Path, config: Mapping[str, Any]) -> Path | None:
    """The checkpoint to resume from; None if the run was stopped before it had saved any.

    Raises:
        SystemExit: if there are checkpoints but none that can be used.
    """
    if not has_saved(run_dir / CHECKPOINTS):
        if is_first_process():
            log.info("nothing was saved in %s: the run begins from the start", run_dir)
        return None
    with user_errors():
        check = partial(check_state, config, run_dir=run_dir)
        path, _ = read_last(run_dir / CHECKPOINTS, check)
    return path


def check_state(config: Mapping[str, Any], state: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse a checkpoint that does not fit the run's configuration.

    Raises:
        DamagedCheckpoint: it is not as a run has saved it.
        CheckpointError: it is of another run, or has hyperparameters that none has.
    """
    check_parts(state)
    check_hyperparameters(state["hyper_parameters"])
    check_same_run(config, state, run_dir)
    callbacks = build_callbacks(config["callbacks"], run_dir=run_dir)
    check_contents(state, data=data_name(config), callbacks=callbacks)


def _changes(
    config: Mapping[str, Any], overrides: Sequence[str], *, allow_precision_change: bool
) -> dict[str, Any]:
    """The sections that the overrides replace."""
    check_changes(overrides)
    sections = {override.partition("=")[0] for override in overrides}
    composed = to_plain(compose_checked(overrides))
    changed = {section: composed[section] for section in sections}
    precision = changed.get("precision", config["precision"])
    if precision != config["precision"] and not allow_precision_change:
        raise ConfigError(
            f"the run computes in precision.trainer={config['precision']['trainer']}, "
            f"{precision['trainer']} would change its figures: add --allow-precision-change "
            "if you want that"
        )
    return changed


def check_same_run(config: Mapping[str, Any], state: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse a checkpoint of another model or recipe than the configuration's.

    Raises:
        CheckpointError: naming what differs.
    """
    kept = state["hyper_parameters"]
    model = kept["model"]
    same_size = {name: model[name] for name in ("num_classes", "in_chans")}
    spec = model_spec(config, **same_size)
    # a checkpoint brings its own weights: it does not keep where the run's first ones came from
    spec = {key: value for key, value in spec.items() if key not in (*WEIGHTS, "memory")}
    spec["name"] = spec["name"].partition(".")[0]
    # as specs, since options that came later are not in it
    wanted: dict[str, Any] = {"model": spec, "optim": OptimSpec.of(config["optim"]).plain()}
    optim = OptimSpec.of(kept["optim"]).plain()
    found: dict[str, Any] = {"model": {key: model.get(key) for key in spec}, "optim": optim}
    if others := [kind.__name__ for kind in DATA.values() if kind.__name__ in state]:
        wanted["data"], found["data"] = data_name(config), ", ".join(others)
    for section, options in wanted.items():
        if options != found[section]:
            raise CheckpointError(
                f"{run_dir / CONFIG_FILE} and the checkpoint differ in {section}: {options} and "
                f"{found[section]}; restore the configuration that the run was started with"
            )


@contextmanager
def logged_to(run_dir: Path) -> Iterator[None]:
    """Log to the terminal and to the run's log file, as Hydra does for a new run."""
    handlers: tuple[logging.Handler, ...] = (
        logging.StreamHandler(sys.stdout),
        logging.FileHandler(run_dir / LOG_FILE, errors="backslashreplace"),
    )
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
