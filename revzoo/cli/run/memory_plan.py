"""Plans the memory modes of a run: ``memory=auto``, ``memory=balanced`` and ``memory=budget``.

The plan fits the run's batch and precision; ``auto`` also asks the device what is free. The run's
configuration records the plan and the conditions that it was made for. A resumed run uses the plan
again unless the conditions have changed, or the plan no longer fits. A plan that the user wrote has
no such record and is never replaced. A new run takes the plan of an earlier one under the same
conditions (:mod:`revzoo.cli.run.plan_cache`). If a GPU runs out of memory in ``auto``, the run
continues with a leaner plan, once (:mod:`revzoo.training.step_retry`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import GradientAccumulationScheduler, WeightAveraging
from pytorch_lightning.strategies import DDPStrategy

from revzoo.cli.run import plan_cache
from revzoo.cli.run.folder import write_config
from revzoo.cli.run.plan_cache import Planned
from revzoo.cli.schema import MEMORY
from revzoo.core.modes import in_table_order, set_memory
from revzoo.data import ImageData
from revzoo.profiling.plan import (
    PLANNED,
    PlannedMode,
    Planner,
    count_modes,
    inverting_mode,
)
from revzoo.profiling.units import bytes_from, in_one_unit, in_units
from revzoo.training.callbacks.progress_bar import Progress, clock
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import callbacks_of, is_first_process
from revzoo.training.memory import free_bytes, optimizer_bytes, return_freed_blocks

log = logging.getLogger(__name__)


def with_plan(
    config: Mapping[str, Any], module: Classifier, data: ImageData, trainer: pl.Trainer
) -> dict[str, Any]:
    """Set the module's memory modes by the run's plan; return the configuration with the plan.

    The module is on the CPU, in training mode; the data are set up.

    Raises:
        BudgetError: ``memory.bytes`` is less than any plan needs; a ValueError.
    """
    memory = config["memory"]
    mode = PLANNED.get(memory["mode"])
    if mode is None or not mode.plans(module.model):
        if mode is not None and memory.get("bytes") is not None and is_first_process():
            log.warning(
                "memory.bytes=%s has no effect: %s has no step, so it stores every activation; "
                "make its blocks reversible, as with model.reversible_bits=4 for timm and "
                "torchvision",
                memory["bytes"],
                config["model"]["name"],
            )
        return dict(config)
    kept = {key: memory[key] for key in memory if key not in ("plan", "planned_for")}
    plan: Mapping[str, str] | None = memory.get("plan")  # of the run that resumes here
    made_for = memory.get("planned_for")
    try:
        conditions = _conditions(memory, config, module, data, trainer)
        device = trainer.strategy.root_device
        free = free_bytes(device) if mode.fills_device else None
        if free is not None and device.type != "cuda":
            free //= max(1, trainer.num_devices)  # processes on a CPU share it
        limit = memory.get("bytes")
        if limit is None and free is not None:
            limit = int(free * memory.get("fraction", MEMORY.options["fraction"].default))
        changed = _changed(made_for, conditions, limit if free is not None else None)
        if changed and is_first_process():
            names = ", ".join(changed).replace("_", " ")
            log.info("memory=%s: plans again, since the run has a different %s", mode.name, names)
        if plan is None or changed:
            made = _new_plan(mode, conditions, config, module, trainer, limit, free)
            plan, made_for = made.modes, {**conditions, "peak_bytes": made.peak}
    except Exception as error:  # a user's model may fail on fake tensors
        # the user asked for a limit, so continuing without one does not help
        if mode.bounded:
            raise
        log.info(
            "memory=%s: the model cannot be planned (%s); using memory=%s",
            mode.name,
            error,
            inverting_mode(module.model),
        )
        return {**config, "memory": kept}
    if mode.bounded and config["callbacks"].get("private") is not None and is_first_process():
        log.warning(
            "callbacks.private may take more than memory.bytes: a plan counts neither the "
            "norms of per-sample gradients nor batches larger than data.batch_size; "
            "keep memory.bytes a third below a hard limit"
        )
    set_memory(module.model, plan)
    if free is not None and device.type == "cpu" and {*plan.values()} != {"store"}:
        return_freed_blocks()  # the plan counts on it: the system ends a process that takes more
    record = {"planned_for": made_for} if made_for else {}
    for bar in callbacks_of(trainer, Progress):
        bar.planned = made_for.get("peak_bytes") if made_for else None
        bar.limit = None if limit is None else bytes_from(limit)
    config = {**config, "memory": {**kept, "plan": dict(plan), **record}}
    # processes would wait for one that repeats its step
    if mode.fills_device and made_for and trainer.world_size == 1:
        module.retry.lower = partial(_lower, config, conditions, module, trainer)
    return config


def _lower(
    config: Mapping[str, Any],
    conditions: Mapping[str, Any],
    module: Classifier,
    trainer: pl.Trainer,
    in_use: int | None,
) -> str:
    """Set a plan for 0.8 of the bytes in use, or the leanest, and record it for a resumed run.

    Returns:
        Its modes and bytes; an empty text if the present plan is as lean.
    """
    memory = config["memory"]
    before = memory["planned_for"].get("peak_bytes", 0)
    with trainer.precision_plugin.forward_context():
        planner = _planner(conditions, module, trainer)
        plan, _ = planner.within(int(0.8 * min(before, in_use or before)))
    if plan.peak_bytes >= before:
        return ""
    set_memory(module.model, plan)
    for bar in callbacks_of(trainer, Progress):
        bar.planned = plan.peak_bytes
    made_for = {**conditions, "peak_bytes": plan.peak_bytes}
    memory = {**memory, "plan": dict(plan), "planned_for": made_for}
    write_config({**config, "memory": memory}, Path(trainer.default_root_dir))
    sizes = f"{in_units(plan.peak_bytes)} instead of {in_units(before)}"
    return f"{count_modes([*plan.values()])}; {sizes}"


def _conditions(
    memory: Mapping[str, Any],
    config: Mapping[str, Any],
    module: Classifier,
    data: ImageData,
    trainer: pl.Trainer,
) -> dict[str, Any]:
    """The conditions of a plan, as plain data."""
    return {
        "inverting": memory.get("inverting"),
        "budget": memory.get("bytes"),
        "input": [data.batch_size, data.in_chans, *data.train_sizes],
        "precision": dict(config["precision"]),
        "device": trainer.strategy.root_device.type,
        "extra_bytes": _extra_bytes(module, trainer),
    }


def _changed(
    made_for: Mapping[str, Any] | None, conditions: Mapping[str, Any], limit: Any
) -> list[str]:
    """The conditions that differ from a recorded plan's, or the free memory if it is too small."""
    if not made_for:
        return []
    names = [name for name in {**conditions, **made_for} if name != "peak_bytes"]
    changed = [name for name in names if made_for.get(name) != conditions.get(name)]
    too_large = limit is not None and made_for.get("peak_bytes", 0) > bytes_from(limit)
    return changed or ["free memory"] * too_large


