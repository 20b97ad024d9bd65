import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torchvision.transforms.v2 import functional as v2f

from revzoo.data import Augment
from revzoo.data.augment import POLICIES


def _ramps(count: int, size: int = 8) -> Tensor:
    """Images with distinct pixel values from 1 up, which show any shift."""
    ramp = torch.arange(1, size * size + 1, dtype=torch.uint8).view(1, 1, size, size)
    return ramp.repeat(count, 1, 1, 1)


def _distinct(images: Tensor) -> int:
    return len({image.numpy().tobytes() for image in images})


def test_a_crop_is_a_shift_filled_with_zeros() -> None:
    torch.manual_seed(0)
    augment = Augment(crop_padding=2, flip=False)
    padded = torch.nn.functional.pad(_ramps(1), (2, 2, 2, 2))
    windows = {
        padded[..., y : y + 8, x : x + 8].numpy().tobytes() for y in range(5) for x in range(5)
    }
    seen = {image[None].numpy().tobytes() for image in augment(_ramps(400))}
    assert seen == windows


@pytest.mark.parametrize("sizes", [(4, 7), (7, 4)])
def test_oblong_images_are_cropped_and_flipped_alike(sizes: tuple[int, int]) -> None:
    image = torch.arange(1, 29, dtype=torch.uint8).view(1, 1, *sizes)
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    draws = torch.tensor([[2, 0], [1, 2], [0, 1]])  # rows, columns, flips of two images
    found = Augment(crop_padding=1)(image.repeat(2, 1, 1, 1), draws)
    assert torch.equal(found[:1], padded[..., 2:, 1:-1])
    assert torch.equal(found[1:], padded[..., :-2, 2:].flip(-1))


def test_a_flip_mirrors_left_and_right_half_of_the_time() -> None:
    torch.manual_seed(0)
    out = Augment(crop_padding=0, flip=True)(_ramps(400))
    mirrored = sum(torch.equal(image, _ramps(1)[0].flip(-1)) for image in out)
    kept = sum(torch.equal(image, _ramps(1)[0]) for image in out)
    assert mirrored + kept == 400
    assert 150 < mirrored < 250


def test_each_image_has_its_own_draw_of_all_its_channels() -> None:
    """Eight images shared one crop and one flip."""
    torch.manual_seed(0)
    out = Augment(crop_padding=4)(_ramps(64).repeat(1, 3, 1, 1))
    assert _distinct(out) > 40
    assert torch.equal(out, out[:, :1].expand_as(out))


def test_images_of_a_chunk_share_a_draw_and_chunks_do_not() -> None:
    torch.manual_seed(0)
    out = Augment(crop_padding=4, chunk=8)(_ramps(64))
    assert all(_distinct(chunk) == 1 for chunk in out.split(8))
    assert _distinct(out) > 4


def test_keeps_shape_dtype_and_its_input() -> None:
    images = _ramps(13)
    out = Augment()(images)
    assert out.shape == images.shape
    assert out.dtype == torch.uint8
    assert torch.equal(images, _ramps(13))


def test_nothing_to_do_changes_nothing() -> None:
    assert torch.equal(Augment(crop_padding=0, flip=False)(_ramps(5)), _ramps(5))


@pytest.mark.parametrize(("size", "padding"), [(32, 4), (8, 1), (224, 28)])
def test_default_padding_is_an_eighth(size: int, padding: int) -> None:
    assert Augment().padding((size, 2 * size)) == padding
    assert Augment(crop_padding=3).padding((size, size)) == 3


def test_options_are_checked() -> None:
    assert Augment.of({"flip": False}) == Augment(flip=False)
    assert Augment.of(None) == Augment()
    with pytest.raises(ValueError, match=r"augment.flipp: no such option; did you mean .flip"):
        Augment.of({"flipp": False})
    with pytest.raises(ValueError, match=r"augment.crop_padding=-1: expected a whole number >= 0"):
        Augment(crop_padding=-1)
    with pytest.raises(ValueError, match=r"crop_scale=0: expected a number in \(0, 1\]"):
        Augment(crop_scale=0)
    with pytest.raises(ValueError, match=r"chunk=0: expected a whole number >= 1"):
        Augment(chunk=0)


A3 = "rand-m6-mstd0.5-inc1"  # timm's arguments of its procedure A3
EACH = [{"policy": name} for name in (*POLICIES, A3)]
EACH += [{"rotation": 30}, {"color": 0.4}, {"blur": 1}]


