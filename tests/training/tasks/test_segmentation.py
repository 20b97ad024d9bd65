"""Segmentation: the loss and the figures."""

import pytest
import torch

from revzoo.training import Segmenter
from revzoo.training.metrics import ASSD, HD95, Dice, IoU, PositionAccuracy
from revzoo.training.tasks.losses import dice

MODEL = {"name": "iunet2d", "num_classes": 3, "channels": [8, 16], "units": [1, 1]}


def test_dice_and_iou_are_those_of_the_counts() -> None:
    true = torch.tensor([[[0, 0, 1, 1], [2, 2, -1, -1]]])
    found = torch.tensor([[[0, 1, 1, 1], [2, 0, 0, 1]]])
    metrics = Dice(4), IoU(4), PositionAccuracy(4)
    for metric in metrics:
        metric.update(found, true)
    # class 1: TP 2, FP 1, FN 0; class 2: TP 1, FP 0, FN 1; class 0: TP 1, FP 1, FN 1; 3: absent
    assert float(metrics[0].compute()) == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert float(metrics[1].compute()) == pytest.approx((2 / 3 + 1 / 2 + 1 / 3) / 3)
    assert float(metrics[2].compute()) == pytest.approx(4 / 6)


@pytest.mark.filterwarnings("ignore:monai.metrics.utils:FutureWarning")  # it calls itself so
def test_surface_distances_are_monais_in_millimetres() -> None:
    from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance

    spacing, masks = (1.0, 2.0, 0.5), []
    for start in ([2, 1, 3], [4, 2, 0]):  # a box each, in two images
        mask = torch.zeros(2, 9, 8, 10, dtype=torch.long)
        x, y, z = start
        mask[:, x : x + 4, y : y + 5, z : z + 6] = 1
        mask[1, :2, :2, :2] = 2
        masks.append(torch.nn.functional.one_hot(mask, 3).movedim(-1, 1))
    found, true = masks
    expected = (
        compute_average_surface_distance(
            found[:, :2], true[:, :2], symmetric=True, spacing=spacing
        ),
        compute_hausdorff_distance(found[:, :2], true[:, :2], percentile=95, spacing=spacing),
    )
    for kind, value in zip((ASSD, HD95), expected, strict=True):
        metric = kind(3, spacing)
        metric.update(found.argmax(1), true.argmax(1))
        assert metric.of_each()[1:].tolist() == pytest.approx([float(value.mean()), 0])
        assert float(metric.compute()) == pytest.approx(float(value.mean()) / 2)
        assert float(value.mean()) > 0.5


def test_a_class_that_only_the_mask_has_is_a_diagonal_away() -> None:
    found, true = torch.zeros(3, 3, 3, 4), torch.zeros(3, 3, 4, dtype=torch.long)
    found[:, 0] = 1
    true[0, 0, 0] = 1  # missed
    true[1, 0, 0], found[1, 1] = -1, torch.tensor([[2.0, 0, 0, 0]] + [[0.0] * 4] * 2)  # not counted
    metric = HD95(3)
    metric.update(found.argmax(1), true)
    assert metric.of_each().tolist() == pytest.approx([float("nan"), 5, float("nan")], nan_ok=True)


def test_the_loss_does_not_see_ignored_positions() -> None:
    module = Segmenter(MODEL).eval()
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    labels[:, 0] = -1
    changed = logits.clone()
    changed[:, :, 0] = 100 * torch.randn(2, 3, 4)
    assert torch.equal(module.loss(logits, labels), module.loss(changed, labels))


def test_a_perfect_prediction_has_dice_1() -> None:
    labels = torch.randint(3, (2, 4, 4, 4))  # a volume
    found = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).double()
    assert float(dice(found, labels)) == pytest.approx(1)
    assert float(dice(1 - found, labels)) < 0.5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_and_smoothing_are_for_training(smoothing: float) -> None:
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    plain = Segmenter(MODEL)
    weighted = Segmenter(MODEL, optim={"class_weights": [1, 2, 5], "label_smoothing": smoothing})
    assert torch.equal(plain.eval().loss(logits, labels), weighted.eval().loss(logits, labels))
    assert not torch.equal(plain.loss(logits, labels), weighted.train().loss(logits, labels))
