"""RevNets: ResNets whose activations are recomputed from their outputs.

    y1 = x1 + F(x2)          x2 = y2 - G(y1)
    y2 = x2 + G(y1)          x1 = y1 - F(x2)

A. Gomez, M. Ren, R. Urtasun, R. Grosse, "The Reversible Residual Network: Backpropagation Without
Storing Activations", NeurIPS 2017, arXiv 1707.04585. F and G are branches of a ResNet, each on half
of the channels, so a RevNet unit is as deep as two residual units. Each variant has about as many
parameters as its baseline ResNet.

Known limits: the stem and the units that change width or resolution (the first of a stage, except
where the stem's output already has the stage's shape) have no inverse. They store their input and
are recomputed from it.
"""

from dataclasses import replace
from typing import ClassVar

from revzoo.core.invertible import Step
from revzoo.layers.sequence import ReversibleBlock
from revzoo.models.staged import StagedNetwork
from revzoo.models.unit import MergedUnit, Transition, branch, shortcut
from revzoo.models.variant import UnitPlan, Variant


def _imagenet(units: tuple[int, ...]) -> Variant:
    return Variant(
        stem_width=128,
        widths=(128, 256, 512, 832),
        units=units,
        strides=(1, 2, 2, 2),
        branch="bottleneck",
        downsampling_stem=True,
    )


# The networks of arXiv 1707.04585 (CIFAR and ImageNet) with the numbers of its TensorFlow release.
# Widths count both streams.
REVNETS: dict[str, Variant] = {
    "revnet38": Variant(stem_width=32, widths=(32, 64, 112), units=(3, 3, 3)),
    "revnet110": Variant(stem_width=32, widths=(32, 64, 128), units=(9, 9, 9)),
    "revnet164": Variant(stem_width=32, widths=(32, 64, 128), units=(9, 9, 9), branch="bottleneck"),
    "revnet56": _imagenet(units=(2, 2, 3, 2)),
    "revnet104": _imagenet(units=(2, 2, 11, 2)),
}
REVNETS |= {
    f"{name}_memcnn": replace(REVNETS[name], convention="memcnn")
    for name in ("revnet38", "revnet110", "revnet164")
}


class RevNet(StagedNetwork):
    """RevNet, ``(B, in_chans, H, W) -> (B, num_classes)``; two streams, merged before the head.

    Basic variants take sizes that are multiples of 4 (three stages of strides 1, 2, 2), bottlenecks
    any size.

    Example:
        >>> from revzoo.models.revnet import REVNETS, RevNet
        >>> RevNet(REVNETS["revnet38"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "exact"
    streams: ClassVar[int] = 2

    @staticmethod
    def build_unit(plan: UnitPlan) -> Step:
        half = plan.per_stream(RevNet.streams)
        memcnn = plan.convention.memcnn
        if memcnn and not plan.keeps_shape:
            return MergedUnit(branch(plan), shortcut=shortcut(plan))
        f = branch(half)
        # G reads y1, which already has the output's shape and has not passed the stem's BN-ReLU
        activate_first = plan.activate_first or not memcnn
        g = branch(
            replace(half, in_channels=half.out_channels, stride=1, activate_first=activate_first)
        )
        if plan.keeps_shape:
            return ReversibleBlock(f, g)
        return Transition(f, g=g, shortcuts=(shortcut(half), shortcut(half)))
