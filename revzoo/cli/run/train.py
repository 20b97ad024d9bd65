"""Runs training and test from a checked configuration."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from hydra._internal.callbacks import Callbacks
from hydra.core.utils import run_job
from hydra.types import HydraContext
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm.contrib.logging import logging_redirect_tqdm

from revzoo._checks import at_most, cores
from revzoo.cli.run.build import (
    apply_precision,
    build_data,
    build_module,
    build_trainer,
    check_network,
)
from revzoo.cli.run.console import (
    log_finished,
    log_opening,
    log_result,
    log_resumed,
    logged_warnings,
    place_of,
    shorten_log,
)
from revzoo.cli.run.folder import (
    check_unused,
    describe_run,
    discard_folder,
    is_timed,
    new_folder,
    record_session,
    resume_hint,
    seconds_before,
    write_config,
    write_summary,
)
from revzoo.cli.run.lock import locked
from revzoo.cli.run.machine import check_started_together
from revzoo.cli.run.record import CONFIG_FILE, moved, new_run_command
from revzoo.cli.schema import MODES
from revzoo.cli.terminal import USER_ERRORS, ConfigError, one_line, user_errors
from revzoo.core.guard.drift import DriftError
from revzoo.core.guard.ranges import RangeError
from revzoo.data import DataError, ImageData
from revzoo.data.loaders import check_batch_size
from revzoo.data.state import check_same_classes, check_same_images
from revzoo.models import pretrained
from revzoo.training.callbacks.checkpoints import (
    best_checkpoint_path,
    check_saved,
    check_validated,
)
from revzoo.training.checkpoint.files import (
    CheckpointError,
    UnwritableCheckpointError,
)
from revzoo.training.classifier import Classifier
from revzoo.training.distributed import end_together, is_first_process
from revzoo.training.lightning_compat import all_callbacks, batches_of_run, callbacks_of
from revzoo.training.quiet_lightning import quiet
from revzoo.training.resume.graceful_stop import GracefulStop, RunStopped
from revzoo.training.resume.run_state import RunState
from revzoo.training.tuning.out_of_memory import NoMemoryError, memory_errors

log = logging.getLogger(__name__)

# errors that end training after its start; the run still writes its summary
ENDINGS = (
    FloatingPointError,
    DataError,
    DriftError,
    RangeError,
    NoMemoryError,
    OSError,
    UnwritableCheckpointError,
    MisconfigurationException,  # Lightning's, such as a fraction of batches that leaves none
)
TRAINING_ERRORS = (*ENDINGS, CheckpointError)
# environment variables that Lightning sets: two for determinism, two for seeds
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "HOROVOD_FUSION_THRESHOLD",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)


def begin(
    config: Mapping[str, Any], whole: DictConfig, *, overrides: Sequence[str]
) -> dict[str, float]:
    """Create, check and lock a run's folder, and train there; return the final figures.

    If the run cannot start, its folder is removed.

    Args:
        config: the composed configuration as plain containers.
        whole: the same with Hydra's section, checked.
        overrides: of the command line.

    Raises:
        SystemExit: as :func:`train`; or the folder is in use or contains a run.
    """
    hydra_cfg = whole.hydra
    if not is_first_process():
        # one process writes the files of .hydra
        hydra_cfg.output_subdir = None
    with user_errors():
        check_started_together(overrides, several=False)
        try:
            folder = Path(str(hydra_cfg.run.dir))
        except OmegaConfBaseException as error:  # a reference to a missing key
            raise ConfigError(one_line(error)) from None
        if not (timed := is_timed(hydra_cfg.run)):
            check_unused(folder)
    if isinstance(root := config["data"].get("root"), str):
        # the run may resume in another working directory
        config = {**config, "data": moved(config["data"], root)}
    if timed:
        folder = new_folder(folder)
    hydra_cfg.run.dir = str(folder)  # resolve it once: its name contains the time
    run_dir = folder.absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    # no other program can begin a run in a locked folder
    with locked(run_dir):
        with user_errors():
            check_unused(run_dir)  # again: another program may have been faster
        try:
            # Hydra's part: log files, .hydra and, with hydra.job.chdir, the working directory
            job = run_job(
                lambda _: train(config, run_dir=run_dir, overrides=without_hydra(overrides)),
                config=whole,
                job_dir_key="hydra.run.dir",
                job_subdir_key=None,
                # no callbacks: Hydra would import the classes that a configuration names
                hydra_context=HydraContext(None, Callbacks()),  # type: ignore[arg-type]
            )
            return dict(job.return_value)
        except BaseException:  # SystemExit and signals, too
            if is_first_process() and not (run_dir / CONFIG_FILE).exists():
                discard_folder(run_dir, log_name=f"{hydra_cfg.job.name}.log")
            raise


def without_hydra(overrides: Sequence[str]) -> list[str]:
    """The overrides of our keys, without Hydra's section."""
    return [o for o in overrides if not o.lstrip("+~").startswith(("hydra.", "hydra/"))]


