"""Maps of each channel: normalisations and an activation with an inverse.

NOTE [ Batch normalisation with an inverse ]
    Ordinary batch normalisation divides by statistics of the batch, which the output does not
    contain. So in training it has no inverse. RealNVP (Dinh et al. 2017, arXiv 1605.08803, appendix
    E) also normalises in training by running averages, which include the batch,

        running = (1 - momentum) * running + momentum * statistic of the batch

    and differentiates through the batch's share of them. The inverse needs only these averages,
    which are in the buffers.

NOTE [ Which map is inverted ]
    In evaluation mode the layer is one affine map per channel. In training mode each forward pass
    is a different map, since it updates the averages. ``inverse`` and ``log_det`` use the averages
    in the buffers, so they match the last forward pass. For its replays the tape keeps the averages
    of each pass (``carried``), so gradients are right with any number of passes in between. But
    ``y = net(a); net(b); net.inverse(y)`` differs from ``a`` by one update: call ``eval()``.

    ``log_det`` in training mode treats the averages as constants, like RealNVP; the Jacobian of the
    whole batch has further terms. Its gradient flows through the averages.

NOTE [ Statistics of the batch ]
    With ``statistics="batch"`` training normalises like ``torch.nn.BatchNorm2d`` (InvTorch's
    ``BatchNorm2d``). The inverse needs mean and variance of the batch, which the output does not
    contain. The forward pass keeps them in two more buffers outside the ``state_dict``, and the
    tape keeps them for each pass, as above.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_choice, check_number
from revzoo.core.conditions import is_replaying
from revzoo.core.invertible import name_of
from revzoo.core.tensors import has_values, version_of
from revzoo.layers.streams import Joint, Streamwise, at_least_float32, log_det_dtype

EPSILON = 1e-6  # of Glow's release


class ActNorm(Joint):
    """``(B, C, ...) -> (B, C, ...)``, ``y = exp(log_scale) * x + shift`` for each channel.

    The first forward pass in training mode, with or without gradients, sets both from its batch and
    sets the buffer ``initialised``: its output has mean zero and variance one per channel (Glow,
    Kingma and Dhariwal 2018, arXiv 1807.03039, section 3.1). Replays, inverses and evaluation never
    do. Before that pass the layer is the identity. Afterwards it is the same map for every batch,
    so it has an inverse in training, too.

    Known limit: each process of a distributed run would initialise from its own batch. Run one
    batch through the model before you wrap it in DistributedDataParallel; a ``Classifier`` raises.

    Args:
        channels: C, of all streams together.
        dim: dimension of the channels, 1 or -1.
        unbiased: use the deviation with Bessel's correction, like FrEIA's ``ActNorm``; False as in
            Glow.
        streams: number of streams of the state.
        epsilon: added to the standard deviation, for constant channels.

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
        self,
        channels: int,
        *,
        dim: int = 1,
        unbiased: bool = False,
        streams: int = 2,
        epsilon: float = EPSILON,
    ) -> None:
        super().__init__(channels, dim=dim, streams=streams)
        check_number("epsilon", epsilon, open_low=True)
        self.unbiased = unbiased
        self.epsilon = epsilon
        self.log_scale = nn.Parameter(torch.zeros(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.register_buffer("initialised", torch.tensor(False))

    def transform(self, x: Tensor) -> Tensor:
        # a replay must repeat the map of its forward pass, not choose one
        if self.training and not is_replaying() and has_values(x) and not self._was_initialised():
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
        # one value per channel has no spread: the scale would be 1 / epsilon
        if x.numel() == self.size:
            raise ValueError(
                f"{name_of(self)} got a first training batch of shape {tuple(x.shape)}: its "
                "scale is set from the spread of each channel's values, so pass a batch with at "
                "least two values per channel"
            )
        # as in BatchNorm: a variance in bfloat16 has an error of percents
        wide, dims = at_least_float32(x), self.over_channels(x)
        variance, mean = torch.var_mean(wide, dims, correction=int(self.unbiased))
        scale = 1 / (variance.sqrt() + self.epsilon)
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


class InvertibleBatchNorm(Joint):
    """``(B, C, ...) -> (B, C, ...)``, normalised per channel, by running averages or as in torch.

    There is no scale and shift; put an :class:`ActNorm` after it.

    Args:
        channels: C, of all streams together.
        momentum: share of the new batch in the averages, in (0, 1], torch's convention.
        eps: added to the variance.
        statistics: statistics for training: ``"running"``, averages that include the batch, or
            ``"batch"``, only the batch, as in torch. Evaluation uses the averages.
        dim: dimension of the channels, 1 or -1.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, the number of channels is not C.

    Example:
        >>> norm = revzoo.InvertibleBatchNorm(8)
        >>> x1, x2 = torch.randn(16, 4, 8, 8), torch.randn(16, 4, 8, 8)
        >>> torch.allclose(norm.inverse(*norm(x1, x2))[0], x1, atol=1e-4)
        True
    """

    inexact = "quotients leave the grid"
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
        check_number("momentum", momentum, high=1, open_low=True)
        check_number("eps", eps, open_low=True)
        check_choice("statistics", statistics, ("running", "batch"))
        self.momentum = momentum
        self.eps = eps
        self.statistics = statistics
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        if statistics == "batch":
            # not persistent: they belong to one forward pass, not to the trained model
            self.register_buffer("batch_mean", torch.zeros(channels), persistent=False)
            self.register_buffer("batch_var", torch.ones(channels), persistent=False)
            self.carried = (*type(self).carried, "batch_mean", "batch_var")

    def transform(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training and x.numel():
            batch_mean, batch_var = self._statistics(x)
            alone = self.statistics == "batch"
            unbiased = self._unbiased(x) if alone else 1.0  # torch averages unbiased variances
            mean = (1 - self.momentum) * mean + self.momentum * batch_mean
            var = (1 - self.momentum) * var + self.momentum * unbiased * batch_var
            # in place, since DistributedDataParallel broadcasts these tensors
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
                # adds 0: forward() has put the batch into the average, but without its gradient
                var = var + self.momentum * (batch_var - batch_var.detach())
        log_scale = -0.5 * (var + self.eps).log().sum()
        return self.at_each_position(log_scale, x)

    def _unbiased(self, x: Tensor) -> float:
        """The factor from a batch's variance to the unbiased estimate."""
        values = x.numel() // self.size
        if values < 2:
            raise ValueError(
                f"{name_of(self)} got a training batch of shape {tuple(x.shape)}: one value per "
                "channel has no variance, so pass at least two"
            )
        return values / (values - 1)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch ``(C,)``, in the type of the averages."""
        # a sum over a batch in bfloat16 would lose most of its bits
        wide = x.to(torch.promote_types(x.dtype, self.running_var.dtype))
        var, mean = torch.var_mean(wide, self.over_channels(x), correction=0)
        return mean.to(self.running_mean.dtype), var.to(self.running_var.dtype)


class InvertibleLeakyReLU(Streamwise):
    """``x -> max(x, 0) + slope * min(x, 0)``, any shape, for each stream.

    The inverse is the leaky ReLU with slope ``1 / slope``.

    Args:
        slope: factor for negative values, positive; 0.01 as in ``torch.nn.LeakyReLU``. The inverse
            multiplies rounding errors by ``1 / slope``.
        streams: number of streams of the state.

    Raises:
        ValueError: ``slope`` is not positive and finite: a ReLU has no inverse.

    Example:
        >>> act = revzoo.InvertibleLeakyReLU(0.2, streams=1)
        >>> act(torch.tensor([-1.0, 2.0]))
        tensor([-0.2000,  2.0000])
    """

    inexact = "products with its slope leave the grid"

    def __init__(self, slope: float = 0.01, *, streams: int = 2) -> None:
        super().__init__(streams=streams)
        check_number("slope", slope, open_low=True, open_high=True)
        self.slope = slope

    def transform(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(x, self.slope)

    def restore(self, y: Tensor) -> Tensor:
        return functional.leaky_relu(y, 1 / self.slope)

    def log_det_of(self, x: Tensor) -> Tensor:
        # the Jacobian is diagonal: 1 or slope
        negative = (x < 0).flatten(1).sum(1)
        return negative.to(log_det_dtype(x)) * math.log(self.slope)

    def extra_repr(self) -> str:
        return f"{self.slope}, streams={self.streams}"
