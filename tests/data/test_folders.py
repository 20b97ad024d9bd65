import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from revzoo.data import DataError
from revzoo.data.decode import suffixes
from revzoo.data.folders import FolderReport, check_folder, fingerprint, scan
from revzoo.data.module import Split

MakeFolder = Callable[..., Path]
_TWO = {"cat": 2, "dog": 3}


def test_classes_are_sorted_names_and_labels_their_positions(make_folder: MakeFolder) -> None:
    tree = scan(make_folder({"train": {"dog": 3, "cat": 2}, "test": _TWO}))
    assert tree.classes == ["cat", "dog"]
    assert sorted(tree.splits) == ["test", "train"]
    train = tree.splits["train"]
    assert train.labels == [0, 0, 1, 1, 1]
    assert [Path(path).parent.name for path in train.paths] == ["cat"] * 2 + ["dog"] * 3


def test_other_files_are_not_images(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO})
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    (root / "train" / "README.md").write_text("no class")
    tree = scan(root)
    assert tree.classes == ["cat", "dog"]
    assert len(tree.splits["train"].paths) == 5


@pytest.mark.parametrize(
    ("splits", "below", "message"),
    [
        ({"train": _TWO}, "nowhere", r"/nowhere does not exist: set data.root; expected ROOT"),
        ({"pictures": _TWO}, "", r"no folder .*/train \(found: pictures\): expected ROOT"),
        ({"train": _TWO}, "train", r"no folder .*/train .*; did you mean .*/images\?"),
        ({"train": {}}, "", r"no class folders in .*/train: expected ROOT"),
        ({"test": {"cat": 2}}, "", r"only one class folder, cat, in .*/test: .* at least"),
        ({"train": {"cat": 2, "dog": 0}}, "", r"no images in .*/train/dog: put images there"),
        (
            {"train": {"ant": 1, "cat": 1}, "val": {"cat": 1, "dog": 1}},
            "",
            "only in train: ant; only in val: dog",
        ),
        ({"train": _TWO, "val": _TWO, "valid": _TWO}, "", "val and valid in .* one split, val"),
        # it passed the checks, and the run failed when it wrote a checkpoint or a log
        (
            {"train": {**_TWO, os.fsdecode(b"caf\xe9"): 1}},
            "",
            r"class folder 'caf\\udce9' in .* not UTF-8.*rename",
        ),
    ],
)
def test_wrong_folders_are_refused(
    splits: dict[str, dict[str, int]], below: str, message: str, make_folder: MakeFolder
) -> None:
    root = make_folder(splits)
    for split in splits:
        (root / split).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError, match=message):
        scan(root / below)


def test_volumes_are_named(make_folder: MakeFolder) -> None:
    root = make_folder({"train": {"cat": 2, "dog": 0}})
    (root / "train" / "dog" / "scan.NII.gz").touch()
    message = r"no images in .*/dog, but volumes, such as scan\.NII\.gz: .*data=volumes"
    with pytest.raises(DataError, match=message):
        scan(root)


@pytest.mark.parametrize(
    ("name", "split"), [("valid", "val"), ("Validation", "val"), ("VAL", "val"), ("Test", "test")]
)
def test_splits_have_their_usual_names_in_any_case(
    name: str, split: Split, make_folder: MakeFolder
) -> None:
    """``train/`` beside ``valid/`` validated with 10 % of ``train/``."""
    tree = scan(make_folder({"Train": _TWO, name: _TWO}))
    assert list(tree.splits) == ["train", split]
    assert not tree.left_out


def test_what_is_left_out_is_said(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO, "evaluation": {"cat": 1}})
    for name in ("a.heic", "b.HEIC", "c.\x1b[31m", ".d.heic", "Thumbs.db"):
        (root / "train" / "cat" / name).touch()
    shutil.copy(root / "train" / "cat" / "00.png", root / "train")
    folders, images, files = scan(root).left_out
    assert "'evaluation'" in folders
    assert "1 image outside the class folders" in images
    assert files.startswith("3 files below ")
    assert files.endswith(": 2 .heic, 1 others")


@pytest.mark.parametrize("suffix", ["gif", "avif", "JPE"])
def test_formats_are_read_by_whatever_suffix_they_have(
    suffix: str, make_folder: MakeFolder
) -> None:
    """``.gif`` and ``.jfif`` were neither read nor reported."""
    if f".{suffix}" == ".avif" not in suffixes():
        pytest.skip("this build of Pillow lacks AVIF")
    root = make_folder({"train": _TWO}, suffix=suffix)
    assert len(scan(root).splits["train"].paths) == 5
    assert check_folder(root, workers=1) == FolderReport(5, {})


