"""Each loss against its formula, written by hand in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_task import TinyNet
from timm.loss import BinaryCrossEntropy
from torch import Tensor
from torch.nn import functional

from revzoo.training import Classifier, MultilabelClassifier, Regressor
from revzoo.training.tasks import losses
from revzoo.training.tasks.registry import TASKS

WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)


def logits_of(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64)


def test_focal_by_hand() -> None:
    logits, labels = logits_of(5, 3), torch.tensor([0, 1, 2, 2, 1])
    p = logits.softmax(1)[range(5), labels]
    each = -((1 - p) ** 2) * p.log()
    torch.testing.assert_close(losses.focal(logits, labels), each.mean())
    weighted = losses.focal(logits, labels, weight=WEIGHT)
    torch.testing.assert_close(weighted, (each * WEIGHT[labels]).mean())
    shares = functional.one_hot(labels, 3).double()
    torch.testing.assert_close(losses.focal(logits, shares), each.mean())


def test_focal_of_positions_leaves_out_those_that_do_not_count() -> None:
    logits, labels = logits_of(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    rows = logits.movedim(1, -1).reshape(-1, 3)
    torch.testing.assert_close(losses.focal(logits, labels), losses.focal(rows, labels.flatten()))
    labels[:, 0] = -1
    counted = labels.flatten() >= 0
    expected = losses.focal(rows[counted], labels.flatten()[counted])
    torch.testing.assert_close(losses.focal(logits, labels), expected)


def test_ordinal_by_hand() -> None:
    """Of classes 0 to 3: y > 0, y > 1 and y > 2 are three questions."""
    logits, labels = logits_of(6, 4), torch.tensor([0, 1, 2, 3, 3, 0])
    p = logits.softmax(1)
    total = 0.0
    for row, label in zip(p, labels.tolist(), strict=True):
        for k in range(3):
            above = float(row[k + 1 :].sum())
            total -= torch.tensor(above if label > k else 1 - above).log()
    found = losses.ordinal(logits, labels)
    assert float(found) == pytest.approx(float(total) / 18, rel=1e-5)
    weight = torch.tensor([2.0, 2, 2, 2]).double()
    torch.testing.assert_close(losses.ordinal(logits, labels, weight=weight), 2 * found)


def test_an_ordinal_error_costs_more_the_further_away() -> None:
    sure = 10 * torch.eye(4).double()
    costs = [float(losses.ordinal(sure[k : k + 1], torch.tensor([0]))) for k in range(4)]
    assert costs == sorted(costs)
    assert costs[3] > 1.9 * costs[1] > 100 * costs[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_of_labels_by_hand(smoothing: float) -> None:
    logits, labels = logits_of(5, 3), (torch.rand(5, 3) > 0.5).double()
    soft, p = labels * (1 - smoothing) + smoothing / 2, logits.sigmoid()
    each = -(WEIGHT * soft * p.log() + (1 - soft) * (1 - p).log())
    options: dict[str, Any] = {"weight": WEIGHT, "smoothing": smoothing}
    found = losses.binary_cross_entropy(logits, labels, **options)
    torch.testing.assert_close(found, each.mean())
    if not smoothing:
        right = torch.where(labels > 0, p, 1 - p)
        each = -((1 - right) ** 2) * right.log()
        torch.testing.assert_close(losses.binary_focal(logits, labels), each.mean())
        each = torch.where(labels > 0, WEIGHT, 1) * each
        torch.testing.assert_close(losses.binary_focal(logits, labels, **options), each.mean())


def test_binary_cross_entropy_of_single_classes_by_hand() -> None:
    logits, labels = logits_of(4, 3), torch.tensor([2, 0, 1, 1])
    shares = 0.7 * functional.one_hot(labels, 3) + 0.3 * functional.one_hot(labels.flip(0), 3)
    for given, soft in ((labels, functional.one_hot(labels, 3)), (shares, shares)):
        soft, p = soft * 0.9 + 0.1 / 3, logits.sigmoid()
        each = -(WEIGHT * soft * p.log() + (1 - soft) * (1 - p).log())
        found = Classifier.losses["bce"](logits, given, weight=WEIGHT, smoothing=0.1)
        torch.testing.assert_close(found, each.mean())


def test_labels_above_a_threshold_count_as_1_as_timms_do() -> None:
    """A3: --bce-loss --bce-target-thresh 0.2 --smoothing 0."""
    logits, labels = logits_of(6, 3), torch.tensor([2, 0, 1, 1, 2, 0])
    ones, others = functional.one_hot(labels, 3), functional.one_hot(labels.flip(0), 3)
    theirs = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.2)
    module = Classifier(TinyNet(3), optim={"loss": "bce", "label_threshold": 0.2})
    plain = Classifier(TinyNet(3), optim={"loss": "bce"})
    found = {}
    for share in (0.0, 0.15, 0.25, 0.7):
        mixed = (1 - share) * ones + share * others.double()
        found[share] = float(module.train().loss(logits, mixed))
        assert found[share] == pytest.approx(float(theirs(logits, mixed)), rel=1e-12)
        assert torch.equal(module.eval().loss(logits, mixed), plain.loss(logits, mixed))
    assert found[0.0] == found[0.15] != found[0.25] == found[0.7]
    assert float(module.train().loss(logits, labels)) == pytest.approx(found[0.0], rel=1e-12)
    for wrong in ({"label_threshold": 1.0, "loss": "bce"}, {"label_threshold": 0.2}):
        with pytest.raises(ValueError, match=r"optim.label_threshold=(1.0: expected|0.2 with)"):
            Classifier(TinyNet(3), optim=wrong)


def test_weights_and_smoothing_are_for_training() -> None:
    labels, logits = (torch.rand(4, 3) > 0.5).float(), torch.randn(4, 3)
    optim = {"class_weights": [1, 3, 0.5], "label_smoothing": 0.1}
    module, plain = MultilabelClassifier(TinyNet(3), optim=optim), MultilabelClassifier(TinyNet(3))
    assert torch.equal(module.eval().loss(logits, labels), plain.loss(logits, labels))
    assert not torch.equal(module.train().loss(logits, labels), plain.loss(logits, labels))


def test_a_regression_learns_standardised_targets() -> None:
    module = Regressor(TinyNet(2), optim={"loss": "mae", "label_smoothing": 0.1})
    module.standardise({"mean": [10.0, -1.0], "std": [2.0, 0.5]})
    logits, labels = torch.randn(4, 2), torch.randn(4, 2)
    inside = (labels - torch.tensor([10.0, -1])) / torch.tensor([2.0, 0.5])
    torch.testing.assert_close(module.loss(logits, labels), (logits - inside).abs().mean())
    torch.testing.assert_close(module.predicted(inside), labels)
    huber = Regressor(TinyNet(2), optim={"loss": "huber"})
    small = torch.tensor([[0.5, 3.0]])
    assert float(huber.loss(small, torch.zeros(1, 2))) == pytest.approx((0.125 + 2.5) / 2)


def test_each_task_names_its_losses() -> None:
    for task, kind in TASKS.items():
        assert kind.task == task
        with pytest.raises(ValueError, match=f"optim.loss=mango with task={task}: expected one of"):
            kind(TinyNet(3), optim={"loss": "mango"})
    with pytest.raises(ValueError, match="expected one of cross_entropy, focal, ordinal, bce"):
        Classifier(TinyNet(3), optim={"loss": "mse"})
    with pytest.raises(ValueError, match=r"class_weights=\(1.0,\) with task=regression: there are"):
        Regressor(TinyNet(1), optim={"class_weights": [1]})
