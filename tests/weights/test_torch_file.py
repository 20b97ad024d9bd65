"""Every reader of torch's files refuses damaged ones and accepts intact ones."""

from __future__ import annotations

import codecs
import copy
import io
import os
import random
import re
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import set_crc32_options

from revzoo.interop.foreign import ConversionError, read_tensors
from revzoo.models import create_model
from revzoo.models.weights_file import read_weights_file
from revzoo.training.checkpoint import files
from revzoo.weights import torch_file
from revzoo.weights.errors import UnreadableWeightsError, WeightsError

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
            error, match=r"a\.pt is damaged.*the checksum of a/data/0 does not match"
        ):
            read(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_without_sums_are_read(zipped: bool, tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        save(tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    finally:
        set_crc32_options(True)
    for tensors in (read_weights_file(tmp_path / "a.pt").tensors, read_tensors(tmp_path / "a.pt")):
        assert torch.equal(tensors["w"], WEIGHT)


def renamed(path: Path, names: Mapping[str, str], kind: int = zipfile.ZIP_STORED) -> None:
    """Write an archive again, with other names of its records, or compressed."""
    with zipfile.ZipFile(path) as archive:
        parts = {names.get(name, name): archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)


def program_in_a_state_dict(folder: Path) -> Path:
    """A file whose last directory lists a state_dict, and whose recorded one lists a program."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(100, 100)), folder / "program.pt")
    program = (folder / "program.pt").read_bytes()
    with zipfile.ZipFile(folder / "program.pt") as archive:
        begin, count = archive.start_dir, len(archive.filelist)
    torch.save({"w": WEIGHT}, folder / "plain.pt")
    plain = io.BytesIO()
    with zipfile.ZipFile(folder / "plain.pt") as archive, zipfile.ZipFile(plain, "w") as copied:
        for name in archive.namelist():
            copied.writestr(name, archive.read(name))
        copied.infolist()[-1].comment = bytes(20_000)  # at least as long as the program's directory
    end = copied.start_dir
    records, listed = plain.getvalue()[:end], plain.getvalue()[end:-22]
    # Python takes the directory before the end, and shifts all offsets by what lies before it
    shift = len(program) + len(records) - begin
    for place in [found.start() for found in re.finditer(b"PK\x01\x02", listed)]:
        offset = int.from_bytes(listed[place + 42 : place + 46], "little")
        moved = offset + len(program) - shift
        listed = listed[: place + 42] + moved.to_bytes(4, "little") + listed[place + 46 :]
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(listed), begin, 0)
    path = folder / "both.pt"
    path.write_bytes(program + records + listed + tail)
    return path


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:.torch.load. received")
def test_a_program_behind_a_second_directory_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``convert`` ran it: the check read the archive with Python's ``zipfile``, torch otherwise."""
    path, loaded = program_in_a_state_dict(tmp_path), []
    with zipfile.ZipFile(path) as archive:
        assert not any("constants.pkl" in name for name in archive.namelist()), "Python's view"
    assert torch._C.PyTorchFileReader(str(path)).has_record("constants.pkl"), "torch's view"
    monkeypatch.setattr(torch.jit, "load", lambda *args, **options: loaded.append(args))
    for read in READERS.values():
        with pytest.raises((RuntimeError, ValueError), match=r"both\.pt holds a program"):
            read(path)
    assert loaded == []


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
    """The result of each reader, or of some; none may take 384 MiB here."""
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
        assert status("VmHWM") - before < 3 * 2**27, name
    return said


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of one second of CPU time, to save time here."""
    monkeypatch.setattr(torch_file, "SECONDS", 1)


def test_an_expanded_tensor_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """A file of 1,655 bytes with ``torch.zeros(1).expand(700_000_000)`` cost 6.2 GB: its values
    were checked before its shapes.
    """
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"fc.weight": torch.zeros(1).expand(100_000_000)}}, path)
    for said in read_with_little_memory(path):
        assert re.search(r"'fc.weight'\] of shape \(100000000,\) takes 400,000,000 bytes", said)


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
        assert re.search("storage|Cannot allocate memory", said)


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
        return OrderedDict, (), None, None, iter([(self.key, 1)])


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
    "a bytearray": lambda: Call(bytearray, 10**9),
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_in_pickles_are_refused(bomb: str, tmp_path: Path) -> None:
    """torch's unpickler hashes, encodes and copies arguments from the file."""
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(1)}, "x": BOMBS[bomb]()}, path)
    for said in read_with_little_memory(path, "training"):
        assert re.match(r"a\.ckpt (is damaged|has .* bytes, but takes more than 1 s)", said)


@pytest.mark.usefixtures("short")
def test_the_names_of_records_hide_nothing(tmp_path: Path) -> None:
    """``data.PKL`` hung: only ``.pkl`` was checked, and torch ignores the case of names."""
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(1)}, "x": Keyed(nested_tuple(60))}, path)
    renamed(path, {"a/data.pkl": "a/data.PKL"})
    for said in read_with_little_memory(path):
        assert "takes more than 1 s" in said


def test_compressed_records_may_not_inflate(tmp_path: Path) -> None:
    """1.5 MB took 1.5 GB. What torch can read in bounded memory is read."""
    path = tmp_path / "a.pt"
    save(path)
    renamed(path, {}, zipfile.ZIP_DEFLATED)
    assert torch.equal(read_weights_file(path).tensors["w"], WEIGHT)
    torch.save({"state_dict": {"w": torch.zeros(100_000_000)}}, path)
    renamed(path, {}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**20
    for said in read_with_little_memory(path, "published"):
        assert "can't allocate memory" in said


def test_flat_tuples_are_keys(tmp_path: Path) -> None:
    """Harmless tuples are accepted."""
    content = {"state_dict": {"w": WEIGHT}, "x": {(1, "a", 2.0): {3, 4}, torch.Size([2]): b"bytes"}}
    torch.save(content, tmp_path / "a.ckpt")
    assert files.read_checkpoint(tmp_path / "a.ckpt")["x"] == content["x"]


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
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(directory, len(whole))] = rng.randrange(256)
        path.write_bytes(damaged)
        for read, error in ((read_weights_file, WeightsError), (read_tensors, ConversionError)):
            try:
                read(path)
            except error as caught:
                assert str(path) in str(caught)  # noqa: PT017


def in_seconds(path: Path, seconds: float = 6) -> list[str]:
    """The result of each reader for ``path``, within a time limit."""
    said = []
    for read in (read_weights_file, files.read_checkpoint, read_tensors):
        start = time.monotonic()
        with pytest.raises((RuntimeError, ValueError), match=re.escape(str(path))) as caught:
            read(path)
        assert time.monotonic() - start < seconds
        said.append(str(caught.value))
    return said


@pytest.mark.usefixtures("short")
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
    assert all("a.ckpt" in said for said in in_seconds(path))


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
