"""Measures the time of each step on a few images.

A step's time is a constant, Python's overhead, plus a part proportional to the counted work. The
slope between two images and a sample of a few milliseconds gives the second part, in mode
``store``; two images in each mode give the constants. For steps so large that two images exceed the
sample and take longer than ``_LONG``, we time only ``store`` and set the constants to 0. Equal
steps are timed once. We time copies of steps on random streams and keyword arguments, never the
model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from revzoo.core.invertible import Step, as_state
from revzoo.core.set_memory import set_memory
from revzoo.core.tensors import tensors_of
from revzoo.profiling.chain import Chain, Choice, Link
from revzoo.profiling.count import Call, Layout
from revzoo.profiling.twins import copied

log = logging.getLogger(__name__)

_LONG = 0.02  # seconds; a constant is at most a few per cent of it
_SAMPLE = 1e7  # nominal nanoseconds of a sample's training step
_FEW = 2  # fewest images: BatchNorm refuses a single value


class _Rate(NamedTuple):
    """Measured over nominal time of the counted work, and each mode's constant in nanoseconds."""

    factor: float
    constants: Mapping[str, float] = {}


def timed(chain: Chain, model: nn.Module, calls: Sequence[Call]) -> Chain:
    """The chain with measured costs instead of nominal ones.

    Operators outside steps, such as the head, get the mean factor of the steps.

    Args:
        chain: of the model, see :func:`revzoo.profiling.chain.chain_of`.
        model: the model of the chain.
        calls: the calls of its steps.

    Raises:
        ValueError: a step cannot be timed.
    """
    known: dict[object, _Rate] = {}
    rates: dict[str | None, _Rate] = {}
    nominal = work = 0.0
    for link, call in zip(chain.steps, calls, strict=True):
        step = model.get_submodule(call.name)
        assert isinstance(step, Step)
        # repr shows layers and their options: equal steps take equal time
        trains = [m.training for m in step.subject.modules()]
        learns = [p.requires_grad for p in step.subject.parameters()]
        key = type(step), repr((step, step.subject, trains, learns, call.layout, call.context))
        if key not in known:
            log.debug("timing %s", call.name)
            try:
                known[key] = _rate(step, call, link.choices, train=not model.training)
            except Exception as error:  # a user's step may fail in any way
                raise ValueError(
                    f"{call.name} {type(step).__name__} cannot be timed: called alone, with random "
                    f"inputs for a few images, it raised {type(error).__name__} ({error}). "
                    "Expected a step that takes any number of images; otherwise pass clock=False, "
                    "which counts operations instead"
                ) from error
        rates[call.name] = known[key]
        nominal += link.choices[0].cost
        work += link.choices[0].cost * known[key].factor
    rates[None] = _Rate(work / max(1, nominal))

    def measured(link: Link, choice: Choice) -> int:
        rate = rates[link.name]
        return int(choice.cost * rate.factor + rate.constants.get(choice.mode, 0))

    return chain.with_costs(measured)


def _rate(step: Step, call: Call, choices: Sequence[Choice], *, train: bool) -> _Rate:
    """Train a copy of the step on a few images; in its modules' own modes unless ``train``."""
    plain, *others = choices
    whole = call.layout[0].shape[0]
    few = min(_FEW, whole)
    count = max(few, min(whole, int(whole * _SAMPLE / max(1, plain.cost))))
    device = next((p.device for p in step.subject.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    # a copy: BatchNorm must not see these images, and the model may be on meta
    replica = _replica(step, device)
    if train:
        replica.train()
    replica.streams = len(call.layout)  # a block of a converted network takes one or two
    # as the whole batch: the streams and the keyword arguments
    batch = call.layout, call.context
    inputs = {n: _few(batch, whole, n, device) for n in (few, count)}

    def fastest(mode: str, n: int) -> float:
        set_memory(replica, {"": mode})
        # the first run also warms up, and other programs only add time; two suffice for a long step
        times = [_time(replica, inputs[n], device) for _ in range(2)]
        if min(times) < _LONG:
            times.append(_time(replica, inputs[n], device))
        return 1e9 * min(times)

    stored = {n: fastest(plain.mode, n) for n in inputs}
    # the slope of a line through both: the constant part does not grow with the images
    rise = (stored[count] - stored[few]) / max(1, count - few)
    per_image = rise if rise > 0 else stored[count] / count
    factor = per_image * whole / max(1, plain.cost)
    # one sample gives no slope, and the constants are small beside its time
    if count == few and stored[few] > 1e9 * _LONG:
        return _Rate(factor)
    # few images: the constant part shows where the work is small
    small = {plain.mode: stored[few]} | {c.mode: fastest(c.mode, few) for c in others}
    work = {c.mode: factor * c.cost * few / whole for c in choices}
    return _Rate(factor, {mode: max(0, small[mode] - work[mode]) for mode in small})


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
        shape = [count, *layout.shape[1:]] if batched else layout.shape
        # dimensions by descending stride: a dense tensor in this order, permuted back
        order = sorted(range(len(shape)), key=lambda d: -layout.stride[d])
        dense = torch.randn([shape[d] for d in order], device=device)
        # as integers between 0 and 1: they may be the indices of a table
        floating = layout.dtype.is_floating_point or layout.dtype.is_complex
        values = dense if floating else dense > 0
        back = sorted(range(len(order)), key=order.__getitem__)
        return values.permute(back).to(layout.dtype).requires_grad_(layout.needs)

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
