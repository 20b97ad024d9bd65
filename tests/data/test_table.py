"""Images listed in a table."""

import csv
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from revzoo.data import DataError, Digits, Table

Rows = list[tuple[str, ...]]
_NAMES = ("path", "label", "split", "patient")


def _row(number: int, split: str = "train") -> tuple[str, ...]:
    """Four images of a patient, of two classes."""
    return f"{number}.png", "10" if number % 2 else "9", split, f"{split} {number // 4}"


def _table(folder: Path, rows: Rows, *, suffix: str = ".csv", separator: str = ",") -> Path:
    for number, row in enumerate(rows):
        if row[0].endswith(".png"):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / row[0])
    path = folder / f"labels{suffix}"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=separator).writerows([_NAMES, *rows])
    return path


def _ready(table: Path, **options: Any) -> Table:
    data = Table(table, **{"batch_size": 1, "num_workers": 0, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def _numbers(loader: Any) -> set[int]:
    """The numbers of the images, from their colour."""
    return {int(image[0, 4, 4]) for images, _ in loader for image in images}


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".csv", ";"), (".tsv", "\t")])
def test_reads_tables_of_text(tmp_path: Path, suffix: str, separator: str) -> None:
    rows = [_row(i) for i in range(40)]
    data = _ready(_table(tmp_path, rows, suffix=suffix, separator=separator))
    assert data.classes == ["9", "10"]  # numbers in their order
    assert (data.train_count, data.val_count) == (36, 4)
    for images, labels in data.train_dataloader():
        assert int(images[0, 0, 4, 4]) % 2 == int(labels[0])


def test_reads_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [_row(i) for i in range(40)]
    _table(tmp_path, rows)
    columns = dict(zip(_NAMES, zip(*rows, strict=True), strict=True))
    parquet.write_table(pyarrow.table(columns), tmp_path / "labels.parquet")
    assert _ready(tmp_path / "labels.parquet").train_count == 36


