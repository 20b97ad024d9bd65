"""The folder of a run: its lock, its record, and what may change in a resume or an evaluation.

- ``config.yaml``: the resolved configuration.
- ``sessions.jsonl``: a line for each start of the run, with overrides, versions and git state.
- ``summary.json``: the final figures, even if the run was stopped or failed.

Torch and Lightning are imported by functions only, so a refused change gets a quick answer.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from hydra.core.override_parser.types import QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from revzoo._checks import is_first_process, number_of
from revzoo._files import write_atomically
from revzoo._version import __version__
from revzoo.cli.config import check, compose, parse, quoted_if_needed, read_yaml
from revzoo.cli.terminal import (
    USER_ERRORS,
    ConfigError,
    command_line,
    imported,
    message_line,
    one_line,
    short_path,
)
from revzoo.weights.source import CHECKPOINTS, LAST

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
SESSIONS_FILE = "sessions.jsonl"
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.csv"
LOG_FILE = "train.log"
LOCK_FILE = ".lock"
LIBRARIES = ("torch", "torchvision", "pytorch-lightning")
PATHS = ("data.root", "data.table", "data.endpoint_url")  # the data may move
# settings of the machine, which leave the run as it is, up to rounding
PROCESSES = ("trainer.devices", "trainer.num_nodes", "data.batch_size")  # their product stays
MACHINE = (
    *("trainer.accelerator", "trainer.strategy", "trainer.cuda_graph"),
    *("data.on_device", "data.num_workers"),
    *PROCESSES,
)
LENGTH = ("trainer.max_epochs", "trainer.max_steps")  # it may grow
CHANGEABLE = (
    *("memory", "memory.bytes", "memory.fraction", "precision"),
    *PATHS,
    *MACHINE,
    *LENGTH,
)

_held: set[IO[str]] = set()  # files whose locks this process holds


# --- a new folder ---


def is_timed(section: DictConfig) -> bool:
    """Whether the folder of ``hydra.run`` or ``hydra.sweep`` has the time in its name."""
    plain: Any = OmegaConf.to_container(section, resolve=False)
    return "${now:" in str(plain["dir"])


def new_folder(folder: Path) -> Path:
    """Create ``folder``; if it exists, ``folder-2``, ``folder-3`` and so on instead.

    Two runs that start in the same second have the same name for their folders.
    """
    path = folder
    for number in itertools.count(2):
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            break
        path = folder.with_name(f"{folder.name}-{number}")
    return path


def dir_of(section: DictConfig) -> Path:
    """The folder of ``hydra.run``."""
    try:
        return Path(str(section.dir))
    except OmegaConfBaseException as error:  # a reference to a missing key
        raise ConfigError(one_line(error)) from None


def check_unused(run_dir: Path) -> None:
    """Refuse the folder of another run."""
    run_dir = run_dir.absolute()
    # further processes would find the file that the first has just written
    if is_first_process() and (run_dir / CONFIG_FILE).exists():
        raise ConfigError(
            f"{run_dir} already holds a run: resume it with --resume {run_dir}, or choose "
            "another hydra.run.dir"
        )


def check_repeated(run_dir: Path, overrides: Sequence[str]) -> None:
    """Check that the run in ``run_dir`` began with these overrides."""
    before, now = recorded_words(run_dir, "overrides"), own_overrides(overrides)
    # further processes may read while the first one begins the run; a kill may prevent the record
    if is_first_process() and before and before != now:
        raise ConfigError(
            f"{run_dir} holds a run of other options ({shlex.join(before)}): repeat these, choose "
            f"another hydra.run.dir, or change options with --resume {run_dir}"
        )


def own_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides that a run records: not Hydra's, such as its folder."""
    return [o for o in overrides if not o.lstrip("+~").startswith("hydra.")]


