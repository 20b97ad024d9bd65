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
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from revzoo.core.invertible import State, Step, as_state
from revzoo.core.set_memory import set_memory
from revzoo.core.tensors import tensors_of
from revzoo.profiling.chain import Chain, Choice, Link
from revzoo.profiling.count import Call, Layout
from revzoo.profiling.twins import copied

log = logging.getLogger(__name__)

_LONG = 0.02  # seconds; a constant is at most a few per cent of it
_SAMPLE = 1e7  # nominal nanoseconds of a sample's training step
_FEW = 2  # fewest images: BatchNorm refuses a single value


def timed(chain: Chain, model: nn.Module, calls: Sequence[Call]) -> Chain:
    """The chain with measured costs instead of nominal ones.

    Operators outside steps, such as the head, get the mean factor of the steps.

    Args:
        chain: see :func:`revzoo.profiling.chain.chain_of`.
        model: the model of the chain.
        calls: the calls of its steps.
    """
    known: dict[object, _Rate] = {}
    scaled: list[Link] = []
    nominal = work = 0.0
    for link, call in zip(chain.steps, calls, strict=True):
        step = model.get_submodule(call.name)
        assert isinstance(step, Step)
        # repr shows layers and their options: equal steps take equal time
        subject = step.subject
        trains = [m.training for m in subject.modules()]
        learns = [p.requires_grad for p in subject.parameters()]
        key = type(step), repr((step, subject, trains, learns, call.layout, call.context))
        if key not in known:
            log.debug("timing %s", call.name)
            try:
                known[key] = _rate(step, call, link.choices, train=not model.training)
            except Exception as error:  # a user's step may fail in any way
                raise ValueError(_not_timed(step, call, error)) from error
        scaled.append(_scaled(link, known[key]))
        nominal += link.choices[0].cost
        work += link.choices[0].cost * known[key].factor
    rest = _Rate(work / max(1, nominal), {})
    steps = iter(scaled)
    links = [_scaled(k, rest) if k.name is None else next(steps) for k in chain.links]
    return replace(chain, links=tuple(links))


def _not_timed(step: Step, call: Call, error: Exception) -> str:
    whole = call.layout[0].shape[0]
    name = f"{call.name} {type(step).__name__}".strip()
    return (
        f"{name} cannot be timed: called alone, with random inputs for "
        f"at least {min(_FEW, whole)} of the {whole} images, it raised {type(error).__name__} "
        f"({error}). Expected a step that takes any number of images; otherwise pass clock=False, "
        "which counts operations instead"
    )


class _Rate(NamedTuple):
    """Measured over nominal time of the counted work, and each mode's constant in nanoseconds."""

    factor: float
    constants: Mapping[str, float]


def _scaled(link: Link, rate: _Rate) -> Link:
    costs = [int(c.cost * rate.factor + rate.constants.get(c.mode, 0)) for c in link.choices]
    pairs = zip(link.choices, costs, strict=True)
    return replace(link, choices=tuple(replace(c, cost=cost) for c, cost in pairs))


def _rate(step: Step, call: Call, choices: Sequence[Choice], *, train: bool) -> _Rate:
    """Measure the rate of a step: train a copy of it on a few images.

    Args:
        step: of the model.
        call: a call of it.
        choices: of its memory modes.
        train: set training mode; False keeps the modes of the step's modules.
    """
    layout = call.layout
    # a mode has several choices, which differ in their neighbours
    modes: dict[str, Choice] = {}
    for choice in choices:
        modes.setdefault(choice.mode, choice)
    plain, *others = modes.values()
    whole = layout[0].shape[0]
    few = min(_FEW, whole)
    count = max(few, min(whole, int(whole * _SAMPLE / max(1, plain.cost))))
    device = next((p.device for p in step.subject.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    # a copy: BatchNorm must not see these images, and the model may be on meta
    replica = _replica(step, device)
    if train:
        replica.train()
    replica.streams = len(layout)  # a block of a converted network takes one or two
    inputs = {n: _Sample.of(call, n, device) for n in (few, count)}

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
        return _Rate(factor, {})
    # few images: the constant part shows where the work is small
    small = {c.mode: fastest(c.mode, few) for c in others} | {plain.mode: stored[few]}
    work = {mode: factor * c.cost * few / whole for mode, c in modes.items()}
    constants = {mode: max(0, small[mode] - work[mode]) for mode in modes}
    return _Rate(factor, constants)


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


class _Sample(NamedTuple):
    """The streams and keyword arguments of a step for a few images."""

    state: State
    context: Mapping[str, Any]

    @classmethod
    def of(cls, call: Call, count: int, device: torch.device) -> _Sample:
        """Random tensors in the layouts of a call for the whole batch."""
        whole = call.layout[0].shape[0]

        def few(value: Any) -> Any:
            if not isinstance(value, Layout):
                return value
            # a tensor without a batch, such as an attention mask, serves any number of images
            batched = value.shape[:1] == (whole,)
            return _random(value, [count, *value.shape[1:]] if batched else value.shape, device)

        # a layout is a tuple, but not a collection of arguments
        context = tree_map(few, call.context, is_leaf=lambda value: isinstance(value, Layout))
        return cls(tuple(map(few, call.layout)), context)


def _random(layout: Layout, shape: Sequence[int], device: torch.device) -> Tensor:
    """A random tensor of a ``shape`` whose dimensions are ordered in memory as in the layout."""
    # dimensions by descending stride: a dense tensor in this order, permuted back, has the layout
    order = sorted(range(len(shape)), key=lambda d: -layout.stride[d])
    dense = torch.randn([shape[d] for d in order], device=device)
    back = sorted(range(len(order)), key=order.__getitem__)
    # as integers between 0 and 1: they may be the indices of a table
    values = dense if layout.dtype.is_floating_point or layout.dtype.is_complex else dense > 0
    return values.permute(back).to(layout.dtype).requires_grad_(layout.needs)


def _time(step: Step, sample: _Sample, device: torch.device) -> float:
    """Seconds of one forward and backward pass."""
    start = now(device)
    outputs = [t for t in as_state(step(*sample.state, **sample.context)) if t.requires_grad]
    seconds = now(device) - start
    # in a training step, the next step makes the gradients
    gradients = [torch.ones_like(t) for t in outputs]
    if outputs:
        start = now(device)
        torch.autograd.backward(outputs, gradients)
        seconds += now(device) - start
    for t in tensors_of(sample):
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
