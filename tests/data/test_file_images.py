from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2

from revzoo.data import Augment
from revzoo.data.file_images import FileImages
from revzoo.data.folders import scan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for n in range(6):
            pixels = rng.integers(0, 256, (40, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "train" / name / f"{n}.png")
    return tmp_path


def _set(
    root: Path,
    augment: Augment | None = None,
    *,
    training: bool,
    sizes: tuple[int, int] = (14, 14),
) -> FileImages:
    return FileImages(
        scan(root).splits["train"],
        classes=["a", "b"],
        channels=3,
        sizes=sizes,
        augment=augment or Augment(),
        training=training,
    )


def test_evaluation_is_torchvisions_image_folder_with_its_usual_transforms(root: Path) -> None:
    steps = [v2.Resize(16), v2.CenterCrop(14), v2.PILToTensor()]
    reference = datasets.ImageFolder(root / "train", v2.Compose(steps))
    data = _set(root, training=False)
    images, labels = data.__getitems__(range(12))
    assert torch.equal(images, torch.stack([image for image, _ in reference]))
    assert labels.tolist() == reference.targets


@pytest.mark.parametrize(
    ("sizes", "resized"),
    [((14, 7), (16, 12)), ((7, 14), (21, 16))],  # of 40 x 30 pixels
)
def test_oblong_crops_are_covered_and_keep_the_aspect(
    root: Path, sizes: tuple[int, int], resized: tuple[int, int]
) -> None:
    steps = [v2.Resize(resized), v2.CenterCrop(sizes), v2.PILToTensor()]
    reference = datasets.ImageFolder(root / "train", v2.Compose(steps))
    assert torch.equal(_set(root, training=False, sizes=sizes)[3][0], reference[3][0])
    train = _set(root, training=True, sizes=sizes)
    assert train[0][0].shape == (3, *sizes)
    assert train._crop.ratio[0] * train._crop.ratio[1] == pytest.approx((sizes[1] / sizes[0]) ** 2)


def test_training_images_are_cropped_at_random_and_evaluation_images_are_not(root: Path) -> None:
    train, held_back = _set(root, training=True), _set(root, training=False)
    assert not torch.equal(train[0][0], train[0][0])
    assert torch.equal(held_back[0][0], held_back[0][0])
    assert train[0][0].shape == (3, 14, 14)
    assert train[0][0].dtype == torch.uint8


def test_crops_show_at_least_the_wanted_part_of_an_image(tmp_path: Path) -> None:
    ramp = np.repeat(np.arange(200, dtype=np.uint8)[None], 200, axis=0)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(ramp).convert("RGB").save(tmp_path / "train" / name / "0.png")

    def narrowest(crop_scale: float) -> int:
        data = _set(tmp_path, Augment(crop_scale=crop_scale, flip=False), training=True)
        crops = [data[0][0][0] for _ in range(60)]
        return min(int(crop.max()) - int(crop.min()) for crop in crops)

    torch.manual_seed(0)
    # of the area, at aspect ratios up to 4/3; the outermost of 14 columns show 13/14 of the width
    assert narrowest(0.9) > 0.9 * 200 * 13 / 14 * (3 / 4) ** 0.5
    assert narrowest(0.08) < 100


def test_a_policy_changes_training_images_alone(root: Path) -> None:
    options = {"crop_padding": 0, "flip": False}
    plain, rotated = Augment(**options), Augment(**options, rotation=90)
    images = _set(root, plain, training=True)[0][0]
    torch.manual_seed(0)
    assert not torch.equal(_set(root, rotated, training=True)[0][0], images)
    assert torch.equal(_set(root, rotated, training=False)[0][0], images)


def test_a_subset_for_evaluation_is_not_augmented(root: Path) -> None:
    subset = _set(root, training=True).subset(torch.tensor([7, 2]), training=False)
    expected = _set(root, training=False)
    assert torch.equal(subset[0][0], expected[7][0])
    assert subset.labels.tolist() == [1, 0]


def test_no_crop_and_no_flip_leave_the_evaluation_image(root: Path) -> None:
    plain = _set(root, Augment(crop_padding=0, flip=False), training=True)
    expected = _set(root, training=False)[3][0]
    assert all(torch.equal(plain[3][0], expected) for _ in range(20))


def test_flip_is_drawn_per_image(root: Path) -> None:
    torch.manual_seed(0)
    expected = _set(root, training=False)[0][0]
    flipping = _set(root, Augment(crop_padding=0, flip=True), training=True)
    drawn = [flipping[0][0] for _ in range(40)]
    mirrored = sum(torch.equal(image, expected.flip(-1)) for image in drawn)
    assert mirrored + sum(torch.equal(image, expected) for image in drawn) == 40
    assert 8 < mirrored < 32


def test_the_sample_is_spread_over_the_set_and_not_augmented(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("revzoo.data.file_images._SAMPLE", 4)
    expected, _ = _set(root, training=False).__getitems__([0, 3, 6, 9])
    assert torch.equal(_set(root, training=True).sample(), expected)
