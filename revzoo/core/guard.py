"""Guards: what must hold for gradients to be right, checked without stalling the device.

Reconstruction is exact only up to rounding. A network that amplifies rounding, streams in a narrow
type, or a branch that does not repeat itself make it wrong, and the gradients with it. So a few
values of every reconstructed stream are kept from the forward pass and compared: the *drift*. In
mode ``exact`` the drift must be zero and the streams must stay in the range of their grid.

All figures stay on the device; they are read once, when the backward pass is over.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from revzoo.core.fixedpoint import Extremes, extremes
from revzoo.core.invertible import State, Step, name_of

SAMPLES = 32  # values compared per stream


class DriftError(RuntimeError):
    """Recomputed activations differ from those of the forward pass, so gradients are wrong.

    Attributes:
        step: the first step beyond its limit; None if unknown.
    """

    step: Step | None = None


class RangeError(RuntimeError):
    """A stream left the range in which its fixed-point sums are exact."""


class Samples(NamedTuple):
    """Values of one computed stream, and of one it is computed from: the scale of its rounding."""

    stream: int
    values: Tensor
    operand: Tensor


class _Drift(NamedTuple):
    step: Step
    name: str
    limit: float
    expected: Tensor
    operand: Tensor
    actual: Tensor


class _Peak(NamedTuple):
    step: Step
    name: str
    extremes: Extremes


def sample(computed: State, known: State) -> list[Samples]:
    """A few values of each stream that the step does not pass on as it is."""
    operands = [t for t in known if _comparable(t) and not _among(t, computed)]
    found = []
    for i, t in enumerate(computed):
        if _comparable(t) and not _among(t, known):
            # what the stream was computed with has its shape; where nothing has, it is moved alone
            operand = next((o for o in reversed(operands) if o.shape == t.shape), t)
            found.append(Samples(i, _sampled(t), _sampled(operand)))
    return found


def _among(t: Tensor, state: State) -> bool:
    return any(t is other for other in state)


def _comparable(t: Tensor) -> bool:
    return (t.is_floating_point() or t.is_complex()) and t.numel() > 0


def _sampled(t: Tensor) -> Tensor:
    t = torch.view_as_real(t) if t.is_complex() else t
    return torch.take(t.detach(), _places(t.numel(), t.device))


@functools.lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> Tensor:
    """Indices of SAMPLES elements spread over ``count``, the same ones in every layout."""
    golden = torch.arange(1, SAMPLES + 1, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2)
    return (golden.frac() * count).long().to(device)


class Guard:
    """Collects the figures of one backward pass and judges them at its end."""

    def __init__(self) -> None:
        self._task = -1
        self._drifts: list[_Drift] = []
        self._peaks: list[_Peak] = []

    def compare(
        self, step: Step, name: str, limit: float, samples: list[Samples], computed: State
    ) -> None:
        """Note the samples of what a replay computed beside those of the forward pass."""
        self._begin()
        for stream, values, operand in samples:
            actual = _sampled(computed[stream])
            self._drifts.append(_Drift(step, name, limit, values, operand, actual))

    def bound(self, step: Step, name: str, values: Extremes) -> None:
        """Note how far a stream went, which must be less than its limit."""
        self._begin()
        self._peaks.append(_Peak(step, name, values))

    def _begin(self) -> None:
        # Figures of a backward pass that an exception ended are dropped.
        task: int = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._drifts, self._peaks = task, [], []
            if task != -1:
                Variable._execution_engine.queue_callback(self.check)

    def check(self) -> None:
        """Read the figures and note each step's drift.

        Raises:
            RangeError: a stream reached its limit; names the step and a grid that fits.
            DriftError: a drift beyond the step's limit; names the step.
        """
        drifts, peaks = self._drifts, self._peaks
        self._task, self._drifts, self._peaks = -1, [], []
        _check_peaks(peaks)
        _check_drifts(drifts)


def check_range(step: Step, state: State) -> None:
    """Raise a RangeError if sums on the step's grid would not have been exact (host sync)."""
    if step.grid is not None:
        _check_peaks([_Peak(step, name_of(step), e) for e in extremes((), state, step.grid)])


def _check_peaks(peaks: list[_Peak]) -> None:
    if not peaks:
        return
    ends = [end.float() for peak in peaks for end in (-peak.extremes.low, peak.extremes.high)]
    values = torch.stack(ends).view(-1, 2).amax(dim=1).tolist()
    for peak, value in zip(peaks, values, strict=True):
        limit = peak.extremes.limit
        if not value < limit:
            excess = math.ceil(math.log2(value / limit)) + 1 if math.isfinite(value) else None
            bits = (peak.step.grid or 0) - (excess or 0)
            remedy = (
                f"choose grid={bits} or fewer bits"
                if excess and bits >= 0
                else "normalise the branches, or lower the learning rate if the training diverges"
            )
            raise RangeError(
                f"{peak.name}: a stream reached {value:.3g}, but with grid={peak.step.grid} sums "
                f"are exact only below {limit:g}; {remedy}"
            )


def _check_drifts(drifts: list[_Drift]) -> None:
    if not drifts:
        return
    columns = (
        [d.expected for d in drifts],
        [d.operand for d in drifts],
        [d.actual for d in drifts],
    )
    expected, operand, actual = (torch.stack(column).cpu().double() for column in columns)
    # A forward pass that overflowed is no fault of the reconstruction; fp16 training skips it.
    diverged = ~expected.isfinite()
    difference = (actual - expected).masked_fill(diverged, 0).abs().nan_to_num(nan=math.inf)
    scale = torch.stack((expected, operand)).nan_to_num(0, 0, 0).abs().amax((0, 2))
    errors = (difference.amax(1) / scale.clamp_min(torch.finfo(scale.dtype).tiny)).tolist()
    for drift in drifts:
        drift.step.drift = 0.0
    for drift, error in zip(drifts, errors, strict=True):
        drift.step.drift = max(drift.step.drift or 0.0, error)
    for drift, error in zip(drifts, errors, strict=True):
        if not error <= drift.limit:
            failure = DriftError(_explain(drift, error, max(errors)))
            failure.step = drift.step
            raise failure


def _explain(drift: _Drift, error: float, worst: float) -> str:
    found = (
        f"{drift.name}: what was recomputed is off by {error:.2g} of its size (limit "
        f"{drift.limit:g}; {worst:.2g} at worst in this chain), so the gradients are wrong. "
    )
    if drift.limit == 0:
        return found + (
            "On a grid it must be the very same: the branch does not repeat its value. Use "
            "memory='store' for this step"
        )
    return found + (
        "Causes: streams in a narrow type (use autocast on a float32 model), a branch that "
        "amplifies (normalise it; lower the learning rate if the training diverges) or does not "
        "repeat its value, a wrong inverse (check_inverse() tells). Use memory='exact', or "
        "'recompute' or 'store' for some steps; set_drift_limit() changes the limit"
    )


def set_drift_limit(module: nn.Module, limit: float) -> None:
    """Set the largest relative drift allowed to the steps of ``module``; infinity allows any.

    Raises:
        ValueError: ``limit`` is negative or no number.
    """
    if not limit >= 0:
        raise ValueError(f"limit={limit}: expected a relative error, 0 or more")
    for step in module.modules():
        if isinstance(step, Step):
            step.drift_limit = limit


def drift(module: nn.Module) -> dict[str, float]:
    """Relative drift of each step of ``module`` in its last replay, by its path, in order.

    Steps that were never replayed are left out.
    """
    return {
        name: step.drift
        for name, step in module.named_modules()
        if isinstance(step, Step) and step.drift is not None
    }
