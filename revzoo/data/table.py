"""Images listed in a table: a CSV or Parquet file with one row for each image.

Medical and scientific sets come as a folder of images and a table of their labels, often with the
patient or site of each image. Images of one patient resemble each other: with some of them in the
training and others in the validation split, a network is tested on what it has seen. So a split by
groups keeps them together.
"""

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

from revzoo._checks import check_choice, did_you_mean, number_of, package_needed, shortened
from revzoo._files import TABLES
from revzoo.data.errors import DataError
from revzoo.data.folders import (
    NAMES,
    Check,
    Files,
    FolderReport,
    Tree,
    read_file,
    split_of,
    unreadable,
)
from revzoo.data.imagefolder import ImageFolder, ReadingOptions
from revzoo.data.module import Split

TASKS = {"classification": "classes", "multilabel": "labels", "regression": "targets"}
_TEXT = {".csv": None, ".tsv": "\t"}  # the separator; None: found in the first lines


class Table(ImageFolder):
    """Images whose paths and labels are in a table.

    The classes are the different labels: numbers in their order, words in alphabetical order.

    An image with several labels (``task="multilabel"``) has a column of 0 and 1 for each, or one
    column with the names of its labels between ``;`` or ``|``, empty without any. Targets of a
    regression (``task="regression"``) are columns of numbers. ``classes`` names these columns.

    Args:
        table: a file .csv, .tsv or .parquet, with the names of its columns in the first row.
        root: folder from which relative paths start; None for the folder of the table.
        path_column: of the images' paths.
        label_column: of the classes; several for labels or targets.
        task: ``"classification"``, ``"multilabel"`` or ``"regression"``; None for
            ``"multilabel"`` if there are several columns, else ``"classification"``.
        split_column: with ``train``, ``val`` or ``test`` in each row (``valid``, ``validation``,
            ``dev`` and others as in :data:`~revzoo.data.folders.NAMES`). None: all rows are for
            training, and a share or a fold of them for validation.
        group_column: rows with the same value, such as a patient, stay in one split.
        **options: see :class:`~revzoo.data.ImageFolder`.

    Raises:
        DataError: from ``prepare_data``: the table cannot be read or lacks a column, a row has no
            path or label, a file is missing or listed twice, a split lacks or adds a class, two
            splits share a group, two labels or groups are the same number (1 and 1.0), or a label
            is not 0 or 1, a target no number.

    Example:
        >>> import csv
        >>> from PIL import Image
        >>> from revzoo.data import Table
        >>> rows = [(f"{i}.png", ("well", "ill")[i % 2], f"patient {i // 4}") for i in range(16)]
        >>> for name, *_ in rows:
        ...     Image.new("RGB", (8, 8)).save(name)
        >>> with open("labels.csv", "w", newline="") as file:
        ...     csv.writer(file).writerows([("path", "label", "patient"), *rows])
        >>> data = Table("labels.csv", group_column="patient", val_fraction=0.25)
        >>> data.setup("fit")
        >>> data.classes, data.train_count, data.val_count
        (['ill', 'well'], 12, 4)
    """

    names: ClassVar[Mapping[str, str]] = {}  # of options, where another set has other ones

    def __init__(
        self,
        table: str | Path,
        *,
        root: str | Path | None = None,
        path_column: str = "path",
        label_column: str | Sequence[str] = "label",
        task: str | None = None,
        split_column: str | None = None,
        group_column: str | None = None,
        **options: Unpack[ReadingOptions],
    ) -> None:
        self.table = Path(table).expanduser()
        if self.table.suffix.lower() not in TABLES:
            raise ValueError(f"table={table}: expected one of {', '.join(TABLES)}")
        root = self.table.parent if root is None else Path(root).expanduser()
        # without "..", as the paths of files
        super().__init__(os.path.normpath(root.absolute()), **options)
        single = isinstance(label_column, str)
        self.label_columns = [label_column] if isinstance(label_column, str) else [*label_column]
        self.task = task or ("classification" if single else "multilabel")
        check_choice("task", self.task, TASKS)
        if not self.label_columns or len({*self.label_columns}) < len(self.label_columns):
            raise ValueError(f"label_column={self.label_columns}: expected different names")
        if self.task == "classification" and not single:
            raise ValueError(
                f"label_column={self.label_columns} with task=classification: expected one column, "
                "with the class of each image; task=multilabel and task=regression take several"
            )
        self.path_column, self._lists = path_column, single and self.task == "multilabel"
        self.split_column, self.group_column = split_column, group_column

    @property
    def notes(self) -> list[str]:
        columns = {"images": [self.path_column], TASKS[self.task]: self.label_columns}
        columns |= {"splits": [self.split_column]} if self.split_column else {}
        columns |= {"groups": [self.group_column]} if self.group_column else {}
        said = ", ".join(
            f"{what} from column{'s' * (len(names) > 1)} {' and '.join(map(repr, names))}"
            for what, names in columns.items()
        )
        return [f"{self.table.name}: {said}", *super().notes]

    def _scan(self) -> Tree:
        by_split = self.rows_by_split()
        rows = [row for chosen in by_split.values() for row in chosen]
        classes, labels = self._labels(rows)
        label_of = {row[self.path_column]: label for row, label in zip(rows, labels, strict=True)}
        splits: dict[Split, Files] = {
            split: self.files_of(chosen, [label_of[row[self.path_column]] for row in chosen])
            for split, chosen in by_split.items()
        }
        if self.task != "regression":
            self._check_classes(splits, classes)
        self.check_files(rows)
        return Tree(classes, splits)

    def files_of(self, rows: list[dict[str, str]], labels: list[int]) -> Files:
        """The paths and the groups of rows, with their labels."""
        groups = [row[self.group_column] for row in rows] if self.group_column else []
        order = {name: i for i, name in enumerate(dict.fromkeys(groups))}
        paths = [row[self.path_column] for row in rows]
        return Files(paths, labels, [order[name] for name in groups] or None)

    def rows_by_split(self) -> dict[Split, list[dict[str, str]]]:
        """The rows of each split, with absolute paths.

        Raises:
            DataError: as ``prepare_data``, except for faults of the files and classes.
        """
        rows = self._read_rows()
        if fault := next(self._row_faults(rows), None):
            raise DataError(fault)
        found: dict[Split, list[dict[str, str]]] = {}
        for row in rows:
            found.setdefault(self._split_of(row) or "train", []).append(row)
        return {split: found[split] for split in NAMES if split in found}

    @property
    def file_columns(self) -> list[str]:
        """The columns with paths, of the images first."""
        return [self.path_column]

    def faults(self) -> Iterator[str]:
        """Everything that training refuses in single rows, and values that two splits share.

        Raises:
            DataError: the table cannot be read, or lacks a column.
        """
        rows = self._read_rows()
        yield from self._row_faults(rows)
        numbers = [] if self.task == "classification" or self._lists else self.label_columns
        for line, row in enumerate(rows, 2):
            for name in filter(row.get, numbers):
                try:
                    self._number(row, name)
                except DataError as error:
                    yield str(error)
            for path in filter(None, map(row.get, self.file_columns)):
                if not Path(path).is_file():
                    yield f"line {line} of {self.table}: there is no file {path}"

    def files(self) -> dict[str, str]:
        """The existing files of all rows, with the image of each mask; empty for an image."""
        found: dict[str, str] = {}
        for row in self._read_rows():
            image, *masks = (row[name] for name in self.file_columns)
            found |= {image: "", **dict.fromkeys(masks, image)}
        return {path: image for path, image in found.items() if Path(path).is_file()}

    def _read_rows(self) -> list[dict[str, str]]:
        """The rows, with absolute paths."""
        rows = _read(self.table)
        self._check_columns(rows[0])
        for row in rows:  # one name for each file: ./a.png is a.png
            for name in self.file_columns:
                if path := row[name]:
                    row[name] = os.path.normpath(self.root / path)
        # the first line has the names
        self._lines = {row[self.path_column]: line for line, row in enumerate(rows, 2)}
        return rows

    def _split_of(self, row: Mapping[str, str]) -> Split | None:
        return split_of(row[self.split_column]) if self.split_column else "train"

    def _labels(self, rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[Any]]:
        """The classes, and the label of each row: a class, or a number for each column or name."""
        columns = self.label_columns
        if self._lists:
            named = [re.split(r"\s*[|;]\s*", row[columns[0]]) for row in rows]
            classes = _in_order({name for names in named for name in names if name})
            return classes, [[float(name in names) for name in classes] for names in named]
        if self.task == "classification":
            classes = _in_order({row[columns[0]] for row in rows})
            number = {name: label for label, name in enumerate(classes)}
            return classes, [number[row[columns[0]]] for row in rows]
        return columns, [[self._number(row, name) for name in columns] for row in rows]

    def _number(self, row: Mapping[str, str], column: str) -> float:
        """A target, or 0 or 1 for a label."""
        text, line = row[column], self._lines[row[self.path_column]]
        try:
            number = float(text)
        except ValueError:
            number = math.inf
        fits = number in (0, 1) if self.task == "multilabel" else abs(number) < math.inf
        if not fits:
            expected = "0 or 1" if self.task == "multilabel" else "a number"
            other = "; task=regression takes numbers" if self.task == "multilabel" else ""
            raise DataError(
                f"line {line} of {self.table} has {text!r} in column {column!r}: expected "
                f"{expected}, since task={self.task}{other}"
            )
        return number

    def _check_columns(self, row: Mapping[str, str]) -> None:
        """Raise a DataError if the table lacks a column that an option names."""
        named = [(option, getattr(self, option)) for option in ("path_column", "split_column")]
        named += [("label_column", name) for name in self.label_columns]
        for option, name in (*named, ("group_column", self.group_column)):
            if name is not None and name not in row:
                raise DataError(
                    f"{self.table} has no column {name!r}; its columns: "
                    f"{shortened(map(repr, row), 20)}. Set data."
                    f"{self.names.get(option, option)}{did_you_mean(name, row)}"
                )

    def _row_faults(self, rows: list[dict[str, str]]) -> Iterator[str]:
        """The faults of rows, except for those of their files and classes."""
        labels = [] if self._lists else self.label_columns
        needed = (self.path_column, *labels, self.split_column, self.group_column)
        for line, row in enumerate(rows, 2):  # the first line has the names
            for name in needed:
                if name and not row[name]:
                    yield (
                        f"line {line} of {self.table} has nothing in column {name!r}: fill it in, "
                        "or remove the line"
                    )
            if self.split_column and row[self.split_column] and self._split_of(row) is None:
                yield (
                    f"line {line} of {self.table} has {row[self.split_column]!r} in column "
                    f"{self.split_column!r}: expected one of {', '.join(NAMES)}"
                )
        if self.group_column:
            try:
                _in_order({row[self.group_column] for row in rows} - {""}, "groups")
            except DataError as error:
                yield str(error)
            yield from self._shared_groups(rows, self.group_column)
        for path, count in Counter(row[self.path_column] for row in rows).items():
            if path and count > 1:
                yield f"{self.table} lists {path} {count} times: expected one row for each image"

    def _shared_groups(self, rows: list[dict[str, str]], column: str) -> Iterator[str]:
        """A sentence for each group that two splits share."""
        seen: dict[str, Split] = {}
        reported: set[str] = set()
        for line, row in enumerate(rows, 2):
            name, split = row[column], self._split_of(row)
            if not name or split is None or name in reported:
                continue
            if (other := seen.setdefault(name, split)) != split:
                reported.add(name)
                yield (
                    f"group {name!r} of {self.table} is in two splits, {other} and {split} (line "
                    f"{line}): what a network has trained on cannot test it. Put it in one of them"
                )

    def _check_classes(self, splits: Mapping[Split, Files], classes: list[str]) -> None:
        if len(classes) == 1 and self.task == "classification":
            raise DataError(
                f"{self.table} has only one class, {classes[0]!r}, in column "
                f"{self.label_columns[0]!r}: expected at least two"
            )
        count = sum(len(files.labels) for files in splits.values())
        fraction = next(filter(_is_fraction, classes), None)
        if self.task == "classification" and fraction and 2 * len(classes) > count:
            raise DataError(
                f"{self.table} has {len(classes)} different numbers, such as {fraction}, in column "
                f"{self.label_columns[0]!r}: expected classes. For a number of each image add "
                "task=regression"
            )
        trained = splits["train"].labels if "train" in splits else [*range(len(classes))]
        if self.task == "multilabel" and "train" in splits:  # an image has any number of labels
            trained = [label for row in trained for label, there in enumerate(row) if there]
        unseen = {*range(len(classes))} - {*trained}
        if unseen:
            raise DataError(
                f"no training image of {shortened(classes[label] for label in sorted(unseen))} in "
                f"{self.table}: put some in the training split, or remove the other rows"
            )

    def check_files(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Raise a DataError if files of rows are missing, or an image has two paths."""
        paths = [row[name] for name in self.file_columns for row in rows]
        if missing := [path for path in paths if not Path(path).is_file()]:
            raise DataError(
                f"{self.table}: {len(missing)} of {number_of(len(paths), 'file')} missing: "
                f"{shortened(missing)}. Relative paths start from {self.root}: set "
                "data.root, or correct the table"
            )
        names: dict[tuple[int, int], str] = {}
        for path in paths[: len(rows)]:  # of images: one file may be in two splits
            file = Path(path).stat()
            if (other := names.setdefault((file.st_dev, file.st_ino), path)) != path:
                raise DataError(
                    f"{self.table}: {other} and {path} are one file: expected one row for each "
                    "image; remove one of them"
                )

    def _no_training(self) -> DataError:
        return DataError(
            f"{self.table} has no training images in column {self.split_column!r}: expected rows "
            "with 'train'"
        )

    def _no_test(self) -> str:
        if self.split_column is None:
            return f"{self.table} has no split column: set data.split_column"
        return f"{self.table} has no row with 'test' in column {self.split_column!r}"


def check_table(
    data: ImageFolder, table: Table, *, workers: int | None = None, check: Check | None = None
) -> FolderReport:
    """Check every row of a table, and decode its files.

    ``table`` is the data module, or its part that reads the rows; the other options are those of
    :func:`~revzoo.data.folders.check_folder`.

    Raises:
        DataError: the table cannot be read, or lacks a column.
    """
    faults, files = [*table.faults()], table.files()
    read = partial(read_file, check=check)
    bad = unreadable([*files], read, files, files.values(), workers=workers)
    if not faults and not bad:  # only now: a wrong row would also seem to lack a class
        try:
            data.prepare_data()
        except DataError as error:
            faults = [str(error)]
    return FolderReport(len(files), bad, faults)


def _in_order(values: set[str], what: str = "labels") -> list[str]:
    names = sorted(values)  # first: a set has another order in each process
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return names
    if any(map(math.isnan, numbers)):
        return names
    found: dict[float, str] = {}
    for number, name in zip(numbers, names, strict=True):
        if (other := found.setdefault(number, name)) != name:
            raise DataError(f"the {what} {other!r} and {name!r} are one number: write one of them")
    return [found[number] for number in sorted(found)]  # classes 0 to 10, not 0, 1, 10, 2


def _is_fraction(name: str) -> bool:
    try:
        return float(name) % 1 > 0  # not of nan
    except ValueError:
        return False


def _read(table: Path) -> list[dict[str, str]]:
    """The rows, as text without spaces around it."""
    if not table.is_file():
        raise DataError(f"table {table.absolute()} does not exist: set data.table")
    suffix = table.suffix.lower()
    try:
        rows = _read_text(table, _TEXT[suffix]) if suffix in _TEXT else _read_parquet(table)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"cannot read the table {table.absolute()} ({error}): expected {', '.join(TABLES)}, "
            "with the names of the columns in the first row and text in UTF-8"
        ) from error
    if not rows:
        raise DataError(f"the table {table.absolute()} has no rows: expected one for each image")
    return rows


def _read_text(table: Path, separator: str | None) -> list[dict[str, str]]:
    with table.open(encoding="utf-8-sig", newline="") as file:  # Excel begins with a mark
        if separator is None:
            first = file.readline()
            separator = max(",;\t", key=first.count)  # Excel writes semicolons in some countries
            file.seek(0)
        reader = csv.reader(file, delimiter=separator, strict=True)
        names = [name.strip() for name in next(reader, [])]
        if len({*names}) < len(names):
            raise ValueError("two columns have one name")
        rows = []
        for values in reader:
            if len(values) == len(names):
                rows.append(dict(zip(names, map(str.strip, values), strict=True)))
            elif values:
                raise ValueError(
                    f"line {reader.line_num} has {len(values)} values for {len(names)} columns"
                )
        return rows


def _read_parquet(table: Path) -> list[dict[str, str]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(package_needed(f"{table.name} needs", "pyarrow")) from None
    return [
        # NaN, too, is a missing value
        {name: "" if v is None or v != v else str(v).strip() for name, v in row.items()}
        for row in parquet.read_table(table).to_pylist()
    ]
