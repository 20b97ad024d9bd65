"""Invertible modules with swapped directions.

A decoder is a reversed encoder, and a layer may be cheaper in one direction than in the other. A
container is reversed step by step, so its memory modes still work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from revzoo.core.invertible import (
    Invertible,
    NotInvertibleError,
    Settings,
    State,
    Step,
    all_steps,
    as_state,
    bare,
    name_of,
    plain_call,
    streams_of,
)
from revzoo.layers.sequence import ReversibleSequence
from revzoo.layers.streams import HALVES, Joint


class Reversed(ReversibleSequence):
    """``forward`` is the module's inverse, ``inverse`` its forward pass.

    It shares the module's parameters and holds its steps in reverse order. Its log-determinant is
    the negative of the module's, at the corresponding point.

    Args:
        module: an :class:`~revzoo.Invertible`, such as a layer or a ``ReversibleSequence``.
        memory: mode of all steps; the steps are shared with the module. None keeps their modes, or
            takes ``invert`` where ``exact`` does not fit the reversal.

    Raises:
        TypeError: ``module`` is not an Invertible.
        NotInvertibleError: a step loses information; the message names it.
        ValueError: at the call, in training mode, if a step updates buffers, such as
            :class:`~revzoo.InvertibleBatchNorm`: its inverse then changes with each pass.

    Example:
        >>> encoder = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Linear(4, 4))])
        >>> decoder, x = revzoo.Reversed(encoder), torch.randn(2, 8)
        >>> torch.allclose(decoder(encoder(x)), x, atol=1e-5)
        True
    """

    def __init__(self, module: Invertible, *, memory: str | None = None) -> None:
        if not isinstance(module, Invertible):
            raise TypeError(
                f"Reversed got a {type(module).__name__}, expected an Invertible: only a module "
                "with an inverse can be reversed"
            )
        # super().__init__ labels the steps again
        labels = [(step, step.label) for step in all_steps(module).values()]
        steps = (ReversedStep(step) for step in _from_last(module))
        # other modules may have attributes of these names for other things
        dim = module.dim if isinstance(module, (ReversibleSequence, Joint)) else 1
        split = module.split if isinstance(module, ReversibleSequence) else HALVES
        super().__init__(steps, memory=memory, dim=dim, split=split)
        for step, label in labels:  # errors name steps by their path in the module
            step.label = label


def _from_last(module: Step) -> Iterator[Invertible]:
    """The steps of ``module`` that are not containers, from the last to the first."""
    # a container that overrides a direction does more than run its steps: it is one step
    if (
        isinstance(module, ReversibleSequence)
        and type(module).forward is ReversibleSequence.forward
        and type(module).inverse is ReversibleSequence.inverse
    ):
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
        # as attributes of the wrapper, since the tape reads them from the step that it runs
        self.exact, self.sums = step.exact and step.exact_inverse, step.sums
        self.inexact = step.inexact or "the inverse of its step leaves the grid"
        settings = Settings.of(step)
        if settings.grid is not None and not self.exact:
            settings = settings._replace(memory="invert", grid=None)
        settings.assign(self)

    @property
    def outputs(self) -> int:
        return self.step.streams

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        for m in self.step.modules():
            if isinstance(m, Invertible) and m.carried and m.training:
                raise ValueError(
                    f"{name_of(self)} got a {type(m).__name__} in training mode: it updates "
                    f"{', '.join(m.carried)} in each forward pass, so its reversal is not a fixed "
                    "map. Call eval() on it"
                )
        return bare(as_state(self.step.inverse(*state, **context)))

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        return bare(streams_of(plain_call(self.step, *state, **context), self.step))

    def log_det(self, *state: Tensor, **context: Any) -> Tensor:
        return -self.step.log_det(*as_state(self.step.inverse(*state, **context)), **context)
