"""A part of a network, as a unit to freeze or to give a learning rate.

    stem, stages.0, ..., stages.N (with the normalisation after it), fc

:meth:`revzoo.models.network.ImageNetwork.parts` lists them from image to logits. The order matters:
a frozen part still saves activations unless all parts before it are frozen, too. Lightning's
``BaseFinetuning.flatten_modules`` returns single layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Part(NamedTuple):
    """The modules between two states of a network, under their name in the network."""

    name: str
    modules: tuple[nn.Module, ...]
    tensors: tuple[nn.Parameter, ...] = ()  # outside these modules, such as class tokens

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all its modules, and its own."""
        yield from self.tensors
        for module in self.modules:
            yield from module.parameters()

    def train(self, trained: bool) -> None:
        """Train the part, or freeze it: evaluation mode, no gradients."""
        for p in self.parameters():
            p.requires_grad_(trained)
        for module in self.modules:
            module.train(trained)