def test_split_column_says_the_split(tmp_path: Path) -> None:
    rows = [*map(_row, range(8)), *(_row(i, "valid") for i in (8, 9)), _row(10, "Test")]
    data = _ready(_table(tmp_path, rows), split_column="split")
    data.setup("test")
    assert _numbers(data.train_dataloader()) == set(range(8))
    assert _numbers(data.val_dataloader()) == {8, 9}
    assert _numbers(data.test_dataloader()) == {10}


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_groups_stay_together(tmp_path: Path, cache_bytes: int) -> None:
    table = _table(tmp_path, [_row(i) for i in range(40)])
    options = {"cache_bytes": cache_bytes, "image_size": 8, "group_column": "patient"}
    seen = []
    for fold in range(5):
        data = _ready(table, folds=5, fold=fold, **options)
        train, val = _numbers(data.train_dataloader()), _numbers(data.val_dataloader())
        assert len(val) == 8
        assert not {i // 4 for i in train} & {i // 4 for i in val}
        seen += val
    assert sorted(seen) == list(range(40))
    data = _ready(table, val_fraction=0.2, **options)
    held = {i // 4 for i in _numbers(data.val_dataloader())}
    assert len(held) == 2
    assert data.val_count == 8


def test_skipped_images_keep_groups_in_line(tmp_path: Path) -> None:
    table = _table(tmp_path, [_row(i) for i in range(40)])
    (tmp_path / "5.png").write_bytes(b"")
    data = _ready(table, group_column="patient", on_error="skip", val_fraction=0.2)
    train, val = _numbers(data.train_dataloader()), _numbers(data.val_dataloader())
    assert len(train | val) == 39
    assert not {i // 4 for i in train} & {i // 4 for i in val}


def test_resuming_needs_the_same_fold_and_rows(tmp_path: Path) -> None:
    rows = [_row(i) for i in range(40)]
    state = _ready(_table(tmp_path, rows), folds=2, fold=0).state_dict()
    changed = [*rows[:-2], ("38.png", "10", "train", "x"), rows[-1]]
    for fold, listed in ((1, rows), (0, changed)):
        other = Table(_table(tmp_path, listed), folds=2, fold=fold)
        other.load_state_dict(state)
        with pytest.raises(DataError, match="other names, sizes or labels"):
            other.setup("fit")


def test_the_digest_follows_the_names_below_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cut off as many characters as the root's name has, also from other folders' names."""
    rows = [_row(i) for i in range(8)]
    (data := Table(_table(tmp_path, rows))).prepare_data()
    monkeypatch.chdir(tmp_path)
    assert Table("labels.csv").digest() == Table("./labels.csv").digest() == data.digest()
    moved = [(str(tmp_path / name), *rest) for name, *rest in rows]
    digests = set()
    swapped = [(moved[1][0], *moved[0][1:]), (moved[0][0], *moved[1][1:]), *moved[2:]]
    for names in (moved, swapped):
        digests.add(Table(_table(tmp_path, names), root=tmp_path / ("x" * 200)).digest())
    assert len(digests) == 2


def test_labels_keep_their_numbers_in_every_process(tmp_path: Path) -> None:
    """NaN is no number, so the order was that of a set, another in each process."""
    rows = [(f"{i}.png", ("nan", "2", "1")[i % 3], "", "") for i in range(6)]
    assert _ready(_table(tmp_path, rows)).classes == ["1", "2", "nan"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([_row(0), ("1.png", "", "", "")], {}, "line 3 of .* has nothing in column 'label'"),
        ([_row(0), ("1.jpg", "10", "", "")], {}, "1 of 2 files missing: .*set data.root"),
        ([_row(0), _row(1), _row(0)], {}, r"lists .*/0.png 2 times"),
        ([_row(0), _row(1), ("./0.png", "9", "", "")], {}, r"lists .*/0.png 2 times"),
        (
            [("0.png", "1", "", ""), ("1.png", "1.0", "", ""), ("2.png", "2", "", "")],
            {},
            "the labels '1' and '1.0' are one number",
        ),
        ([_row(0), _row(2)], {}, "only one class, '9'"),
        (
            [("0.png", "41.5", "", ""), ("1.png", "40", "", ""), ("2.png", "38.2", "", "")],
            {},
            "3 different numbers, such as 38.2, in column 'label'.*task=regression",
        ),
        ([], {}, "has no rows"),
        ([_row(0)], {"label_column": "labels"}, "'labels'; its columns: .*did you mean 'label'"),
        ([_row(0, "cat")], {"split_column": "split"}, "line 2 .*'cat'.*expected one of train, val"),
        ([_row(0), _row(1, "val")], {"split_column": "split"}, "no training image of 10"),
        (
            [_row(0), _row(1), ("2.png", "9", "test", "train 0")],
            {"split_column": "split", "group_column": "patient"},
            "group 'train 0' of .* is in two splits, train and test",
        ),
        (
            [_row(0), _row(1), (".//0.png", "9", "test", "x")],
            {"split_column": "split"},
            r"lists .*/0.png 2 times",
        ),
        ([_row(0), _row(1), ("2.png", "9")], {}, "line 4 has 2 values for 4 columns"),
        (  # patient 1 was in the training and patient 1.0 in the validation split
            [(f"{i}.png", str(i % 2), "train", "1" if i < 4 else "1.0") for i in range(8)],
            {"group_column": "patient"},
            r"the groups '1' and '1\.0' are one number",
        ),
        (
            [*map(_row, range(8)), _row(8, "val"), _row(9, "val")],
            {"split_column": "split", "folds": 2},
            "data.folds=2, but the set has a validation split",
        ),
        (
            [_row(i) for i in range(8)],
            {"group_column": "label", "folds": 2},
            "leaves no image of .* to train with: their groups are all held back",
        ),
        (
            [(f"{i}.png", "9" if i else "10", "train", "x") for i in range(8)],
            {"folds": 2, "fold": 1},
            "leaves no image of 10 to train with: they are all held back",
        ),
    ],
)
def test_bad_tables_are_refused(
    tmp_path: Path, rows: Rows, options: dict[str, Any], message: str
) -> None:
    table = _table(tmp_path, rows)
    with pytest.raises(DataError, match=message):
        _ready(table, **options)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_one_file_with_two_names_is_refused(link: str, tmp_path: Path) -> None:
    """A linked image was in the training and in the validation split."""
    table = _table(tmp_path, [_row(i) for i in range(4)])
    (tmp_path / "3.png").unlink()
    getattr(tmp_path / "3.png", link)(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"0\.png and .*3\.png are one file: expected one row"):
        Table(table).prepare_data()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"table=.*labels.xlsx: expected one of .csv, .tsv, .parquet"
    ):
        Table("labels.xlsx")
    with pytest.raises(DataError, match=r"does not exist: set data\.table"):
        Table(tmp_path / "labels.csv").prepare_data()
    (tmp_path / "labels.csv").write_bytes(b"path,label\n\xff,1\n")
    with pytest.raises(DataError, match="cannot read the table"):
        Table(tmp_path / "labels.csv").prepare_data()


def test_a_class_without_images_is_not_lost_by_the_split(tmp_path: Path) -> None:
    class Named(Digits):
        def read(self, split: Any) -> Any:
            if (images := super().read(split)) is not None:
                images.classes = [*images.classes, "none of these"]
            return images

    data = Named()
    data.setup("fit")
    assert data.num_classes == 11
