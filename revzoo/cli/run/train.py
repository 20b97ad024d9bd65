"""Runs training and test from a checked configuration, in a new folder or a resumed run's.

A resumed run has the configuration of its ``config.yaml``: on the CPU, it ends with the same
weights and figures as an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from tqdm.contrib.logging import logging_redirect_tqdm

from revzoo._checks import at_most, cores
from revzoo._files import json_bytes, write_atomically
from revzoo.cli.config import check_started_together, quoted
from revzoo.cli.run import console, folder
from revzoo.cli.run.build import (
    apply_precision,
    build_data,
    build_module,
    build_trainer,
    check_launcher,
    check_network,
    data_name,
    for_task,
    model_spec,
)
from revzoo.cli.schema import MODES
from revzoo.cli.terminal import USER_ERRORS, short_path, user_errors
from revzoo.core.guard import DriftError, RangeError
from revzoo.data import DataError, ImageData
from revzoo.data.loaders import check_batch_size
from revzoo.data.registry import DATA
from revzoo.data.state import check_same_classes, check_same_images
from revzoo.models import pretrained
from revzoo.models.registry import WEIGHTS_ARGUMENTS
from revzoo.training.callbacks.checkpoints import (
    best_checkpoint_path,
    best_figures,
    check_saved,
    check_validated,
)
from revzoo.training.callbacks.progress_bar import epoch_of
from revzoo.training.callbacks.registry import build_callbacks
from revzoo.training.checkpoint.files import (
    CheckpointError,
    UnwritableCheckpointError,
    check_hyperparameters,
    has_saved,
    read_last,
)
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import (
    LostProcessError,
    all_callbacks,
    batches_of_run,
    callbacks_of,
    end_together,
    epochs_of_run,
    is_first_process,
    lost_processes,
    quiet,
)
from revzoo.training.memory import NoMemoryError, memory_errors
from revzoo.training.optim.optimizers import OptimSpec
from revzoo.training.resume import GracefulStop, RunState, RunStopped, check_step_images
from revzoo.weights.source import BEST, CHECKPOINTS, LAST

log = logging.getLogger(__name__)

# errors that end training after its start; the run still writes its summary
ENDINGS = (
    FloatingPointError,
    DataError,
    DriftError,
    RangeError,
    NoMemoryError,
    LostProcessError,
    OSError,
    UnwritableCheckpointError,
    MisconfigurationException,  # Lightning's, such as a fraction of batches that leaves none
)
TRAINING_ERRORS = (*ENDINGS, CheckpointError)


def begin(
    config: Mapping[str, Any], whole: DictConfig, *, overrides: Sequence[str]
) -> dict[str, float]:
    """Create, check and lock a run's folder, and train there; return the final figures.

    If the run cannot start, its folder is removed. ``whole`` is ``config`` with Hydra's section.
    """
    check_started_together(overrides, several=False)
    path = folder.dir_of(whole.hydra.run)
    config = {**config, "data": folder.located(config["data"])}
    if folder.is_timed(whole.hydra.run):
        path = folder.new_folder(path)
        # Lightning repeats the command line in further processes, which need the same folder
        sys.argv = [*sys.argv, f"hydra.run.dir={quoted(path)}"]
    run_dir = path.absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    # no other program can begin a run in a locked folder
    with folder.locked(run_dir):
        folder.check_unused(run_dir)
        try:
            with console.logged_to(run_dir / folder.LOG_FILE):
                return train(config, run_dir=run_dir, overrides=folder.own_overrides(overrides))
        except BaseException:  # SystemExit and signals, too
            if is_first_process() and not (run_dir / folder.CONFIG_FILE).exists():
                folder.discard_folder(run_dir)
            raise


def resume(
    run_dir: Path, config: Mapping[str, Any], overrides: Sequence[str] = ()
) -> dict[str, float]:
    """Continue a run in its folder, with the ``resumed_config``; return its figures."""
    # messages and records name the path, and the process may change its folder
    run_dir = run_dir.absolute()
    with folder.locked(run_dir), console.logged_to(run_dir / folder.LOG_FILE):
        arguments = ["--resume", str(run_dir), *overrides]
        # under the lock: it may rename a damaged file
        checkpoint = last_state(run_dir, config)
        return train(config, run_dir=run_dir, overrides=arguments, resume=checkpoint)


def last_state(run_dir: Path, config: Mapping[str, Any]) -> Saved | None:
    """The checkpoint to resume from; None if the run has saved none."""
    if not has_saved(run_dir / CHECKPOINTS):
        if is_first_process():
            log.warning("%s has no %s: the run starts from the beginning", run_dir, LAST)
            best = run_dir / CHECKPOINTS / BEST
            if best.exists():  # someone has removed only last.ckpt
                log.warning("%s is now %s", best, best.replace(best.with_name(f"{BEST}.earlier")))
        return None
    check = partial(check_fits, config, run_dir=run_dir)
    path, state = read_last(run_dir / CHECKPOINTS, check)
    # the rest is freed: it may hold gigabytes
    of_run = state["callbacks"][RunState.__name__]
    return Saved(path, state["global_step"], state[data_name(config)], of_run)


def check_fits(
    config: Mapping[str, Any], state: Mapping[str, Any], path: Path, *, run_dir: Path
) -> None:
    """Check that the checkpoint ``path`` is whole, and fits the run's configuration."""
    from revzoo.training.checkpoint.restore import check_complete  # only resumed runs

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
    """Check that the checkpoint ``path`` has the model and the recipe of the configuration."""
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
                f"{run_dir / folder.CONFIG_FILE} and {path} differ in {section}: {options} and "
                f"{saved[section]}; restore the configuration with which the run started"
            )


