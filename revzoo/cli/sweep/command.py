"""Search for hyper-parameters.

  revzoo sweep dir=outputs/lr optim.lr='tag(log,interval(0.01,1))'

Each trial is a run of revzoo train in its own process and folder. optuna proposes the values and
compares the trials by a figure of their summary.json. Options, besides the overrides of revzoo
train:

  dir=DIR            the sweep's folder (default outputs/sweep/DAY/TIME)
  trials=20          number of trials, failed ones included
  metric=val/acc     the figure of summary.json to compare
  direction=maximize or minimize; default minimize for losses, else maximize
  sampler_seed=0     seed of the proposals; trials use the configuration's seed
  prune=false        true stops a trial whose figure is worse than the median

revzoo sweep dir=DIR continues a stopped sweep and resumes its interrupted trial. The folder has
study.db (optuna's, in SQLite), trials.csv, best.yaml, and the folder and log of each trial.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from revzoo._checks import nearest, number_of
from revzoo.cli.invocation import override_argument

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    help_text = "options, overrides, and ranges to search: interval, range, choice, a,b"
    parser.add_argument(
        "overrides", nargs="*", type=override_argument, metavar="KEY=VALUE", help=help_text
    )
    help_text = "a further folder of options, as in revzoo train"
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help=help_text)


def run(args: argparse.Namespace) -> None:
    """Search.

    Raises:
        ValueError: no trial could run; no file is written.
        SystemExit: the folder is in use, or the first trials fail; 143 or 130 after SIGTERM or
            Ctrl-C.
    """
    from revzoo.cli.config import parse, quoted_if_needed
    from revzoo.cli.invocation import command_line
    from revzoo.cli.sweep.search import OPTIONS, Search
    from revzoo.cli.sweep.space import check_space
    from revzoo.cli.terminal import ConfigError

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    names, overrides = ("dir", *OPTIONS), []
    options: dict[str, Any] = {}
    for override in parse(args.overrides):
        if override.key_or_group in names and not override.is_sweep_override():
            # parsed by Hydra: trials=5 is an int, prune=true a bool; dir=2026 would be a number
            is_text = override.key_or_group in ("dir", "metric", "direction")
            value = override.value()
            options[override.key_or_group] = str(value) if is_text else value
        elif meant := nearest(override.key_or_group, names, cutoff=0.75):
            # closer than elsewhere: the other words are keys of revzoo train
            raise ConfigError(
                f"{override.input_line}: there is no key {override.key_or_group!r}; "
                f"did you mean {meant[0]!r}?"
            )
        else:
            overrides.append(str(override.input_line))
    if overrides:
        options["overrides"] = overrides
    if args.config_dir is not None:
        # the sweep may continue in another working directory
        options["config_dir"] = str(args.config_dir.absolute())
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    folder = Path(options.pop("dir", Path("outputs", "sweep", now)))
    search = Search(folder, options)
    trials = number_of(search.options["trials"], "trial")
    log.info("%s: %s, to %s %s", folder, trials, search.options["direction"], search.metric)
    # before torch is imported: most mistakes are in the ranges
    check_space(search.fixed, search.space, search.source)
    from revzoo.cli.run.lock import locked
    from revzoo.cli.run.machine import check_started_together
    from revzoo.training.resume.graceful_stop import RunStopped

    check_started_together(args.overrides, several=True)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        try:
            search.run()
        except (RunStopped, KeyboardInterrupt) as end:  # KeyboardInterrupt: between two trials
            stopped = end if isinstance(end, RunStopped) else RunStopped(signal.SIGINT)
            again = command_line("sweep", f"dir={quoted_if_needed(folder)}")
            log.warning("%s; to resume: %s", stopped, again)
            sys.exit(stopped.status)
        search.log_best()
