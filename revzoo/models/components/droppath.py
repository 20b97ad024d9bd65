"""Stochastic depth: in training, drops the whole value of a branch for random images.

Huang et al. 2016, arXiv 1603.09382: the probability of dropping a branch grows linearly with its
depth; a kept value is divided by the probability of keeping it. We put torchvision's layer at the
end of the branch. If the value is dropped, the coupling's stream passes unchanged, so the inverse
works as usual, and a replay draws the same images. On a grid, the value is rounded after the
division.
"""

from torch import nn


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """The probabilities of ``depth`` units, from 0 for the first to ``rate`` for the last."""
    return [rate * i / max(1, depth - 1) for i in range(depth)]


def drop_path(rate: float) -> nn.Module:
    """Stochastic depth of probability ``rate``; the identity for 0.

    Imports torchvision only when needed: it imports torch's compiler, which takes seconds.
    """
    if not rate:
        return nn.Identity()
    from torchvision.ops import StochasticDepth

    layer: nn.Module = StochasticDepth(rate, mode="row")
    return layer


def add_drop_path(branch: nn.Sequential, rate: float) -> nn.Sequential:
    """Append stochastic depth to ``branch`` unless ``rate`` is 0; keys do not change."""
    if rate:
        branch.add_module("drop_path", drop_path(rate))
    return branch
