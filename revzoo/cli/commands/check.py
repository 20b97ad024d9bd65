"""``revzoo check DIR``: decode every image or volume of a folder and list those that fail.

    revzoo check images/train

Only data can be checked; check data DIR means the same. revzoo info NAME shows a model, and
revzoo train ... --cfg job checks a configuration and prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from revzoo._checks import check_count, number_of
from revzoo.cli.terminal import folded, status_of

SHOWN = 10  # paths of each reason, on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("words", nargs="+", metavar="DIR", help="a folder of images")
    parser.add_argument("--workers", type=int, help="processes; the CPUs but one by default")


def run(args: argparse.Namespace) -> None:
    """Print the unreadable images by reason, and the fault of the folders."""
    folder = _folder(args.words)
    if args.workers is not None:
        check_count("--workers", args.workers)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder.absolute()}: expected a folder of images")
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
    for reason, paths in report.bad.items():
        # a path a line: they are copied
        shown = paths[:SHOWN] if sys.stdout.isatty() else paths
        listed = "".join(f"  {path}\n" for path in shown)
        if more := len(paths) - len(shown):
            listed += f"  and {more} more; > FILE writes all\n"
        what = f"{number_of(len(paths), 'image')}: {reason}"
        sys.stdout.write(f"{folded(what, indent=4)}\n{listed}")
    for note in (*report.left_out, *filter(None, [report.layout])):
        sys.stdout.write(f"{folded(note, indent=2)}\n")
    if count := sum(map(len, report.bad.values())):
        # a run cannot skip all images
        skip = ", or train with data.on_error=skip" if count < report.images else ""
        raise ValueError(
            f"{count} of {report.images} images cannot be read: replace or remove them{skip}"
        )
    if report.layout:
        raise ValueError(
            f"all {report.images} images can be read, but their folders are not a data set: "
            "see above"
        )
    sys.stdout.write(f"all {report.images} images can be read\n")


def _report_volumes(count: int, faults: Sequence[str]) -> None:
    """Print the faults of volumes, a line each."""
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    if faults:
        raise ValueError(f"{len(faults)} of {number_of(count, 'volume')} cannot be used: see above")
    sys.stdout.write(f"all {number_of(count, 'volume')} can be read\n")


def _folder(words: Sequence[str]) -> Path:
    """The folder of ``DIR`` or ``data DIR``."""
    *before, last = words
    # a missing path is named later
    if before == ["data"] or (not before and (Path(last).is_dir() or "/" in last)):
        return Path(last).expanduser()
    raise ValueError(
        f"check {' '.join(words)}: expected revzoo check DIR, where DIR is a folder of images. To "
        "see a model: revzoo info NAME. To check a configuration: revzoo train ... --cfg job"
    )
