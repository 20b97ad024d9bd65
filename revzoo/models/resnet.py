"""Pre-activation ResNets, the baselines of the RevNets.

    y = s(x) + F(x)

K. He, X. Zhang, S. Ren, J. Sun, "Identity Mappings in Deep Residual Networks", ECCV 2016, arXiv
1603.05027, as in the TensorFlow release of the RevNet paper (arXiv 1707.04585): the stem ends in
BN-ReLU, so the first branch skips it; a unit that changes the shape pools and pads its shortcut
(basic) or projects it without normalisation (bottleneck).

torchvision's ``resnet50`` is the post-activation network of arXiv 1512.03385: another architecture,
whose weights do not fit here.
"""

from dataclasses import replace
from typing import ClassVar

from revzoo.core.invertible import Step
from revzoo.models.staged import StagedNetwork
from revzoo.models.unit import ResidualUnit, branch, shortcut
from revzoo.models.variant import UnitPlan, Variant


def _imagenet(units: tuple[int, ...]) -> Variant:
    return Variant(
        stem_width=64,
        widths=(64, 128, 256, 512),
        units=units,
        strides=(1, 2, 2, 2),
        branch="bottleneck",
        downsampling_stem=True,
    )


# The baselines of arXiv 1707.04585 (CIFAR and ImageNet), as in its TensorFlow release. The names
# count layers: resnet32 has 15 units of 2 convolutions, the stem and the classifier.
RESNETS: dict[str, Variant] = {
    "resnet32": Variant(stem_width=16, widths=(16, 32, 64), units=(5, 5, 5)),
    "resnet56": Variant(stem_width=16, widths=(16, 32, 64), units=(9, 9, 9)),
    "resnet110": Variant(stem_width=16, widths=(16, 32, 64), units=(18, 18, 18)),
    "resnet164": Variant(
        stem_width=16, widths=(16, 32, 64), units=(18, 18, 18), branch="bottleneck"
    ),
    "resnet50": _imagenet(units=(3, 4, 6, 3)),
    "resnet101": _imagenet(units=(3, 4, 23, 3)),
}
RESNETS |= {
    f"{name}_memcnn": replace(RESNETS[name], convention="memcnn")
    for name in ("resnet32", "resnet110", "resnet164")
}


class ResNet(StagedNetwork):
    """Pre-activation ResNet, ``(B, in_chans, H, W) -> (B, num_classes)``; one stream.

    Its units have no inverse, so the memory modes are ``store`` and ``recompute``;
    :func:`revzoo.create_model` makes them reversible with ``reversible_bits=4``. Basic variants
    take sizes that are multiples of 4 (three stages of strides 1, 2, 2), bottlenecks any size.

    Example:
        >>> from revzoo.models.resnet import RESNETS, ResNet
        >>> ResNet(RESNETS["resnet32"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "store"
    streams: ClassVar[int] = 1
    convertible: ClassVar[bool] = True

    @staticmethod
    def build_unit(plan: UnitPlan) -> Step:
        return ResidualUnit(branch(plan), shortcut=shortcut(plan))
