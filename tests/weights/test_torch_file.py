"""Every reader of torch's files refuses damaged ones and accepts intact ones."""

from __future__ import annotations

import codecs
import contextlib
import copy
import os
import pickle
import random
import re
import time
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import set_crc32_options

from revzoo.interop.foreign import ConversionError, read_tensors
from revzoo.models import create_model
from revzoo.models.weights_file import read_weights_file
from revzoo.training.checkpoint import files
from revzoo.weights.errors import UnreadableWeightsError, WeightsError
from revzoo.weights.torch_file import check_archive

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
    for read, error in (
        (read_weights_file, UnreadableWeightsError),
        (read_tensors, ConversionError),
    ):
        with pytest.raises(
            error, match=r"a\.pt is damaged: the checksum of a/data/0 does not match"
        ):
            read(path)


def test_damage_anywhere_is_reported_as_damage(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.pt", random.Random(0)
    whole, found = save(path), 0
    for place in (*range(len(whole) - 1200, len(whole)), *rng.sample(range(len(whole)), 100)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            check_archive(path)  # bits between the entries have no meaning
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
    for tensors in (read_weights_file(tmp_path / "a.pt").tensors, read_tensors(tmp_path / "a.pt")):
        assert torch.equal(tensors["w"], WEIGHT)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.pt")
    packed = zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "a.pt") as plain, packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(UnreadableWeightsError, match=r"b\.pt is compressed"):
        read_weights_file(tmp_path / "b.pt")


READERS = {
    "zoo": read_weights_file,
    "model": lambda path: create_model("revnet38", checkpoint_path=path),
    "training": files.read_checkpoint,
    "published": read_tensors,
}


def status(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, or ``VmHWM``, the peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def read_with_little_memory(path: Path, *readers: str) -> list[str]:
    """The result of each reader, which must take less than 128 MiB."""
    said = []
    for name in readers or READERS:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM to current use
        before = status("VmRSS")
        try:
            READERS[name](path)
        except (RuntimeError, ValueError) as error:
            said.append(str(error).replace(str(path), path.name))
        else:
            said.append("was read")
        assert status("VmHWM") - before < 2**27, name
    return said


def test_an_expanded_tensor_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """A file of 1,655 bytes with ``torch.zeros(1).expand(700_000_000)`` cost 6.2 GB: its values
    were checked before its shapes.
    """
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"fc.weight": torch.zeros(1).expand(100_000_000)}}, path)
    for said in read_with_little_memory(path):
        assert re.match(r"a\.ckpt: fc.weight of shape \(100000000,\) takes 400,000,000 bytes", said)


class Announced:
    """A tensor with a shape larger than its storage; torch then enlarges the storage."""

    def __init__(self, storage: torch.Tensor, size: int) -> None:
        self.storage, self.size = storage, size

    def __reduce__(self) -> Any:
        storage = torch.storage.TypedStorage(
            wrap_storage=self.storage.untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (
            storage,
            0,
            (self.size,),
            (1,),
            False,
            OrderedDict(),
        )


@pytest.mark.parametrize("zipped", [True, False])
def test_a_storage_is_not_enlarged(zipped: bool, tmp_path: Path) -> None:
    """A shape is larger than its storage: torch refuses it in the versions we support."""
    path = tmp_path / "a.ckpt"
    content = {"state_dict": {"fc.weight": Announced(torch.ones(4), 100_000_000)}}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    for said in read_with_little_memory(path):
        assert re.search("storage|cut off or not a checkpoint", said)


def test_a_bytearray_is_not_filled(tmp_path: Path) -> None:
    """torch allows a pickle to call ``bytearray(n)``, which fills n bytes with zeros."""

    class Filled:
        def __reduce__(self) -> Any:
            return bytearray, (400_000_000,)

    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(1)}, "x": Filled()}, path)
    *refused, published = read_with_little_memory(path)
    assert all("it names builtins.bytearray" in said for said in refused)
    assert published == "was read"  # with a stand-in for the bytearray


class Call:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def digits(times: int) -> Any:
    """Bytes that are hex-encoded ``times`` times, which doubles them each time."""
    found: Any = b"ab"
    for _ in range(times):
        found = Call(codecs.encode, found, "hex")
    return found


def endless() -> Any:
    """A tensor of 8 bytes whose shape repeats them endlessly."""
    storage = torch.storage.TypedStorage(
        wrap_storage=torch.ones(1).untyped_storage(), dtype=torch.float32, _internal=True
    )
    return Call(torch._utils._rebuild_tensor_v2, storage, 0, (10**9,), (0,), False, OrderedDict())


def nested_tuple(levels: int) -> Any:
    """2**levels items in a file that holds one tuple per level."""
    found: Any = (1,)
    for _ in range(levels):
        found = (found, found)
    return found


class Keyed:
    """Pickles as a dictionary with this key; hashing the key here would never end."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter([(self.key, 1)])


BOMBS = {
    "a key of nested tuples": lambda: Keyed(nested_tuple(60)),
    "a set of nested tuples": lambda: Call(set, [nested_tuple(60)]),
    "a counter of nested tuples": lambda: Call(Counter, [nested_tuple(60)]),
    "pairs with a key of nested tuples": lambda: Call(OrderedDict, [[nested_tuple(60), 1]]),
    "hexadecimal digits": lambda: digits(31),
    "a set of a tensor": lambda: Call(set, endless()),
    "a size of a tensor": lambda: Call(torch.Size, endless()),
    "a dictionary of a tensor": lambda: Call(OrderedDict, endless()),
    "a converted tensor": lambda: Call(
        torch._utils._rebuild_device_tensor_from_cpu_tensor,
        endless(),
        torch.float64,
        "cpu",
        False,
    ),
    "a tensor of a size": lambda: Call(torch.FloatTensor, 10**9),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_in_pickles_are_refused_at_once(bomb: str, zipped: bool, tmp_path: Path) -> None:
    """torch's unpickler hashes, encodes and copies arguments from the file."""
    path = tmp_path / "a.ckpt"
    content = {"state_dict": {"w": torch.ones(1)}, "x": BOMBS[bomb]()}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    started = time.monotonic()
    *refused, published = read_with_little_memory(path)
    assert time.monotonic() - started < 2
    assert all(re.search(r"a\.ckpt is (damaged|cut off)", said) for said in refused)
    assert published == "was read" or "a.ckpt is damaged" in published


