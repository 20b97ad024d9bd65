import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import EpsImagePlugin, ExifTags, Image, ImageOps

from revzoo.data import Augment, DataError
from revzoo.data.decode import open_image, read_mask, suffixes
from revzoo.data.file_images import FileImages
from revzoo.data.folders import Files
from revzoo.weights.transforms import cropped


def _noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _save(path: Path, pixels: np.ndarray) -> str:
    Image.fromarray(pixels).save(path)
    return str(path)


def loaded(paths: list[str], *, channels: int = 3, size: int) -> torch.Tensor:
    """Images in memory, uint8 (N, C, size, size)."""
    options = {"augment": Augment(), "crop_pct": 1.0, "classes": ["a"]}
    files = Files(paths, list(range(len(paths))))
    images = FileImages(files, channels=channels, sizes=(size, size), **options).loaded()  # type: ignore[arg-type]
    assert images.labels.tolist() == files.labels
    return images.sample()


def test_pixels_arrive_unchanged_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("revzoo.data.file_images._BLOCK", 3)  # several tasks, the last one short
    pixels = [np.roll(_noise(8, 8), n, axis=0) for n in range(10)]
    paths = [_save(tmp_path / f"{n}.png", image) for n, image in enumerate(pixels)]
    images = loaded(paths, size=8)
    assert torch.equal(images, torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))


def test_grey_and_rgb_are_converted_into_each_other(tmp_path: Path) -> None:
    rgb = _save(tmp_path / "rgb.png", _noise(8, 8))
    grey = _save(tmp_path / "grey.png", _noise(8, 8)[..., 0])
    one = loaded([rgb, grey], channels=1, size=8)
    assert torch.equal(one[1, 0], torch.from_numpy(_noise(8, 8)[..., 0]))
    luma = torch.from_numpy(np.array(Image.fromarray(_noise(8, 8)).convert("L")))
    assert torch.equal(one[0, 0], luma)
    three = loaded([rgb, grey], size=8)
    assert torch.equal(three[1], one[1].expand(3, 8, 8))


@pytest.mark.parametrize(
    ("suffix", "orientation"),
    [("jpg", 1), ("jpg", 3), ("jpg", 6), ("jpg", 7), ("png", 8), ("webp", 6), ("tif", 6)],
)
def test_images_are_turned_upright(tmp_path: Path, suffix: str, orientation: int) -> None:
    """The EXIF orientation was ignored: photographs of a telephone lay on their side."""
    path = tmp_path / f"a.{suffix}"
    image, exif = (
        Image.fromarray(np.kron(_noise(3, 2), np.ones((16, 16, 1), np.uint8))),
        Image.Exif(),
    )
    exif[ExifTags.Base.Orientation] = orientation
    image.save(path, exif=exif)
    with Image.open(path) as file:
        upright = np.asarray(ImageOps.exif_transpose(file).convert("RGB"))
    assert np.array_equal(np.asarray(open_image(str(path), 3)), upright)
    assert upright.shape[0] == (48 if orientation < 5 else 32)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_damaged_exif_block_leaves_the_image(tmp_path: Path) -> None:
    for block in (b"Exif\0\0no TIFF", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif"):
        path = tmp_path / "a.jpg"
        Image.fromarray(_noise(8, 8)).save(path, exif=block)
        assert open_image(str(path), 3).size == (8, 8)


def test_shorter_side_is_resized_and_the_middle_kept() -> None:
    left_to_right = np.zeros((10, 30, 3), dtype=np.uint8)
    left_to_right[:, 10:20] = 255
    left_to_right[:2] = 0  # a fifth of the height: one row of the result
    square = cropped(Image.fromarray(left_to_right), (5, 5))
    assert square.size == (5, 5)
    assert np.asarray(square)[0].max() < 128
    assert np.asarray(square)[2:, 1:4].min() == 255


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [("png", "truncated"), ("jpg", "truncated"), ("png", "text"), ("jpg", "empty")],
)
def test_a_corrupt_image_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    good = _save(tmp_path / f"good.{suffix}", _noise(64, 64))
    bad = tmp_path / f"bad.{suffix}"
    whole = Path(good).read_bytes()
    content = {"truncated": whole[: len(whole) // 2], "text": b"no image", "empty": b""}
    bad.write_bytes(content[damage])
    with pytest.raises(DataError, match=f"cannot decode image {bad} .*: replace or remove it"):
        loaded([good, str(bad), good], size=64)


def test_a_png_broken_after_its_first_data_chunk_is_named(tmp_path: Path) -> None:
    path = Path(_save(tmp_path / "bad.png", _noise(300, 300)))
    content = path.read_bytes()
    second = content.index(b"IDAT", content.index(b"IDAT") + 4)
    path.write_bytes(content[:second] + b"\0\0\0\0" + content[second + 4 :])
    with pytest.raises(DataError, match=r"cannot decode image .*bad\.png \(SyntaxError"):
        open_image(str(path), 3)


def test_an_image_too_large_for_pillow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _save(tmp_path / "huge.png", _noise(16, 16))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"cannot decode image .*huge\.png"):
        open_image(path, 3)


def _deep(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 2**16, shape, dtype=np.uint16)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_grey_images_keep_16_bits(tmp_path: Path, suffix: str) -> None:
    path = _save(tmp_path / f"deep.{suffix}", _deep(5, 4))
    for channels in (1, 3):
        pixels = open_image(path, channels)
        assert np.array_equal(np.asarray(pixels), np.broadcast_to(_deep(5, 4), (channels, 5, 4)))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("a.npy", (4, 9, 8)), ("a.tif", (4, 9, 8)), ("a.tif", (9, 8, 4)), ("a.tif", (5, 9, 8))],
)
def test_files_of_many_channels_are_read_whole(
    tmp_path: Path, name: str, shape: tuple[int, ...], kind: type
) -> None:
    """Pillow reduced such TIFFs to 8 bits, or read the first of their channels."""
    path, values = str(tmp_path / name), _deep(*shape).astype(kind)
    if name.endswith("npy"):
        np.save(path, values)
    else:
        planes = "separate" if shape[0] == 4 else None
        colours = "minisblack" if shape[0] == 5 else "rgb"  # with pages of one channel
        tifffile.imwrite(path, values, photometric=colours, planarconfig=planes)
    first = values if shape[0] < 9 else np.moveaxis(values, -1, 0)
    pixels = open_image(path, len(first))
    assert np.array_equal(np.asarray(pixels), first)
    assert np.asarray(pixels).dtype == kind
    with pytest.raises(DataError, match=rf"{len(first)} channels, .*: expected 2, from data"):
        open_image(path, 2)
    open_image(path, None)


