"""Measures how fast this machine does the work that a plan counts.

A plan compares steps by FLOPs and bytes (:func:`revzoo.profiling.count.nominal_cost`). To give its
time in seconds, we time the steps with the most work on a few images, and take their mean speed for
all others. We time copies on random streams and keyword arguments, never the model.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from revzoo.core.invertible import Step, as_state
from revzoo.core.set_memory import set_memory
from revzoo.core.tensors import tensors_of
from revzoo.profiling.count import Call, Layout
from revzoo.profiling.twins import copied

log = logging.getLogger(__name__)

_TIMED = 4  # different steps
_SAMPLE = 1e7  # nominal nanoseconds of a timed step: Python's constant part is small beside it
_FEW = 2  # fewest images: BatchNorm refuses a single value


def speed(model: nn.Module, calls: Sequence[Call], costs: Sequence[int]) -> float:
    """Measured over nominal time of the steps with the most work, in mode ``store``.

    Args:
        model: on any device; a step on the meta device is timed on the CPU.
        calls: of the model's steps.
        costs: nanoseconds of each, see :func:`revzoo.profiling.count.nominal_cost`.

    Raises:
        ValueError: a step cannot be timed.
    """
    # equal steps have equal costs
    numbers, call_of = Counter(costs), dict(zip(costs, calls, strict=True))
    measured = nominal = 0.0
    for cost in sorted(numbers, key=lambda cost: -cost * numbers[cost])[:_TIMED]:
        call, step = call_of[cost], model.get_submodule(call_of[cost].name)
        assert isinstance(step, Step)
        log.debug("timing %s", call.name)
        try:
            measured += numbers[cost] * _nanoseconds(step, call, cost, train=not model.training)
        except Exception as error:  # a user's step may fail in any way
            raise ValueError(
                f"{call.name} {type(step).__name__} cannot be timed: called alone, with random "
                f"inputs for a few images, it raised {type(error).__name__} ({error}). "
                "Expected a step that takes any number of images; otherwise pass clock=False, "
                "which counts operations instead"
            ) from error
        nominal += numbers[cost] * cost
    return measured / max(1, nominal)


def _nanoseconds(step: Step, call: Call, cost: int, *, train: bool) -> float:
    """Time of the whole batch, from a few images; in the modules' own modes unless ``train``."""
    whole = call.layout[0].shape[0]
    count = max(min(_FEW, whole), min(whole, int(whole * _SAMPLE / max(1, cost))))
    device = next((p.device for p in step.subject.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    # a copy: BatchNorm must not see these images, and the model may be on meta
    replica = _replica(step, device)
    if train:
        replica.train()
    replica.streams = len(call.layout)  # a block of a converted network takes one or two
    set_memory(replica, "store")
    inputs = _few((call.layout, call.context), whole, count, device)
    # the first run also warms up, and other programs only add time
    return 1e9 * min(_time(replica, inputs, device) for _ in range(3)) * whole / count


def _replica(step: Step, device: torch.device) -> Step:
    """A copy of the step; one on the meta device gets random weights."""

    def real(t: Tensor) -> Tensor:
        if t.device.type != "meta":
            return t.clone()
        # small and positive: variances are valid, and deep steps do not overflow
        return (torch.rand(t.shape, device=device) / 16).to(t.dtype)

    replica = copied(step, real)
    for m in replica.modules():
        if isinstance(m, Step) and m.drift_limit is not None:
            m.drift_limit = math.inf  # random weights may have no accurate inverse
    return replica


def _few(batch: Any, whole: int, count: int, device: torch.device) -> Any:
    """Random tensors for ``count`` images in the layouts of a batch of ``whole`` images."""

    def few(layout: Any) -> Any:
        if not isinstance(layout, Layout):
            return layout
        # a tensor without a batch, such as an attention mask, serves any number of images
        batched = layout.shape[:1] == (whole,)
        values = torch.randn([count, *layout.shape[1:]] if batched else layout.shape, device=device)
        # as integers between 0 and 1: they may be the indices of a table
        floating = layout.dtype.is_floating_point or layout.dtype.is_complex
        return (values if floating else values > 0).to(layout.dtype).requires_grad_(layout.needs)

    # a layout is a tuple, but not a collection of arguments
    return tree_map(few, batch, is_leaf=lambda value: isinstance(value, Layout))


def _time(step: Step, inputs: Any, device: torch.device) -> float:
    """Seconds of one forward and backward pass."""
    state, context = inputs
    start = now(device)
    outputs = [t for t in as_state(step(*state, **context)) if t.requires_grad]
    seconds = now(device) - start
    # in a training step, the next step makes the gradients
    gradients = [torch.ones_like(t) for t in outputs]
    if outputs:
        start = now(device)
        torch.autograd.backward(outputs, gradients)
        seconds += now(device) - start
    for t in tensors_of(inputs):
        t.grad = None  # otherwise the next timing would add to it
    return seconds


def now(device: torch.device) -> float:
    """Seconds on a clock, after the device has finished its work.

    With one thread we use the thread's clock, which stops while other programs have the core.
    """
    wait_for(device)
    if device.type != "cuda" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work: kernels run after their call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
