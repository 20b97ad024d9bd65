"""The parts of a network in order, as units to freeze or to give a learning rate.

    stem, stages.0, ..., stages.N (with the normalisation after it), fc

Lightning's ``BaseFinetuning.flatten_modules`` returns single layers. We need the order from image
to logits: a frozen part still saves activations unless all parts before it are frozen, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from revzoo.models.library import LibraryNetwork
from revzoo.models.network import ImageNetwork


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


def parts(network: nn.Module) -> tuple[Part, ...]:
    """The parts of ``network`` in order, the classifier last; each parameter is in one part.

    Raises:
        ValueError: ``network`` is not a network of the zoo, so its order is unknown.
    """
    if not isinstance(network, ImageNetwork):
        raise ValueError(
            f"{type(network).__name__} is not an ImageNetwork: expected a model of create_model, "
            "with stem, stages and classifier; freeze other models and group their parameters by "
            "hand"
        )
    if isinstance(network, LibraryNetwork):
        return tuple(Part(name, tuple(ms), tuple(ts)) for name, ms, ts in network.parts())
    named = dict(network.named_children())
    stem, stages = named.pop("stem"), named.pop("stages")
    classifier = named.pop(network.classifier)
    assert isinstance(stages, nn.ModuleList)
    *earlier, last = stages
    # the rest of `named`, the normalisation and layers without parameters, reads the last stage
    return (
        # parameters of the network itself go with the first part
        Part("stem", (stem,), tuple(network.parameters(recurse=False))),
        *(Part(f"stages.{i}", (stage,)) for i, stage in enumerate(earlier)),
        Part(f"stages.{len(earlier)}", (last, *named.values())),
        Part(network.classifier, (classifier,)),
    )
