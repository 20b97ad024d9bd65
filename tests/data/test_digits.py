import hashlib

import torch

from revzoo.data import Digits
from revzoo.data.order import stratified_split


def _both() -> tuple[Digits, torch.Tensor]:
    data = Digits()
    train, test = data.read("train"), data.read("test")
    assert train is not None
    assert test is not None
    return data, torch.cat([train.sample(), test.sample()])


def test_the_embedded_file_holds_the_whole_uci_test_part() -> None:
    data, images = _both()
    train, test = data.read("train"), data.read("test")
    assert images.shape == (1797, 1, 8, 8)
    assert images.max() == 16
    # class counts from optdigits.names, for optdigits.tes
    counts = torch.bincount(train.labels) + torch.bincount(test.labels)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_split_is_fixed_stratified_and_reproducible() -> None:
    data, images = _both()
    train, test = data.read("train"), data.read("test")
    assert (len(train), len(test)) == (1437, 360)
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    assert digest == "173c95a3ec002b577e206afefd59d5479e16492b7efa07ffd170185811b48421"
    shares = torch.bincount(test.labels) / (
        torch.bincount(train.labels) + torch.bincount(test.labels)
    )
    assert (shares - 360 / 1797).abs().max() < 0.01


def test_the_stored_split_is_the_documented_draw() -> None:
    from importlib.resources import files

    import numpy as np

    with (files("revzoo.data") / "digits.npz").open("rb") as file:
        archive = dict(np.load(file))
    _, drawn = stratified_split(torch.from_numpy(archive["labels"]).long(), 360 / 1797, seed=0)
    assert np.flatnonzero(archive["test"]).tolist() == drawn.tolist()


def test_ready_for_use_without_arguments() -> None:
    data = Digits()
    data.setup("fit")
    assert (data.num_classes, data.in_chans, data.sizes) == (10, 1, (8, 8))
    assert data.classes == [str(digit) for digit in range(10)]
    assert data.batch_size == 64
    assert not data.augment.flip
    assert data.augment.crop_padding == 1
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (64, 1, 8, 8)
    assert labels.dtype == torch.int64


def test_attribution_ships_with_the_data() -> None:
    from importlib.resources import files

    text = (files("revzoo.data") / "digits.md").read_text()
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text
