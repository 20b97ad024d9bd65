"""Damaged files of torch are refused wherever they are read; whole ones are not."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch.serialization import set_crc32_options

from revzoo.interop.foreign import ConversionError, read_tensors
from revzoo.models.tensors import read_checkpoint
from revzoo.weights.archive import check_archive
from revzoo.weights.errors import UnreadableWeightsError

WEIGHT = torch.arange(1000.0)


def save(path: Path, **options: bool) -> bytes:
    torch.save({"state_dict": {"w": WEIGHT}}, path, **options)
    return path.read_bytes()


def test_a_flipped_bit_of_a_weight_is_found_by_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    whole = save(path)
    damaged = bytearray(whole)
    damaged[whole.index(WEIGHT.numpy().tobytes()) + 402] ^= 0x3F
    path.write_bytes(damaged)
    assert not torch.equal(torch.load(path)["state_dict"]["w"], WEIGHT), "torch says nothing"
    for read, error in ((read_checkpoint, UnreadableWeightsError), (read_tensors, ConversionError)):
        with pytest.raises(error, match=r"a\.pt is damaged, the sum of a/data/0 does not match"):
            read(path)


def test_damage_anywhere_is_told_as_damage(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.pt", random.Random(0)
    whole, found = save(path), 0
    for place in (*range(len(whole) - 1200, len(whole)), *rng.sample(range(len(whole)), 100)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            check_archive(path)  # a bit between the entries means nothing
        except UnreadableWeightsError:
            found += 1
    assert found > 100


@pytest.mark.parametrize("zipped", [True, False])
def test_files_without_sums_are_read(zipped: bool, tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        save(tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    finally:
        set_crc32_options(True)
    for tensors in (read_checkpoint(tmp_path / "a.pt").tensors, read_tensors(tmp_path / "a.pt")):
        assert torch.equal(tensors["w"], WEIGHT)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.pt")
    packed = zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "a.pt") as plain, packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(UnreadableWeightsError, match=r"b\.pt is compressed"):
        read_checkpoint(tmp_path / "b.pt")
