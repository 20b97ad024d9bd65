"""An optuna study whose trials are runs of ``revzoo train``, each in its own process and folder.

NOTE [ The same search ]
The study records the options of the sweep, so ``revzoo sweep dir=DIR`` continues it. The seed of
the sampler is ``sampler_seed`` plus the number of the trial. So its proposals depend only on the
results so far, not on whether the sweep was stopped in between.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from revzoo._checks import check_choice, check_count, did_you_mean, nearest, package_needed
from revzoo._files import replacing_table
from revzoo.cli.config import TRAIN, ConfigFiles, check_machine, compose, parse, quoted
from revzoo.cli.run.folder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, locked, write_yaml
from revzoo.cli.run.multirun import run_program
from revzoo.cli.terminal import (
    ConfigError,
    command_line,
    folded,
    folded_command,
    one_line,
    status_of,
    train_words,
)
from revzoo.training.figure_names import higher_is_better

log = logging.getLogger(__name__)

STUDY = "study.db"
OPTIONS = {"trials": 20, "metric": "val/acc", "direction": "", "sampler_seed": 0, "prune": False}
GIVE_UP = 3  # consecutive failures that end a sweep without any success


def split_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a sweep. ``overrides`` are overrides of ``revzoo train``, with ranges."""
    names = ("dir", *OPTIONS)
    options: dict[str, Any] = {}
    for override in parse(words):
        key, value = override.key_or_group, override.value()
        if key in names and not override.is_sweep_override():
            # parsed by Hydra: trials=5 is an int, prune=true a bool; dir=2026 would be a number
            options[key] = str(value) if key in ("dir", "metric", "direction") else value
        elif meant := nearest(key, names, cutoff=0.75):
            # closer than elsewhere: the other words are keys of revzoo train
            raise ConfigError(
                f"{override.input_line}: there is no key {key!r}; did you mean {meant[0]!r}?"
            )
        else:
            options.setdefault("overrides", []).append(str(override.input_line))
    return options


def open_study(folder: Path, direction: str | None = None) -> Any:
    """The study in ``folder``; with ``direction``, a new one if there is none."""
    optuna, file = load_optuna(), folder.absolute() / STUDY
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{file}",
            study_name="revzoo",
            direction=direction,
            # only with prune=true, which reports values
            pruner=optuna.pruners.MedianPruner(),
            load_if_exists=True,
        )
        # a damaged file may open and fail here
        study.get_trials(deepcopy=False)
    except Exception as error:  # of optuna, its storage and SQLite
        raise ConfigError(
            f"{file} is not readable as a study of optuna ({one_line(error)}): restore it from a "
            "copy, or move it away to start the sweep again"
        ) from error
    return study


class NoFigureError(ValueError):
    """The figure to compare is missing; further trials would not have it either."""


