"""Several runs from one command line (``-m seed=0,1``), each a plain run in its own process.

A job is a normal run: it may be distributed (``trainer=ddp``), and if it fails, the others still
run. It cannot change the memory, random states or environment of the next one. This process writes
no files: each job locks its folder before it writes there.

Why not Hydra's launcher: it writes into the folders of the jobs before they are locked, and
Lightning repeats its command line in each process of a distributed job.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from types import FrameType
from typing import IO, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.errors import HydraException
from omegaconf import DictConfig

from revzoo._checks import number_of
from revzoo.cli.config import (
    TRAIN,
    Composed,
    ConfigFiles,
    check_machine,
    check_started_together,
    compose,
    hydra_of,
    parse,
    quoted,
)
from revzoo.cli.run.folder import SUMMARY_FILE, is_timed, new_folder
from revzoo.cli.terminal import USER_ERRORS, ConfigError, folded, one_line, status_of, train_words

log = logging.getLogger(__name__)


def multirun(overrides: Sequence[str], source: ConfigFiles = TRAIN) -> None:
    """Run a job for each combination of the values, one after the other."""
    jobs, shared = split_jobs(overrides, source)
    runs = check_jobs(jobs, shared, source)
    # Lightning is imported only once a job can run
    from revzoo.training.resume import RunStopped

    check_started_together(overrides, several=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    # a refused job does not stop the others; its message must not wait for their training
    refused = [
        f"job {number} ({' '.join(job)}): {run}"
        for number, (job, run) in enumerate(zip(jobs, runs, strict=True))
        if isinstance(run, Exception)
    ]
    for message in refused:
        log.warning("%s", folded(f"cannot run {message}", indent=2))
    log.info("Launching %s, one after the other", number_of(len(jobs) - len(refused), "job"))
    names = {"name": "--config-name", "folder": "--config-path", "extra": "--config-dir"}
    changed = {o: getattr(source, n) for n, o in names.items() if vars(source)[n] != vars(TRAIN)[n]}
    files = [str(word) for pair in changed.items() for word in pair]
    failed, sweep_dir, words = [*refused], None, [*train_words(), *files]
    ended: list[dict[str, Any]] = []  # the summaries
    for number, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        if isinstance(run, Exception):
            continue
        log.info("  #%d: %s", number, " ".join(job))
        # resolve it once: its name contains the time
        if sweep_dir is None:
            sweep_dir = Path(str(run.hydra.sweep.dir))
            sweep_dir = new_folder(sweep_dir) if is_timed(run.hydra.sweep) else sweep_dir
        run_dir = sweep_dir / str(run.hydra.sweep.subdir)
        try:
            folder = f"hydra.run.dir={quoted(run_dir)}"
            status = run_program([*words, *job, *shared, folder])
        except RunStopped as stopped:
            sys.exit(stopped.status)
        if status:
            failed.append(f"{run_dir}: the run failed with status {status}")
        elif (summary := run_dir / SUMMARY_FILE).is_file():
            ended.append(json.loads(summary.read_text()))
    if len(ended) > 1 and are_repeats(jobs):
        log.info("%s", summary_of(ended))
    if failed:
        # a list of all, since the first message has scrolled away
        sys.exit("\n".join(f"revzoo: {message}" for message in failed))


def are_repeats(jobs: Sequence[Sequence[str]]) -> bool:
    """Whether the jobs differ only in chance or in the fold, so that a mean says something."""
    varied = ("seed=", "data.fold=", "data.split_seed=")
    return len({tuple(o for o in job if not o.startswith(varied)) for job in jobs}) == 1


def summary_of(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Mean and spread of the figures of each run's best checkpoint, a line each."""
    runs = [
        run["best"] | {name: x for name, x in run["metrics"].items() if name.startswith("test/")}
        for run in summaries
    ]
    lines = [f"best checkpoints of {len(runs)} runs: mean and standard deviation"]
    for name in sorted(set.intersection(*map(set, runs))):
        values = [figures[name] for figures in runs]
        spread = f"{min(values):.4f} to {max(values):.4f}"
        lines.append(f"  {name:<20} {mean(values):.4f} +- {stdev(values):.4f}  ({spread})")
    return "\n".join(lines)


def check_jobs(
    jobs: Sequence[Sequence[str]], shared: Sequence[str], source: ConfigFiles
) -> list[DictConfig | Exception]:
    """The configuration of each job with Hydra's section, or the error that refuses the job."""

    def each(items: Iterable[Any], do: Callable[[Any], Any]) -> list[Any]:
        done: list[Any] = []
        for item in items:
            try:
                done.append(item if isinstance(item, Exception) else do(item))
            except USER_ERRORS as error:
                done.append(error)
        if all(isinstance(item, Exception) for item in done):
            raise ConfigError("\n".join(dict.fromkeys(map(str, done))))
        return done

    def compose_job(job: tuple[int, Sequence[str]]) -> Composed:
        # the number is not among the keys that users may set
        return compose([*job[1], *shared], source, trusted=[f"hydra.job.num={job[0]}"])

    def check_job(composed: Composed) -> DictConfig:
        check_machine(composed.config)
        check_parts(composed.config)
        return composed.whole

    composed = each(enumerate(jobs), compose_job)  # a typo is answered before torch is imported
    with status_of("loading torch and Lightning"):
        from revzoo.cli.run.build import check_parts
    return each(composed, check_job)


def split_jobs(overrides: Sequence[str], source: ConfigFiles) -> tuple[list[list[str]], list[str]]:
    """The overrides of each job, and Hydra's, which all jobs share."""
    with hydra_of(source) as hydra:
        parsed = parse(overrides, hydra.config_loader)
    hydras = [str(o.input_line) for o in parsed if o.is_hydra_override()]
    # a job gets its folder from here
    shared = [o for o in hydras if not o.lstrip("+").startswith("hydra.run.")]
    try:
        # max_batch_size=None: one batch with all jobs
        (jobs,) = BasicSweeper.split_arguments(
            [o for o in parsed if not o.is_hydra_override()], max_batch_size=None
        )
    except HydraException as error:
        raise ConfigError(f"-m: {one_line(error)}; revzoo sweep searches intervals") from None
    return jobs, shared


def run_program(
    command: Sequence[str],
    *,
    output: IO[str] | None = None,
    should_end: Callable[[], bool] | None = None,
) -> int:
    """Start a program and wait until it ends; return its exit status.

    The program is in this process's group, so Ctrl-C on the terminal reaches both. After a signal
    this process also sends it SIGTERM, since an interrupt may have reached only this process. A run
    that gets both stops once.

    Args:
        command: the program and its arguments.
        output: a file for its output and errors; None for this process's streams.
        should_end: called every second; once it returns True, the program gets SIGTERM.

    Raises:
        RunStopped: this process received a signal; the program has ended.
    """
    from revzoo.training.resume import RunStopped, stop_signals

    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if process is not None:
            process.terminate()

    # before the process starts: a signal in between must not leave it alone
    before = {signum: signal.signal(signum, pass_on) for signum in stop_signals()}
    try:
        # both streams in one file, in their order
        errors = subprocess.STDOUT if output is not None else None
        process = subprocess.Popen(list(command), stdout=output, stderr=errors)
        if received:  # between the first line of this function and now
            process.terminate()
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            if should_end is not None and process.returncode is None and should_end():
                process.terminate()
                # ask once; saving may take longer
                should_end = None
        if received:
            raise RunStopped(received[0])
        return process.returncode
    finally:
        if process is not None and process.poll() is None:  # after any other error
            process.terminate()
            process.wait()
        for signum, handler in before.items():
            signal.signal(signum, handler)
