"""Data modules and transforms by name, from the package and registered by users."""

from pathlib import Path

import numpy as np
import pytest
import torch
from small_images import image_folder
from torchvision.transforms import v2

import revzoo
from revzoo.cli.config import check_value
from revzoo.cli.run.build import build_data
from revzoo.cli.schema import AUGMENT
from revzoo.cli.terminal import ConfigError
from revzoo.data import (
    CIFAR10,
    CIFAR100,
    DATA,
    Blobs3d,
    DictTransform,
    Digits,
    ImageFolder,
    Masks,
    Shapes,
    Shards,
    Table,
    Volumes,
)
from revzoo.data.augment import POLICIES


class Sevens(Digits):
    """A user's set."""


@pytest.fixture
def table(monkeypatch):
    table = dict(DATA)
    for module in ("revzoo.data.registry", "revzoo.cli.run.build"):
        monkeypatch.setattr(f"{module}.DATA", table)
    return table


def test_the_package_registers_its_own():
    kinds = (Blobs3d, CIFAR10, CIFAR100, Digits, ImageFolder, Masks, Shapes, Shards, Table, Volumes)
    assert {f"revzoo.data.{kind.__name__}": kind for kind in kinds} == DATA


def test_a_registered_set_is_built_from_a_configuration(table):
    revzoo.register_data("sevens", Sevens)
    assert type(build_data({"_target_": "sevens", "batch_size": 7})) is Sevens


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("revzoo.data.Digits", Sevens, "'revzoo.data.Digits' is already registered"),
        ("digits", type("Digits", (Digits,), {}), "class Digits is already registered"),
        ("digits", Sevens(), "expected a subclass of ImageData"),
        ("digits", dict, "expected a subclass of ImageData"),
    ],
)
def test_what_cannot_be_registered_is_refused(name, kind, message, table):
    with pytest.raises((ValueError, TypeError), match=message):
        revzoo.register_data(name, kind)
    assert table == DATA


@pytest.fixture
def black(monkeypatch):
    """A transform that makes images black."""
    table = dict(POLICIES)
    for module in ("augment", "registry"):
        monkeypatch.setattr(f"revzoo.data.{module}.POLICIES", table)
    revzoo.register_transform("black", Black)
    return table


class Black:
    """No transform of torchvision, but a function."""

    def __call__(self, image):
        return image * 0 if isinstance(image, torch.Tensor) else image.point(lambda _: 0).copy()


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_a_registered_transform_changes_training_images(black, tmp_path: Path, cache_bytes: int):
    options = {"augment": {"policy": "black"}, "batch_size": 4, "num_workers": 0}
    data = ImageFolder(image_folder(tmp_path), cache_bytes=cache_bytes, image_size=8, **options)
    data.setup("fit")
    images, _ = next(iter(data.train_dataloader()))
    assert data.shown(data.transform(images, training=True)).max() < 1e-6
    images, _ = next(iter(data.val_dataloader()))
    assert data.shown(data.transform(images, training=False)).max() > 0.1
    check_value("data.augment.policy", "black", AUGMENT.options["policy"])
    with pytest.raises(ConfigError, match=r"expected one of .*augmix, .*black, null; did"):
        check_value("data.augment.policy", "blakc", AUGMENT.options["policy"])


def test_names_of_transforms_are_new_and_builders_callable(black):
    with pytest.raises(ValueError, match="transform 'black' is already registered"):
        revzoo.register_transform("black", Black)
    with pytest.raises(TypeError, match="expected the class, or a function that builds it"):
        revzoo.register_transform("white", 255)


def of_torchvision():
    return v2.RandomRotation((180, 180))


def of_monai():
    transforms = pytest.importorskip("monai.transforms")
    flip = transforms.RandFlipd(["image", "label"], prob=1, spatial_axis=(-1, -2))
    return DictTransform(transforms.Compose([flip]))


@pytest.mark.parametrize(
    ("kind", "build"), [(Shapes, of_torchvision), (Shapes, of_monai), (Blobs3d, of_monai)]
)
def test_a_registered_transform_takes_masks(black, kind, build):
    revzoo.register_transform("turn", build)
    options = {"crop_padding": 0, "flip": False}
    data, plain = (kind(augment={**options, "policy": p}, batch_size=4) for p in ("turn", None))
    for each in (data, plain):
        each.setup("fit")
    images, masks = data._images("train")[:4]
    masks[0, 0] = 255
    turned = data._augmented_masks(images, masks, None)
    kept = plain._augmented_masks(images, masks, None)
    for one, other in zip(turned, kept, strict=True):
        assert torch.equal(one.flip((-1, -2)), other)


def test_transforms_of_dictionaries_read_files_and_repeat_their_draws(black, tmp_path: Path):
    transforms = pytest.importorskip("monai.transforms")
    noise = transforms.RandGaussianNoised(["image"], prob=1, std=0.5, sample_std=False)
    revzoo.register_transform("noise", lambda: DictTransform(noise))
    flip = transforms.RandFlipd(["image", "label"], prob=1, spatial_axis=0)
    revzoo.register_transform("flip", lambda: DictTransform(flip))
    for part in ("images", "labels"):
        (tmp_path / "train" / part).mkdir(parents=True)
        for n in range(3):
            volume = np.arange(8**3, dtype=np.uint8).reshape(8, 8, 8) % 3
            np.save(tmp_path / "train" / part / f"{n}.npy", volume)

    def patches(policy):
        augment = {"policy": policy, "flip": False}
        data = Volumes(tmp_path, patch=[8, 8, 8], augment=augment, num_workers=0, val_fraction=0.4)
        data.setup("fit")
        (train := data._images("train")).begin_epoch(0, 0)
        return train[0]

    (volume, mask), (again, _), (plain, classes) = map(patches, ("noise", "noise", None))
    assert torch.equal(volume, again)
    assert 0.3 < (volume - plain).std() < 0.7
    assert torch.equal(mask, classes)
    volume, mask = patches("flip")
    assert torch.equal(volume.flip(1), plain)
    assert torch.equal(mask.flip(0), classes)
