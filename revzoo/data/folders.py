"""The files of an image folder: ``ROOT/{train,val,test}/CLASS/...``, checked before any image is
opened.

Listing is torchvision's; what it does not check is whether the splits agree on their classes.
Labels are positions in the sorted class names, so a class that one split lacks would shift the
labels of all that follow.
"""

from dataclasses import dataclass
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from revzoo.data.errors import DataError

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
    """All splits that are there, and the class names they share, by label."""

    classes: list[str]
    splits: dict[str, Files]


def scan(root: Path) -> Tree:
    """List the images of every split under ``root``; one at least is there.

    Raises:
        DataError: all folders are missing, there is one class only, one is empty, or the splits
            have different classes.
    """
    if not root.is_dir():
        raise DataError(f"image folder {root.absolute()} does not exist: set data.root; {_LAYOUT}")
    there = [name for name in ("train", "val", "test") if (root / name).is_dir()]
    if not there:
        raise no_training(root)
    classes = _class_names(root / there[0])
    if len(classes) == 1:
        raise DataError(
            f"only one class folder, {classes[0]}, in {(root / there[0]).absolute()}: a classifier "
            f"tells at least two apart, each with a folder of its own; {_LAYOUT}"
        )
    for name in there[1:]:
        _check_same_classes(root, name, there[0], classes)
    return Tree(classes, {name: _list_images(root / name, classes) for name in there})


def no_training(root: Path) -> DataError:
    """The error of a folder without training images, where they are needed."""
    found = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
    return DataError(f"no folder {root.absolute() / 'train'} (found: {found}): {_LAYOUT}")


def _class_names(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not names:
        raise DataError(f"no class folders in {folder.absolute()}: {_LAYOUT}")
    return names


def _check_same_classes(root: Path, split: str, first: str, classes: list[str]) -> None:
    names = _class_names(root / split)
    missing, extra = sorted(set(classes) - set(names)), sorted(set(names) - set(classes))
    if missing or extra:
        raise DataError(
            f"{root.absolute() / split} and {root.absolute() / first} have different classes; "
            f"missing from {split}: {', '.join(missing) or 'none'}; "
            f"only in {split}: {', '.join(extra) or 'none'}. "
            "Give every split the same class folders"
        )


def _list_images(folder: Path, classes: list[str]) -> Files:
    label_of = {name: label for label, name in enumerate(classes)}
    found = make_dataset(folder, label_of, extensions=IMG_EXTENSIONS, allow_empty=True)
    labels = [label for _, label in found]
    missing = set(label_of.values()).difference(labels)
    empty = [str(folder.absolute() / name) for name, label in label_of.items() if label in missing]
    if empty:
        raise DataError(
            f"no images in {', '.join(empty[:5])}: put images there ({', '.join(IMG_EXTENSIONS)}) "
            "or remove the folder from every split"
        )
    return Files([path for path, _ in found], labels)
