"""Invertible modules the other way round.

A decoder is an encoder reversed; a layer whose forward direction is cheap may be wanted in the
other one. A container is reversed step by step, so that its memory modes work as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from revzoo.core.invertible import (
    Invertible,
    NotInvertibleError,
    State,
    Step,
    as_state,
    name_of,
    plain_call,
    streams_of,
)
from revzoo.layers.sequence import ReversibleSequence
from revzoo.layers.split import HALVES


class Reversed(ReversibleSequence):
    """``forward`` is the module's inverse, ``inverse`` its forward pass.

    It shares the module's parameters and holds its steps in reverse order; log-determinants are
    negated at the point that the module maps to.

    Args:
        module: an :class:`~revzoo.Invertible`, such as a layer or a ``ReversibleSequence``.
        memory: mode of all steps, which are the module's own; None keeps their modes.

    Raises:
        TypeError: ``module`` is no Invertible.
        NotInvertibleError: it, or a step of it, loses information; names the step.
        ValueError: in training mode, at the call: a step adapts itself to what it is given, as
            :class:`~revzoo.InvertibleBatchNorm` does, so its inverse is no fixed map.

    Example:
        >>> encoder = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Linear(4, 4))])
        >>> decoder, x = revzoo.Reversed(encoder), torch.randn(2, 8)
        >>> torch.allclose(decoder(encoder(x)), x, atol=1e-5)
        True
    """

    def __init__(self, module: Invertible, *, memory: str | None = None) -> None:
        if not isinstance(module, Invertible):
            raise TypeError(
                f"Reversed got a {type(module).__name__}, expected an Invertible: only what has an "
                "inverse can be reversed"
            )
        labels = [(m, m.label) for m in module.modules() if isinstance(m, Step)]
        steps = (ReversedStep(step) for step in _from_last(module))
        dim, split = getattr(module, "dim", 1), getattr(module, "split", HALVES)
        super().__init__(steps, memory=memory, dim=dim, split=split)
        for step, label in labels:  # errors name them by their place in the module
            step.label = label


def _from_last(module: Step) -> Iterator[Invertible]:
    """The steps of ``module`` that are no containers, from the last to the first."""
    if isinstance(module, ReversibleSequence):
        for step in reversed(list(module)):
            yield from _from_last(step)
    elif isinstance(module, Invertible) and module.invertible:
        yield module
    else:
        raise NotInvertibleError(
            f"{name_of(module)} has no inverse: it loses information and cannot be reversed"
        )


class ReversedStep(Invertible):
    """One step with its directions swapped."""

    def __init__(self, step: Invertible) -> None:
        super().__init__()
        self.step = step
        self.streams = step.outputs
        self.exact, self.sums = step.exact, step.sums
        self.memory, self.grid, self.drift_limit = step.memory, step.grid, step.drift_limit

    @property
    def outputs(self) -> int:
        return self.step.streams

    def forward(self, *state: Tensor, **context: Any) -> State:
        for m in self.step.modules():
            if isinstance(m, Invertible) and m.carried and m.training:
                raise ValueError(
                    f"{name_of(self)} got a {type(m).__name__} in training mode: it moves "
                    f"{', '.join(m.carried)} whenever it runs forwards, so its reversal is no "
                    "fixed map. Call eval() on it"
                )
        return as_state(self.step.inverse(*state, **context))

    def inverse(self, *state: Tensor, **context: Any) -> State:
        return streams_of(plain_call(self.step, *state, **context), self.step)

    def log_det(self, *state: Tensor, **context: Any) -> Tensor:
        return -self.step.log_det(*as_state(self.step.inverse(*state, **context)), **context)
