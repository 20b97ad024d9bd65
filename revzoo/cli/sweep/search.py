"""An optuna study whose trials are runs.

NOTE [ The same search ]
The seed of the sampler is ``sampler_seed`` plus the number of the trial. So its proposals depend
only on the results so far, not on whether the sweep was stopped in between.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from revzoo.cli.config.config import quoted
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.config.yaml_files import CONFIG_FILE
from revzoo.cli.invocation import train_words
from revzoo.cli.run.child_process import run_program
from revzoo.cli.run.lock import locked
from revzoo.cli.sweep.results import (
    Curve,
    NoFigureError,
    best_command,
    best_of,
    figure_of,
    last_line,
    write_results,
)
from revzoo.cli.sweep.space import Parameter
from revzoo.cli.sweep.spec import SweepSpec, load_optuna
from revzoo.cli.terminal import folded, folded_command

log = logging.getLogger(__name__)

STUDY = "study.db"
GIVE_UP = 3  # consecutive failures that end a sweep without any success


class Search:
    """A study and its trials.

    Args:
        spec: the options of the sweep.
        folder: the sweep's folder, which this process has locked.

    Raises:
        ConfigError: the study in the folder is damaged.
    """

    def __init__(self, spec: SweepSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.optuna = load_optuna()
        self.states = self.optuna.trial.TrialState
        sql: Any = import_module("sqlalchemy.exc")  # of optuna's storage
        file = folder.absolute() / STUDY
        try:
            self.study = self.optuna.create_study(
                storage=f"sqlite:///{file}",
                study_name="revzoo",
                direction=spec.direction,
                # only with prune=true, which reports values
                pruner=self.optuna.pruners.MedianPruner(),
                load_if_exists=True,
            )
            # a damaged file may open and fail here
            self.study.get_trials(deepcopy=False)
        except (sql.SQLAlchemyError, self.optuna.exceptions.OptunaError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{file} is not readable as a study of optuna ({reason}): restore it from a copy, "
                "or move it away to start the sweep again"
            ) from error

    def run(self) -> None:
        """Run the missing trials.

        Raises:
            NoFigureError: no trial so far has the figure.
            SystemExit: the first trials all fail.
        """
        failed = 0
        while (trial := self.next_trial()) is not None:
            state = self.run_trial(trial)
            trials = self.study.get_trials(deepcopy=False)
            failed = failed + 1 if state == self.states.FAIL else 0
            # later failures may come from unlucky values, but not failures of all first trials
            if failed >= GIVE_UP and not any(t.value is not None for t in trials):
                error = trials[-1].user_attrs["error"]
                sys.exit(f"revzoo: the first {failed} trials have failed, the last with: {error}")

    def next_trial(self) -> Any:
        """An interrupted trial, or a new one; None if there are enough."""
        trials = self.study.get_trials(deepcopy=False)
        # this process holds the folder's lock, so no trial is really running
        interrupted = [trial for trial in trials if trial.state == self.states.RUNNING]
        if not interrupted and len(trials) >= self.spec.trials:
            return None
        # see NOTE [ The same search ]
        number = interrupted[0].number if interrupted else len(trials)
        self.study.sampler = self.optuna.samplers.TPESampler(seed=self.spec.sampler_seed + number)
        if interrupted:
            # suggest() then returns the values that the trial has already drawn
            # private in optuna 5: there is no public way to continue a trial
            trial = self.optuna.trial.Trial(self.study, interrupted[0]._trial_id)
        else:
            trial = self.study.ask()
        for parameter in self.spec.space:
            suggest(trial, parameter)
        return trial

    def run_of(self, number: int) -> Path:
        """The folder of a trial's run."""
        return self.folder / f"{number:04d}"

    def run_trial(self, trial: Any) -> Any:
        """Train; report the trial's state to the study and return it.

        Raises:
            NoFigureError: no trial so far has the figure.
            RunStopped: after SIGTERM or Ctrl-C. The run has stopped and can be resumed.
        """
        run_dir = self.run_of(trial.number)
        curve = Curve(run_dir, self.spec.metric, trial) if self.spec.prune else None
        output = run_dir.with_suffix(".log")
        log.info("trial %d starts; its log: %s", trial.number, output)
        # a resumed trial appends
        with output.open("a") as file:
            prune = curve.should_prune if curve is not None else None
            status = run_program(self.command(trial, run_dir), output=file, should_end=prune)
        if curve is not None:
            # we stopped the run ourselves, so its status is not a failure
            if curve.pruned:
                return self.end(trial, self.states.PRUNED)
            curve.report()  # values since the last poll: the median of later trials needs them
        if status:
            return self.end(trial, self.states.FAIL, error=last_line(output, status))
        try:
            value = figure_of(run_dir, self.spec.metric)
        except (OSError, ValueError) as error:
            state = self.end(trial, self.states.FAIL, error=str(error))
            trials = self.study.get_trials(deepcopy=False)
            # a figure that earlier trials have had may come again
            if isinstance(error, NoFigureError) and not any(t.value is not None for t in trials):
                raise
            return state
        return self.end(trial, self.states.COMPLETE, value=value)

    def command(self, trial: Any, run_dir: Path) -> list[str]:
        """The command of a trial: a new run, or ``--resume`` if it was interrupted."""
        if (run_dir / CONFIG_FILE).exists():
            with locked(run_dir):  # fails if a run that outlived its sweep still works there
                return [*train_words(), "--resume", str(run_dir)]
        overrides = self.spec.overrides(trial.params)
        if not any(override.startswith("test=") for override in overrides):
            overrides.append("test=false")  # validation chooses; only the best run is tested, later
        folder = f"hydra.run.dir={quoted(run_dir.absolute())}"
        return [*train_words(), *self.spec.config_arguments, *overrides, folder]

    def end(self, trial: Any, state: Any, *, value: float | None = None, error: str = "") -> Any:
        """Report the end of a trial to the study, log it, and write the tables."""
        if error:
            trial.set_user_attr("error", error)
        self.study.tell(trial, value, state=state)
        figure = f"{self.spec.metric} {value:.6g}" if value is not None else state.name.lower()
        chosen = " ".join(self.spec.overrides(trial.params)[len(self.spec.fixed) :])
        reason = f" ({error})" if error else ""
        log.info("%s", folded(f"trial {trial.number}: {figure}{reason}  {chosen}", indent=2))
        write_results(self.study.get_trials(deepcopy=False), self.spec, self.folder)
        return state


def suggest(trial: Any, parameter: Parameter) -> None:
    """Let a trial draw a value; an interrupted trial keeps its value."""
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.choices:
        trial.suggest_categorical(parameter.key, parameter.choices)
    elif isinstance(low, int) and isinstance(high, int):
        trial.suggest_int(parameter.key, low, high, step=step or 1, log=parameter.log)
    else:
        trial.suggest_float(parameter.key, low, high, step=step, log=parameter.log)


def log_best(search: Search) -> None:
    """Log the best trial's figure, and the command that trains with its parameters."""
    best = best_of(search.study.get_trials(deepcopy=False), search.spec)
    if best is None:
        log.info("no trial has completed; see %s", search.folder / "trials.csv")
        return
    figure = f"{search.spec.metric} {best.value:.6g}"
    log.info("best: trial %d, %s, in %s", best.number, figure, search.run_of(best.number))
    log.info("%s", folded_command(best_command(best, search.spec), indent=2))
