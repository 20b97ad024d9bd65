"""Logits of volumes that do not fit into a device, from windows that slide over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

OVERLAP = 0.25
"""Of neighbouring windows along each axis; MONAI's default."""


def by_windows(
    network: Callable[[Tensor], Tensor],
    volumes: Tensor,
    window: Sequence[int],
    *,
    device: torch.device,
    progress: bool = False,
) -> Tensor:
    """Logits (B, K, D, H, W) on the CPU, of volumes (B, C, D, H, W) of any size.

    Windows are weighted by a Gaussian around their middle (MONAI's ``sliding_window_inference``).
    Only one window at a time is on the device. A volume smaller than a window is padded with zeros.

    Args:
        network: ``(1, C, *window) -> (1, K, *window)``.
        volumes: on the CPU.
        window: voxels along each axis.
        device: of the network.
        progress: show a bar.
    """
    from monai.inferers.utils import sliding_window_inference  # takes seconds

    found = sliding_window_inference(
        volumes,
        tuple(window),
        1,
        network,
        overlap=OVERLAP,
        mode="gaussian",
        sw_device=device,
        device="cpu",
        progress=progress,
    )
    assert isinstance(found, Tensor)
    return found