def train(
    config: Mapping[str, Any],
    *,
    run_dir: Path,
    overrides: Sequence[str] = (),
    resume: Saved | None = None,
) -> dict[str, float]:
    """Train, then test the best checkpoint; write configuration, logs and figures to ``run_dir``.

    Args:
        config: a composed configuration as plain containers.
        run_dir: the run's folder.
        overrides: of the command line, for the record.
        resume: the checkpoint to resume from; None for a new run.

    Returns:
        The last figures of training and validation, and of the test; empty after a search with
        ``tuner.then=stop``.

    Raises:
        SystemExit: the configuration or the data cannot be used, or training fails in a known way
            (the message says why); or with 143 or 130 after SIGTERM or Ctrl-C.
    """
    shorten_log()
    # before the search: trials stop at signals, too
    stop = GracefulStop()
    stop.hint = partial(resume_hint, run_dir)
    try:
        with stop.listening(), switches_restored(), logged_warnings():
            # a resumed run has the value in its configuration
            if config.get("tuner") is not None and resume is None:
                following = search(config, run_dir, overrides)
                if config["tuner"]["then"] == "stop":
                    return {}
                config = following
            with quiet(), user_errors():
                run = build(config, run_dir, stop, resume)
            # only now: a run that cannot work leaves no files
            if run.trainer.is_global_zero:
                announce(run, run_dir, overrides)
            figures = fit_and_test(run, run_dir)
            # only now: Lightning, too, checks the checkpoint before it ends the run
            nothing_trained = run.trainer.global_step == run.first_step
            if resume is not None and nothing_trained and run.trainer.is_global_zero:
                log_finished(run.trainer, resume.path)
            return figures
    except RunStopped as stopped:
        status = stopped.status
        if is_first_process():
            log.warning("%s; %s", stopped, resume_hint(run_dir), extra={"command": True})
    # Exit outside the handler: the exception refers to its frames, and these to the graph of the
    # interrupted step, which must be freed before the interpreter ends.
    sys.exit(status)