@user_errors((*USER_ERRORS, *TRAINING_ERRORS))
def train(
    config: Mapping[str, Any],
    *,
    run_dir: Path,
    overrides: Sequence[str] = (),
    resume: Saved | None = None,
) -> dict[str, float]:
    """Train, then test the best checkpoint; write configuration, logs and figures to ``run_dir``.

    Returns the last figures; ``overrides`` are for the record.

    Raises:
        SystemExit: the configuration or the data cannot be used, or training fails in a known way
            (the message says why); or with 143 or 130 after SIGTERM or Ctrl-C.
    """
    # before the search: trials stop at signals, too
    stop = GracefulStop()
    stop.hint = partial(folder.resume_hint, run_dir)
    try:
        with stop.listening(), console.logged_warnings():
            # a resumed run has the value in its configuration
            if config.get("tuner") is not None and resume is None:
                from revzoo.cli.run.tune import tune  # few runs search

                with quiet():
                    prepare_process(config)
                    following = tune(config, run_dir)
                if config["tuner"]["then"] == "stop":
                    folder.write_config(config, run_dir)
                    folder.record_session(run_dir, overrides=overrides, from_step=0)
                    return {}
                config = following
            with quiet():
                run = build(config, run_dir, stop, resume)
            # only now: a run that cannot work leaves no files
            if run.trainer.is_global_zero:
                announce(run, run_dir, overrides)
            figures = fit_and_test(run, run_dir)
            # only now: Lightning, too, checks the checkpoint before it ends the run
            nothing_trained = run.trainer.global_step == run.first_step
            if resume is not None and nothing_trained and run.trainer.is_global_zero:
                console.log_finished(run.trainer, run_dir, resume.path)
            return figures
    except RunStopped as stopped:
        status = stopped.status
        if is_first_process():
            log.warning("%s; %s", stopped, folder.resume_hint(run_dir), extra={"command": True})
    # Exit outside the handler: the exception refers to its frames, and these to the graph of the
    # interrupted step, which must be freed before the interpreter ends.
    sys.exit(status)


class Saved(NamedTuple):
    """The checkpoint from which a run resumes."""

    path: Path
    step: int  # optimiser steps so far
    data: Mapping[str, Any]  # the state of the data module
    of_run: Mapping[str, Any]  # of RunState


