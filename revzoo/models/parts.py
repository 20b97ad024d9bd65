"""The parts of a network from the image to the logits, each frozen or given a learning rate as one.

    stem, stages.0, ..., stages.N (with the normalisation after it), fc

Lightning's ``BaseFinetuning.flatten_modules`` takes a network apart into layers; here its order is
what matters, as a part that is frozen saves activations unless all parts before it are, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from revzoo.models.network import ImageNetwork


class Part(NamedTuple):
    """Modules of a network that stand between the same two states; named as in the network."""

    name: str
    modules: tuple[nn.Module, ...]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all its modules."""
        for module in self.modules:
            yield from module.parameters()


def parts(network: nn.Module) -> tuple[Part, ...]:
    """The parts of ``network`` in order, the classifier last; every parameter is in one of them.

    Raises:
        ValueError: it is no network of the zoo, so that its order is not known.
    """
    if not isinstance(network, ImageNetwork):
        raise ValueError(
            f"{type(network).__name__} is no ImageNetwork: expected a model of create_model, whose "
            "stem, stages and classifier are known; freeze other models, and group their "
            "parameters, by hand"
        )
    named = dict(network.named_children())
    stem, stages = named.pop("stem"), list(network.stages)
    del named["stages"]
    classifier = named.pop(network.classifier)
    *earlier, last = stages
    return (
        Part("stem", (stem,)),
        *(Part(f"stages.{i}", (stage,)) for i, stage in enumerate(earlier)),
        Part(f"stages.{len(earlier)}", (last, *named.values())),
        Part(network.classifier, (classifier,)),
    )
