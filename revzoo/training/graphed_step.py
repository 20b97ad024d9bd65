"""A training step whose forward and backward pass are one CUDA graph, for a loop of one's own.

A small network leaves a GPU waiting for Python: revnet38 at batch 512 in bfloat16 takes 46 to 67 ms
a step on an H100, of which its kernels take 12. A CUDA graph starts all kernels at once.
``torch.cuda.make_graphed_callables`` has no place for the guard of the inverting modes, and its
warm-up counts batches in the statistics of norms.

The optimiser runs outside the graph, so every optimiser, schedule and hook works. Random numbers
cannot be repeated inside a graph, so a network with dropout is captured only in mode ``store``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable, check_count, check_module
from revzoo.core.guard import RangeError, set_drift_limit
from revzoo.core.invertible import all_steps
from revzoo.core.modes import mode_of

_log = logging.getLogger(__name__)
_WARM_UP = 3  # passes before a capture, with and without the guard, as in torch

Batch = tuple[Tensor, ...]


def graphed_step(
    module: nn.Module,
    loss: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    example_batch: Tensor | Sequence[Tensor],
    *,
    check_every: int = 200,
) -> GraphedStep:
    """A training step: forward and backward pass as one CUDA graph, then the optimiser.

    A batch of another shape runs without the graph, and so does every ``check_every``-th step, in
    which the guard compares reconstructions. What cannot be captured runs without a graph, too; one
    line of the log says why. Autocast, where it is on now, applies to all steps.

    Args:
        module: on its device, in the mode (train or eval) and memory mode in which it will run.
        loss: ``loss(module(first), *others)`` is a scalar, for a batch ``(first, *others)``.
        optimizer: of the module's parameters, or some of them; not one that needs a closure, such
            as LBFGS. Clip gradients by ``register_step_pre_hook``.
        example_batch: a tensor, or a tuple such as images ``(B, C, H, W)`` and labels ``(B,)``,
            with the shapes, types and layout of all batches. Not trained on.
        check_every: how many steps lie between two with the guard.

    Returns:
        ``step(batch)``, or ``step(*batch)``: the loss, a tensor on the device.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``check_every`` is not a positive number.
        DriftError, RangeError: by a step, as in any loop.

    Example:
        >>> model = revzoo.create_model("revnet38", num_classes=10)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> batch = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
        >>> step = revzoo.graphed_step(model, nn.functional.cross_entropy, optimizer, batch)
        >>> step(batch).shape
        torch.Size([])
    """
    check_module("module", module)
    check_callable("loss", loss)
    check_count("check_every", check_every)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer"
        )
    return GraphedStep(module, loss, optimizer, _as_batch(example_batch), check_every)


class GraphedStep:
    """See :func:`graphed_step`. ``reason``: why there is no graph; empty if there is one."""

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        check_every: int,
    ) -> None:
        self._module, self._loss, self._optimizer = module, loss, optimizer
        self._check_every = check_every
        self._calls = 0
        self._static = tuple(t.clone() for t in batch)  # the graph reads these
        kind = batch[0].device.type
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": False,  # a cast that is kept would stay as it was in the capture
        }
        self._value: Tensor | None = None
        self._capture()

    def __call__(self, *batch: Any) -> Tensor:
        """The loss of a batch, before the optimiser's step."""
        tensors = _as_batch(batch[0] if len(batch) == 1 else batch)
        self._calls += 1
        if self._replay is not None and self._trained != self._trained_now():
            self._capture()  # parameters were frozen, unfrozen, added or given other memory
        alike = [kind_of(t) for t in tensors] == [kind_of(t) for t in self._static]
        if self._replay is None or not alike or self._calls % self._check_every == 0:
            try:
                value = self._run(tensors)
            finally:
                if self._replay is not None and self._grids != _grids_of(self._module):
                    self._capture()  # a grid has adapted, and the graph holds the old one
            self._optimizer.step()
            return value
        for static, t in zip(self._static, tensors, strict=True):
            static.copy_(t, non_blocking=True)
        for p, g in zip(self._parameters, self._gradients, strict=True):
            p.grad = g
        self._replay()
        assert self._value is not None
        value = self._value.clone()  # the next step overwrites it
        self._optimizer.step()
        return value

    @property
    def _parameters(self) -> list[Tensor]:
        """Of the module, also those of another optimiser; and of the optimiser, as of now."""
        groups = (group["params"] for group in self._optimizer.param_groups)
        return [*dict.fromkeys(itertools.chain(self._module.parameters(), *groups))]

    def _trained_now(self) -> list[Any]:
        """The parameters of which a pass computes gradients, and the memory that it reads."""
        tensors = (*self._parameters, *self._module.buffers())
        return [(id(t), t.requires_grad, t.data_ptr()) for t in tensors]

    def _run(self, batch: Batch) -> Tensor:
        """One pass with new gradients; returns the loss."""
        for p in self._parameters:
            p.grad = None
        with torch.autocast(**self._autocast):
            value = self._loss(self._module(batch[0]), *batch[1:])
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def _capture(self) -> None:
        """Capture the pass; leaves buffers and gradients as they were."""
        self._replay: Callable[[], None] | None = None
        self.reason = why_not(self._static[0].device)
        if not self.reason:
            parameters = self._parameters
            with kept(parameters, [*self._module.buffers()]):
                for _ in range(_WARM_UP):  # with the guard
                    try:
                        self._run(self._static)
                    except RangeError as error:
                        if not error.adapted:
                            raise
                self._replay, self.reason = try_to_capture(self._pass, self._module)
                self._gradients = [p.grad for p in parameters]
            self._grids = _grids_of(self._module)
            self._trained = self._trained_now()
        if self.reason:
            _log.info("the training step runs without a CUDA graph: %s", self.reason)

    def _pass(self) -> None:
        self._value = self._run(self._static)


