"""Lists and checks the files of an image folder, ``ROOT/{train,val,test}/CLASS/...``.

Why not torchvision's ``make_dataset``: it does not check that the splits have the same classes, so
a class that is missing in one split would shift all later labels; it takes hidden folders, such as
``.ipynb_checkpoints``, for classes; and it follows links to parent folders without end. We enter
each folder only once, even if several links lead to it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from lightning_fabric.utilities.data import suggested_max_num_workers

from revzoo._checks import number_of, shortened
from revzoo.data.decode import check_mask_size, open_image, read_mask, suffixes
from revzoo.data.errors import DataError
from revzoo.data.module import Split

NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""The names of the folders of each split, in any letter case."""

VOLUMES = (".npz", ".nii", ".nii.gz", ".dcm", ".mha", ".nrrd")
_SIZES = 10_000
_LAYOUT = (
    "expected ROOT/train/CLASS/*.jpg, optionally with ROOT/val/ and ROOT/test/ of the same classes"
)
MASKS_LAYOUT = (
    "expected ROOT/train/images/NAME.jpg with ROOT/train/masks/NAME.png, optionally val/ and test/"
)
_MASK_SUFFIX = "_mask"  # as in Carvana: a.jpg and a_mask.gif


@dataclass(frozen=True)
class Files:
    """One split: paths and labels of the same length; a label may be a list of numbers.

    Attributes:
        groups: by image; the images of one group stay in one part of a split.
        masks: by image; the paths of masks, whose pixels are the labels.
        shards: the file that holds the image, by image; None if each is a file.
        window: number of shards whose images are shuffled together.
        prefetch: number of shards that are downloaded before they are needed.
    """

    paths: list[str]
    labels: list[Any]
    groups: list[int] | None = None
    masks: list[str] | None = None
    shards: list[int] | None = None
    window: int = 1
    prefetch: int = 0

    def source(self, row: int) -> str | BinaryIO:
        """The file of an image, or its bytes."""
        return self.paths[row]

    def fetch(self, shards: Sequence[int]) -> None:
        """Start to download shards, if they are elsewhere."""


@dataclass(frozen=True)
class Tree:
    """All existing splits, and their common class names, by label.

    Attributes:
        classes: names, by label.
        splits: the files of each split.
        left_out: what is below the root and not read, a sentence each.
    """

    classes: list[str]
    splits: dict[Split, Files]
    left_out: list[str] = field(default_factory=list)


def split_of(name: str) -> Split | None:
    """The split to which a folder of this name belongs."""
    return next((split for split, names in NAMES.items() if name.lower() in names), None)


def split_folders(root: Path) -> dict[Split, Path]:
    """The folder of each split under ``root``, in the order of :data:`NAMES`."""
    found: dict[Split, Path] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if (split := split_of(folder.name)) is None or not folder.is_dir():
            continue
        if (other := found.setdefault(split, folder)) is not folder:
            raise DataError(
                f"{other.name} and {folder.name} in {root.absolute()} are two folders of "
                f"one split, {split}: merge them, or move one away"
            )
    return {split: found[split] for split in NAMES if split in found}


def scan(root: Path) -> Tree:
    """List the images of every split under ``root``."""
    if not root.is_dir():
        raise DataError(f"image folder {root.absolute()} does not exist: set data.root; {_LAYOUT}")
    if is_mask_folder(root):  # otherwise the two would be classes
        raise DataError(f"{root.absolute()} has images and masks: use data=masks")
    folders = split_folders(root)
    if not folders:
        raise no_training(root)
    first, *others = folders.values()
    classes = _class_names(first)
    if len(classes) == 1:
        raise DataError(
            f"only one class folder, {classes[0]}, in {first.absolute()}: expected at "
            f"least two, each with its own folder; {_LAYOUT}"
        )
    # before the files are listed, which is slow for a large set
    for folder in others:
        _check_same_classes(folder, first, classes)
    unread: Counter[str] = Counter()
    splits = {split: _list_images(folder, classes, unread) for split, folder in folders.items()}
    return Tree(classes, splits, [*_outside(root, folders), *unread_files(root, unread)])