class Search:
    """The trials of a sweep.

    Options that are not ``given`` on the command line are recorded, or :data:`OPTIONS`.
    """

    def __init__(self, folder: Path, given: Mapping[str, Any]) -> None:
        if (folder / CONFIG_FILE).exists():
            raise ConfigError(f"{folder} holds a run: choose another folder for the sweep, dir=DIR")
        recorded = open_study(folder).user_attrs if (folder / STUDY).exists() else {}
        options: dict[str, Any] = {**OPTIONS, **recorded, **given}
        check_count("trials", options["trials"])
        check_count("sampler_seed", options["sampler_seed"], least=0)
        if not isinstance(options["prune"], bool):
            raise ConfigError(f"prune={options['prune']}: expected true or false")
        self.metric = options["metric"]
        if self.metric.startswith("test/"):
            raise ConfigError(
                f"metric={self.metric}: a model chosen on the test split cannot be evaluated on "
                "it; use a figure of the validation, such as val/acc"
            )
        if not options["direction"]:
            options["direction"] = "maximize" if higher_is_better(self.metric) else "minimize"
        check_choice("direction", options["direction"], ("maximize", "minimize"))
        # the results so far would not be comparable
        for name, value in options.items() if recorded else ():
            if name != "trials" and value != recorded.get(name):
                raise ConfigError(
                    f"{folder} is a sweep with {name}={recorded.get(name)}, got {value}: only "
                    "trials may change; use another dir for another search"
                )
        self.fixed, self.space = split_space(options.get("overrides", []))
        if not self.space:
            raise ConfigError(
                "the sweep has no range: add one, such as optim.lr='tag(log,interval(0.01,1))'"
            )
        self.folder, self.options = folder, options
        extra = options.get("config_dir")
        self.source = ConfigFiles(extra=None if extra is None else Path(extra))
        self.config_arguments = [] if extra is None else ["--config-dir", extra]

    def run(self) -> None:
        """Run the missing trials. This process has locked the folder."""
        self.study = open_study(self.folder, self.options["direction"])
        for name, value in self.options.items():
            self.study.set_user_attr(name, value)
        failed = 0
        while (trial := self.next_trial()) is not None:
            error = self.run_trial(trial)
            failed = failed + 1 if error else 0
            # later failures may come from unlucky values, but not failures of all first trials
            if failed >= GIVE_UP and self.best() is None:
                sys.exit(f"revzoo: the first {failed} trials have failed, the last with: {error}")

    def best(self) -> Any:
        """The best complete trial; None if there is none."""
        with suppress(ValueError):
            return self.study.best_trial
        return None

    def next_trial(self) -> Any:
        """An interrupted trial, or a new one; None if there are enough."""
        optuna, trials = load_optuna(), self.study.get_trials(deepcopy=False)
        for trial in trials:
            # this process holds the folder's lock, so no trial is really running
            if not trial.state.is_finished() and trial.params.keys() == self.space.keys():
                # private in optuna 5: there is no public way to continue a trial
                return optuna.trial.Trial(self.study, trial._trial_id)
        if len(trials) >= self.options["trials"]:
            return None
        # see NOTE [ The same search ]
        seed = self.options["sampler_seed"] + len(trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed)
        return self.study.ask(self.space)

    def run_trial(self, trial: Any) -> str:
        """Train, and report the trial's end to the study; return the reason of a failure."""
        run_dir = self.folder / f"{trial.number:04d}"
        output, pruned, error = run_dir.with_suffix(".log"), False, ""

        def should_prune() -> bool:
            nonlocal pruned
            self.report(trial, run_dir)
            pruned = trial.should_prune()
            return pruned

        log.info("trial %d starts; its log: %s", trial.number, output)
        # a resumed trial appends
        with output.open("a") as file:
            prune = should_prune if self.options["prune"] else None
            status = run_program(self.command(trial, run_dir), output=file, should_end=prune)
        if prune is not None and not pruned:
            # values since the last poll: the median of later trials needs them
            self.report(trial, run_dir)
        reason, value = None, None
        # we stopped a pruned run ourselves, so its status is no failure
        state = "pruned" if pruned else "complete"
        try:
            value = None if pruned else self.figure_of(run_dir, status)
        except (OSError, ValueError) as raised:
            state, reason, error = "fail", raised, str(raised)
            trial.set_user_attr("error", error)
        self.study.tell(trial, value, state=load_optuna().trial.TrialState[state.upper()])
        self.write_results()
        # a figure that earlier trials have had may come again
        if isinstance(reason, NoFigureError) and self.best() is None:
            raise reason
        figure = state if value is None else f"{self.metric} {value:.6g}"
        chosen = " ".join(f"{key}={value}" for key, value in trial.params.items())
        because = f" ({error})" if error else ""
        log.info("%s", folded(f"trial {trial.number}: {figure}{because}  {chosen}", indent=2))
        return error

    def command(self, trial: Any, run_dir: Path) -> list[str]:
        """The command of a trial: a new run, or ``--resume`` if it was interrupted."""
        if (run_dir / CONFIG_FILE).exists():
            with locked(run_dir):  # fails if a run that outlived its sweep still works there
                return [*train_words(), "--resume", str(run_dir)]
        overrides = self.overrides(trial)
        if not any(override.startswith("test=") for override in overrides):
            overrides.append("test=false")  # validation chooses; only the best run is tested, later
        folder = f"hydra.run.dir={quoted(run_dir.absolute())}"
        return [*train_words(), *self.config_arguments, *overrides, folder]

    def overrides(self, trial: Any) -> list[str]:
        """The overrides of a trial's run."""
        return [*self.fixed, *(f"{key}={trial.params[key]}" for key in self.space)]

    def report(self, trial: Any, run_dir: Path) -> None:
        """Report the new values of ``metrics.csv`` to the study."""
        reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        with suppress(OSError):  # the run has not begun
            # it may be writing the last row at this moment
            whole = (run_dir / METRICS_FILE).read_text().rpartition("\n")[0].splitlines()
            rows = [row[self.metric] for row in csv.DictReader(whole) if row.get(self.metric)]
            for step, value in enumerate(rows):
                if step not in reported:
                    trial.report(float(value), step)

    def figure_of(self, run_dir: Path, status: int) -> float:
        """The figure of a run that ended with ``status``, from its ``summary.json``."""
        if status:
            # the last line of a traceback, or our one-line message
            lines = run_dir.with_suffix(".log").read_text(errors="replace").splitlines()
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            raise ValueError(f"status {status}: {last}")
        figures = dict(json.loads((run_dir / SUMMARY_FILE).read_text())["metrics"])
        if self.metric not in figures:  # 'acc' finds val/acc before train/acc, but not test/acc
            names = sorted((n for n in figures if not n.startswith("test/")), reverse=True)
            same = [name for name in names if name.endswith(f"/{self.metric}")]
            hint = did_you_mean(self.metric, same or names, cutoff=0.0 if same else 0.5)
            listed = "" if hint else f", expected one of {', '.join(names)}"
            raise NoFigureError(f"metric={self.metric}: a run has no such figure{listed}{hint}")
        value = float(figures[self.metric])
        # optuna would fail such a trial without a reason
        if not math.isfinite(value):
            raise ValueError(f"{self.metric} is {value}")
        return value

    def write_results(self) -> None:
        """Write ``trials.csv`` and, if a trial is complete, ``best.yaml``."""
        with replacing_table(self.folder / "trials.csv") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", "state", self.metric, *self.space, "seconds", "error"])
            for t in self.study.get_trials(deepcopy=False):
                seconds = f"{t.duration.total_seconds():.1f}" if t.duration else ""
                chosen = [t.params.get(key, "") for key in self.space]
                figure = t.value if t.state.name == "COMPLETE" else ""
                row = [t.number, t.state.name.lower(), figure, *chosen, seconds]
                writer.writerow([*row, t.user_attrs.get("error", "")])
        if (best := self.best()) is not None:
            result = {"trial": best.number, "metric": self.metric, "value": best.value}
            command = command_line("train", *self.config_arguments, *self.overrides(best))
            result |= {"parameters": dict(best.params), "command": command}
            write_yaml(result, self.folder / "best.yaml")

    def log_best(self) -> None:
        """Log the best trial's figure, and the command that trains with its values."""
        if (best := self.best()) is None:
            log.info("no trial has completed; see %s", self.folder / "trials.csv")
            return
        run_dir = self.folder / f"{best.number:04d}"
        log.info("best: trial %d, %s %.6g, in %s", best.number, self.metric, best.value, run_dir)
        command = command_line("train", *self.config_arguments, *self.overrides(best))
        log.info("%s", folded_command(command, indent=2))


