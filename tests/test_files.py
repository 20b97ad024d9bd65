from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import revzoo
from revzoo._files import check_writable, write_atomically, write_together


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: the kernel refuses the write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_all_files_as_they_were(tmp_path: Path) -> None:
    """The message named no file; the first file was new, the second old."""
    old, new = {tmp_path / "a": b"one", tmp_path / "b": b"one"}, tmp_path / "x" / "y"
    write_together(old)
    too_large = b"two" * 100
    with disk_of(100), pytest.raises(OSError, match=rf"too large: '{tmp_path}/b'"):
        write_together({tmp_path / "a": b"two", tmp_path / "b": too_large})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old
    with disk_of(100), pytest.raises(OSError, match=rf"too large: '{new}/b'"):
        write_together({new / "a": b"two", new / "b": too_large})
    assert list(new.iterdir()) == []
    write_together({new / "a": b"two", new / "b": too_large})
    assert [path.stat().st_size for path in sorted(new.iterdir())] == [3, 300]


def test_a_network_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    network = revzoo.create_model("revnet38", units=(1, 1, 1))
    folder = tmp_path / "saved"
    with disk_of(10_000), pytest.raises(OSError, match=r"'.*/saved/model\.safetensors'"):
        network.save_pretrained(folder)
    assert list(folder.iterdir()) == []


def test_writing_replaces_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"one")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_new_files_have_the_rights_that_the_user_gives_to_files(tmp_path: Path) -> None:
    """They could be read by everyone, whatever the umask."""
    earlier = os.umask(0o077)
    try:
        write_atomically(tmp_path / "f", b"secret")
    finally:
        os.umask(earlier)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("path", "message"),
    [
        # a new file would replace the device
        ("/dev/null", "is not a regular file"),
        # the file lets you write, its folder does not let you create the new one
        ("/proc/self/comm", r"cannot be written \(/proc/self: "),
    ],
)
def test_a_file_that_cannot_be_replaced_is_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{path} {message}"):
        check_writable(Path(path))
