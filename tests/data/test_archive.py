"""Archives: what would be written elsewhere, or without end, is refused before anything is."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from revzoo.data.archive import ArchiveError, unpack
from revzoo.data.errors import DataError

LIMITS = {"max_bytes": 10_000, "max_members": 10}
Change = Callable[[tarfile.TarInfo], object]


def member(name: str, *, size: int = 5, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def archive(path: Path, *members: tarfile.TarInfo, content: bytes = b"hello") -> Path:
    """A tar file with a good first member and these; sizes are what their headers say."""
    with tarfile.open(path, "w:gz") as tar:
        for info in (member("set/good"), *members):
            there = info.isreg() and info.size <= 20_000
            data = io.BytesIO(content.ljust(info.size)[: info.size]) if there else None
            tar.addfile(info, data)
    return path


def everything_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_files_and_folders_arrive(tmp_path: Path) -> None:
    folder = member("set/deep", type=tarfile.DIRTYPE, size=0)
    path = archive(tmp_path / "a.tar.gz", folder, member("set/deep/x"))
    unpack(path, tmp_path / "set", **LIMITS)
    assert everything_below(tmp_path) == ["a.tar.gz", "set", "set/deep", "set/deep/x", "set/good"]
    assert (tmp_path / "set" / "deep" / "x").read_bytes() == b"hello"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (member("../out"), "expected paths below set/"),
        (member("set/../../out"), "expected paths below set/"),
        (member("/tmp/out"), "expected paths below set/"),
        (member("other/out"), "expected paths below set/"),
        (member("set/..\\out"), "expected paths below set/"),
        (member("set"), "expected a folder set/"),
        (member("set/link", size=0, type=tarfile.SYMTYPE, linkname="/etc"), "is a link"),
        (member("set/link", size=0, type=tarfile.SYMTYPE, linkname="good"), "is a link"),
        (member("set/link", size=0, type=tarfile.LNKTYPE, linkname="set/good"), "is a link"),
        (member("set/link", size=0, type=tarfile.LNKTYPE, linkname="/etc/passwd"), "is a link"),
        (member("set/null", size=0, type=tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
        (member("set/disk", size=0, type=tarfile.BLKTYPE), "a device"),
        (member("set/pipe", size=0, type=tarfile.FIFOTYPE), "special file"),
        (member("set/bomb", size=2**40), "more than 10,000 bytes"),
        (member("set/big", size=9_996), "more than 10,000 bytes"),
    ],
    ids=lambda value: value.name if isinstance(value, tarfile.TarInfo) else "",
)
def test_bad_members_are_refused_before_anything_is_written(
    bad: tarfile.TarInfo, message: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    path = archive(tmp_path / "a.tar.gz", bad)
    with pytest.raises(ArchiveError, match=message) as caught:
        unpack(path, root / "set", **LIMITS)
    assert isinstance(caught.value, DataError)
    assert everything_below(tmp_path) == ["a.tar.gz", "root"]


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", *(member(f"set/{n}") for n in range(10)))
    with pytest.raises(ArchiveError, match="more than 10 members"):
        unpack(path, tmp_path / "set", **LIMITS)
    assert everything_below(tmp_path) == ["a.tar.gz"]


def test_a_header_of_a_terabyte_costs_nothing(tmp_path: Path) -> None:
    """Only the header is there: what it announces is neither read nor looked for."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(member("set/bomb", size=2**40).tobuf()))
    with pytest.raises(ArchiveError, match="more than 10,000 bytes"):
        unpack(path, tmp_path / "set", **LIMITS)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_archive_leaves_nothing(share: float, tmp_path: Path) -> None:
    content = os.urandom(4_000)
    path = archive(tmp_path / "a.tar.gz", member("set/x", size=4_000), content=content)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ArchiveError, match="cannot be unpacked"):
        unpack(path, tmp_path / "set", **LIMITS)
    assert everything_below(tmp_path) == ["a.tar.gz"]


def test_what_a_killed_run_has_left_is_not_taken_for_good(tmp_path: Path) -> None:
    stale = tmp_path / ".set.unpacking"
    stale.mkdir()
    (stale / "half").write_text("a")
    unpack(archive(tmp_path / "a.tar.gz"), tmp_path / "set", **LIMITS)
    assert everything_below(tmp_path) == ["a.tar.gz", "set", "set/good"]


def test_a_folder_that_is_there_is_mended_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "good").write_text("damaged")
    (tmp_path / "set" / "mine").write_text("notes")
    unpack(archive(tmp_path / "a.tar.gz"), tmp_path / "set", **LIMITS)
    assert (tmp_path / "set" / "good").read_bytes() == b"hello"
    assert everything_below(tmp_path / "set") == ["good", "mine"]