class Run(NamedTuple):
    """The parts of a run that is ready to train."""

    config: dict[str, Any]  # with the plan of memory modes, if the run has one
    trainer: pl.Trainer
    module: Classifier
    data: ImageData  # after ``setup``
    first_step: int | None  # None in a new folder
    resumed: Path | None  # the checkpoint; None for a new run


def build(
    config: Mapping[str, Any], run_dir: Path, stop: GracefulStop, resume: Saved | None
) -> Run:
    """Build the parts of a run. Writes no files."""
    prepare_process(config)
    step = None if resume is None else resume.step
    if resume is None and (run_dir / folder.CONFIG_FILE).exists():
        step = 0  # stopped before its first checkpoint: begins again and replaces its log rows
    data = build_data(config["data"], config.get("task"))
    config = for_task(config, data.task)
    trainer = build_trainer(config, run_dir=run_dir, stop=stop, first_step=step)
    check_launcher(trainer)
    if resume is not None:  # before all processes start, and each raises
        check_step_images(resume.path, resume.of_run, data.batch_size, trainer.world_size)
    if trainer.is_global_zero and (place := console.place_of(config["data"])):
        log.info("reading  %s", place)  # takes minutes for many files
    data.prepare_data()

    def build_network(shape: Mapping[str, Any]) -> Classifier:
        # a checkpoint replaces the weights that the run started from: say nothing of these
        before = pretrained.log.level
        pretrained.log.setLevel(before if resume is None else logging.WARNING)
        try:
            module = build_module(config, **shape)
        finally:
            pretrained.log.setLevel(before)
        check_network(config, all_callbacks(trainer), module.model)
        return module

    # before all images are read, which may take minutes
    shape = data.shape if resume is None else {}
    module = build_network(shape) if shape else None
    data.setup("fit")
    check_batch_size(data.batch_size, data.train_count, trainer.world_size)
    data.place(trainer.strategy.root_device)  # now: a plan asks for the memory that is free
    if resume is not None:  # before the model, which is built for these data
        check_same_classes(resume.data["classes"], data.classes)
        if (channels := resume.data.get("in_chans", data.in_chans)) != data.in_chans:
            raise DataError(
                f"the run was trained on images of {channels} channels, these have "
                f"{data.in_chans}: set data.in_chans={channels}"
            )
        command = folder.new_run_command([], run_dir)
        remedy = f"start a new run from its weights: {command}"
        check_same_images(resume.data, data.identity, remedy)
    module = module or build_network(data.shape)
    module.balance(data)
    if config["memory"]["mode"] not in (None, *MODES):
        from revzoo.cli.run.memory_plan import with_plan  # few modes need the profiler

        config = with_plan(config, module, data, trainer)
    resumed = None if resume is None else resume.path
    return Run(dict(config), trainer, module, data, step, resumed)


def announce(run: Run, run_dir: Path, overrides: Sequence[str]) -> None:
    """Write the configuration and the session to the folder, and the opening to the log."""
    if (checkpoint := run.resumed) is None:
        folder.write_config(run.config, run_dir)
    else:  # record changes only after the trainer has accepted the checkpoint

        def started(trainer: pl.Trainer, module: pl.LightningModule) -> None:
            folder.write_config(run.config, run_dir)
            at = f"at epoch {epoch_of(trainer)}, after step {trainer.global_step:,}"
            log.info("%-8s %s, from %s", "resumed", at, short_path(checkpoint))

        recorder = pl.callbacks.LambdaCallback(on_train_start=started)
        all_callbacks(run.trainer).append(recorder)
    folder.record_session(run_dir, overrides=overrides, from_step=run.first_step or 0)
    console.log_opening(run.config, run.trainer, run.module, run.data, run_dir, resumed=checkpoint)


