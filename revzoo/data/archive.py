"""Archives unpacked whole or not at all, and nowhere but where they should.

Why not ``tarfile.extractall(filter="data")``: it writes what comes before a member that it refuses,
lets links inside the folder pass, knows no limit of size, and a kill leaves a half-unpacked folder
under the final name. Here every member is judged before anything is written; the folder is unpacked
under another name beside the final one, and takes that in one rename.

Refused are paths that leave the folder, links, devices, more members or bytes than a data set of
this kind has, and archives that end early.

Known limit: ``tarfile`` reads the headers of extended names whole, whatever they announce. Archives
from elsewhere are told by their hash before they come here.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

from revzoo.data.errors import DataError

_CHUNK = 1 << 20  # bytes


class ArchiveError(DataError):
    """An archive is damaged, or holds what is not unpacked; nothing was written."""


def unpack(
    archive: Path,
    folder: Path,
    *,
    max_bytes: int,
    max_members: int,
    check: Callable[[Path], None] = lambda _: None,
) -> None:
    """Unpack a tar file, compressed or not, whose members all lie in one folder, as ``folder``.

    Where ``folder`` exists already, its files of the same names are replaced, one by one.

    Args:
        archive: the file.
        folder: what is made; the archive's members are below a folder of the same name.
        max_bytes: of all members together, unpacked.
        max_members: files and folders.
        check: is called with the unpacked folder before it takes its name, and may raise.

    Raises:
        ArchiveError: the archive is damaged, or a member is refused; ``folder`` is as it was.
    """
    partial = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        with tarfile.open(archive) as tar:
            files = _judged(tar, folder.name, max_bytes, max_members)
            for member, path in files:
                target = partial / path
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None, "regular files have content"
                with source, target.open("wb") as file:
                    _copy(source, file, member)
        check(partial)
        _install(partial, folder)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ArchiveError(
            f"{archive} cannot be unpacked ({type(error).__name__}: {error}): fetch it again, or "
            "free space"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _judged(
    tar: tarfile.TarFile, top: str, max_bytes: int, max_members: int
) -> list[tuple[tarfile.TarInfo, Path]]:
    """The regular files and their paths below ``top``; headers are read one by one, so that a
    member of an absurd size is refused before it is decompressed.
    """
    found: list[tuple[tarfile.TarInfo, Path]] = []
    total = count = 0
    while (member := tar.next()) is not None:
        count, total = count + 1, total + member.size
        if count > max_members:
            raise _refused(tar, member, f"it has more than {max_members} members")
        if member.size < 0 or total > max_bytes:
            raise _refused(tar, member, f"unpacked, it has more than {max_bytes:,} bytes")
        if not (member.isreg() or member.isdir()):
            raise _refused(tar, member, "it is a link, a device or another special file")
        parts = PurePosixPath(member.name).parts
        if parts[:1] != (top,) or ".." in parts or "\\" in member.name or "\0" in member.name:
            raise _refused(tar, member, f"expected paths below {top}/")
        if member.isreg():
            if len(parts) < 2:
                raise _refused(tar, member, f"expected a folder {top}/")
            found.append((member, Path(*parts[1:])))
    return found


def _copy(source: IO[bytes], file: IO[bytes], member: tarfile.TarInfo) -> None:
    left = member.size
    while left:
        chunk = source.read(min(_CHUNK, left))
        if not chunk:
            raise EOFError(f"{member.name} ends {left} bytes early")
        file.write(chunk)
        left -= len(chunk)


def _install(partial: Path, folder: Path) -> None:
    if not folder.exists():
        partial.rename(folder)
        return
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        target = folder / path.relative_to(partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


def _refused(tar: tarfile.TarFile, member: tarfile.TarInfo, why: str) -> ArchiveError:
    return ArchiveError(
        f"{tar.name!r} is refused at its member {member.name!r:.80}: {why}. Nothing was unpacked; "
        "fetch the archive from its publisher"
    )