def discard_folder(run_dir: Path) -> None:
    """Remove the files of a run that could not start, then empty folders."""
    for name in (LOG_FILE, LOCK_FILE):
        (run_dir / name).unlink(missing_ok=True)
    # outputs/MODEL-DATA/TIME: two parents may be new, too
    for folder in (run_dir, *list(run_dir.parents)[:2]):
        # not the working directory
        if folder.resolve() == Path.cwd():
            return
        try:
            folder.rmdir()
        except OSError:
            return


# --- the lock ---


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which must exist; in a distributed run, rank 0 holds it.

    The lock belongs to the open file: the system releases it when the holder ends, even after a
    kill. Programs and forks that the holder starts do not inherit it. Why not ``filelock``: it does
    not name the holder, and empties the file when it asks for the lock.

    Raises:
        SystemExit: another program holds it; the message names the process.
    """
    with ExitStack() as stack:
        if is_first_process():
            # "a+" creates the file and does not empty it: it names a holder
            file = stack.enter_context((folder / LOCK_FILE).open("a+"))
            try:
                # flock, not lockf: POSIX locks end when any file of the process is closed
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                # empty if the holder is just writing its name
                holder = file.read().strip()
                pid = holder.split()[1] if holder else "PID"
                error = ConfigError(
                    f"{folder} is in use by {holder or 'another process'}: wait until it ends, "
                    f"stop it (kill {pid}), or use another folder; no file was changed"
                )
                sys.exit(message_line(error))
            except OSError as error:
                # some network file systems have no locks; a run should not fail for this
                log.warning("cannot lock %s (%s): start no second program there", folder, error)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            _held.add(file)
            stack.callback(_held.discard, file)
        yield


def _forget_locks() -> None:
    """Close the files in a fork: the system keeps a lock while any process has its file open."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


# --- what a run records ---


def write_yaml(values: Mapping[str, Any], path: Path) -> None:
    """Write plain containers as YAML, atomically."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(dict(values))).encode())


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Write the resolved configuration as ``config.yaml``."""
    write_yaml(config, run_dir / CONFIG_FILE)


def record_session(run_dir: Path, *, overrides: Sequence[str], from_step: int) -> None:
    """Add a line to ``sessions.jsonl`` for a start of the run at optimiser step ``from_step``."""
    session = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": list(overrides),
        # a resumed run must repeat them, see check_imports
        "imports": imported,
        "from_step": from_step,
        "versions": versions(),
        "git": git_state(),
    }
    with (run_dir / SESSIONS_FILE).open("a") as file:
        file.write(json.dumps(session) + "\n")


def versions() -> dict[str, str]:
    """Versions of this package and the libraries that a run's figures depend on."""
    return {"revzoo": __version__} | {name: version(name) for name in LIBRARIES}


