"""Log-determinants summed along a chain, as one more stream of its state.

    (x1, x2, total) -> (y1, y2, total + log abs det of the step's Jacobian at (x1, x2))

The change of variables needs ``sum(log abs det)`` and its gradient (Dinh et al. 2014, NICE, arXiv
1410.8516, equation 2). As a stream, the sum runs under the tape like the others. So the activations
of a log-determinant are recomputed in the backward pass, too, and a flow trains in constant memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from revzoo.core.invertible import (
    Invertible,
    Settings,
    State,
    Step,
    as_state,
    has_hooks,
    name_of,
    plain_call,
)
from revzoo.core.modes import mode_of
from revzoo.core.replay import Recorder
from revzoo.core.words import call_on_grid, inverse_on_grid
from revzoo.layers.streams import log_det_dtype


def zero_total(x: Tensor) -> Tensor:
    """The initial sum: zeros ``(B,)``, at least in float32."""
    return x.new_zeros(len(x), dtype=log_det_dtype(x))


class WithLogDet(Invertible):
    """``step`` with its log-determinant added to the last stream.

    A replay in mode ``invert`` evaluates the step's inverse and its forward pass. So here it
    evaluates a coupling's branch twice, not once.

    Raises:
        NotImplementedError: the step has no log-determinant; names the step.
    """

    float_streams = 1  # the total

    def __init__(self, step: Step) -> None:
        super().__init__()
        assert isinstance(step, Invertible)
        self.step = step
        self.streams = step.streams + 1
        self.extras = step.extras
        Settings.of(step).assign(self)
        if has_hooks(step) and mode_of(self.memory).inverts:
            self.memory = "recompute"  # hooks may change the streams
        self.label = name_of(step)

    def forward(self, *state: Tensor, **context: Any) -> State:
        *streams, total = state
        step, log_dets = self.step, list[Tensor]()

        def with_log_det(step: Invertible, /, *streams: Tensor, **context: Any) -> Any:
            outputs, log_det = step.forward_with_log_det(*streams, **context)
            log_dets.append(log_det)
            return outputs

        call: Callable[..., Any] = plain_call
        # otherwise forward and log_det are separate, and the step can be called with its hooks
        if type(step).forward_with_log_det is not Invertible.forward_with_log_det:
            call = with_log_det
        outputs = as_state(call_on_grid(call, step, tuple(streams), context))
        log_det = log_dets[0] if log_dets else step.log_det(*streams, **context)
        cut = len(outputs) - self.extras
        return *outputs[:cut], total + log_det, *outputs[cut:]

    def inverse(self, *state: Tensor, **context: Any) -> State:
        *outputs, total = state
        streams = as_state(self.step.inverse(*outputs, **context))
        return *streams, total - self.step.log_det(*streams, **context)

    def replay(
        self, outputs: Any, record: Recorder, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        *ended, total = outputs
        inverse = functools.partial(inverse_on_grid, self.step)
        streams = record.inverted(inverse, tuple(ended), context)
        # the graph does not depend on the total's value; the subtraction below recovers it
        leaves = [record.leaf(i, t) for i, t in enumerate((*streams, torch.zeros_like(total)))]
        recorded = self.forward(*leaves, **context)
        log_det = recorded[len(outputs) - 1]
        return (*streams, total - log_det.detach()), recorded

    @property
    def drift(self) -> float | None:
        return self.step.drift

    @drift.setter
    def drift(self, value: float | None) -> None:
        self.step.drift = value
