"""``revzoo check data DIR``: decode every image of a folder and list those that fail.

    revzoo check data images/train

Only data can be checked. revzoo info NAME shows a model, and revzoo train ... --cfg job checks a
configuration and prints it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from revzoo._checks import check_count, number_of
from revzoo.cli.status import status_of
from revzoo.cli.terminal import folded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    # no choices=...: argparse would not explain the word
    parser.add_argument("what", metavar="data", help="the literal word: data")
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a folder of images")
    parser.add_argument("--workers", type=int, help="processes; the CPUs but one by default")


def run(args: argparse.Namespace) -> None:
    """Print the unreadable images by reason, and the fault of the folders.

    Raises:
        ValueError: an image cannot be read, or the folders are not a data set; or the arguments are
            not ``data DIR``.
        DataError: there is no such folder, or it has no images.
    """
    if args.what != "data" or args.folder is None:
        raise ValueError(_usage(args.what, args.folder))
    if args.workers is not None:
        check_count("--workers", args.workers)
    with status_of("loading torch"):  # only now: it takes seconds
        from revzoo.data.folders import check_folder

    with status_of(f"reading the images of {args.folder}"):
        report = check_folder(args.folder, workers=args.workers)
    for reason, paths in report.bad.items():
        # a path a line: they are copied
        listed = "".join(f"  {path}\n" for path in paths)
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


def _usage(what: str, folder: Path | None) -> str:
    """The message for wrong arguments, with the right ones."""
    form = "expected revzoo check data DIR, where DIR is a folder of images"
    if what == "data":
        return f"check data: {form}"
    typed = f"check {what}" if folder is None else f"check {what} {folder}"
    if Path(what).is_dir():
        return f"{typed}: {form}; did you mean revzoo check data {what}?"
    return (
        f"{typed}: {form}. To see a model: revzoo info NAME. To check a configuration: "
        "revzoo train ... --cfg job"
    )
