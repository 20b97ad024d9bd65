"""Activation normalisation: a scale and a shift per channel, initialised from the first batch.

    y = exp(log_scale) * x + shift

The first training batch sets the parameters, so that its output has mean zero and variance one per
channel; training continues from there (Kingma and Dhariwal 2018, Glow, arXiv 1807.03039, section
3.1). Unlike batch normalisation, the layer is the same map for every batch, so it has an inverse
and a log-determinant in training, too.

Known limit: each process of a distributed run would initialise from its own batch. Run one batch
through the model before you wrap it in DistributedDataParallel, which then broadcasts one copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from revzoo.core.conditions import is_replaying
from revzoo.core.invertible import name_of
from revzoo.core.tensors import version_of
from revzoo.layers.streams import Joint

# Added to the standard deviation, for constant channels (Glow's release).
EPSILON = 1e-6


class ActNorm(Joint):
    """``(B, C, ...) -> (B, C, ...)``, ``y = exp(log_scale) * x + shift`` for each channel.

    The first forward pass in training mode, with or without gradients, sets both from its batch and
    sets the buffer ``initialised``. Replays, inverses and evaluation never do. Before that pass the
    layer is the identity.

    Args:
        channels: C, of all streams together.
        dim: dimension of the channels, 1 or -1.
        unbiased: use the deviation with Bessel's correction, like FrEIA's ``ActNorm``; False as in
            Glow.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, the number of channels is not C, or
            the first batch is not finite.

    Example:
        >>> norm = revzoo.ActNorm(8)
        >>> y1, y2 = norm(torch.randn(16, 4, 8, 8) * 3 + 1, torch.randn(16, 4, 8, 8))
        >>> round(y1.std().item(), 2), abs(y1.mean().item()) < 1e-4
        (1.0, True)
    """

    inexact = "products with its scales leave the grid"

    initialised: Tensor

    def __init__(
        self, channels: int, *, dim: int = 1, unbiased: bool = False, streams: int = 2
    ) -> None:
        super().__init__(channels, dim=dim, streams=streams)
        self.unbiased = unbiased
        self.log_scale = nn.Parameter(torch.zeros(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.register_buffer("initialised", torch.tensor(False))

    def transform(self, x: Tensor) -> Tensor:
        # a replay must repeat the map of its forward pass, not choose one
        if self.training and not is_replaying() and x.numel() and not self._was_initialised():
            self._initialise(x.detach())
        return x * self.per_channel(self.log_scale.exp(), x) + self.per_channel(self.shift, x)

    def restore(self, y: Tensor) -> Tensor:
        centred = y - self.per_channel(self.shift, y)
        return centred * self.per_channel((-self.log_scale).exp(), y)

    def log_det_of(self, x: Tensor) -> Tensor:
        return self.at_each_position(self.log_scale.sum(), x)

    def _was_initialised(self) -> bool:
        # Reading the buffer stalls a GPU, so we note on it the version at which it was true. A load
        # or a rollback in place changes the version; torch.func.functional_call has another buffer.
        buffer: Any = self.initialised
        version = version_of(buffer)
        if getattr(buffer, "_true_at", None) == version:
            return True
        if initialised := bool(buffer):
            buffer._true_at = version
        return initialised

    @torch.no_grad()
    def _initialise(self, x: Tensor) -> None:
        # one value per channel has no spread: the scale would be 1 / EPSILON
        if x.numel() == self.size:
            raise ValueError(
                f"{name_of(self)} got a first training batch of shape {tuple(x.shape)}: its "
                "scale is set from the spread of each channel's values, so pass a batch with at "
                "least two values per channel"
            )
        # as in BatchNorm: a variance in bfloat16 has an error of percents
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = self.over_channels(x)
        variance, mean = torch.var_mean(wide, dims, correction=int(self.unbiased))
        scale = 1 / (variance.sqrt() + EPSILON)
        if not (scale.isfinite() & mean.isfinite()).all():
            raise ValueError(
                f"{name_of(self)} got a first training batch with values that are not finite: "
                "its scale and shift are set from that batch, so pass finite values; after a "
                "sequence in mode exact, fewer bits allow larger values: "
                'set_memory(model, "exact", grid=16)'
            )
        self.log_scale.copy_(scale.log())
        self.shift.copy_(-mean * scale)
        self.initialised.fill_(True)
