"""The state that a run needs, beyond Lightning's, to resume exactly; see the room's docstring."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torchmetrics import Metric

from revzoo.core.invertible import Step, all_steps
from revzoo.core.kernels import Growth
from revzoo.core.modes import mode_of
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.distributed import gathered, process_count
from revzoo.training.lightning_compat import count_epochs, epoch_is_open, is_fitting


def generator_states() -> dict[str, Any]:
    """The states of torch's generators (CPU, CUDA), NumPy's and Python's, as plain data."""
    # lists: weights_only refuses NumPy's arrays
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy
    assert name == "MT19937", "NumPy's global generator is always of this type"
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        # of all devices: this process learns its device later
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [keys.tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss],
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore :func:`generator_states`; states of missing devices are ignored."""
    torch.set_rng_state(states["torch"].cpu())
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state.cpu(), device)
    keys, position, has_gauss, cached = states["numpy"]
    # uint32: lists lose the type
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))


def can_drift(step: Step) -> bool:
    """Whether the step's memory mode inverts it in floating point."""
    mode = mode_of(step.memory)
    # modes with a grid invert integers, exactly
    return mode.inverts and mode.grid is None


class RunState(pl.Callback):
    """Saves and restores the random states of each process, training metrics and logged figures.

    Attributes:
        figures: the logged figures when the run was saved; empty in a new run.
        notes: warnings for the run's summary, by topic.
        recomputed: names of the steps whose drift was too large to invert; they are recomputed.
    """

    _trainer: pl.Trainer  # both from setup
    _module: pl.LightningModule

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self.recomputed: list[str] = []
        self._loaded: dict[str, Any] | None = None
        self._planned_steps: float | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module
        # before Lightning restores its loops
        count_epochs(trainer)

    def state_dict(self) -> dict[str, Any]:
        figures = {name: float(v) for name, v in self._trainer.callback_metrics.items()}
        is_open = epoch_is_open(self._trainer)
        for logger in self._trainer.loggers:
            logger.save()  # a resumed run does not log the rows before this state again
        return {
            # one state for each rank
            "random": gathered(generator_states()),
            # sums over all processes: see on_train_start
            "metrics": states_of(self._metrics() if is_open else {}, sync=True),
            "figures": {**self.figures, **figures},
            "planned_steps": self._planned_steps,
            "notes": dict(self.notes),
            "recomputed": list(self.recomputed),
            # of each process: its grids have adapted to its own samples
            "growth": gathered(growth_of(self._module)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved state, to restore it when training starts."""
        # a test may use a different number of devices
        if is_fitting(self._trainer):
            self._check_same_length(state_dict)
        self._loaded = state_dict
        self.figures = dict(state_dict["figures"])
        self.notes = dict(state_dict.get("notes", {}))
        # .get: earlier versions lack the key
        self.recomputed = list(state_dict.get("recomputed", []))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._planned_steps = self._plan()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore here, not earlier: the setup of a run may draw random numbers, too."""
        for name, step in all_steps(pl_module).items():
            # the resumed run may use a different memory mode
            if name in self.recomputed and can_drift(step):
                step.memory = "recompute"
        if self._loaded is None:
            return
        state, self._loaded = self._loaded, None
        if (growth := state.get("growth")) is not None:
            set_growth(pl_module, growth[trainer.global_rank])
        if trainer.is_global_zero:  # only one process: the saved states are sums over all of them
            set_states(self._metrics(), state["metrics"])
        set_generator_states(state["random"][trainer.global_rank])

    def _check_same_length(self, saved: Mapping[str, Any]) -> None:
        path, before, now = self._trainer.ckpt_path, len(saved["random"]), process_count()
        if before != now:
            raise CheckpointError(
                f"{path} comes from a run with devices * num_nodes = {before}, this run has {now}: "
                f"use {before}, because each process resumes with its images and random numbers"
            )
        planned, steps = saved.get("planned_steps"), self._plan()
        if planned is not None and steps is not None and planned != steps:
            raise CheckpointError(
                f"{path} comes from a run of {planned} optimiser steps, this run has {steps}, and "
                "the learning rates depend on their number: use the same epochs, steps, images and "
                "batch size, or begin a new run"
            )

    def _plan(self) -> float | None:
        """The optimiser steps of the run; None if the learning rates do not depend on them."""
        # a user's own module may have no schedule
        steps: float | None = getattr(self._module, "planned_steps", lambda: None)()
        return steps

    def _metrics(self) -> dict[str, Metric]:
        """The metrics of the training steps, by their path in the module."""
        metrics: dict[str, Metric] = getattr(self._module, "training_metrics", dict)()
        return metrics


def states_of(metrics: Mapping[str, Metric], *, sync: bool = False) -> dict[str, Any]:
    """Copies of the metrics' states; with ``sync``, sums over all processes, on the CPU."""
    states = {}
    for name, metric in metrics.items():
        with metric.sync_context(should_sync=sync):
            # inside the context these are the sums; it restores the process's values
            state: dict[str, Any] = metric.metric_state
            values = {key: value.detach().clone() for key, value in state.items()}
        if sync:
            values = {key: value.cpu() for key, value in values.items()}
        states[name] = {"updates": metric.update_count, "values": values}
    return states


def set_states(metrics: Mapping[str, Metric], states: Mapping[str, Any]) -> None:
    """Restore the result of :func:`states_of`; metrics without a state start again."""
    for name, metric in metrics.items():
        state = states.get(name, {})
        for key, value in state.get("values", {}).items():
            # torchmetrics keeps each state as an attribute
            setattr(metric, key, value.to(metric.device))
        # torchmetrics warns if compute() follows no update, and has no public setter
        metric._update_count = state.get("updates", 0)


def growth_of(module: torch.nn.Module) -> dict[str, list[Any]]:
    """What grids have adapted to, by path of the step: ratio, floor, grid of the first pass."""
    return {
        path: [g.ratio, g.floor, g.seen]
        for path, step in all_steps(module).items()
        if (g := step.growth) is not None
    }


def set_growth(module: torch.nn.Module, saved: Mapping[str, Sequence[Any]]) -> None:
    """Restore :func:`growth_of`; paths that the module lacks are ignored."""
    for path, step in all_steps(module).items():
        if path in saved:
            step.growth = Growth()
            step.growth.ratio, step.growth.floor, step.growth.seen = saved[path]