def test_flat_tuples_are_keys(tmp_path: Path) -> None:
    """Harmless tuples are accepted."""
    content = {"state_dict": {"w": WEIGHT}, "x": {(1, "a", 2.0): {3, 4}, torch.Size([2]): b"bytes"}}
    torch.save(content, tmp_path / "a.ckpt")
    assert files.read_checkpoint(tmp_path / "a.ckpt")["x"] == content["x"]


def test_a_pickle_does_not_choose_the_size_of_the_readers_memo(tmp_path: Path) -> None:
    """Python's C unpickler allocates as many values as the largest index in the file."""
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(1)}, "x": Path}, path)  # Path: not plain
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    put = pickle.LONG_BINPUT + (30_000_000).to_bytes(4, "little")
    parts["a/data.pkl"] = parts["a/data.pkl"].replace(b"q\x00", b"q\x00" + put, 1)
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    assert read_with_little_memory(path, "published") == ["was read"]


def test_files_without_checksums_are_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 600 bare pickles with flipped bits 192 were read silently, with wrong tensors."""
    save(tmp_path / "whole.pt")
    save(tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for read in (read_weights_file, read_tensors):
        caplog.clear()
        read(tmp_path / "whole.pt")
        assert caplog.messages == []
        read(tmp_path / "old.pt")
        assert "old.pt has no checksums, so damage would go unnoticed" in caplog.text


def test_damaged_archives_are_refused_by_name(tmp_path: Path) -> None:
    """Damaged names and versions in an archive's directory raised errors of ``zipfile``."""
    path, rng = tmp_path / "a.pt", random.Random(0)
    whole = save(path)
    directory = whole.index(b"PK\x01\x02")
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(directory, len(whole))] = rng.randrange(256)
        path.write_bytes(damaged)
        for read, error in ((read_weights_file, WeightsError), (read_tensors, ConversionError)):
            try:
                read(path)
            except error as caught:
                assert str(path) in str(caught)  # noqa: PT017


def test_flipped_bits_of_bare_pickles_are_read_or_refused_by_name(tmp_path: Path) -> None:
    """The only outcome is a ConversionError: no large allocation and no hang."""
    path, rng = tmp_path / "a.pt", random.Random(0)
    whole = save(path, _use_new_zipfile_serialization=False)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 8))):
            damaged[rng.randrange(700)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        tensors = {}
        with contextlib.suppress(ConversionError):
            tensors = read_tensors(path)
        refused += not tensors
        assert sum(t.numel() * t.element_size() for t in tensors.values()) <= len(whole)
    assert refused > 100


def in_seconds(path: Path, seconds: float = 5) -> list[str]:
    """The result of each reader for ``path``, within a time limit."""
    said = []
    for read in (read_weights_file, files.read_checkpoint, read_tensors):
        start = time.monotonic()
        with pytest.raises((RuntimeError, ValueError), match=re.escape(str(path))) as caught:
            read(path)
        assert time.monotonic() - start < seconds
        said.append(str(caught.value))
    return said


def test_sixty_thousand_entries_over_one_record_are_refused_at_once(tmp_path: Path) -> None:
    """Its checksums took more than 20 s, and the tensors would take 60,000 times the file."""
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data/0", bytes(2**20))
        one = archive.filelist[0]
        for index in range(1, 60_000):
            other = copy.copy(one)
            other.filename = f"a/data/{index:05}"
            archive.filelist.append(other)
        archive._didModify = True  # type: ignore[attr-defined]
    assert all("more memory than its" in said or "verlap" in said for said in in_seconds(path))


@pytest.mark.parametrize("place", ["epoch", "state_dict", "hyper_parameters"])
def test_shared_lists_are_refused_at_once(place: str, tmp_path: Path) -> None:
    """40 levels of ``l = [l] * 10`` have 10**40 paths, all of which we once walked."""
    shared: list[Any] = [1.0]
    for _ in range(40):
        shared = [shared] * 10
    content = {"state_dict": {"w": torch.ones(1)}, "hyper_parameters": {"model": {}}}
    content[place] = {"x": shared} if place == "state_dict" else {"model": {"name": shared}}
    torch.save(content, tmp_path / "a.ckpt")
    assert all("more than 2,000,000 values" in said for said in in_seconds(tmp_path / "a.ckpt"))


def test_deep_lists_and_lists_that_hold_themselves_are_refused(tmp_path: Path) -> None:
    """Walking the content raised a RecursionError."""
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    own: list[Any] = []
    own.append(own)
    for bad in (deep, own):
        torch.save({"state_dict": {"w": torch.ones(1)}, "x": bad}, tmp_path / "a.ckpt")
        assert all("more than 50 deep" in said for said in in_seconds(tmp_path / "a.ckpt"))


def test_a_pipe_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Opening a pipe blocks until a writer comes."""
    os.mkfifo(tmp_path / "a.ckpt")
    assert all("there is no" in said for said in in_seconds(tmp_path / "a.ckpt"))
