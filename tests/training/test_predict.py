"""``revzoo.predict`` with all types of images and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from small_weights import small

import revzoo
from revzoo.data import DataError
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.weights.errors import UnknownWeightsError

CLASSES = tuple("abcde")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    facts = {"classes": CLASSES, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    small().save_pretrained(tmp_path / "net", **facts, input_size=(3, 8, 8))
    return tmp_path / "net"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 3), dtype=np.uint8)
    path = tmp_path / "cat.png"
    Image.fromarray(pixels).save(path)
    return path


def test_an_image_returns_the_probability_of_each_class(folder: Path, image: Path) -> None:
    found = revzoo.predict(str(image), folder)
    model = revzoo.create_model(folder, pretrained=True).eval()
    with torch.no_grad():
        row = model(model.transforms()(Image.open(image))[None]).softmax(1)[0]
    assert found == pytest.approx(dict(zip(CLASSES, row.tolist(), strict=True)), rel=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert list(revzoo.predict(image, folder, top=2)) == list(found)[:2]


def test_an_opened_image_is_turned_upright_as_its_file_is(folder: Path, image: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with Image.open(image) as file:
        upright = revzoo.predict(file, folder)
        file.save(image, exif=exif)
    with Image.open(image) as file:
        turned = revzoo.predict(file, folder)
    assert turned == revzoo.predict(image, folder) != upright


def test_a_list_of_images_returns_a_list(folder: Path, image: Path) -> None:
    picture = Image.open(image)
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    model = revzoo.create_model(folder, pretrained=True)
    found = revzoo.predict([image, str(image), picture, tensor], model)
    assert model.training
    one = revzoo.predict(image, folder)
    assert all(p == pytest.approx(one, rel=1e-2) for p in found)
    assert all(list(p) == list(one) for p in found)


def test_the_mean_over_mirror_images(folder: Path, image: Path) -> None:
    picture = torch.from_numpy(np.array(Image.open(image))).permute(2, 0, 1)
    plain, mirrored = (revzoo.predict(p, folder) for p in (picture, picture.flip(-1)))
    expected = {name: (p + mirrored[name]) / 2 for name, p in plain.items()}
    assert revzoo.predict(image, folder, tta="flip") == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="tta=flop: expected one of None, flip"):
        revzoo.predict(image, folder, tta="flop")


def test_floats_that_overshoot_by_interpolation_are_clamped(folder: Path) -> None:
    tensor = torch.linspace(-0.05, 1.05, 192).view(3, 8, 8)
    clamped = revzoo.predict(tensor.clamp(0, 1), folder)
    assert revzoo.predict(tensor, folder) == pytest.approx(clamped)


def test_a_wrong_image_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no image dog\.jpg$"):
        revzoo.predict("dog.jpg", folder)
    with pytest.raises(DataError, match="is a folder: give a list"):
        revzoo.predict(tmp_path, folder)
    with pytest.raises(TypeError, match="image is a int"):
        revzoo.predict([1], folder)  # type: ignore[list-item]


def test_a_model_must_know_its_classes(folder: Path, image: Path) -> None:
    with pytest.raises(ValueError, match="training images are unknown"):
        revzoo.predict(image, small())
    model = revzoo.create_model(folder, pretrained=True)
    model.reset_classifier(5)
    with pytest.raises(ValueError, match="with unknown classes"):
        revzoo.predict(image, model)


def test_tensors_that_are_not_images(folder: Path) -> None:
    """Floats of 0 to 255 were classified without an error."""
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 8\): expected \(C, H, W\).*list\(images\)"):
        revzoo.predict(torch.rand(2, 3, 8, 8), folder)
    for image in (torch.full((3, 8, 8), 255.0), torch.full((3, 8, 8), -1.0)):
        with pytest.raises(ValueError, match=r"float32 with values from .* floats from 0 to 1"):
            revzoo.predict(image, folder)
    with pytest.raises(ValueError, match=r"\(8, 8, 3\): .* 3 channels; image\.permute\(2, 0, 1\)"):
        revzoo.predict(torch.rand(8, 8, 3), folder)
    with pytest.raises(ValueError, match=r"\(4, 8, 8\): expected \(C, H, W\) with 3 channels"):
        revzoo.predict(torch.rand(4, 8, 8), folder)
    with pytest.raises(ValueError, match=r"of torch\.int64 .* image\.to\(torch\.uint8\)"):
        revzoo.predict(torch.full((3, 8, 8), 255), folder)
    with pytest.raises(TypeError, match=r"model is a Tensor: .* predict\(images, model\)"):
        revzoo.predict(folder, torch.rand(3, 8, 8))  # type: ignore[call-overload]


@pytest.mark.parametrize(("option", "number"), [("top", 0), ("top", 2.5), ("size", -1)])
def test_counts_are_whole_numbers(option: str, number: Any, image: Path, folder: Path) -> None:
    """``top=0`` gave an empty result."""
    with pytest.raises(ValueError, match=rf"{option}={number}: expected a whole number >= 1"):
        revzoo.predict(image, folder, **{option: number})


def test_a_run_is_not_weights(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for source in (tmp_path, tmp_path / "checkpoints" / "best.ckpt"):
        with pytest.raises(UnknownWeightsError, match=r"a run or its checkpoint.*revzoo export"):
            revzoo.from_pretrained(source)


def test_an_output_of_nan_is_refused(folder: Path, image: Path) -> None:
    model = revzoo.create_model(folder, pretrained=True)
    with torch.no_grad():
        model.fc.bias.fill_(float("nan"))
    with pytest.raises(CheckpointError, match=r"output is NaN or Inf: .* earlier checkpoint"):
        revzoo.predict(image, model)


def test_a_misspelt_name_suggests_the_nearest(image: Path) -> None:
    """``revnet39`` was taken for the path of a checkpoint."""
    with pytest.raises(UnknownWeightsError, match=r"folder 'revnet39'; did you mean '\w+net38"):
        revzoo.predict(image, "revnet39")


def test_a_grey_image_of_16_bits_has_the_class_of_its_8_bits(tmp_path: Path) -> None:
    shallow = np.kron(np.arange(16, dtype=np.uint8).reshape(4, 4), np.ones((2, 2), np.uint8)) * 16
    deep = Image.fromarray(shallow.astype(np.uint16) * 257)
    deep.save(tmp_path / "deep.png")
    expected = revzoo.predict(Image.fromarray(shallow), "irevnet13.digits")
    for image in (deep, tmp_path / "deep.png"):
        assert revzoo.predict(image, "irevnet13.digits") == pytest.approx(expected, abs=1e-4)


def test_classes_of_the_same_name_keep_their_own_probabilities(tmp_path: Path) -> None:
    """One of them hid the other: the best class was listed with the last one's probability."""
    names = ("crane", "b", "crane", "d", "e")
    facts = {"classes": names, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    network = small()
    x = torch.rand(3, 8, 8)
    by_label = list(
        revzoo.predict(x, saved(network, tmp_path / "a", **facts | {"classes": CLASSES})).items()
    )
    found = list(revzoo.predict(x, saved(network, tmp_path / "b", **facts)).items())
    assert [p for _, p in found] == [p for _, p in by_label]
    as_letters = {"crane (0)": "a", "crane (2)": "c"}
    assert [as_letters.get(name, name) for name, _ in found] == [name for name, _ in by_label]


def test_a_class_may_have_the_name_that_another_one_gets(tmp_path: Path) -> None:
    """Its probability replaced the other's."""
    names = ("crane (2)", "crane", "crane", "d", "e")
    facts = {"classes": names, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    found = revzoo.predict(torch.rand(3, 8, 8), saved(small(), tmp_path, **facts))
    assert len(found) == 5
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize("channels", [2, 4])
def test_images_of_other_channels_are_tensors_or_files(channels: int, tmp_path: Path) -> None:
    """Torchvision's conversion to grey refused them, even with the right channels."""
    facts = {"classes": CLASSES, "mean": [0.5] * channels, "std": [0.2] * channels}
    network = small(in_chans=channels)
    network.save_pretrained(tmp_path, **facts, input_size=(channels, 8, 8))
    x = torch.rand(channels, 8, 8)
    found = revzoo.predict(x, tmp_path)
    with torch.no_grad():
        expected = network.eval()((x[None] - 0.5) / 0.2).softmax(1)[0]
    assert found == pytest.approx(dict(zip(CLASSES, expected.tolist(), strict=True)), abs=1e-6)
    values = np.random.default_rng(0).integers(0, 2**16, (channels, 8, 8), dtype=np.uint16)
    np.save(tmp_path / "a.npy", values)
    expected = revzoo.predict(torch.from_numpy(values / 65535).float(), tmp_path)
    assert revzoo.predict(tmp_path / "a.npy", tmp_path) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(DataError, match=f"image has 3 channels, .*: expected {channels}, from"):
        revzoo.predict(Image.new("RGB", (8, 8)), tmp_path)
    with pytest.raises(ValueError, match=rf"\(C, H, W\) with {channels} channels"):
        revzoo.predict(torch.rand(1, 8, 8), tmp_path)


def saved(network: Any, folder: Path, **facts: Any) -> Path:
    network.save_pretrained(folder, **facts, input_size=(3, 8, 8))
    return folder


def test_images_without_pixels_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 0, 8\): expected"):
        revzoo.predict(torch.zeros(3, 0, 8), folder)


def test_an_array_is_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"is a ndarray.*PIL\.Image\.fromarray\(image\)"):
        revzoo.predict(np.zeros((8, 8, 3), np.uint8), folder)  # type: ignore[call-overload]
