"""Batch normalisation with an inverse, by running or by batch statistics.

    y = (x - mean) / sqrt(var + eps)

Ordinary batch normalisation divides by statistics of the batch, which its output no longer has: in
training it has no inverse. RealNVP (Dinh et al. 2017, arXiv 1605.08803, appendix E) normalises by
running averages that include the batch,

    running = (1 - momentum) * running + momentum * statistic of the batch

in training as well, and differentiates through the batch's share of them. The averages are what
the inverse needs, and they are in the buffers.

NOTE [ Which map is inverted ]
    In evaluation mode the layer is one affine map per channel. In training mode each forward pass
    is another one, since it moves the averages. ``inverse`` and ``log_det`` speak of the averages
    in the buffers: of the map that the last forward pass applied. The tape keeps each pass's own
    averages for its replay (``carried``), so gradients are right with any number of passes in
    between; ``y = net(a); net(b); net.inverse(y)`` in training mode is not, and gives ``a`` only
    up to one update of the averages. For inference, call ``eval()``.

    ``log_det`` in training mode takes the averages for constants of the image, as RealNVP does;
    the Jacobian of the whole batch has further terms. Its gradient goes through the averages.

NOTE [ Statistics of the batch ]
    With ``statistics="batch"`` training normalises as ``torch.nn.BatchNorm2d`` does (InvTorch's
    ``BatchNorm2d``). The inverse needs mean and variance of that batch, which the output has lost:
    they are hidden outputs of the forward pass, kept in two more buffers, outside the
    ``state_dict``, and per pass on the tape, as above.

It has no scale and shift; put an :class:`~revzoo.ActNorm` after it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from revzoo.core.invertible import name_of
from revzoo.layers.streams import Joint


class InvertibleBatchNorm(Joint):
    """``(B, C, ...) -> (B, C, ...)``, normalised per channel by running averages, or as torch does.

    Args:
        channels: C, of all streams together.
        momentum: share of the new batch in the averages, in (0, 1], torch's convention.
        eps: added to the variance.
        statistics: what training normalises by: ``"running"``, averages that include the batch, or
            ``"batch"``, the batch alone, as torch does. Evaluation uses the averages.
        dim: where the channels are, 1 or -1.
        streams: how many streams the state has.

    Raises:
        ValueError: an argument is out of range; at the call, the streams have not C channels.

    Example:
        >>> norm = revzoo.InvertibleBatchNorm(8)
        >>> x1, x2 = torch.randn(16, 4, 8, 8), torch.randn(16, 4, 8, 8)
        >>> torch.allclose(norm.inverse(*norm(x1, x2))[0], x1, atol=1e-4)
        True
    """

    inexact = "is not exact on fixed-point streams, since quotients leave the grid"
    carried: tuple[str, ...] = ("running_mean", "running_var")

    running_mean: Tensor
    running_var: Tensor
    batch_mean: Tensor
    batch_var: Tensor

    def __init__(
        self,
        channels: int,
        *,
        momentum: float = 0.1,
        eps: float = 1e-5,
        statistics: Literal["running", "batch"] = "running",
        dim: int = 1,
        streams: int = 2,
    ) -> None:
        super().__init__(channels, dim=dim, streams=streams)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum={momentum}: expected more than 0 and at most 1")
        if not eps > 0:
            raise ValueError(f"eps={eps}: expected a positive number")
        if statistics not in ("running", "batch"):
            raise ValueError(f"statistics={statistics!r}: expected 'running' or 'batch'")
        self.momentum = momentum
        self.eps = eps
        self.statistics = statistics
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        if statistics == "batch":
            self.register_buffer("batch_mean", torch.zeros(channels), persistent=False)
            self.register_buffer("batch_var", torch.ones(channels), persistent=False)
            self.carried = (*type(self).carried, "batch_mean", "batch_var")

    def transform(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training and x.numel():
            batch_mean, batch_var = self._statistics(x)
            alone = self.statistics == "batch"
            unbiased = self._unbiased(x) if alone else 1.0  # averaged as torch does
            mean = (1 - self.momentum) * mean + self.momentum * batch_mean
            var = (1 - self.momentum) * var + self.momentum * unbiased * batch_var
            self.running_mean.copy_(mean.detach())
            self.running_var.copy_(var.detach())
            if alone:
                mean, var = batch_mean, batch_var
                self.batch_mean.copy_(mean.detach())
                self.batch_var.copy_(var.detach())
        return (x - self.per_channel(mean, x)) * self.per_channel((var + self.eps).rsqrt(), x)

    def restore(self, y: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training and self.statistics == "batch":
            mean, var = self.batch_mean, self.batch_var
        return y * self.per_channel((var + self.eps).sqrt(), y) + self.per_channel(mean, y)

    def log_det_of(self, x: Tensor) -> Tensor:
        var = self.running_var
        if self.training and x.numel():
            _, batch_var = self._statistics(x)
            if self.statistics == "batch":
                var = batch_var
            else:
                var = var + self.momentum * (batch_var - batch_var.detach())  # the gradient's way
        log_scale = -0.5 * (var + self.eps).log().sum()
        return (log_scale.to(x.dtype) * self.positions(x)).expand(len(x))

    def _unbiased(self, x: Tensor) -> float:
        """What makes of a batch's variance an unbiased one."""
        values = x.numel() // self.size
        if values < 2:
            raise ValueError(
                f"{name_of(self)} got a training batch of shape {tuple(x.shape)}: one value per "
                "channel has no variance, so give it several"
            )
        return values / (values - 1)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch ``(C,)``, in the type of the averages."""
        wide = x.to(torch.promote_types(x.dtype, self.running_var.dtype))
        var, mean = torch.var_mean(wide, self.over_channels(x), correction=0)
        return mean.to(self.running_mean.dtype), var.to(self.running_var.dtype)
