"""Log-determinants summed along a chain, as one more stream of its state.

    (x1, x2, total) -> (y1, y2, total + log abs det of the step's Jacobian at (x1, x2))

The change of variables needs ``sum(log abs det)`` with its gradient (Dinh et al. 2014, NICE, arXiv
1410.8516, equation 2). As a stream it runs under the tape like the others, so the activations of a
log-determinant are recomputed in the backward pass too and a flow trains in constant memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from revzoo.core.fixedpoint import counting_changes, move_words
from revzoo.core.invertible import Invertible, Recording, State, Step, as_state, name_of
from revzoo.core.layout import dense
from revzoo.core.modes import mode_of
from revzoo.core.recording import call_without_changing_hooks, hooked, moves_words


def zero_total(x: Tensor) -> Tensor:
    """Where a sum over the steps begins: zeros ``(B,)``, at least in float32."""
    return x.new_zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32))


class WithLogDet(Invertible):
    """``step`` with its log-determinant added to the last stream.

    A replay in mode ``invert`` evaluates the step's inverse and its forward pass; the sharing of
    the branch's value that a coupling has by itself is lost.

    Raises:
        NotImplementedError: the step has no log-determinant; names the step.
    """

    sums = True
    loose = 1  # the total

    def __init__(self, step: Step) -> None:
        super().__init__()
        assert isinstance(step, Invertible)
        self.step = step
        self.streams = step.streams + 1
        self.extras = step.extras
        self.memory = step.memory
        self.grid = step.grid
        self.drift_limit = step.drift_limit
        self.label = name_of(step)

    def forward(self, *state: Tensor, **context: Any) -> State:
        *streams, total = state
        step, inverted = self.step, mode_of(self.memory).inverts
        moves = moves_words(step)
        with counting_changes() if moves else nullcontext():
            if inverted and type(step).forward_with_log_det is Invertible.forward_with_log_det:
                outputs = call_without_changing_hooks(step, *streams, **context)
                log_det = step.log_det(*streams, **context)
            else:
                outputs, log_det = step.forward_with_log_det(*streams, **context)
            given = as_state(outputs)
            cut = len(given) - self.extras
            if moves:
                given = *(dense(t, streams[0]) for t in given[:cut]), *given[cut:]
        if moves and (inverted or not hooked(step)):
            move_words(functools.partial(step.forward, **context), tuple(streams), given[:cut])
        return *given[:cut], total + log_det, *given[cut:]

    def inverse(self, *state: Tensor, **context: Any) -> State:
        *outputs, total = state
        streams = as_state(self.step.inverse(*outputs, **context))
        return *streams, total - self.step.log_det(*streams, **context)

    def replay(self, outputs: State, record: Recording, context: Mapping[str, Any]) -> State:
        *ended, total = outputs
        streams = record.inverted(self.step.inverse, tuple(ended), context)
        if self.step.exact and not self.step.sums:
            move_words(functools.partial(self.step.inverse, **context), tuple(ended), streams)
        inputs = record.laid_out((*streams, torch.zeros_like(total)))
        recorded = record(self.forward, inputs, record.needs, context)
        log_det = recorded[len(outputs) - 1]
        return *inputs[:-1], total - log_det.detach()

    @property
    def drift(self) -> float | None:
        return self.step.drift

    @drift.setter
    def drift(self, value: float | None) -> None:
        self.step.drift = value
