"""Memory modes: what a step does with the activations that its backward pass will need.

=============  ================================================================================
``store``      keep them, as plain autograd does: least time, most memory
``offload``    keep them in host memory (pinned where there is a GPU), fetched back when needed
``recompute``  keep the step's inputs, evaluate the step once more in the backward pass
``invert``     keep nothing: recover the inputs from the outputs, evaluating each branch once more
=============  ================================================================================

The mode is no part of the ``state_dict`` and may change at any time; it governs the forward
passes that follow.
"""

from __future__ import annotations

from torch import nn

from revzoo.core.invertible import Step

MODES = ("store", "offload", "recompute", "invert")


def check_mode(mode: str) -> str:
    """Return ``mode``, or raise a ValueError that lists the modes."""
    if mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"unknown memory mode {mode!r}: expected one of {known}")
    return mode


def set_memory(module: nn.Module, mode: str) -> None:
    """Choose the memory mode of every step in ``module``: a model, a stage, a block, one step.

    A step that has no inverse (a stem, a change of resolution) is recomputed where ``mode`` is
    ``invert``.

    Raises:
        ValueError: unknown mode; no step in ``module``; ``invert`` where nothing has an inverse.
    """
    check_mode(mode)
    steps = [m for m in module.modules() if isinstance(m, Step)]
    if not steps:
        raise ValueError(
            f"{type(module).__name__} holds no step whose memory mode could be set to {mode!r}: "
            "build it from ReversibleSequence, ReversibleBlock or your own Step"
        )
    if mode == "invert" and not any(s.invertible for s in steps):
        raise ValueError(
            f"{type(module).__name__} has no invertible step, so memory mode 'invert' cannot "
            "apply: use 'recompute' or 'store', or a reversible model"
        )
    for step in steps:
        step.memory = mode
