"""``revzoo check DIR``: decode every image or volume of a folder and list those that fail.

  revzoo check images/train
  revzoo check labels.csv data.label_column=age task=regression

Of a table (.csv, .tsv, .parquet) it also lists every row that training would refuse: missing files,
labels and groups. It takes the options of revzoo train: the columns, task, and data=masks for a
table of masks. With data=masks data.classes=[a,b], of a table or a folder, it also lists masks with
values without a class.

Only data can be checked; check data DIR means the same. revzoo info NAME shows a model, and
revzoo train ... --cfg job checks a configuration and prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo._checks import check_count, number_of
from revzoo._files import TABLES
from revzoo.cli.terminal import folded, override_argument, status_of

if TYPE_CHECKING:  # torch is imported when the command runs, not for its help
    from revzoo.data.folders import FolderReport

SHOWN = 10  # paths of each reason, on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "words",
        nargs="+",
        type=override_argument,
        metavar="DIR",
        help="a folder of images; or a table, with KEY=VALUE as of revzoo train",
    )
    parser.add_argument("--workers", type=int, help="processes; the CPUs but one by default")


def run(args: argparse.Namespace) -> None:
    """Print the unreadable images by reason, and the faults of the folders or rows."""
    if args.workers is not None:
        check_count("--workers", args.workers)
    words = [word for word in args.words if "=" not in word or Path(word).exists()]
    folder, options = _folder(words), [word for word in args.words if word not in words]
    is_table = folder.suffix.lower() in TABLES and not folder.is_dir()
    if options and not is_table and "data=masks" not in options:
        raise ValueError(
            f"{' '.join(options)}: options are for a table, or with data=masks for a folder of "
            f"masks, got the folder {folder}"
        )
    if not is_table and not folder.is_dir():
        place = words[-1] if "://" in words[-1] else folder.absolute()
        raise ValueError(f"there is no folder {place}: expected a folder of images on this machine")
    if is_table or options:
        _report(_check_set(folder, options, args.workers), folder)
        return
    with status_of("loading torch"):  # only now: it takes seconds
        from revzoo.data.folders import check_folder
        from revzoo.data.sharded import INDEX, check_shards
        from revzoo.data.volumes import check_volumes

    with status_of(f"reading the volumes of {folder}"):
        volumes = check_volumes(folder)
    if volumes is not None:
        _report_volumes(*volumes)
        return
    check_images = check_shards if (folder / INDEX).is_file() else check_folder
    with status_of(f"reading the images of {folder}"):
        report = check_images(folder, workers=args.workers)
    _report(report, folder)


def _check_set(source: Path, options: Sequence[str], workers: int | None) -> FolderReport:
    """Check a table, or a folder of masks, with the options of a run."""
    from revzoo.cli.config import compose, quoted

    kind = [] if any(word.startswith("data=") for word in options) else ["data=table"]
    place = f"data.{'root' if source.is_dir() else 'table'}={quoted(source)}"
    # what names the data comes before their options
    config = compose([*kind, *options, place], complete=False).config
    with status_of("loading torch"):
        from revzoo.cli.run.build import build_data
        from revzoo.data.folders import check_folder
        from revzoo.data.masks import Masks
        from revzoo.data.table import Table, check_table

    data = build_data(config["data"], config.get("task"))
    if not isinstance(data, Table | Masks):
        raise ValueError(f"{' '.join(options)}: expected data=table or data=masks, for {source}")
    masks = data if isinstance(data, Masks) else None
    rows = data if masks is None else masks.rows
    check = None if masks is None else masks.check_of_values()
    with status_of(f"reading the images of {source}"):
        if not isinstance(rows, Table):
            return check_folder(source, workers=workers, check=check)
        return check_table(data, rows, workers=workers, check=check)


def _report(report: FolderReport, source: Path) -> None:
    for reason, paths in report.bad.items():
        # a path a line: they are copied
        shown = paths[:SHOWN] if sys.stdout.isatty() else paths
        listed = "".join(f"  {path}\n" for path in shown)
        if more := len(paths) - len(shown):
            listed += f"  and {more} more; > FILE writes all\n"
        what = f"{number_of(len(paths), 'image')}: {reason}"
        sys.stdout.write(f"{folded(what, indent=4)}\n{listed}")
    for note in (*report.left_out, *report.faults):
        sys.stdout.write(f"{folded(note, indent=2)}\n")
    if count := sum(map(len, report.bad.values())):
        # a run cannot skip all images
        skip = ", or train with data.on_error=skip" if count < report.images else ""
        raise ValueError(
            f"{count} of {report.images} images cannot be read: replace or remove them{skip}"
        )
    if report.faults:
        what = f"{source} has {number_of(len(report.faults), 'fault')}"
        raise ValueError(f"all {report.images} images can be read, but {what}: see above")
    sys.stdout.write(f"all {report.images} images can be read\n")


def _report_volumes(count: int, faults: Sequence[str]) -> None:
    """Print the faults of volumes, a line each."""
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    if faults:
        raise ValueError(f"{len(faults)} of {number_of(count, 'volume')} cannot be used: see above")
    sys.stdout.write(f"all {number_of(count, 'volume')} can be read\n")


def _folder(words: Sequence[str]) -> Path:
    """The folder or table of ``DIR`` or ``data DIR``."""
    *before, last = words or [""]
    # a missing path is named later
    named = Path(last).is_dir() or "/" in last or last.lower().endswith(TABLES)
    if before == ["data"] or (not before and named):
        return Path(last).expanduser()
    raise ValueError(
        f"check {' '.join(words)}: expected revzoo check DIR, where DIR is a folder of images, or "
        "revzoo check FILE.csv. To see a model: revzoo info NAME. To check a configuration: revzoo "
        "train ... --cfg job"
    )
