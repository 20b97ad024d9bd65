"""Volumes in files, read by parts: NIfTI, folders of DICOM slices, NumPy arrays.

An array keeps the order of its axes in the file: x, y, z in NIfTI, and so in DICOM series.
``.nii`` (by nibabel) and ``.npy`` are sliced on the disk. ``.nii.gz`` and DICOM series (by pydicom)
cannot be: they are unpacked once, into ``.nii`` files in ``volumes`` in the user's cache folder.

Known limit: nothing empties that folder.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from revzoo._checks import package_needed
from revzoo._files import replacing
from revzoo.data.errors import DataError
from revzoo.weights.files import cache_folder

SUFFIXES = (".nii", ".nii.gz", ".npy")
_SLAB = 2**24  # voxels in memory while a file is checked


@dataclass(frozen=True)
class Volume:
    """An open file.

    Attributes:
        array: sliced like NumPy's; a slice reads only its part.
        affine: (4, 4) from indices to millimetres, as in NIfTI; None in ``.npy`` files.
    """

    array: Any
    affine: np.ndarray | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of voxels along each axis."""
        return tuple(self.array.shape)

    @property
    def spacing(self) -> tuple[float, ...]:
        """Millimetres between voxels along each axis; 1 in ``.npy`` files."""
        if self.affine is None:
            return (1.0,) * 3
        return tuple(np.linalg.norm(self.affine[:3, :3], axis=0).tolist())

    def read(self, part: tuple[slice, ...] = ()) -> np.ndarray:
        """The values in a part, float32."""
        return np.asarray(self.array[part], dtype=np.float32)

    def slabs(self) -> Iterator[tuple[slice, slice, slice]]:
        """Parts along the last axis that together are the volume."""
        step = max(1, _SLAB // int(np.prod(self.sizes[:2])))
        for start in range(0, self.sizes[2], step):
            yield slice(None), slice(None), slice(start, start + step)


def stem(path: Path) -> str:
    """The name of a file without its suffix, also without ``.nii.gz``; of a folder, its name."""
    suffix = next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")
    return path.name.removesuffix(path.name[len(path.name) - len(suffix) :])


def volumes_in(folder: Path) -> list[tuple[Path, ...]]:
    """The channels of each volume in a folder, sorted by name.

    A file ``NAME_0000`` is the first channel of a volume, ``NAME_0001`` the second, as in nnU-Net.
    Other files, and folders of ``.dcm`` slices, are volumes of one channel.
    """
    entries = sorted(folder.iterdir())
    found = [p for p in entries if p.name.lower().endswith(SUFFIXES) or is_series(p)]
    by_name = {stem(path): path for path in found}
    return [channels for path in found if (channels := channels_of(path, by_name))]


def channels_of(path: Path, by_name: dict[str, Path] | None = None) -> tuple[Path, ...]:
    """The files of all channels of a volume, from the first one; empty for a later one.

    Args:
        path: of the first channel.
        by_name: all files of its folder, by stem; None to list them.
    """
    if (match := re.fullmatch(r"(.+)_(\d{4})", stem(path))) is None:
        return (path,)
    if by_name is None:
        by_name = {stem(other): other for other in path.parent.iterdir()}
    name, number = match.groups()
    if f"{name}_0000" not in by_name:
        return (path,)
    if int(number):
        return ()
    pattern = re.compile(rf"{re.escape(name)}_\d{{4}}")
    return tuple(by_name[other] for other in sorted(filter(pattern.fullmatch, by_name)))


def case_name(channels: Sequence[Path]) -> str:
    """The name of a volume: the stem of its label."""
    return stem(channels[0]).removesuffix("_0000")


def is_series(path: Path) -> bool:
    """Whether this is a folder of DICOM slices."""
    return path.is_dir() and any(path.glob("*.dcm"))


def open_volume(path: Path) -> Volume:
    """Open a file or a folder of slices; reads its voxels only if it must be unpacked.

    Raises:
        DataError: the file cannot be read, is not a volume of three axes, or needs a package.
        OSError: it cannot be unpacked into the cache.
    """
    try:
        volume = _open(path)
    except ImportError as error:
        raise DataError(package_needed(f"{path} needs", str(error.name))) from None
    except Exception as error:  # damaged files raise anything
        if str(getattr(error, "filename", "")).startswith(str(cache_folder())):
            raise  # a full disk, say: no fault of this file
        raise DataError(f"{path} cannot be read ({error!s:.200}): replace or remove it") from error
    if len(volume.sizes) != 3 or 0 in volume.sizes:
        raise DataError(
            f"{path} has the shape {volume.sizes}: expected three axes; write a file for each "
            "channel, NAME_0000, NAME_0001 and so on"
        )
    return volume


def _open(path: Path) -> Volume:
    if path.name.lower().endswith(".npy"):
        return Volume(np.load(path, mmap_mode="r"), None)
    import nibabel

    file = path
    if is_series(path):
        file = _unpacked(path, lambda target: nibabel.save(_read_series(path), target))
    elif path.name.lower().endswith(".gz"):
        file = _unpacked(path, lambda target: _gunzip(path, target))
    image: Any = nibabel.load(file)
    return Volume(image.dataobj, image.affine)


def _unpacked(path: Path, write: Callable[[Path], None]) -> Path:
    """The ``.nii`` in the cache; calls ``write`` if it is not there."""
    target = cache_folder() / "volumes" / f"{hash_of([path])}.nii"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            write(file)
    return target


def files_in(path: Path) -> list[Path]:
    """The file, or the slices in a folder."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def hash_of(paths: Sequence[Path]) -> str:
    """A hash of the places, sizes and times of files; of all files in a folder."""
    digest = hashlib.sha256()
    for path in paths:
        for file in files_in(path):
            status = file.stat()
            digest.update(repr((str(file.absolute()), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


def _gunzip(path: Path, target: Path) -> None:
    with gzip.open(path) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, 2**20)


def _read_series(folder: Path) -> Any:
    """A NIfTI image from the slices of a DICOM series, in Hounsfield units for CT.

    NIfTI counts towards the right and the front, DICOM towards the left and the back.
    """
    import nibabel
    import pydicom

    slices = [pydicom.dcmread(path) for path in sorted(folder.glob("*.dcm"))]
    if len({str(part.SeriesInstanceUID) for part in slices}) > 1:
        raise ValueError("its slices are of several series: give each a folder")
    row, column = np.array(slices[0].ImageOrientationPatient, dtype=float).reshape(2, 3)
    places = np.array([part.ImagePositionPatient for part in slices], dtype=float)
    order = np.argsort(places @ np.cross(row, column))
    places = places[order]
    steps = np.diff(places, axis=0)
    if not len(steps) or not np.allclose(steps, steps[0], atol=0.01):
        raise ValueError("its slices are not evenly spaced: one may be missing")
    pixels = np.stack([_pixels(slices[i]) for i in order], axis=-1).swapaxes(0, 1)
    height, width = map(float, slices[0].PixelSpacing)
    affine = np.eye(4)
    affine[:3] = np.stack([row * width, column * height, steps.mean(0), places[0]], axis=1)
    affine = np.diag([-1, -1, 1, 1]) @ affine
    return nibabel.Nifti1Image(pixels, affine)  # type: ignore[no-untyped-call]


def _pixels(part: Any) -> np.ndarray:
    slope, intercept = part.get("RescaleSlope", 1), part.get("RescaleIntercept", 0)
    return part.pixel_array.astype(np.float32) * float(slope) + float(intercept)


def write_volume(path: Path, array: np.ndarray, like: Volume) -> Path:
    """Write an array to ``path`` with a suffix: NIfTI with the affine of ``like``, or ``.npy``."""
    if like.affine is None:
        target = path.with_name(f"{path.name}.npy")
        np.save(target, array)
    else:
        import nibabel

        target = path.with_name(f"{path.name}.nii.gz")
        image = nibabel.Nifti1Image(array, like.affine)  # type: ignore[no-untyped-call]
        nibabel.save(image, target)
    return target