def load_optuna() -> Any:
    """The package optuna; raises a ConfigError if it is not installed."""
    try:
        optuna = import_module("optuna")
    except ImportError:
        raise ConfigError(package_needed("revzoo sweep needs", "optuna")) from None
    # it logs each trial at INFO, as we do
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def split_space(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The overrides of every trial, and a distribution for each key to search."""
    parsed = parse(overrides)
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    space: dict[str, Any] = {}
    for override in parsed:
        if override.is_sweep_override():
            # with + if it adds a key
            key = str(override.input_line).partition("=")[0]
            try:
                space[key] = _distribution(override)
            except ValueError as error:
                raise ConfigError(f"{override.input_line}: {error}") from error
    return fixed, space


def _distribution(override: Override) -> Any:
    distributions, sweep = load_optuna().distributions, override.value()
    tags: set[str] = getattr(sweep, "tags", set())
    if tags - {"log"}:
        raise ValueError("the only tag is log, as in tag(log, ...)")
    options: dict[str, Any] = {"log": True} if tags else {}
    if isinstance(sweep, ChoiceSweep) and not tags:
        # text: the values go into a command line again
        return distributions.CategoricalDistribution(tuple(override.sweep_string_iterator()))
    if isinstance(sweep, RangeSweep) and not tags:
        # a falling range has the same numbers
        values = sorted(sweep.range())
        if len(values) < 2:
            raise ValueError("expected two numbers or more")
        low, high, options = values[0], values[-1], {"step": values[1] - values[0]}
    elif isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
    else:  # Hydra expands a glob with the names of a group's files, which may change
        raise ValueError("expected choice(a, b), range, interval or tag(log, interval(a, b))")
    whole = isinstance(low, int) and isinstance(high, int)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(low, high, **options)


def check_space(
    fixed: Sequence[str], space: Mapping[str, Any], source: ConfigFiles = TRAIN
) -> None:
    """Check a configuration for each choice and each end of a range, one key at a time."""
    # all combinations would be too many
    values = {key: getattr(d, "choices", None) or (d.low, d.high) for key, d in space.items()}
    first = {key: outermost[0] for key, outermost in values.items()}
    trials = [{**first, key: value} for key, ends in values.items() for value in ends]
    words = [[f"{key}={value}" for key, value in trial.items()] for trial in trials]
    composed = [compose([*fixed, *chosen], source).config for chosen in words]
    # import torch after checking the keys
    with status_of("loading torch and Lightning"):
        from revzoo.cli.run.build import check_parts

    for config in composed:
        check_machine(config)
        check_parts(config)
        if (config.get("tuner") or {}).get("then") == "stop":
            raise ConfigError(
                "tuner.then=stop does not train, so there is no figure to compare: remove the "
                "tuner, or give tuner.then=use"
            )
