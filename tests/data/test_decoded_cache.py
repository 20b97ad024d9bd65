"""Decoded images are read again by the next run on the same files."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_images import image_folder

from revzoo.data import DataError, ImageFolder, Masks, decoded_cache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return image_folder(tmp_path / "images")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small sets, too, are worth an entry."""
    monkeypatch.setattr(decoded_cache, "WORTH", 0)
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))


def _pixels(root: Path, **options: Any) -> torch.Tensor:
    data = ImageFolder(root, **options)
    data.setup("fit")
    return torch.cat([data._images(split).sample() for split in ("train", "val")])  # type: ignore[arg-type]


def _entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "images").glob("*"))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the images that are decoded."""
    from revzoo.data import file_images

    paths: list[str] = []
    read = file_images.open_image

    def spy(path: str, *args: Any, **options: Any) -> Any:
        paths.append(path)
        return read(path, *args, **options)

    monkeypatch.setattr(file_images, "open_image", spy)
    return paths


def test_the_second_start_decodes_nothing(root: Path, tmp_path: Path, decoded: list[str]) -> None:
    first = _pixels(root)
    assert len(decoded) == 40
    assert torch.equal(_pixels(root), first)
    assert len(decoded) == 40
    (entry,) = _entries(tmp_path)
    assert entry.parent.stat().st_mode & 0o077 == 0
    data = ImageFolder(root)
    data.setup("fit")
    assert any(str(entry.parent) in note for note in data.notes)


@pytest.mark.parametrize("change", ["content", "size", "channels", "name", "damage", "cut"])
def test_a_change_decodes_again(
    root: Path, tmp_path: Path, decoded: list[str], change: str, caplog: pytest.LogCaptureFixture
) -> None:
    _pixels(root)
    options, path = {}, next(root.rglob("train/dark/*.png"))
    if change == "content":
        Image.new("RGB", (8, 8), "red").save(path)
        os.utime(path, (1, 1))  # clocks of some file systems are coarse
    elif change == "name":
        path.rename(path.with_name("other.png"))
    elif change == "damage":
        _entries(tmp_path)[0].write_bytes(b"no tensors")
    elif change == "cut":
        whole = _entries(tmp_path)[0].read_bytes()
        _entries(tmp_path)[0].write_bytes(whole[: len(whole) // 2])
    else:
        options = {"size": {"image_size": 6}, "channels": {"in_chans": 1}}[change]
    with caplog.at_level(logging.WARNING):
        pixels = _pixels(root, **options)
    assert len(decoded) == 80
    assert torch.equal(_pixels(root, **options), pixels)
    assert len(decoded) == 80
    assert torch.equal(pixels, _pixels(root, **options, cache_dir=None))
    assert ("cannot be read" in caplog.text) == (change in ("damage", "cut"))


def test_a_cache_may_be_elsewhere_or_nowhere(
    root: Path, tmp_path: Path, decoded: list[str]
) -> None:
    _pixels(root, cache_dir=None)
    assert not _entries(tmp_path)
    _pixels(root, cache_dir=str(tmp_path / "own"))
    assert len([*(tmp_path / "own").iterdir()]) == 1
    assert not _entries(tmp_path)


def test_short_decoding_and_skipped_files_are_not_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(root.rglob("train/dark/*.png")).write_bytes(b"")
    assert len(_pixels(root, on_error="skip")) == 39
    with pytest.raises(DataError):
        _pixels(root)
    assert not _entries(tmp_path)
    for path in root.rglob("train/dark/*.png"):
        Image.new("RGB", (8, 8)).save(path)
    monkeypatch.setattr(decoded_cache, "WORTH", 1000)
    _pixels(root)
    assert not _entries(tmp_path)


def test_the_least_recently_used_entries_go(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (8, 7, 6):
        _pixels(root, image_size=size)
    killed = tmp_path / "cache" / "images" / ".0.1.safetensors"  # while it wrote
    killed.write_bytes(b"0")
    for age, entry in enumerate(_entries(tmp_path), 1):
        os.utime(entry, (age, age))
    os.utime(killed, (0, 0))
    _pixels(root, image_size=8)  # used again
    _, oldest, *_ = sorted(_entries(tmp_path), key=lambda entry: entry.stat().st_mtime)
    total = sum(entry.stat().st_size for entry in _entries(tmp_path) if entry != killed)
    monkeypatch.setattr(decoded_cache, "LIMIT", total)
    _pixels(root, image_size=5)
    left = _entries(tmp_path)
    assert oldest not in left
    assert len(left) == 3
    monkeypatch.setattr(decoded_cache, "LIMIT", 10)  # less than an entry
    _pixels(root, image_size=4)
    assert _entries(tmp_path) == left


def test_a_folder_that_cannot_be_written_warns(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert len(_pixels(root, cache_dir=str(tmp_path / "file" / "cache"))) == 40
    assert "not kept for the next run" in caplog.text


def test_masks_are_kept_with_their_classes(tmp_path: Path, decoded: list[str]) -> None:
    root = tmp_path / "set"
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
        for n in range(10):
            Image.new("L", (8, 8), n % 2).save(root / part / f"{n}.png")

    def labels(classes: list[str] | dict[int, str]) -> torch.Tensor:
        data = Masks(root, classes=classes)
        data.setup("fit")
        return data.train_labels

    first = labels(["a", "b"])
    assert torch.equal(labels(["a", "b"]), first)
    assert len(decoded) == 10
    assert torch.equal(labels({1: "a", 0: "b"}), 1 - first)
    assert np.asarray(first).max() == 1


def test_a_bar_shows_the_images_that_are_decoded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    from revzoo.data import file_images

    bar = file_images.tqdm
    monkeypatch.setattr(file_images, "tqdm", lambda **options: bar(**{**options, "delay": 0}))
    _pixels(root)
    assert "decoding images" in terminal.getvalue()
    assert "/40" in terminal.getvalue()