def search(config: Mapping[str, Any], run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the search of ``config["tuner"]``; return the configuration of the run that follows."""
    from revzoo.cli.run.tune import tune  # few runs search

    with quiet(), user_errors((*USER_ERRORS, *TRAINING_ERRORS)):
        prepare_process(config)
        following = tune(config, run_dir)
    if config["tuner"]["then"] == "stop":
        write_config(config, run_dir)
        record_session(run_dir, overrides=overrides, from_step=0)
    return following


class Saved(NamedTuple):
    """The checkpoint from which a run resumes.

    Attributes:
        path: of the file.
        step: the optimiser steps so far.
        data: the state of the data module.
    """

    path: Path
    step: int
    data: Mapping[str, Any]


class Run(NamedTuple):
    """The parts of a run that is ready to train.

    Attributes:
        config: with the plan of memory modes, if the run has one.
        trainer: with the callbacks.
        module: with the model.
        data: after ``setup``.
        first_step: the step at which it starts; None in a new folder.
        resumed: the checkpoint from which it resumes; None for a new run.
    """

    config: dict[str, Any]
    trainer: pl.Trainer
    module: Classifier
    data: ImageData
    first_step: int | None
    resumed: Path | None


def build(
    config: Mapping[str, Any], run_dir: Path, stop: GracefulStop, resume: Saved | None
) -> Run:
    """Build the parts of a run. Writes no files."""
    prepare_process(config)
    step = None if resume is None else resume.step
    if resume is None and (run_dir / CONFIG_FILE).exists():
        step = 0  # stopped before its first checkpoint: begins again and replaces its log rows
    trainer = build_trainer(config, run_dir=run_dir, stop=stop, first_step=step)
    data = build_data(config["data"])
    if trainer.is_global_zero and (place := place_of(config["data"])):
        log.info("reading  %s", place)  # takes minutes for many files
    data.prepare_data()

    def build_network(shape: Mapping[str, int]) -> Classifier:
        # the checkpoint replaces the weights that the run started from: say nothing of these
        with nullcontext() if resume is None else unlogged(pretrained.log):
            module = build_module(config, **shape)
        check_network(config, all_callbacks(trainer), module.model)
        return module

    # before all images are read, which may take minutes
    shape = data.shape if resume is None else {}
    module = build_network(shape) if shape else None
    data.setup("fit")
    check_batch_size(data.batch_size, data.train_count, trainer.world_size)
    if resume is not None:  # before the model, which is built for these data
        _check_same_data(resume.data, data, run_dir)
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
        write_config(run.config, run_dir)
    else:  # record changes only after the trainer has accepted the checkpoint

        def started(trainer: pl.Trainer, module: pl.LightningModule) -> None:
            write_config(run.config, run_dir)
            log_resumed(trainer, checkpoint)

        recorder = pl.callbacks.LambdaCallback(on_train_start=started)
        all_callbacks(run.trainer).append(recorder)
    record_session(run_dir, overrides=overrides, from_step=run.first_step or 0)
    log_opening(run.config, run.trainer, run.module, run.data, run_dir, resumed=checkpoint)


@contextmanager
def unlogged(logger: logging.Logger) -> Iterator[None]:
    """Suppress a logger's messages below warnings."""
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_same_data(trained_on: Mapping[str, Any], data: ImageData, run_dir: Path) -> None:
    check_same_classes(trained_on["classes"], data.classes)
    if (channels := trained_on.get("in_chans", data.in_chans)) != data.in_chans:
        raise DataError(
            f"the run was trained on images of {channels} channels, these have {data.in_chans}: "
            f"set data.in_chans={channels}"
        )
    command = new_run_command([], run_dir)
    check_same_images(trained_on, data.identity, f"start a new run from its weights: {command}")


@user_errors((*USER_ERRORS, *TRAINING_ERRORS))  # here: Hydra would print all overrides first
def fit_and_test(run: Run, run_dir: Path) -> dict[str, float]:
    """Train, test the best checkpoint (without one, the last weights), write the summary.

    Raises:
        SystemExit: training or test has failed in a known way; the summary has the message, too.
        RunStopped: after SIGTERM or Ctrl-C.
    """
    trainer, module, data = run.trainer, run.module, run.data
    # the seconds of a resumed run include its earlier sessions
    start = time.perf_counter() - seconds_before(run_dir)
    figures: dict[str, float] = {}
    stopped, by_signal = None, False
    try:
        with quiet(), redirected_log(trainer), memory_errors(trainer, module, data):
            trainer.fit(module, datamodule=data, ckpt_path=run.resumed, weights_only=True)
        figures = figures_of(trainer)
        seconds = time.perf_counter() - start
        check_validated(trainer, figures)
        if run.config["test"] and data.has("test") and trainer.state.finished:
            figures |= test_best(trainer, module, data)
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
                best = best_checkpoint_path(trainer)
                log_result(trainer, figures, seconds=seconds, run_dir=run_dir, best=best, data=data)
            summary = describe_run(
                trainer, module, seconds=seconds, figures=figures, stopped=stopped
            )
            write_summary(summary, run_dir)
        end_together(trainer, ask=by_signal)
    return figures


def figures_of(trainer: pl.Trainer) -> dict[str, float]:
    """The figures of training and validation, also from before the resume of a resumed run."""
    before = [state.figures for state in callbacks_of(trainer, RunState)]
    now = {name: float(v) for name, v in trainer.callback_metrics.items()}
    # the first map wins: a figure of this session replaces the old one
    return dict(ChainMap(now, *before))


def test_best(trainer: pl.Trainer, module: Classifier, data: ImageData) -> dict[str, float]:
    """The figures of the test split, with the best checkpoint's weights."""
    best = best_checkpoint_path(trainer)
    with quiet(), memory_errors(trainer, module, data):
        results = trainer.test(
            module, datamodule=data, ckpt_path=best, weights_only=True, verbose=False
        )
    return {name: float(value) for name, value in results[0].items()}


def redirected_log(trainer: pl.Trainer) -> AbstractContextManager[Any]:
    """Write log lines above the progress bar, if there is one."""
    # a line written past tqdm would break the bar
    drawn = trainer.progress_bar_callback and sys.stdout.isatty()
    return logging_redirect_tqdm() if drawn else nullcontext()


def prepare_process(config: Mapping[str, Any]) -> None:
    """Set torch's threads, TensorFloat-32 and all random seeds."""
    if config.get("threads") is not None:
        torch.set_num_threads(at_most(cores(), "threads", config["threads"]))
    apply_precision(config["precision"])
    pl.seed_everything(config["seed"], workers=True, verbose=False)


@contextmanager
def switches_restored() -> Iterator[None]:
    """Restore determinism, cuDNN, TF32, threads and the environment after a run.

    Torch's random state is not restored.
    """
    cudnn = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, tf32 = cudnn.benchmark, cudnn.allow_tf32
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    # a sweep in a notebook starts several runs in one process
    variables = {name: os.environ.get(name) for name in VARIABLES}
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        cudnn.benchmark, cudnn.allow_tf32 = benchmark, tf32
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