def test_colour_tiffs_keep_16_bits(tmp_path: Path) -> None:
    path = str(tmp_path / "a.tif")
    tifffile.imwrite(path, _deep(9, 8, 3), photometric="rgb")
    assert np.array_equal(np.asarray(open_image(path, 3)), np.moveaxis(_deep(9, 8, 3), -1, 0))


def test_a_missing_reader_of_tiffs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", _deep(4, 9, 8), photometric="minisblack")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(DataError, match=r"a\.tif needs tifffile: pip install tifffile"):
        open_image(str(tmp_path / "a.tif"), 4)


def test_transparency_is_the_fourth_channel_if_there_are_four(tmp_path: Path) -> None:
    pixels = np.dstack([_noise(8, 8), _noise(8, 8)[..., :1]])
    path = _save(tmp_path / "a.png", pixels)
    assert np.array_equal(np.asarray(open_image(path, 4)), np.moveaxis(pixels, -1, 0))
    assert np.array_equal(np.asarray(open_image(path, 3)), _noise(8, 8))


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (np.zeros((8, 8), np.float32), "values of type float32: expected 8 or 16 bits"),
        (np.zeros((2, 3, 8, 8), np.uint8), r"the shape \(2, 3, 8, 8\): expected \(C, H, W\) or"),
        (np.array([{}]), "allow_pickle=False"),
    ],
)
def test_arrays_that_are_no_images_are_refused(
    tmp_path: Path, values: np.ndarray, fault: str
) -> None:
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(DataError, match=rf"a\.npy .*{fault}"):
        open_image(str(tmp_path / "a.npy"), 3)


@pytest.mark.parametrize("suffix", ["gif", "jfif", "avif", "JPEG", "bmp", "webp", "jp2"])
def test_every_format_is_read(tmp_path: Path, suffix: str) -> None:
    flat = np.full((16, 16, 3), 200, np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(flat).save(path)
    assert path.name.lower().endswith(suffixes())
    read = np.asarray(open_image(str(path), 3)).astype(int)
    assert read.shape == flat.shape
    assert abs(read - 200).max() <= 3


def test_of_a_moving_picture_the_first_frame_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert open_image(str(tmp_path / "a.gif"), 3).getpixel((0, 0)) == (255, 0, 0)


def test_a_name_that_is_not_utf8_can_be_printed(tmp_path: Path) -> None:
    """A log file could not hold the error message."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    with pytest.raises(DataError, match=r"caf\\udce9\.png") as caught:
        open_image(path, 3)
    str(caught.value).encode()


@pytest.mark.filterwarnings("ignore")  # Pillow also warns of some damage
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_mutated_images_are_read_or_refused_by_name(tmp_path: Path, suffix: str) -> None:
    """Pillow's errors for some damaged images did not name the file."""
    whole = Path(_save(tmp_path / f"good.{suffix}", _noise(8, 8))).read_bytes()
    rng, bad, refused = random.Random(0), tmp_path / f"bad.{suffix}", 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            place = rng.randrange(len(damaged))
            if rng.random() < 0.2:
                del damaged[place : place + rng.randrange(1, 9)]
            else:
                damaged[place] = rng.randrange(256)
        bad.write_bytes(damaged)
        try:
            open_image(str(bad), 3)
        except DataError as error:
            refused += str(bad) in str(error)
    assert refused > 20


def test_an_error_of_any_kind_in_a_decoder_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("of a decoder")

    path = _save(tmp_path / "a.png", _noise(8, 8))
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(DataError, match=r"a\.png \(IndexError: of a decoder\)"):
        open_image(path, 3)


@pytest.mark.parametrize("value", [-1, 65536, 65537])
def test_a_mask_of_32_bits_has_no_values_of_more_than_16(tmp_path: Path, value: int) -> None:
    """65537 became class 1."""
    path = str(tmp_path / "a.tif")
    Image.fromarray(np.array([[1, value]], np.int32)).save(path)
    with pytest.raises(DataError, match=rf"a\.tif has the pixel value {value}: .*renumber them"):
        read_mask(path)
    Image.fromarray(np.array([[1, 65535]], np.int32)).save(path)
    assert read_mask(path).tolist() == [[1, 65535]]


def test_no_other_program_decodes_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PostScript file named ``.png`` was passed to Ghostscript, which runs it."""
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/has-run\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    path = tmp_path / "a.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nrun\n")
    with pytest.raises(DataError, match="cannot identify image file"):
        open_image(str(path), 3)
    assert not (tmp_path / "has-run").exists()
