"""Stochastic depth: in training, whole branch values are dropped, image by image.

Huang et al. 2016, arXiv 1603.09382: a branch is dropped with a probability that grows linearly with
its depth, and is divided by the probability of being kept otherwise. The layer is torchvision's,
at the end of the branch: a coupling's stream then passes unchanged, which inverts as ever, and a
replay draws the same images again. Streams on a grid round the value after the division.
"""

from torch import nn


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """The probabilities of ``depth`` units: 0 for the first, ``rate`` for the last of several."""
    return [rate * i / max(1, depth - 1) for i in range(depth)]


def drop_path(rate: float) -> nn.Module:
    """Stochastic depth of probability ``rate``; the identity for 0.

    Only then is torchvision imported: with it comes torch's compiler, seconds of CPU time.
    """
    if not rate:
        return nn.Identity()
    from torchvision.ops import StochasticDepth

    layer: nn.Module = StochasticDepth(rate, mode="row")
    return layer


def add_drop_path(branch: nn.Sequential, rate: float) -> nn.Sequential:
    """Append stochastic depth to ``branch``, if ``rate`` is not 0; no key of it changes."""
    if rate:
        branch.add_module("drop_path", drop_path(rate))
    return branch
