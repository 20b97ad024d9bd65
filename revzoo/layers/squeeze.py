"""Invertible downsampling: space to depth, on every stream.

    (B, C, H, W) -> (B, b*b*C, H/b, W/b)

Convolutions with stride lose information, a squeeze only moves it (the psi of i-RevNet, Jacobsen
et al. 2018, arXiv 1802.07088, section 3.2; RealNVP, Dinh et al. 2017, arXiv 1605.08803). torch has
the operation for one channel order, ``pixel_unshuffle``; published i-RevNet weights need the other.

===========  =========================================  ==================
``order``    channel that pixel (dy, dx) of c goes to   used by
===========  =========================================  ==================
``torch``    ``(c*b + dy)*b + dx``                      pixel_unshuffle
``irevnet``  ``(dy*b + dx)*C + c``                      the i-RevNet release
===========  =========================================  ==================
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from revzoo.layers.streams import Streamwise

Order = Literal["torch", "irevnet"]


class Squeeze(Streamwise):
    """``(B, C, H, W) -> (B, b*b*C, H/b, W/b)`` for each stream of the state.

    Args:
        factor: b, at least 2.
        order: where a pixel's channels go, ``"torch"`` or ``"irevnet"`` (see the module).
        streams: how many streams the state has.

    Raises:
        ValueError: an argument is out of range; at the call, height or width (or, in the inverse,
            channels) do not divide.

    Example::

        Squeeze(2)(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))  # two of (1, 12, 16, 16)
    """

    exact = True

    def __init__(self, factor: int = 2, *, order: Order = "torch", streams: int = 2) -> None:
        super().__init__(streams=streams)
        if factor < 2:
            raise ValueError(f"factor={factor}: expected a whole number of at least 2")
        if order not in ("torch", "irevnet"):
            raise ValueError(f"order={order!r}: expected 'torch' or 'irevnet'")
        self.factor = factor
        self.order: Order = order

    def transform(self, x: Tensor) -> Tensor:
        b = self.factor
        if x.dim() != 4 or x.shape[2] % b or x.shape[3] % b:
            raise ValueError(
                f"{type(self).__name__}({b}) got a stream of shape {tuple(x.shape)}: expected "
                f"(B, C, H, W) with height and width divisible by {b}; pad or crop the images"
            )
        batch, channels, height, width = x.shape
        if x.numel() == 0:  # torch's function returns an empty batch as it is
            return x.reshape(batch, channels * b * b, height // b, width // b)
        y = functional.pixel_unshuffle(x, b)
        return y if self.order == "torch" else _transposed(y, x.shape[1], b * b)

    def restore(self, y: Tensor) -> Tensor:
        self.check_squeezed(y)
        return unsqueezed(y, self.factor, order=self.order)

    def check_squeezed(self, y: Tensor) -> None:
        """Raise a ValueError if ``y`` cannot have come out of :meth:`transform`."""
        b = self.factor
        if y.dim() != 4 or y.shape[1] % (b * b):
            raise ValueError(
                f"the inverse of {type(self).__name__}({b}) got a stream of shape "
                f"{tuple(y.shape)}: expected (B, C, H, W) with channels divisible by {b * b}"
            )

    def extra_repr(self) -> str:
        return f"{self.factor}, order={self.order!r}"


def unsqueezed(y: Tensor, factor: int, *, order: Order) -> Tensor:
    """The inverse of a squeeze by b: ``(B, b*b*C, H, W) -> (B, C, b*H, b*W)``."""
    rows = factor * factor
    if y.numel() == 0:
        batch, channels, height, width = y.shape
        return y.reshape(batch, channels // rows, height * factor, width * factor)
    x = y if order == "torch" else _transposed(y, rows, y.shape[1] // rows)
    return functional.pixel_shuffle(x, factor)


def _transposed(x: Tensor, rows: int, columns: int) -> Tensor:
    """Channels read as a (rows, columns) matrix, transposed."""
    batch, _, height, width = x.shape
    return x.reshape(batch, rows, columns, height, width).transpose(1, 2).reshape(x.shape)
