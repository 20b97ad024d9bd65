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

The ranges, in Hydra's grammar for sweeps:

  optim=onecycle,muon                   one of these, also choice(onecycle,muon)
  optim.lr=interval(0.01,1)             a number from 0.01 to 1
  optim.lr=tag(log,interval(0.01,1))    the same, evenly by orders of magnitude
  seed=int(interval(0,9))               an integer from 0 to 9
  trainer.max_epochs=range(5,30,5)      5, 10, 15, 20 or 25, as Python's range
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from datetime import datetime
from pathlib import Path

from revzoo._checks import number_of
from revzoo.cli.terminal import command_line, override_argument

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, text = parser.add_argument, "options, overrides, and ranges: interval, range, choice, a,b"
    add("overrides", nargs="*", type=override_argument, metavar="KEY=VALUE", help=text)
    text = "a further folder of options, as in revzoo train"
    add("--config-dir", "-cd", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> None:
    """Search."""
    from revzoo.cli.config import check_started_together, quoted_if_needed
    from revzoo.cli.run.folder import locked
    from revzoo.cli.sweep import Search, check_space, split_options

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = split_options(args.overrides)
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
    from revzoo.training.resume import RunStopped

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
