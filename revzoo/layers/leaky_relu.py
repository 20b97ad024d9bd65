"""An activation with an inverse.

    y = x where x >= 0, slope * x elsewhere

Among torch's piecewise linear activations, only a leaky ReLU with a positive slope has an inverse:
the leaky ReLU with slope ``1 / slope``.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from revzoo._checks import check_number
from revzoo.layers.streams import Streamwise, log_det_dtype


class InvertibleLeakyReLU(Streamwise):
    """``x -> max(x, 0) + slope * min(x, 0)``, any shape, for each stream.

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
