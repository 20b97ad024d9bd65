"""Plans the memory modes of a run: ``memory=auto`` and ``memory=budget``.

The plan is for the run's batch and precision. It uses counts only, no measured times, so every
process makes the same plan. The run's configuration keeps it, and a resumed run uses it again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch

from revzoo.cli.config.quick import model_spec
from revzoo.core.modes import set_memory
from revzoo.data import ImageData
from revzoo.models.registry import WEIGHTS
from revzoo.profiling.plan import (
    PLANNED,
    Plan,
    PlannedMode,
    Planner,
    count_modes,
    inverting_mode,
    state_bytes,
)
from revzoo.profiling.units import in_units
from revzoo.training import Classifier
from revzoo.training.classifier import model_from
from revzoo.training.distributed import is_first_process
from revzoo.training.optim.optimizers import OptimSpec, build_optimizer

log = logging.getLogger(__name__)


def with_plan(
    config: Mapping[str, Any], module: Classifier, data: ImageData, trainer: pl.Trainer
) -> dict[str, Any]:
    """Set the module's memory modes by the run's plan; return the configuration with the plan.

    Args:
        config: the checked configuration of the run.
        module: on the CPU, in training mode.
        data: a data module after ``setup``.
        trainer: of the run, for its device and precision.

    Raises:
        BudgetError: ``memory.bytes`` is less than any plan needs; a ValueError.
    """
    memory = config["memory"]
    mode = PLANNED.get(memory["mode"])
    if mode is None:
        return dict(config)
    plan: Mapping[str, str] | None = memory.get("plan")  # of the run that resumes here
    if plan is None:
        plan = _new_plan(mode, config, module, data, trainer)
    if plan is None:
        return dict(config)
    set_memory(module.model, plan)
    return {**config, "memory": {**memory, "plan": dict(plan)}}


def _new_plan(
    mode: PlannedMode,
    config: Mapping[str, Any],
    module: Classifier,
    data: ImageData,
    trainer: pl.Trainer,
) -> Plan | None:
    """Make a plan and log it; None if an unbounded mode keeps the model's mode."""
    if not mode.plans(module.model):
        return None
    shape = (data.batch_size, data.in_chans, data.image_size, data.image_size)
    try:
        with trainer.precision_plugin.forward_context():  # autocast halves most activations
            planner = Planner(
                module.model,
                shape,
                # measured times would differ from process to process, and the plans with them
                clock=False,
                extra=_optimiser_bytes(config, data),
                recompute=mode.bounded,
                device=trainer.strategy.root_device,
            )
            plan = mode.plan(planner, config["memory"].get("bytes"))
    except Exception as error:  # a user's model may fail on fake tensors
        # the user asked for a limit, so going on without one is no help
        if mode.bounded:
            raise
        log.info(
            "memory=%s: the model cannot be planned (%s); using memory=%s",
            mode.name,
            error,
            inverting_mode(module.model),
        )
        return None
    if is_first_process():
        log.info("memory=%s: %s", mode.name, _summary(plan, planner))
    return plan


def _summary(plan: Plan, planner: Planner) -> str:
    modes = [plan[link.name] for link in planner.chain.links if link.name]
    pure = {mode: planner.pure(mode) for mode in (planner.inverting, "store")}
    others = ", ".join(f"{m} {in_units(p.peak)}" for m, p in pure.items() if p is not None)
    return f"steps: {count_modes(modes)}; peak {in_units(plan.peak_bytes)} ({others})"


def _optimiser_bytes(config: Mapping[str, Any], data: ImageData) -> int:
    spec = model_spec(config, num_classes=data.num_classes, in_chans=data.in_chans)
    # on meta: the state of the optimiser is counted, not allocated
    with torch.device("meta"):
        model = model_from({key: value for key, value in spec.items() if key not in WEIGHTS})
    return state_bytes(build_optimizer(model, OptimSpec.of(config["optim"])))
