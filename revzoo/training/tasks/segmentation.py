"""Semantic segmentation as a Lightning module: a class for each position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from torchmetrics import Metric

from revzoo.training.classifier import Classifier, class_count
from revzoo.training.figure_names import SURFACES
from revzoo.training.lightning_compat import data_of
from revzoo.training.metrics import (
    ASSD,
    HD95,
    Dice,
    IoU,
    PositionAccuracy,
    by_split,
)
from revzoo.training.tasks.losses import SEGMENTATION, Loss
from revzoo.training.windows import by_windows


class Segmenter(Classifier):
    """Train, validate, test and predict with a network that classifies each position.

    As :class:`Classifier`, but labels are masks: int64 ``(B, H, W)``, -1 for positions that do not
    count. Logs ``train/acc``, ``val/acc``, ``test/acc``, the share of positions; ``val/dice``,
    ``val/iou`` and the same of the test; with :attr:`surface_distances` also ``assd`` and ``hd95``.

    Args:
        model: a module ``(B, C, H, W) -> (B, num_classes, H, W)``, or the keywords of
            :func:`revzoo.create_model` for a U-Net, such as ``iunet2d``.
        options: see :class:`Classifier`.

    Example:
        >>> from revzoo.training import Segmenter
        >>> module = Segmenter({"name": "iunet2d", "num_classes": 4}, optim={"lr": 1e-3})
        >>> module(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 4, 16, 16])
    """

    task = "segmentation"
    losses: ClassVar[Mapping[str, Loss]] = SEGMENTATION
    monitor = "val/dice"
    console = ("loss", "acc", "dice", "iou", *SURFACES)

    window: tuple[int, ...] | None = None
    """Of an evaluation of volumes: the size of the data's patches."""
    surface_distances: bool = False
    """Whether tests, and validations outside of a training, also log ``assd`` and ``hd95``."""
    spacing: tuple[float, ...] | None = None
    """Millimetres between the voxels of the evaluated volumes; None for pixels."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        sizes: tuple[int, ...] = getattr(data_of(self.trainer), "sizes", ())
        self.window = sizes if len(sizes) == 3 else None
        if self.surface_distances and stage != "fit":  # slow: not in each epoch
            self.spacing = getattr(data_of(self.trainer), "spacing", None)
            self.metrics = by_split(self.figures)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes, *sizes), in evaluation from windows if a volume is no patch."""
        # in evaluation, volumes from files stay on the CPU
        here = images.shape[2:] == self.window and images.device == self.device
        if self.training or self.window is None or here:
            return super().forward(images)
        return by_windows(super().forward, images, self.window, device=self.device)

    def measured(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        # max, not argmax, which takes nine times as long along this dimension on a CPU
        return {"preds": logits.max(1).indices, "target": labels}

    def figures(self, evaluated: bool) -> dict[str, Metric]:
        count = class_count(self.model)
        found: dict[str, Metric] = {"acc": PositionAccuracy(count)}
        if evaluated:
            found |= {"dice": Dice(count), "iou": IoU(count)}
        if evaluated and self.surface_distances:
            found |= {"assd": ASSD(count, self.spacing), "hd95": HD95(count, self.spacing)}
        return found