def git_state() -> dict[str, Any] | None:
    """The commit of this package's checkout, and the changed files; None without a checkout."""
    root = Path(__file__).parents[3]  # above revzoo/cli/run
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        # a time limit: the checkout may be on a slow network disk
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10}
        return subprocess.run(command, check=True, **options).stdout

    try:
        commit = git("rev-parse", "HEAD")
        # data and outputs are untracked, and listing them may take long
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    # git prints two letters and a space before each path
    return {"commit": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def seconds_before(run_dir: Path) -> float:
    """The training time of earlier sessions in seconds, from the run's summary; 0 without one.

    A killed session writes no summary and does not count.
    """
    path = run_dir / SUMMARY_FILE
    try:
        return float(json.loads(path.read_text())["train_seconds"])
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s lacks the training time so far (%r): counting from 0", path, error)
        return 0.0


def resume_hint(run_dir: Path) -> str:
    """The command that continues a stopped run, for a message."""
    from revzoo.training.checkpoint.files import has_saved

    if not (run_dir / CONFIG_FILE).exists():
        return "training had not started: run the command again"
    note = "" if has_saved(run_dir / CHECKPOINTS) else " (no checkpoint yet: from the start)"
    return f"to resume: {command_line('train', '--resume', run_dir)}{note}"


# --- reading the record ---


def run_of(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint's run, if it is in one: ``RUN_DIR/checkpoints/best.ckpt``."""
    return Path(checkpoint).absolute().parent.parent


def newest_run(path: Path) -> Path:
    """The run that ``--resume PATH`` means: a run's folder, or the newest run below a folder.

    ``last`` means the newest run below ``outputs``. The newest is the one that was started last.
    """
    if (path / CONFIG_FILE).is_file():
        return path.absolute()
    is_last = str(path) == "last" and not path.exists()
    folder = Path("outputs") if is_last else path
    runs = [file.parent for file in folder.rglob(SESSIONS_FILE)]  # each start writes there
    runs = [run for run in runs if (run / CONFIG_FILE).is_file()]
    if not runs and is_last:
        raise ConfigError(f"there is no run below {folder.absolute()}: give the folder of a run")
    if not runs:
        return path.absolute()
    newest = max(runs, key=lambda run: (run / SESSIONS_FILE).stat().st_mtime)
    if is_first_process():
        what = number_of(len(runs), "run")
        sys.stdout.write(f"resuming {newest}, the newest of {what} below {folder}\n")
    # Lightning repeats the command line in further processes, which need the same folder
    sys.argv = [*sys.argv, "--resume", str(newest.absolute())]
    return newest.absolute()


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """Read ``config.yaml``; a ConfigError if there is no such file, or it is not a mapping."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        for folder in run_dir.parents[:2]:  # of RUN_DIR/checkpoints/last.ckpt
            if (folder / CONFIG_FILE).is_file():
                raise ConfigError(f"{run_dir}: expected the folder of the run, --resume {folder}")
        raise ConfigError(
            f"there is no {path}: give the folder of a run, such as outputs/MODEL-DATA/TIME"
        )
    return read_yaml(path)


def recorded_words(run_dir: Path, key: str, *, session: int = 0) -> list[str]:
    """The ``imports`` or ``overrides`` of a session of a run; none without the record."""
    path = run_dir / SESSIONS_FILE
    if not path.is_file():
        return []
    try:
        words = json.loads(path.read_text().splitlines()[session]).get(key, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{key}: {words!r:.40}, expected a list of words")
    except (OSError, ValueError, IndexError, AttributeError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{path} is damaged ({reason})") from None
    return words


def check_imports(run_dir: Path) -> None:
    """Check that the user has passed ``--import`` for each plugin of a run.

    A file alone must not cause an import.
    """
    try:
        # the last session: a resumed run may have added a plugin
        recorded = recorded_words(run_dir, "imports", session=-1)
    except ConfigError as error:
        log.warning("%s. If it used plugins, add --import MODULE", error)
        return  # an unknown name raises later
    if missing := [name for name in recorded if name not in imported]:
        arguments = shlex.join(word for name in missing for word in ("--import", name))
        raise ConfigError(
            f"{run_dir} was trained with plugins: add {arguments}, if you trust these modules"
        )


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Turn any error in the block into a ConfigError of one line that names the file.

    A configuration edited by hand may hold any value anywhere, but the checks expect the types of a
    composed configuration.
    """
    try:
        yield
    except USER_ERRORS as error:  # their message is complete; other errors need their type
        raise ConfigError(f"{path}: {one_line(error)}") from None
    except Exception as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {one_line(error)}): restore it from a copy"
        ) from error


# --- changes of a resume or an evaluation ---