def why_not(device: torch.device) -> str:
    """Why steps on ``device`` cannot be a graph; empty if they may be one."""
    return "" if device.type == "cuda" else f"the batch is on {device.type}, not on a GPU"


def try_to_capture(
    run: Callable[[], None], module: nn.Module
) -> tuple[Callable[[], None] | None, str]:
    """``run``, steps of ``module`` without its guard, as a CUDA graph; or None and the reason."""
    if any(mode_of(step.memory).on_host for step in all_steps(module).values()):
        # others may use the host memory between two replays
        return None, "memory=offload keeps activations on the host"
    with _unguarded(module):
        try:
            return captured(run), ""
        except RuntimeError as error:  # values that the host reads, random numbers, no memory
            return None, str(error).splitlines()[0]


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """``run`` as a CUDA graph: a function that repeats its kernels, after some runs on the side."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):  # libraries make their handles
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # other threads may pin batches meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


@contextlib.contextmanager
def kept(parameters: Sequence[Tensor], state: Sequence[Tensor]) -> Iterator[None]:
    """A context after which gradients, ``state`` and torch's random state are as they were."""
    gradients = [p.grad for p in parameters]
    before = [(t, t.detach().clone()) for t in state]
    devices = list({t.device for t in (*parameters, *state) if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)


@contextlib.contextmanager
def _unguarded(module: nn.Module) -> Iterator[None]:
    """A context without the guard, which reads values."""
    limits = [(step, step.drift_limit) for step in all_steps(module).values()]
    set_drift_limit(module, None)
    try:
        yield
    finally:
        for step, limit in limits:
            step.drift_limit = limit


def _grids_of(module: nn.Module) -> list[Any]:
    """The figures from which the grids of the module's chains follow."""
    grown = [step.growth for step in all_steps(module).values()]
    return [None if g is None else (g.ratio, g.floor) for g in grown]


def _as_batch(batch: Any) -> Batch:
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    some = isinstance(tensors, (tuple, list)) and len(tensors) > 0
    if some and all(isinstance(t, Tensor) for t in tensors):
        return tuple(tensors)
    raise TypeError(
        f"the batch is a {type(batch).__name__}: expected a tensor, or a tuple of tensors, such as "
        "(images, labels)"
    )


def kind_of(t: Tensor) -> tuple[Any, ...]:
    """What tensors of a graph's batches have in common."""
    return t.shape, t.dtype, t.device, t.stride()
