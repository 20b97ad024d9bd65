"""The head of convolutional networks, and the image sizes that their strides allow.

streams -> BN - ReLU -> pool -> [dropout] -> linear
"""

from typing import ClassVar

from torch import Tensor

from revzoo.models.components.lean import run
from revzoo.models.components.norm import NormAct
from revzoo.models.network import ImageNetwork, ImageSizeError


class ConvolutionalClassifier(ImageNetwork):
    """Image classifier whose streams are feature maps ``(B, C, H, W)``.

    Subclasses call :meth:`_append_norm` before :meth:`_assemble`.
    """

    size_multiple: int
    """Height and width of an image must be multiples of this number."""

    size_reason: ClassVar[str]
    """The reason in the error message, after "this model": "squeezes them", say."""

    def _append_norm(self, norm_act: NormAct, *, size_multiple: int) -> None:
        self.size_multiple = size_multiple
        self.norm = norm_act.normalise(self.num_features)
        self.relu = norm_act.activate()

    def forward_features(self, x: Tensor) -> Tensor:
        """Last feature maps ``(B, num_features, H', W')``: streams merged, normalised, after ReLU.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        return self._activated(self.encode(x))

    def normed(self, z: Tensor, index: int) -> Tensor:
        # the head's normalisation has the width of the last stage
        return self._activated(z) if index == len(self.stages) - 1 else z

    def check_size(self, height: int, width: int) -> None:
        multiple = self.size_multiple
        if height < 1 or width < 1 or height % multiple or width % multiple:
            near = max(multiple, round(height / multiple) * multiple)
            raise ImageSizeError(
                f"images of {height} x {width} pixels: expected height and width to be positive "
                f"multiples of {multiple}, since this model {self.size_reason}",
                f"; resize or pad the images (a folder of images: data.image_size={near})",
                side=near,
            )

    def _activated(self, z: Tensor) -> Tensor:
        # run lets the ReLU work in place, so autograd keeps one tensor, not two
        return run((self.norm, self.relu), z)
