"""Whether a file of torch is whole: torch checks neither the end of its archive nor its sums.

``torch.save`` writes a ZIP archive without compression; before torch 1.6 it wrote bare pickles,
which have no sums that could be checked; nor has an archive of ``set_crc32_options(False)``.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from revzoo.weights.errors import UnreadableWeightsError

_MAGIC = b"PK\x03\x04"  # what torch.load takes for an archive begins with this
_REMEDY = "use another copy of it, or another checkpoint of the run"


def is_archive(path: Path) -> bool:
    """Whether ``torch.load`` reads the file as an archive, and not as a bare pickle."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_archive(path: Path) -> None:
    """Refuse a file that is no complete archive, by the sums (CRC-32) that it keeps of its parts.

    Raises:
        UnreadableWeightsError: cut off, damaged, or compressed, which ``torch.save`` never does.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            summed = any(entry.CRC for entry in entries)
            damaged = archive.testzip() if summed and not compressed else None
    except Exception as error:  # a damaged archive fails in any way
        raise UnreadableWeightsError(
            f"{path} is cut off or no checkpoint at all ({path.stat().st_size:,} bytes, {error}): "
            f"it was not loaded; {_REMEDY}"
        ) from None
    if compressed:
        raise UnreadableWeightsError(
            f"{path} is compressed, which nothing that torch saves is: it was not loaded; save it "
            "again with torch.save"
        )
    if damaged is not None:
        raise UnreadableWeightsError(
            f"{path} is damaged, the sum of {damaged} does not match: it was not loaded; {_REMEDY}"
        )
