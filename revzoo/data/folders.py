"""Lists and checks the files of an image folder, ``ROOT/{train,val,test}/CLASS/...``.

Why not torchvision's ``make_dataset``: it does not check that the splits have the same classes.
Labels are positions in the sorted class names, so a class that is missing in one split would shift
all later labels. It takes hidden folders, such as ``.ipynb_checkpoints`` or ``__MACOSX``, for
classes. And it follows links to parent folders: a class then contains the images of the others, or
the walk never ends. We enter each folder only once, even if several links lead to it.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from lightning_fabric.utilities.data import suggested_max_num_workers
from torchvision.datasets.folder import IMG_EXTENSIONS

from revzoo._checks import shortened
from revzoo.data.decode import open_image
from revzoo.data.errors import DataError
from revzoo.data.module import Split

SPLITS: tuple[str, ...] = get_args(Split)
VOLUMES = (".npy", ".npz", ".nii", ".nii.gz", ".dcm", ".mha", ".nrrd")
_LAYOUT = (
    "expected ROOT/train/CLASS/*.jpg, optionally with ROOT/val/ and ROOT/test/ of the same classes"
)


@dataclass(frozen=True)
class Files:
    """One split: paths and labels of the same length, sorted by class, then by path."""

    paths: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Tree:
    """All existing splits, and their common class names, by label."""

    classes: list[str]
    splits: dict[str, Files]


def scan(root: Path) -> Tree:
    """List the images of every split under ``root``.

    Raises:
        DataError: there is no split, a single class, an empty class, or the splits have different
            classes.
    """
    if not root.is_dir():
        raise DataError(f"image folder {root.absolute()} does not exist: set data.root; {_LAYOUT}")
    splits = [name for name in SPLITS if (root / name).is_dir()]
    if not splits:
        raise no_training(root)
    classes = _class_names(root / splits[0])
    if len(classes) == 1:
        raise DataError(
            f"only one class folder, {classes[0]}, in {(root / splits[0]).absolute()}: expected at "
            f"least two, each with its own folder; {_LAYOUT}"
        )
    # before the files are listed, which is slow for a large set
    for name in splits[1:]:
        _check_same_classes(root, name, splits[0], classes)
    return Tree(classes, {name: _list_images(root / name, classes) for name in splits})


def no_training(root: Path) -> DataError:
    """The error for a folder without training images."""
    names = shortened(sorted(path.name for path in root.iterdir()), 8)
    absolute = root.absolute()
    # the user gave the folder of a split instead of its parent
    meant = f"; did you mean {absolute.parent}?" if absolute.name in SPLITS else ""
    return DataError(f"no folder {absolute / 'train'} (found: {names}): {_LAYOUT}{meant}")


def _class_names(folder: Path) -> list[str]:
    # sorted: labels are positions in this list, so the disk's order must not matter
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not _is_hidden(p.name))
    for name in names:
        if not name.isprintable():  # checkpoints and log files could not hold it
            raise DataError(
                f"the class folder {name!a} in {folder.absolute()} has a name that is not "
                "UTF-8, or has control characters: rename it in every split"
            )
    if not names:
        raise DataError(f"no class folders in {folder.absolute()}: {_LAYOUT}")
    return names


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # from archives of macOS


def _check_same_classes(root: Path, split: str, first: str, classes: list[str]) -> None:
    names = _class_names(root / split)
    missing, extra = sorted(set(classes) - set(names)), sorted(set(names) - set(classes))
    if missing or extra:
        raise DataError(
            f"{root.absolute() / split} and {root.absolute() / first} have different classes; "
            + "; ".join(
                f"only in {where}: {shortened(names)}"
                for where, names in ((first, missing), (split, extra))
                if names
            )
            + ". Give every split the same class folders"
        )


def _list_images(folder: Path, classes: list[str]) -> Files:
    by_class = [list(images_below(folder / name)) for name in classes]
    empty = [
        str(folder.absolute() / name)
        for name, paths in zip(classes, by_class, strict=True)
        if not paths
    ]
    if empty:
        files = (path.name for name in empty for path in sorted(Path(name).iterdir()))
        _refuse_volumes(shortened(empty), files)
        raise DataError(
            f"no images in {shortened(empty)}: put images there ({', '.join(IMG_EXTENSIONS)}) "
            "or remove the folder from every split"
        )
    labels = [label for label, paths in enumerate(by_class) for _ in paths]
    return Files([path for paths in by_class for path in paths], labels)


@dataclass(frozen=True)
class FolderReport:
    """The result of :func:`check_folder`.

    Attributes:
        images: number of image files.
        bad: the paths of the images that cannot be decoded, by reason.
        layout: error in the structure of split and class folders; None for a correct one.
    """

    images: int
    bad: dict[str, list[str]]
    layout: str | None


def check_folder(root: str | Path, *, workers: int | None = None) -> FolderReport:
    """Decode every image below ``root``, even if the structure of its folders is wrong.

    Args:
        root: an image folder, see :class:`~revzoo.data.imagefolder.ImageFolder`, or a part of one.
        workers: number of processes; None for the CPUs minus one.

    Raises:
        DataError: ``root`` is not a folder, or has no images.
    """
    root = Path(root).expanduser()
    layout = None
    try:
        if root.name not in SPLITS or not root.is_dir():  # a single split has no splits to scan
            scan(root)
    except DataError as error:
        if not root.is_dir():
            raise
        layout = str(error)  # report it with the bad images: one run shows everything to repair
    paths = list(images_below(root))
    if not paths:
        raise no_images(root)
    # processes: Python's share of decoding small images would keep threads waiting for its lock
    with ProcessPoolExecutor(workers or suggested_max_num_workers(1)) as pool:
        bad: dict[str, list[str]] = {}
        for path, reason in zip(paths, pool.map(_reason_of, paths, chunksize=64), strict=True):
            if reason:
                bad.setdefault(reason, []).append(path)
    return FolderReport(len(paths), bad, layout)


def no_images(folder: Path) -> DataError:
    """The error for a folder without images.

    Raises:
        DataError: it has volumes, which need their own data set.
    """
    _refuse_volumes(str(folder.absolute()), (path.name for path in sorted(folder.rglob("*"))))
    return DataError(f"no images in {folder.absolute()}: expected {', '.join(IMG_EXTENSIONS)}")


def _refuse_volumes(where: str, names: Iterable[str]) -> None:
    if volume := next((name for name in names if name.lower().endswith(VOLUMES)), ""):
        raise DataError(
            f"no images in {where}, but volumes, such as {volume}: the data sets read images of "
            "two dimensions. For volumes, write a data set and train in your own script: "
            "docs/how-to/volumes.md"
        )


def images_below(root: Path) -> Iterator[str]:
    """The images below ``root``, sorted by folder, then by name."""
    top = root.resolve()
    seen = {str(top), *map(str, top.parents)}  # do not follow links to parent folders
    images = []
    for folder, folders, files in os.walk(root, followlinks=True):
        visible = sorted((n for n in folders if not _is_hidden(n)), reverse=True)
        # reversed: if a place has two names, the first in the alphabet overwrites the other
        places = {os.path.realpath(f"{folder}/{n}"): n for n in visible}
        folders[:] = [n for place, n in places.items() if place not in seen]  # os.walk enters these
        seen.update(places)
        images += [(folder, n) for n in files if n.lower().endswith(IMG_EXTENSIONS)]
    for folder, name in sorted(images):  # as text: a million Path objects take seconds
        if not _is_hidden(name):
            yield f"{folder}/{name}"


def _reason_of(path: str) -> str:
    """Why an image cannot be read; empty if it can."""
    try:
        open_image(path, 3)
    except DataError as error:
        return error.reason
    return ""
