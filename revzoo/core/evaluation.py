"""Temporary evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


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
