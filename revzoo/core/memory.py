"""Context managers that change the mode of a module for a while: memory, and evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from revzoo.core.invertible import Step
from revzoo.core.modes import set_memory

_SETTINGS = ("memory", "grid")  # what set_memory sets on a step


@contextlib.contextmanager
def memory(module: nn.Module, mode: Any, **options: Any) -> Iterator[None]:
    """Change the memory mode of ``module`` inside a ``with`` block; restore each step's mode after.

    Args:
        module: a module that holds steps.
        mode: see :func:`~revzoo.set_memory`.
        **options: further arguments of :func:`~revzoo.set_memory`.

    Raises:
        ValueError: as :func:`~revzoo.set_memory`; nothing changes.

    Example:
        >>> net = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Linear(4, 4))])
        >>> with revzoo.memory(net, "store"):
        ...     net(torch.randn(2, 8)).sum().backward()
        >>> [step.memory for step in net[0].steps]
        ['exact', 'exact']
    """
    steps = [m for m in module.modules() if isinstance(m, Step)]
    # from __dict__: a step may report another mode than was set (PaddedCoupling)
    before = [{k: vars(s)[k] for k in _SETTINGS if k in vars(s)} for s in steps]
    try:
        set_memory(module, mode, **options)
        yield
    finally:
        for step, settings in zip(steps, before, strict=True):
            for key in _SETTINGS:
                vars(step).pop(key, None)
            vars(step).update(settings)


@contextlib.contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the context, then restore the mode of each module."""
    # one by one: parts may be frozen in evaluation mode
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
