"""Residual blocks that are invertible because their residual function is a contraction.

    y = x + F(x),  Lip(F) < 1           x <- y - F(x), repeated from x = y, is the inverse
    log abs det = sum over k of (-1)^(k+1) / k  tr(J^k),  J the Jacobian of F

J. Behrmann, W. Grathwohl, R. Chen, D. Duvenaud, J.-H. Jacobsen, "Invertible Residual Networks",
ICML 2019, arXiv 1811.00995, and its release. F acts on all channels. Build it of the layers below,
and of activations with slopes of at most 1 (ELU, ReLU, Tanh); batch normalisation is no
contraction.

A weight is divided by ``sigma / coefficient`` where its largest singular value sigma is above the
coefficient. ``torch.nn.utils.parametrizations.spectral_norm`` divides always, and takes a
convolution's weight for a matrix, whose norm is not that of the convolution (H. Gouk et al. 2018,
arXiv 1804.04368). Power iteration finds sigma: one step in each forward pass in training.

In mode ``invert`` the replay repeats F until the input changes by rounding only, 10 times or more,
and raises a DriftError if it does not get there. ``recompute`` evaluates F once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from revzoo._checks import check_callable, check_count, check_number
from revzoo.core.guard import DriftError
from revzoo.core.invertible import Invertible, name_of
from revzoo.core.tensors import has_values
from revzoo.layers.streams import log_det_dtype

FIRST_STEPS = 10  # power iterations when a layer is built
CLOSE = 8  # an inverse ends at changes of this many times the precision of the largest value
TOLERANCE = 1e-6  # after all iterations: the change that is accepted, over the largest value


class _Contractive(nn.Module):
    """A linear layer whose largest singular value is at most ``coefficient``."""

    carried = ("vector",)  # see Invertible: a forward pass updates it, an inverse reads it
    vector: Tensor
    weight: Tensor
    coefficient: float
    margin: float = 0.0

    def _begin(self, coefficient: float, *shape: int) -> None:
        check_number("coefficient", coefficient, high=1, open_low=True, open_high=True)
        self.coefficient = float(coefficient)
        start = torch.randn(1, *shape)
        self.register_buffer("vector", start / start.norm())
        for _ in range(FIRST_STEPS):
            self.iterate()

    def _map(self, x: Tensor, weight: Tensor) -> Tensor:
        """The layer without its bias."""
        raise NotImplementedError

    def _transposed(self, y: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def iterate(self) -> None:
        """One power iteration: brings ``vector`` closer to the first right singular vector."""
        vector = self._transposed(self._map(self.vector, self.weight))
        # a new tensor: graphs of earlier passes hold the old one
        self.vector = functional.normalize(vector.flatten(), dim=0).view_as(vector)

    def bounded_weight(self) -> Tensor:
        """The weight that the layer computes with."""
        sigma = torch.linalg.vector_norm(self._map(self.vector, self.weight))
        return self.weight / ((sigma / self.coefficient).clamp(min=1) + self.margin)

    def forward(self, x: Tensor) -> Tensor:
        y = self._map(x, self.bounded_weight())
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        return y if bias is None else y + bias.view(-1, *[1] * (x.dim() - 2))


class ContractiveLinear(_Contractive, nn.Linear):
    """``nn.Linear`` on ``(B, in_features)`` with singular values of at most ``coefficient``.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        coefficient: the bound, above 0 and below 1.
        bias: whether to add a bias.

    Raises:
        ValueError: ``coefficient`` is out of range.

    Example:
        >>> layer = revzoo.ContractiveLinear(4, 8, coefficient=0.5)
        >>> x = torch.randn(2, 4)
        >>> bool(((layer(x) - layer(0 * x)).norm(dim=1) <= 0.55 * x.norm(dim=1)).all())
        True
    """

    def __init__(
        self, in_features: int, out_features: int, *, coefficient: float = 0.9, bias: bool = True
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self._begin(coefficient, in_features)

    def _map(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    def _transposed(self, y: Tensor) -> Tensor:
        return y @ self.weight


class ContractiveConv2d(_Contractive, nn.Conv2d):
    """``(B, in, H, W) -> (B, out, H, W)``, singular values of at most ``coefficient``.

    Zeros pad the image, so the singular values depend on its size. On larger images than ``size``
    they are larger, by a few percent at most.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: side of the kernel, odd.
        size: height and width of the images, to find the singular values.
        coefficient: the bound, above 0 and below 1.
        bias: whether to add a bias.
        margin: added to the divisor of the weight.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> layer = revzoo.ContractiveConv2d(4, 8, 3, size=(16, 16))
        >>> layer(torch.randn(2, 4, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        size: tuple[int, int],
        coefficient: float = 0.9,
        bias: bool = True,
        margin: float = 0.0,
    ) -> None:
        check_count("kernel_size", kernel_size)
        check_number("margin", margin)
        if kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size={kernel_size}: expected an odd number, which keeps the size"
            )
        super().__init__(
            in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=bias
        )
        self.margin = margin
        self._begin(coefficient, in_channels, *size)

    def _map(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(x, weight, padding=self.padding)

    def _transposed(self, y: Tensor) -> Tensor:
        return functional.conv_transpose2d(y, self.weight, padding=self.padding)  # type: ignore[arg-type]


class ContractiveBlock(Invertible):
    """``x -> x + F(x)`` on one stream ``(B, C, ...)``, for a contraction F.

    Args:
        branch: F, from ``(B, C, ...)`` to the same shape, of contractive layers.
        iterations: largest number of evaluations of F in an inverse.
        terms: of the power series in :meth:`log_det`; the rest is at most ``C H W L^terms`` for a
            Lipschitz constant L.
        probes: random vectors in Hutchinson's estimate of the traces.

    Raises:
        DriftError: at the inverse, the iteration does not converge.
        ValueError: an argument is out of range.

    Example:
        >>> branch = nn.Sequential(
        ...     revzoo.ContractiveLinear(4, 8), nn.ELU(), revzoo.ContractiveLinear(8, 4)
        ... )
        >>> block = revzoo.ContractiveBlock(branch).eval()
        >>> x = torch.randn(2, 4)
        >>> torch.allclose(block.inverse(block(x)), x, atol=1e-5)
        True
    """

    streams = 1
    inexact = "its inverse is a fixed-point iteration in floating point"

    def __init__(
        self, branch: nn.Module, *, iterations: int = 100, terms: int = 10, probes: int = 1
    ) -> None:
        super().__init__()
        check_callable("branch", branch)
        for name, value in (("iterations", iterations), ("terms", terms), ("probes", probes)):
            check_count(name, value)
        self.branch = branch
        self.iterations, self.terms, self.probes = iterations, terms, probes

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        if self.training:
            for layer in self.branch.modules():
                if isinstance(layer, _Contractive):
                    layer.iterate()
        return x + self._value(x, context)

    def inverse(self, y: Tensor, **context: Any) -> Tensor:
        x = y
        for _ in range(self.iterations):
            x, before = y - self._value(x, context), x
            if not has_values(y):  # only shapes are wanted
                return x
            change = (x - before).detach().abs().amax()
            size = y.detach().abs().amax()
            # "not": also where values are not finite, as in an output that overflows
            if not change > CLOSE * torch.finfo(y.dtype).eps * size:
                return x
        if not change > TOLERANCE * size:
            return x
        reason = (
            f"the inverse of {name_of(self)} did not converge in {self.iterations} iterations: the "
            f"last one changed x by {change / size:.1e} of its size, expected {TOLERANCE} at most"
        )
        error = DriftError(
            f"{reason}. The branch must be a contraction: build it of ContractiveConv2d, "
            "ContractiveLinear and activations like ELU, with a smaller coefficient; or use "
            "set_memory(step, 'recompute')"
        )
        error.step, error.reason = self, reason
        raise error

    def log_det(self, x: Tensor, **context: Any) -> Tensor:
        """An estimate of the log-determinants ``(B,)`` at ``x``; draws random numbers.

        Differentiable. In the dtype of ``x``, or float32 if that is narrower.
        """
        wanted = torch.is_grad_enabled()
        # its derivatives are taken here, so its graph must be a plain one
        with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
            x = x if x.requires_grad else x.detach().requires_grad_()
            value = self._value(x, context)
            total = x.new_zeros(len(x), dtype=log_det_dtype(x))
            for _ in range(self.probes):
                probe = torch.randn_like(x)
                vector = probe
                for k in range(1, self.terms + 1):
                    (vector,) = torch.autograd.grad(
                        value, x, vector, retain_graph=True, create_graph=wanted
                    )
                    trace = (vector * probe).flatten(1).sum(1, dtype=total.dtype)
                    total = total + math.copysign(1 / k, k % 2 - 0.5) / self.probes * trace
        return total if wanted else total.detach()

    def _value(self, x: Tensor, context: Any) -> Tensor:
        value: Tensor = self.branch(x, **context)
        return value.to(x.dtype)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, terms={self.terms}, probes={self.probes}"