def fit_and_test(run: Run, run_dir: Path) -> dict[str, float]:
    """Train, test the best checkpoint (without one, the last weights), write the summary."""
    trainer, module, data = run.trainer, run.module, run.data
    # the seconds of a resumed run include its earlier sessions
    start = time.perf_counter() - folder.seconds_before(run_dir)
    figures: dict[str, float] = {}
    stopped, by_signal = None, False
    # a line written past tqdm would break the bar
    drawn = trainer.progress_bar_callback and sys.stdout.isatty()
    lines_above: AbstractContextManager[Any] = logging_redirect_tqdm() if drawn else nullcontext()
    lost = partial(lost_processes, partial(folder.resume_hint, run_dir))
    options: dict[str, Any] = {"datamodule": data, "weights_only": True}
    try:
        with quiet(), lines_above, lost(), memory_errors(trainer, module, data):
            trainer.fit(module, ckpt_path=run.resumed, **options)
        figures = figures_of(trainer)
        seconds = time.perf_counter() - start
        check_validated(trainer, figures)
        if run.config["test"] and data.has("test") and trainer.state.finished:
            best = best_checkpoint_path(trainer)
            with quiet(), lost(), memory_errors(trainer, module, data):
                (tested,) = trainer.test(module, ckpt_path=best, verbose=False, **options)
            figures |= {name: float(value) for name, value in tested.items()}
        check_saved(trainer)
    except (RunStopped, *ENDINGS) as error:
        seconds = time.perf_counter() - start
        by_signal = isinstance(error, RunStopped)
        # a run that fails before its first batch gets no summary
        if by_signal or batches_of_run(trainer):
            figures = figures or figures_of(trainer)  # known already if the test failed
            stopped = str(error)
        raise
    finally:
        if trainer.is_global_zero and (figures or stopped):
            if not stopped:
                # before the summary, which a full disk refuses
                console.log_result(trainer, figures, data, run_dir, seconds=seconds)
                split = "test" if any(name.startswith("test/") for name in figures) else "val"
                console.log_classes(trainer, module, split, data.classes, run_dir)
            summary = describe_run(run, seconds, figures, stopped)
            # sorted: two summaries can be compared line by line
            content = json_bytes(summary, sort_keys=True)
            write_atomically(run_dir / folder.SUMMARY_FILE, content)
        end_together(trainer, ask=by_signal)
    return figures


def describe_run(
    run: Run, seconds: float, figures: Mapping[str, float], stopped: str | None
) -> dict[str, Any]:
    """The figures of a run as plain values; ``stopped`` is the signal or error that ended it."""
    trainer, device = run.trainer, run.module.device
    best = best_checkpoint_path(trainer)
    root = os.path.realpath(trainer.default_root_dir)  # Lightning resolves checkpoint paths, too
    return {
        "metrics": dict(figures),
        "epochs": epochs_of_run(trainer),
        "steps": trainer.global_step,
        # a resumed run adds to it, see seconds_before
        "train_seconds": round(seconds, 3),
        "parameters": sum(p.numel() for p in run.module.parameters()),
        # relative, since users move folders
        "checkpoint": os.path.relpath(best, root) if best else None,
        # from its validation; metrics has the last figures
        "best": best_figures(trainer) if best else {},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": folder.versions(),
        "stopped": stopped,
        "notes": [
            note for state in callbacks_of(trainer, RunState) for note in state.notes.values()
        ],
    }


def figures_of(trainer: pl.Trainer) -> dict[str, float]:
    """The figures of training and validation, also from before the resume of a resumed run."""
    before = [state.figures for state in callbacks_of(trainer, RunState)]
    now = {name: float(v) for name, v in trainer.callback_metrics.items()}
    # the first map wins: a figure of this session replaces the old one
    return dict(ChainMap(now, *before))


@cache  # only the first of several runs has no garbage yet
def _freeze_imports() -> None:
    """Else the next collection visits all objects of the imports: 0.3 s."""
    gc.freeze()


def prepare_process(config: Mapping[str, Any]) -> None:
    """Set torch's threads, TensorFloat-32 and all random seeds."""
    _freeze_imports()
    if config.get("threads") is not None:
        torch.set_num_threads(at_most(cores(), "threads", config["threads"]))
    apply_precision(config["precision"])
    pl.seed_everything(config["seed"], workers=True, verbose=False)
