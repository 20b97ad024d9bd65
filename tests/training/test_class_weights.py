"""Weights of classes in the training loss: by hand, by count, and what is refused."""

import pytest
import torch
from small_task import TINY, TinyNet, loader, trainer
from torch.nn import functional

from revzoo.data import DataError, Digits
from revzoo.training import Classifier
from revzoo.training.classifier import balanced_weights

LABELS = torch.tensor([0, 0, 1, 2])
WEIGHTS = torch.tensor([1.0, 3.0, 0.5])
DIGITS = {**TINY, "num_classes": 10, "in_chans": 1}


def weighted(**optim):
    return Classifier(TinyNet(3), optim={"class_weights": [1, 3, 0.5], **optim})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_torchs_weighted_one_over_the_number_of_images(smoothing, dtype):
    logits = torch.randn(4, 3, dtype=dtype)
    loss = weighted(label_smoothing=smoothing).loss(logits, LABELS)
    options = {"weight": WEIGHTS.to(dtype), "label_smoothing": smoothing}
    by_torch = functional.cross_entropy(logits, LABELS, **options)
    # torch divides by the weights of the images, 1 + 1 + 3 + 0.5
    torch.testing.assert_close(loss, by_torch * 5.5 / 4)
    if not smoothing:
        each = -logits.log_softmax(1)[range(4), LABELS]
        torch.testing.assert_close(loss, (each * torch.tensor([1.0, 1, 3, 0.5])).mean())
    # torch divides by the number for probabilities
    shares = functional.one_hot(LABELS).to(dtype)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, shares, **options))
    torch.testing.assert_close(loss, weighted(label_smoothing=smoothing).loss(logits, shares))


def test_mixed_labels_are_weighted_by_their_shares():
    logits, shares = torch.randn(4, 3), torch.rand(4, 3).softmax(1)
    expected = -(shares * WEIGHTS * logits.log_softmax(1)).sum() / 4
    torch.testing.assert_close(weighted().loss(logits, shares), expected)


def test_balanced_weights_are_those_of_scikit_learn():
    """compute_class_weight("balanced", classes=[0, 1], y=[0] * 40 + [1] * 14) of its 1.7."""
    found = balanced_weights(torch.tensor([0] * 40 + [1] * 14), ["benign", "malignant"])
    assert found.tolist() == pytest.approx([0.675, 1.9285714])
    assert float(found @ torch.tensor([40.0, 14.0]).double()) == pytest.approx(54)


def test_a_class_without_images_is_refused():
    with pytest.raises(DataError, match="no training images of b, c: add some, or give a list"):
        balanced_weights(torch.tensor([0, 0, 3]), ["a", "b", "c", "d"])


def test_balanced_counts_the_training_images(tmp_path):
    module, data = Classifier(DIGITS, optim={"class_weights": "balanced"}), Digits(batch_size=32)
    with pytest.raises(ValueError, match=r"call balance\(DATA\) after DATA\.setup"):
        module.loss(torch.zeros(1, 10), torch.zeros(1, dtype=torch.int64))
    trainer(tmp_path, max_steps=1, limit_val_batches=1).fit(module, datamodule=data)
    counts = torch.tensor([int((data.train_labels == c).sum()) for c in range(10)])
    assert int(counts.sum()) == data.train_count
    assert module.class_weights is not None
    torch.testing.assert_close(module.class_weights, data.train_count / (10 * counts))
    # weights come from the options and the data, not from the file
    assert not [name for name in module.state_dict() if "weights" in name]


def test_other_data_cannot_be_counted(tmp_path):
    module = Classifier(TinyNet(), optim={"class_weights": "balanced"})
    with pytest.raises(ValueError, match="got NoneType: give a list of numbers"):
        trainer(tmp_path).fit(module, loader())
    trainer(tmp_path).test(module, loader(), verbose=False)  # an evaluation has no weights


def test_a_list_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"class_weights=\[1\.0, 2\.0\]: expected 3 numbers"):
        Classifier(TinyNet(3), optim={"class_weights": [1, 2]})


@pytest.mark.parametrize("weights", ["balanced", [1.0] * 5 + [2] * 5])
def test_a_checkpoint_has_the_option(tmp_path, weights):
    module, data = Classifier(DIGITS, optim={"class_weights": weights}), Digits(batch_size=32)
    runner = trainer(tmp_path, max_steps=1, limit_val_batches=1)
    runner.fit(module, datamodule=data)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.optim == module.optim
