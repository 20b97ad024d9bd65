"""Activation normalisation: a scale and a shift per channel, initialised from the first batch.

    y = exp(log_scale) * x + shift

Parameters are set once, so that the first training batch comes out with mean zero and variance one
per channel, and are trained from there (Kingma and Dhariwal 2018, Glow, arXiv 1807.03039, section
3.1). Unlike batch normalisation it does the same to every batch, so it has an inverse and a
log-determinant in training too.

Known limit: each process of a distributed run would initialise from its own batch. Run one batch
through the model before wrapping it in DistributedDataParallel, which then hands out one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.core.invertible import name_of
from revzoo.core.replay import is_replaying
from revzoo.layers.streams import Joint

# Added to the standard deviation, for channels that are constant (Glow's release).
EPSILON = 1e-6


class ActNorm(Joint):
    """``(B, C, ...) -> (B, C, ...)``, ``y = exp(log_scale) * x + shift`` for each channel.

    The first forward pass in training mode, with gradients or without, sets both from its batch
    and notes so in the buffer ``initialised``. Replays, inverses and evaluation never do: before
    that pass the layer is the identity.

    Args:
        channels: C, of all streams together.
        dim: where the channels are, 1 or -1.
        unbiased: divide by the deviation with Bessel's correction, as FrEIA's ``ActNorm``
            does; without it as Glow does.
        streams: how many streams the state has.

    Raises:
        ValueError: an argument is out of range; at the call, the streams have not C channels, or
            the first batch holds values that are not finite.

    Example:
        >>> norm = revzoo.ActNorm(8)
        >>> y1, y2 = norm(torch.randn(16, 4, 8, 8) * 3 + 1, torch.randn(16, 4, 8, 8))
        >>> round(y1.std().item(), 2), abs(y1.mean().item()) < 1e-4
        (1.0, True)
    """

    inexact = "is not exact on fixed-point streams, since products with its scales leave the grid"

    initialised: Tensor

    def __init__(
        self, channels: int, *, dim: int = 1, unbiased: bool = False, streams: int = 2
    ) -> None:
        super().__init__(channels, dim=dim, streams=streams)
        self.unbiased = unbiased
        self.log_scale = nn.Parameter(torch.zeros(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.register_buffer("initialised", torch.tensor(False))
        self._settled = False  # what the buffer says, once it says so: reading it stalls a GPU

    def transform(self, x: Tensor) -> Tensor:
        if self.training and not self._settled and not is_replaying() and x.numel():
            self._initialise(x.detach())
        return x * self.per_channel(self.log_scale.exp(), x) + self.per_channel(self.shift, x)

    def restore(self, y: Tensor) -> Tensor:
        centred = y - self.per_channel(self.shift, y)
        return centred * self.per_channel((-self.log_scale).exp(), y)

    def log_det_of(self, x: Tensor) -> Tensor:
        return (self.log_scale.sum().to(x.dtype) * self.positions(x)).expand(len(x))

    @torch.no_grad()
    def _initialise(self, x: Tensor) -> None:
        if not self.initialised:
            if x.numel() == self.size:
                raise ValueError(
                    f"{name_of(self)} got a first training batch of shape {tuple(x.shape)}: its "
                    "scale is set from the spread of each channel's values, so give it several"
                )
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            dims = self.over_channels(x)
            variance, mean = torch.var_mean(wide, dims, correction=int(self.unbiased))
            scale = 1 / (variance.sqrt() + EPSILON)
            if not (scale.isfinite() & mean.isfinite()).all():
                raise ValueError(
                    f"{name_of(self)} got a first training batch with values that are not finite: "
                    "its scale and shift are set from that batch, so give it one that is"
                )
            self.log_scale.copy_(scale.log())
            self.shift.copy_(-mean * scale)
            self.initialised.fill_(True)
        self._settled = True

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *args: Any) -> None:
        self._settled = False  # what is loaded decides
        super()._load_from_state_dict(state_dict, *args)