def _new_plan(
    mode: PlannedMode,
    conditions: Mapping[str, Any],
    config: Mapping[str, Any],
    module: Classifier,
    trainer: pl.Trainer,
    limit: Any,
    free: int | None,
) -> Planned:
    """Make a plan, or take an earlier run's, and log it."""
    start = time.perf_counter()
    most = 0 if limit is None else bytes_from(limit)
    key = plan_cache.key_of(module.model, mode, config["model"], conditions)
    plan = plan_cache.find(key, most)
    source = "planned by an earlier run"
    if plan is None:
        with trainer.precision_plugin.forward_context():  # autocast halves most activations
            plan = _planned(mode, _planner(conditions, module, trainer), limit, most)
        source = f"planned in {clock(time.perf_counter() - start)}"
        if is_first_process():
            plan_cache.keep(key, plan)
    if is_first_process():
        given = conditions["budget"]
        if free is None:
            summary = _summary(plan)
        else:
            bound = f"{in_units(free)} free" if given is None else f"memory.bytes={given}"
            summary = _summary_of_auto(plan, bound)
        log.info("memory=%s: %s; %s", mode.name, summary, source)
    return plan


def _planned(mode: PlannedMode, planner: Planner, limit: Any, most: int) -> Planned:
    plan = mode.plan(planner, limit)
    pure = {name: planner.pure(name) for name in in_table_order((planner.inverting, "store"))}
    return Planned(
        modes=plan.modes,
        limit=most,
        need=plan.peak_bytes + planner.reserve,
        peak=plan.peak_bytes,
        seconds=plan.seconds,
        extra=plan.extra,
        inverting=planner.inverting,
        pure={name: [o.peak, o.cost / 1e9] for name, o in pure.items() if o is not None},
    )


def _planner(conditions: Mapping[str, Any], module: Classifier, trainer: pl.Trainer) -> Planner:
    return Planner(
        module.model,
        conditions["input"],
        inverting=conditions["inverting"],
        # measured times would differ from process to process, and the plans with them
        clock=False,
        extra=conditions["extra_bytes"],
        device=trainer.strategy.root_device,
    )


def _summary(plan: Planned) -> str:
    sized = in_one_unit(max(plan.peak, *(peak for peak, _ in plan.pure.values())))
    others = ", ".join(f"{mode} {sized(peak)}" for mode, (peak, _) in plan.pure.items())
    # an audit does not count these
    extra = f", {sized(plan.extra)} of it for the optimiser" if plan.extra else ""
    return (
        f"steps: {count_modes([*plan.modes.values()])}; peak {sized(plan.peak)}{extra} ({others})"
    )


def _summary_of_auto(plan: Planned, limit: str) -> str:
    """``store, 99 MiB of 18 GiB free (exact: 18 MiB in 1.4 times the time)``."""
    modes = {*plan.modes.values()}
    what = modes.pop() if len(modes) == 1 else count_modes([*plan.modes.values()])
    text = f"{what}, {in_units(plan.peak)} of {limit}"
    if plan.inverting not in plan.pure or what == plan.inverting:
        return text
    peak, seconds = plan.pure[plan.inverting]
    times = seconds / plan.seconds
    return f"{text} ({plan.inverting}: {in_units(peak)} in {times:.1f} times the time)"


def _extra_bytes(module: Classifier, trainer: pl.Trainer) -> int:
    """Bytes that a run keeps through its steps, besides the tensors of the model's own step."""
    schedules = callbacks_of(trainer, GradientAccumulationScheduler)
    later = [count for each in schedules for count in each.scheduling.values()]
    accumulates = max(trainer.accumulate_grad_batches, *later, 1) > 1
    kept = optimizer_bytes(module.model, module.optim)
    gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    weights = sum(p.nbytes for p in module.parameters()) + buffers
    kept += weights * len(callbacks_of(trainer, WeightAveraging))
    if isinstance(trainer.strategy, DDPStrategy):
        kept += gradients  # the buckets that processes exchange
    # copies with which StepRetry repeats a step
    return kept + buffers + gradients * accumulates