def take_paths(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take :data:`PATHS` out of overrides: the places to which the data of a run have moved."""
    others = [override for override in overrides if override.partition("=")[0] not in PATHS]
    paths: dict[str, str] = {}
    for override in parse([override for override in overrides if override not in others]):
        value: Any = override.value()
        path = value.text if isinstance(value, QuotedString) else value
        if not isinstance(path, str) or not path or "${" in path:
            raise ConfigError(
                f"{override.input_line}: expected the path of a folder or a table, or an address"
            )
        paths[str(override.key_or_group)] = path
    return others, paths


def moved(data: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """The section ``data`` with other :data:`PATHS`."""
    new = {name.partition(".")[2]: path for name, path in paths.items()}
    for key, path in new.items():
        if key not in data:
            what = {"root": "folder"}.get(key, key)
            raise ConfigError(
                f"data.{key}={path}: the data of this run have no {what}; leave it out"
            )
    return located({**data, **new})


def located(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data`` with absolute paths: its run may resume in another folder."""
    # other sets may call other things a table
    ours = str(data.get("_target_")).startswith("revzoo.data.")
    paths = ["root", "table"] if ours else ["root"]
    found = {key: _absolute(data[key]) for key in paths if isinstance(data.get(key), str)}
    return {**data, **found}


def _absolute(path: str) -> str:
    # a user's data set may read from an address
    return path if "://" in path else str(Path(path).expanduser().absolute())


def resumed_config(
    run_dir: Path, overrides: Sequence[str] = (), *, allow_precision_change: bool = False
) -> dict[str, Any]:
    """The checked configuration with which a run resumes; the overrides are :data:`CHANGEABLE`."""
    # before the configuration, which may use names that a plugin registers
    check_imports(run_dir)
    config = recorded_config(run_dir)
    check_changes(overrides, run_dir)
    others, paths = take_paths(overrides)
    composed = compose(others).config if others else {}
    # a file that someone may have edited
    with errors_naming(run_dir / CONFIG_FILE):
        check(config)
    if overrides:
        before = config["precision"]
        config |= _changes(config, others, composed, paths)
        precision = config["precision"]["trainer"]
        if config["precision"] != before and not allow_precision_change:
            raise ConfigError(
                f"the run uses precision.trainer={before['trainer']}, {precision} would change its "
                "figures: add --allow-precision-change to accept this"
            )
        check(config)
    return config


def _changes(
    config: Mapping[str, Any],
    overrides: Sequence[str],
    composed: Mapping[str, Any],
    paths: Mapping[str, str],
) -> dict[str, Any]:
    """The sections that the overrides, already composed, and the ``paths`` replace."""
    given = {override.partition("=")[0] for override in overrides}
    # whole sections: memory=budget brings its own keys
    changed = {key: dict(composed[key]) for key in given & {"memory", "precision"}}
    for name in given - changed.keys():
        key, _, option = name.partition(".")
        section = changed.setdefault(key, dict(config[key]))
        before, after = section.get(option), composed[key][option]
        if name in LENGTH and (after or -1) < (before or -1):
            raise ConfigError(f"{name}={after}: the run has {before}, and can only become longer")
        section[option] = after
    for key in ("plan", "planned_for"):  # they were for other limits
        changed.get("memory", {}).pop(key, None)
    return {**changed, "data": moved(changed.get("data", config["data"]), paths)}


def check_changes(overrides: Sequence[str], run_dir: Path) -> None:
    """Refuse overrides that would change the results of a resumed run.

    The message has the command of a new run with them.
    """
    for override in overrides:
        if override.partition("=")[0] not in CHANGEABLE:
            raise ConfigError(
                f"{override}: a resumed run keeps its configuration, except for "
                f"{', '.join(CHANGEABLE)}; precision needs --allow-precision-change, the product "
                f"of {', '.join(PROCESSES)} stays, and a run can only become longer. Start a new "
                "run for the rest (with its --config-dir, if it had one): "
                f"{new_run_command(overrides, run_dir)}"
            )


def new_run_command(overrides: Sequence[str], run_dir: Path) -> str:
    """The command of a run with other overrides that starts from a run's last weights, if any."""
    new, weights = list(overrides), run_dir / CHECKPOINTS / LAST
    names = {_name_of(override) for override in new}  # replaced
    if weights.exists():
        new.append(f"+model.checkpoint_path={quoted_if_needed(short_path(weights))}")
        names |= {"model.checkpoint_path", "model.pretrained"}
    first: list[str] = []
    with suppress(ConfigError):  # a damaged record
        first = recorded_words(run_dir, "overrides")
    kept = [o for o in first if _name_of(o) not in names]
    return command_line("train", *kept, *new)


def _name_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