@pytest.mark.parametrize("options", EACH, ids=str)
@pytest.mark.parametrize(("channels", "pixel_max"), [(3, 255), (1, 16)])
def test_a_policy_changes_each_image_by_itself(
    options: dict[str, Any], channels: int, pixel_max: int
) -> None:
    image = torch.randint(pixel_max + 1, (1, channels, 16, 16), dtype=torch.uint8)
    torch.manual_seed(0)
    out = Augment(**options).each(pixel_max, image.repeat(32, 1, 1, 1))[0]
    assert (out.dtype, out.shape) == (torch.uint8, (32, channels, 16, 16))
    assert out.max() <= pixel_max
    assert _distinct(out) > 10


def test_erased_boxes_have_the_mean_colour() -> None:
    torch.manual_seed(0)
    images = torch.ones(200, 3, 16, 16)
    out = Augment(erasing=0.5).erase(images)
    erased = (out == 0).flatten(1).any(1)
    assert 70 < erased.sum() < 130
    assert torch.equal(out[~erased], images[~erased])


def test_erased_boxes_have_noise() -> None:
    torch.manual_seed(0)
    out = Augment(erasing=1.0, erasing_noise=True).erase(torch.ones(100, 3, 32, 32))
    noise = out[out != 1]
    assert noise.mean().abs() < 0.02
    assert 0.98 < noise.std() < 1.02


@pytest.mark.parametrize("option", ["rotation", "color", "blur", "erasing"])
def test_each_option_has_a_range(option: str) -> None:
    with pytest.raises(ValueError, match=f"augment.{option}=-1: expected a number"):
        Augment(**{option: -1})


def test_randaugment_has_a_magnitude() -> None:
    (policy,) = Augment(policy="randaugment", magnitude=18).single
    assert policy.magnitude == 18  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"augment.magnitude=31: expected one of 0, 1, .*, 30"):
        Augment(magnitude=31)


def test_a_policy_is_one_of_torchvisions() -> None:
    with pytest.raises(ValueError, match=r"policy=randaug: expected one of randaugment, .*mean"):
        Augment(policy="randaug")


def test_timms_randaugment_is_timms_and_torch_decides_its_draws() -> None:
    image = torch.randint(256, (3, 24, 24), dtype=torch.uint8)
    picture = v2f.to_pil_image(image)
    (policy,) = Augment(policy=A3).single
    theirs = rand_augment_transform(A3, {"img_mean": (124, 116, 104)})
    changed = 0
    for seed in range(40):
        drawn = int(torch.randint(2**32, (), generator=torch.Generator().manual_seed(seed)))
        random.seed(drawn)
        np.random.seed(drawn)
        expected = theirs(picture)
        before = random.getstate()
        for given in (picture, image):
            torch.manual_seed(seed)
            assert np.array_equal(v2f.to_image(policy(given)), v2f.to_image(expected))
        assert random.getstate() == before
        changed += expected.tobytes() != picture.tobytes()
    assert 20 < changed < 40


def test_timms_magnitudes_have_a_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes of each image, each half of the time, of magnitude 6 with a deviation of 0.5."""
    drawn, gauss = [], random.gauss
    monkeypatch.setattr(random, "gauss", lambda *of: drawn.append(gauss(*of)) or drawn[-1])
    torch.manual_seed(0)
    Augment(policy=A3).each(255, torch.zeros(2000, 3, 8, 8, dtype=torch.uint8))
    assert 1900 < len(drawn) < 2100
    assert np.mean(drawn) == pytest.approx(6, abs=0.05)
    assert np.std(drawn) == pytest.approx(0.5, abs=0.03)


def test_a_policy_is_timms() -> None:
    Augment(policy="rand-m9-n3-mstd0.5-p0.8-mmax12-inc1")
    for wrong in ("rand-", "rand-9", "rand-m9mstd0.5", "rand-mstdx"):
        with pytest.raises(ValueError, match=f"augment.policy={wrong}: .* as rand-m9-mstd0.5-inc1"):
            Augment(policy=wrong)


def test_timm_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.data.auto_augment", None)
    with pytest.raises(ValueError, match=f"policy={A3} needs the package timm: pip install timm"):
        _ = Augment(policy=A3).single
