"""Feature maps: a network without its head that returns the maps after chosen stages.

Forward hooks on stages would give the same maps, but also run the layers after the last one. We
read the states between the stages. Only the returned maps, copies of the concatenated streams, are
kept; the stages recompute their activations as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from revzoo.models.network import FeatureInfo, ImageNetwork, taken_indices


class FeatureInfos(tuple[FeatureInfo, ...]):
    """Descriptions of the chosen maps, in the order of ``out_indices``."""

    def channels(self) -> list[int]:
        """Channels of each map."""
        return [info.num_chs for info in self]

    def reduction(self) -> list[int]:
        """Image side over map side, of each map."""
        return [info.reduction for info in self]


class FeatureNet(nn.Module):
    """``(B, in_chans, H, W)`` to a list of maps ``(B, num_chs, H / reduction, W / reduction)``.

    A map is the streams concatenated along the channels, before the head's normalisation. Every
    memory mode works; gradients may enter at any map.

    Args:
        network: modified in place: loses its head and the stages after the last map.
        out_indices: stages, negative ones counted from the last; a number n for the last n; None
            for all. The maps have this order.

    Raises:
        ValueError: no index, an index out of range, or a stage twice.
    """

    def __init__(
        self, network: ImageNetwork, out_indices: int | Sequence[int] | None = None
    ) -> None:
        super().__init__()
        infos = network.feature_info
        self.out_indices = tuple(taken_indices(out_indices, len(infos)))
        if len(set(self.out_indices)) != len(self.out_indices):
            raise ValueError(f"out_indices={out_indices}: expected each stage at most once")
        self.feature_info = FeatureInfos(infos[i] for i in self.out_indices)
        # DistributedDataParallel raises for parameters that get no gradient
        network.keep_stages(max(self.out_indices) + 1)
        self.network = network

    def forward(self, x: Tensor) -> list[Tensor]:
        """The maps of images ``x``.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        order = sorted(self.out_indices)
        maps = self.network.forward_intermediates(
            x, order, stop_early=True, intermediates_only=True
        )
        return [maps[order.index(i)] for i in self.out_indices]
