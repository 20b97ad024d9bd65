"""Feature maps: a network without its head, giving the maps at the ends of chosen stages.

Forward hooks on stages would give the same maps, but also run the layers after the last one. Here
the states are taken between the stages, where no step holds them: only the maps given out are kept,
copies of the streams side by side, and everything between is recomputed as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from revzoo.models.network import FeatureInfo, ImageNetwork


class FeatureInfos(tuple[FeatureInfo, ...]):
    """The chosen maps, in the order in which they are given."""

    def channels(self) -> list[int]:
        """Channels of each map."""
        return [info.num_chs for info in self]

    def reduction(self) -> list[int]:
        """How many times smaller than the image each map is."""
        return [info.reduction for info in self]


class FeatureNet(nn.Module):
    """``(B, in_chans, H, W)`` to a list of maps ``(B, num_chs, H / reduction, W / reduction)``.

    Maps are the streams merged along the channels, before any normalisation of the head. Every
    memory mode works; gradients may enter at any of the maps.

    Args:
        network: taken over: stages after the last map, and the head, are removed from it.
        out_indices: stages, negative ones from the last; None for all. Maps come in this order.

    Raises:
        ValueError: no index, one out of range, or a stage twice.
    """

    def __init__(self, network: ImageNetwork, out_indices: Sequence[int] | None = None) -> None:
        super().__init__()
        infos = network.feature_info
        self.out_indices = _positive(
            range(len(infos)) if out_indices is None else out_indices, infos
        )
        self.feature_info = FeatureInfos(infos[i] for i in self.out_indices)
        network.keep_stages(max(self.out_indices) + 1)
        self.network = network

    def forward(self, x: Tensor) -> list[Tensor]:
        """The maps of images ``x``.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        maps: dict[int, Tensor] = {}
        for i, state in enumerate(self.network.stage_states(x)):
            if i in self.out_indices:
                maps[i] = self.network.feature_map(state)
        return [maps[i] for i in self.out_indices]


def _positive(indices: Iterable[int], infos: Sequence[FeatureInfo]) -> tuple[int, ...]:
    given, count = (indices,) if isinstance(indices, int) else tuple(indices), len(infos)
    if not given or not all(isinstance(i, int) and -count <= i < count for i in given):
        raise ValueError(
            f"out_indices={given}: this model has {count} stages; expected indices from {-count} "
            f"to {count - 1}, at least one"
        )
    stages = tuple(i % count for i in given)
    if len(set(stages)) != len(stages):
        raise ValueError(f"out_indices={given} names a stage twice; expected each once")
    return stages
