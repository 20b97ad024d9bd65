"""Memory modes: what a step does with the activations that its backward pass will need.

=============  ================================================================================
``store``      keep them, as plain autograd does: least time, most memory
``offload``    keep them in host memory (pinned where there is a GPU), fetched back when needed
``recompute``  keep the step's inputs, evaluate the step once more in the backward pass
``invert``     keep nothing: recover the inputs from the outputs, evaluating each branch once more
``exact``      as ``invert``, on fixed-point streams: what is recovered is the same bit for bit
=============  ================================================================================

The mode is no part of the ``state_dict`` and may change at any time; it governs the forward
passes that follow.
"""

from __future__ import annotations

from torch import nn

from revzoo.core.fixedpoint import DEFAULT_BITS, check_bits
from revzoo.core.invertible import Step, name_of

MODES = ("store", "offload", "recompute", "invert", "exact")


def check_mode(mode: str) -> str:
    """Return ``mode``, or raise a ValueError that lists the modes."""
    if mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"unknown memory mode {mode!r}: expected one of {known}")
    return mode


def set_memory(module: nn.Module, mode: str, *, grid: int | None = None) -> None:
    """Choose the memory mode of every step in ``module``: a model, a stage, a block, one step.

    A step that has no inverse (a stem, a change of resolution) is recomputed where ``mode`` is
    ``invert`` or ``exact``.

    Args:
        module: whatever holds steps.
        mode: one of :data:`MODES`.
        grid: fractional bits of the fixed-point streams. Mode ``exact`` takes
            :data:`~revzoo.core.fixedpoint.DEFAULT_BITS` for None; the other modes round only if
            it is given, to what ``exact`` computes.

    Raises:
        ValueError: unknown mode or grid; no step in ``module``; ``invert`` where nothing has an
            inverse; ``exact``, or a grid, for a step whose arithmetic is not exact on a grid.
    """
    check_mode(mode)
    steps = [m for m in module.modules() if isinstance(m, Step)]
    if not steps:
        raise ValueError(
            f"{type(module).__name__} holds no step whose memory mode could be set to {mode!r}: "
            "build it from ReversibleSequence, ReversibleBlock or your own Step"
        )
    if mode in ("invert", "exact") and not any(s.invertible for s in steps):
        raise ValueError(
            f"{type(module).__name__} has no invertible step, so memory mode {mode!r} cannot "
            "apply: use 'recompute' or 'store', or a reversible model"
        )
    assign_memory(steps, mode, grid=grid)


def assign_memory(steps: list[Step], mode: str, *, grid: int | None = None) -> None:
    """What :func:`set_memory` does to the steps, where some of them may have no inverse.

    Raises:
        ValueError: as :func:`set_memory`.
    """
    check_mode(mode)
    if mode == "exact" and grid is None:
        grid = DEFAULT_BITS
    if grid is not None:
        check_bits(grid)
        _check_exact(steps)
    for step in steps:
        step.memory = mode
        step.grid = grid if step.invertible else None


def _check_exact(steps: list[Step]) -> None:
    for step in reversed(steps):  # what a container holds comes before the container
        if step.invertible and not step.exact:
            raise ValueError(
                f"{name_of(step)} {step.inexact}: use 'invert' for it, or additive couplings, "
                "squeezes and permutations instead, which are exact"
            )
