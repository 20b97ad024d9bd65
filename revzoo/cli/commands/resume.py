"""``revzoo-train --resume RUN_DIR``: go on with a run, in its folder, as it was configured.

What a run computes is fixed by its ``config.yaml``; resumed on the CPU it ends with the weights and
figures of a run that was never stopped, bit for bit. Two things may be changed: the memory mode,
which does not change what is computed (``memory=invert``), and, where it is asked for in so many
words, the precision (``precision=bf16 --allow-precision-change``). A change is written to
``config.yaml``, for the next time.
"""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from revzoo.cli.commands.train import train
from revzoo.cli.config.build import data_name, model_spec
from revzoo.cli.config.checks import check_config
from revzoo.cli.config.overrides import ConfigError, compose_checked, to_plain
from revzoo.cli.run.errors import told_plainly
from revzoo.cli.run.folder import CONFIG_FILE
from revzoo.cli.run.lock import locked
from revzoo.data.registry import DATA
from revzoo.training.callbacks.registry import build_callbacks
from revzoo.training.checkpoint.files import CHECKPOINTS, CheckpointError, has_saved, read_last
from revzoo.training.checkpoint.hyperparameters import WEIGHTS, check_hyperparameters
from revzoo.training.checkpoint.validate import check_contents, check_parts
from revzoo.training.distributed import is_first_process
from revzoo.training.optim.optimizers import OptimSpec

log = logging.getLogger(__name__)

LOG_FILE = "train.log"
LOG_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # as Hydra's


def asks_to_resume(arguments: Sequence[str]) -> bool:
    """Whether a command line is one of :func:`resume`."""
    return any(a == "--resume" or a.startswith("--resume=") for a in arguments)


def resume(arguments: Sequence[str], *, config_dir: Path | None = None) -> dict[str, float]:
    """Go on with the run that the command line names.

    Args:
        arguments: the command line without the program's name.
        config_dir: folder of the configurations; None for the installed ones.

    Returns:
        The figures of the run.

    Raises:
        SystemExit: if the run cannot go on, or not with these changes; the message says why.
    """
    args = _parsed(arguments)
    run_dir = args.resume.absolute()
    with told_plainly():
        config = recorded_config(run_dir)
        check_config(config)
        config = {**config, **_changes(args, config, config_dir)}
        check_config(config)
    with locked(run_dir), logged_to(run_dir):
        path = last_state(run_dir, config)
        return train(config, run_dir=run_dir, overrides=list(arguments), resume=path)


def last_state(run_dir: Path, config: Mapping[str, Any]) -> Path | None:
    """The checkpoint to go on from; None if the run was stopped before it had saved any.

    Raises:
        SystemExit: if there are checkpoints but none that can be used.
    """
    if not has_saved(run_dir / CHECKPOINTS):
        if is_first_process():
            log.info("nothing was saved in %s: the run begins from the start", run_dir)
        return None
    with told_plainly():
        check = partial(check_state, config, run_dir=run_dir)
        path, _ = read_last(run_dir / CHECKPOINTS, check)
    return path


def check_state(config: Mapping[str, Any], state: Mapping[str, Any], run_dir: Path) -> None:
    """Refuse a checkpoint that the run cannot go on from as it was.

    Raises:
        DamagedCheckpoint: it is not as a run has saved it.
        CheckpointError: it is of another run, or has hyperparameters that none has.
    """
    check_parts(state)
    check_hyperparameters(state["hyper_parameters"])
    check_same_run(config, state, run_dir)
    callbacks = build_callbacks(config["callbacks"], run_dir=run_dir)
    check_contents(state, data=data_name(config), callbacks=callbacks)


def _parsed(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser("revzoo-train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", required=True)
    parser.add_argument("--allow-precision-change", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="memory=MODE")
    return parser.parse_intermixed_args(list(arguments))


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run, as it was last started or resumed.

    Raises:
        ConfigError: if there is none, or it is no YAML mapping.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"there is no {path}: give the folder of a run, such as outputs/DAY/TIME")
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): restore it from a copy") from None
    except Exception as error:  # of the YAML library, which is not ours to import
        raise ConfigError(f"{path} is no YAML ({error}): restore it from a copy") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no configuration: restore it from a copy")
    return {str(key): value for key, value in plain.items()}


def _changes(args: Namespace, config: Mapping[str, Any], config_dir: Path | None) -> dict[str, Any]:
    """The sections that the overrides replace."""
    for override in args.overrides:
        if override.partition("=")[0] not in ("memory", "precision"):
            raise ConfigError(
                f"{override}: a run goes on as it was configured; only memory=MODE may be changed, "
                "and precision=NAME with --allow-precision-change. Start a new run for the rest"
            )
    composed = to_plain(compose_checked(args.overrides, config_dir=config_dir))
    sections = {override.partition("=")[0] for override in args.overrides}
    changed = {section: composed[section] for section in sections}
    precision = changed.get("precision", config["precision"])
    if precision != config["precision"] and not args.allow_precision_change:
        raise ConfigError(
            f"the run computes in precision.trainer={config['precision']['trainer']}, "
            f"{precision['trainer']} would change its figures: add --allow-precision-change "
            "if that is meant"
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
        logging.FileHandler(run_dir / LOG_FILE),
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