def test_the_fingerprint_is_of_names_and_sizes(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO, "test": _TWO})
    before = fingerprint(scan(root), root)
    root = root.rename(root.with_name("moved"))
    assert fingerprint(scan(root), root) == before
    (root / "test" / "cat" / "00.png").unlink()
    assert fingerprint(scan(root), root) == before
    with (root / "train" / "cat" / "00.png").open("ab") as file:
        file.write(b"x")
    other = fingerprint(scan(root), root)
    assert other != before
    (root / "train" / "cat" / "00.png").rename(root / "train" / "dog" / "00b.png")
    assert fingerprint(scan(root), root) not in (before, other)


@pytest.mark.parametrize("hidden", [".ipynb_checkpoints", "__MACOSX"])
def test_hidden_folders_and_files_are_neither_classes_nor_images(
    hidden: str, make_folder: MakeFolder
) -> None:
    """``.ipynb_checkpoints`` and ``__MACOSX`` became classes, and shifted the labels."""
    root = make_folder({"train": {**_TWO, hidden: 2}, "test": _TWO})
    cat = root / "train" / "cat"
    (cat / hidden).mkdir()
    for copy in (cat / hidden / "00.png", cat / "._00.png"):
        copy.write_bytes((cat / "00.png").read_bytes())
    tree = scan(root)
    assert tree.classes == ["cat", "dog"]
    assert len(tree.splits["train"].paths) == 5


def test_a_root_in_a_hidden_folder_is_read(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO})
    root = root.rename(root.with_name(".images"))
    assert len(scan(root).splits["train"].paths) == 5


def test_a_folder_is_checked_whole(make_folder: MakeFolder) -> None:
    """The error named only the first bad image, so the next run failed at the next bad image."""
    root = make_folder({"train": _TWO, "test": _TWO})
    bad = [root / "test" / "cat" / "01.png", root / "train" / "dog" / "00.png"]
    bad[0].write_bytes(b"no image")
    bad[1].unlink()
    bad[1].symlink_to(root / "gone.png")
    report = check_folder(root, workers=2)
    assert (report.images, report.faults) == (10, [])
    assert report.bad == {
        "UnidentifiedImageError: cannot identify image file": [str(bad[0])],
        "FileNotFoundError: [Errno 2] No such file or directory": [str(bad[1])],
    }


def test_a_folder_without_the_layout_is_checked_too(make_folder: MakeFolder) -> None:
    root = make_folder({"train": {"cat": 2}})
    report = check_folder(root, workers=1)
    assert (report.images, report.bad) == (2, {})
    (fault,) = report.faults
    assert "only one class folder" in fault
    with pytest.raises(DataError, match="does not exist"):
        check_folder(root / "nowhere")


def test_a_folder_with_several_names_is_entered_once(make_folder: MakeFolder) -> None:
    """Two links to one folder, side by side, listed its images twice."""
    root = make_folder({"train": _TWO, "elsewhere": {"images": 3}})
    for name in ("one", "two", ".hidden"):
        (root / "train" / "cat" / name).symlink_to(root / "elsewhere" / "images")
    paths = scan(root).splits["train"].paths
    assert len(paths) == sum(_TWO.values()) + 3
    assert sum("/one/" in path for path in paths) == 3


def test_links_that_lead_back_are_not_followed_again(make_folder: MakeFolder) -> None:
    """A class contained the images of all others, 41 times; with three such links the scan hung."""
    root = make_folder({"train": _TWO})
    for name in ("x", "y", "z"):
        (root / "train" / "cat" / name).symlink_to("..")
    files = scan(root).splits["train"]
    cats = [path for path, label in zip(files.paths, files.labels, strict=True) if label == 0]
    assert [Path(path).parent.name for path in cats] == ["cat"] * _TWO["cat"]
    assert check_folder(root, workers=1).images == sum(_TWO.values())


def test_a_folder_that_cannot_be_read_is_named(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run trained without its images."""
    root = make_folder({"train": _TWO})
    closed = root / "train" / "cat" / "closed"
    closed.mkdir()
    read = os.scandir

    def refuse(path: str) -> Any:
        if os.fspath(path) == str(closed):
            raise PermissionError(13, "Permission denied", path)
        return read(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(OSError, match=str(closed)):
        scan(root)