def fingerprint(tree: Tree, root: Path) -> str:
    """A hash of names, sizes, labels and groups of the images to train and to validate with.

    It asks for the size of at most :data:`_SIZES` evenly spaced files of a split, since a million
    of them take minutes on a network's disk. The test split does not change a training.
    """
    digest = hashlib.sha256()
    for split, files in tree.splits.items():
        if split == "test":
            continue
        paths = files.paths + (files.masks or [])
        # relative: the data may move
        names = (split, *(path.removeprefix(f"{root}/") for path in paths))
        digest.update(b"\0".join(map(os.fsencode, names)))
        sizes = map(_size_of, paths[:: -(-len(paths) // _SIZES)])  # rounded up
        digest.update(repr((list(sizes), files.labels, files.groups)).encode())
    return digest.hexdigest()


def _size_of(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:  # a broken link, which is an error only when it is read
        return -1


def no_training(root: Path) -> DataError:
    """The error for a folder without training images."""
    names = shortened(sorted(path.name for path in root.iterdir()), 8)
    absolute = root.absolute()
    # the user gave the folder of a split instead of its parent
    meant = f"; did you mean {absolute.parent}?" if split_of(absolute.name) else ""
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
    # from archives of macOS, from folders that Windows has shown, and from disks of Linux
    others = ("__MACOSX", "Thumbs.db", "desktop.ini", "lost+found")
    return name.startswith(".") or name in others


def _check_same_classes(folder: Path, first: Path, classes: list[str]) -> None:
    names = _class_names(folder)
    differences = ((first, {*classes} - {*names}), (folder, {*names} - {*classes}))
    if found := [f"only in {f.name}: {shortened(sorted(only))}" for f, only in differences if only]:
        raise DataError(
            f"{folder.absolute()} and {first.absolute()} have different classes; "
            f"{'; '.join(found)}. Give every split the same class folders"
        )


def _outside(root: Path, folders: dict[Split, Path]) -> Iterator[str]:
    """What lies outside the splits and their class folders."""
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    if others := [name for name in names if not (split_of(name) or _is_hidden(name))]:
        expected = ", ".join(f"{split}/" for split in NAMES)
        yield (
            f"{root.absolute()} has folders that are no split and are not read: "
            f"{shortened(map(repr, others))}; expected {expected}"
        )
    for folder in folders.values():
        files = (p for p in folder.iterdir() if p.is_file() and not _is_hidden(p.name))
        if count := sum(path.suffix.lower() in suffixes() for path in files):
            yield (
                f"{folder.absolute()} has {number_of(count, 'image')} outside the class folders, "
                "not read"
            )


def unread_files(folder: Path, unread: Counter[str]) -> list[str]:
    """The sentence about files below ``folder`` that are no images, counted by suffix; if any."""
    if not unread:
        return []
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in unread.most_common(8))
    files = number_of(sum(unread.values()), "file")
    return [f"{files} below {folder.absolute()} are no images by their suffix, not read: {kinds}"]


def _list_images(folder: Path, classes: list[str], unread: Counter[str]) -> Files:
    by_class = {name: list(images_below(folder / name, unread)) for name in classes}
    if empty := [folder.absolute() / name for name, paths in by_class.items() if not paths]:
        files = (path.name for place in empty for path in sorted(place.iterdir()))
        _refuse_volumes(shortened(empty), files)
        raise DataError(
            f"no images in {shortened(empty)}: put images there ({', '.join(suffixes())}) or "
            "remove the folder from every split"
        )
    labels = [label for label, paths in enumerate(by_class.values()) for _ in paths]
    return Files(list(chain(*by_class.values())), labels)


def is_mask_folder(root: Path) -> bool:
    """Whether a folder, or one of its splits, has images and masks side by side."""
    places = [*split_folders(root).values(), root]
    return any((p / "images").is_dir() and (p / "masks").is_dir() for p in places)


def no_masks(root: Path) -> DataError:
    """The error for a folder without images and masks."""
    return DataError(f"no images and masks in {root.absolute()}: {MASKS_LAYOUT}")


def scan_masks(root: Path) -> Tree:
    """List the images of every split under ``root``, with their masks; no classes.

    Raises:
        DataError: an image has no mask.
    """
    if not is_mask_folder(root):
        raise no_masks(root)
    folders = split_folders(root) or {"train": root}
    splits: dict[Split, Files] = {}
    for split, folder in folders.items():
        images, masks = (_by_name(folder / part) for part in ("images", "masks"))
        if missing := [path for name, path in images.items() if name not in masks]:
            raise DataError(
                f"{number_of(len(missing), 'image')} of {folder.absolute()} without a mask: "
                f"{shortened(missing)}; expected a file of the same name in {folder / 'masks'}"
            )
        paths = [masks[name] for name in images]
        splits[split] = Files([*images.values()], [0] * len(images), masks=paths)
    return Tree([], splits)


def _by_name(folder: Path) -> dict[str, str]:
    """The images below a folder by their paths in it, without suffix and ``_mask``."""
    found: dict[str, str] = {}
    paths = images_below(folder) if folder.is_dir() else ()
    for path in paths:
        name = str(Path(path).relative_to(folder).with_suffix("")).removesuffix(_MASK_SUFFIX)
        if (other := found.setdefault(name, path)) != path:
            raise DataError(f"{other} and {path} have one name: rename one of them")
    if not found:
        raise DataError(f"no images in {folder.absolute()}: {MASKS_LAYOUT}")
    return found


@dataclass(frozen=True)
class FolderReport:
    """The result of :func:`check_folder`.

    Attributes:
        images: number of image files.
        bad: the paths of the images that cannot be decoded, by reason.
        faults: errors in the structure of split and class folders, or in the rows of a table.
        left_out: what is below the root and not read, a sentence each.
    """

    images: int
    bad: dict[str, list[str]]
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


Check = Callable[[Any, str], object]
"""Takes the pixel values of a mask and its path; raises a DataError for wrong ones."""


def check_folder(
    root: str | Path, *, workers: int | None = None, check: Check | None = None
) -> FolderReport:
    """Decode every image below ``root``, even if the structure of its folders is wrong.

    Args:
        root: an image folder, see :class:`~revzoo.data.imagefolder.ImageFolder`, or a part of one.
        workers: number of processes; None for the CPUs minus one.
        check: of masks.

    Raises:
        DataError: ``root`` is not a folder, or has no images.
    """
    root = Path(root).expanduser()
    faults, outside = [], []
    of_mask: dict[str, str] = {}  # the image of each mask
    try:
        if is_mask_folder(root):
            files = scan_masks(root).splits.values()
            of_mask = {m: p for f in files for m, p in zip(f.masks or [], f.paths, strict=True)}
        elif not (split_of(root.name) and root.is_dir()):  # a single split has no splits to scan
            scan(root)
            outside = list(_outside(root, split_folders(root)))
    except DataError as error:
        if not root.is_dir():
            raise
        faults = [str(error)]  # reported with the bad images: one run shows all to repair
    unread: Counter[str] = Counter()
    paths = list(images_below(root, unread))
    if not paths:
        raise no_images(root)
    images = [of_mask.get(path, "") for path in paths]
    bad = unreadable(paths, partial(read_file, check=check), paths, images, workers=workers)
    return FolderReport(len(paths), bad, faults, [*outside, *unread_files(root, unread)])


def unreadable(
    paths: Sequence[str],
    read: Callable[..., object],
    *arguments: Iterable[Any],
    workers: int | None,
) -> dict[str, list[str]]:
    """The paths of images by the reason of the DataError that ``read`` raises."""
    bad: dict[str, list[str]] = {}
    # processes: Python's share of decoding small images would keep threads waiting for its lock
    with ProcessPoolExecutor(workers or suggested_max_num_workers(1)) as pool:
        reasons = pool.map(partial(_reason_of, read), *arguments, chunksize=64)
        for path, reason in zip(paths, reasons, strict=True):
            if reason:
                bad.setdefault(reason, []).append(path)
    return bad


def no_images(folder: Path) -> DataError:
    """The error for a folder without images."""
    _refuse_volumes(str(folder.absolute()), (path.name for path in sorted(folder.rglob("*"))))
    return DataError(f"no images in {folder.absolute()}: expected {', '.join(suffixes())}")


def _refuse_volumes(where: str, names: Iterable[str]) -> None:
    if volume := next((name for name in names if name.lower().endswith(VOLUMES)), ""):
        raise DataError(
            f"no images in {where}, but volumes, such as {volume}: train with data=volumes "
            "data.root=DIR, the folder above train/images and train/labels"
        )


def images_below(root: Path, unread: Counter[str] | None = None) -> Iterator[str]:
    """The images below ``root``, sorted by folder, then by name; counts other suffixes.

    Raises:
        OSError: a folder cannot be read; without its images, a run would train on fewer.
    """
    top = root.resolve()
    seen = {str(top), *map(str, top.parents)}  # do not follow links to parent folders
    images = []
    for folder, folders, files in os.walk(root, onerror=_raise, followlinks=True):
        visible = sorted((n for n in folders if not _is_hidden(n)), reverse=True)
        # reversed: if a place has two names, the first in the alphabet overwrites the other
        places = {os.path.realpath(f"{folder}/{n}"): n for n in visible}
        folders[:] = [n for place, n in places.items() if place not in seen]  # os.walk enters these
        seen.update(places)
        for name in files:
            if _is_hidden(name):
                continue
            if name.lower().endswith(suffixes()):
                images.append((folder, name))
            elif unread is not None:
                suffix = Path(name).suffix.lower()
                unread[suffix if suffix[1:].isalnum() else "others"] += 1
    for folder, name in sorted(images):  # as text: a million Path objects take seconds
        yield f"{folder}/{name}"


def _raise(error: OSError) -> NoReturn:
    raise error


def _reason_of(read: Callable[..., object], *arguments: Any) -> str:
    try:
        read(*arguments)
    except DataError as error:
        return error.reason
    return ""


def read_file(path: str, image: str, check: Check | None = None) -> None:
    """Read an image, or the mask of an image.

    Raises:
        DataError: it cannot be used.
    """
    if not image:
        open_image(path, None)
        return
    values = read_mask(path)
    check_mask_size(values, path, open_image(image, None), image)
    if check is not None:
        check(values, path)
