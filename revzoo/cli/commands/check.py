"""``revzoo check data DIR``: decode every image of a folder and list those that fail.

    revzoo check data images/train

Only data can be checked. revzoo info NAME shows a model, and revzoo train ... --cfg job checks a
configuration and prints it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from revzoo._checks import check_count
from revzoo.cli.terminal import folded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    # no choices=...: argparse would not explain the word
    parser.add_argument("what", metavar="data", help="the literal word: data")
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a folder of images")
    parser.add_argument("--workers", type=int, help="processes; the CPUs but one by default")


def run(args: argparse.Namespace) -> None:
    """Print a line for each unreadable image and each fault of the folders.

    Raises:
        ValueError: an image cannot be read, or the folders are not a data set; or the arguments are
            not ``data DIR``.
        DataError: there is no such folder, or it has no images.
    """
    if args.what != "data" or args.folder is None:
        raise ValueError(_usage(args.what, args.folder))
    if args.workers is not None:
        check_count("--workers", args.workers)
    # only now: it imports torch
    from revzoo.data.folders import check_folder

    report = check_folder(args.folder, workers=args.workers)
    # unreadable images first, then the fault of the folders
    faults = report.bad + ([report.layout] if report.layout else [])
    sys.stdout.write("".join(f"{folded(fault, indent=2)}\n" for fault in faults))
    if report.bad:
        raise ValueError(
            f"{len(report.bad)} of {report.images} images cannot be read: replace or remove them, "
            "or train with data.on_error=skip"
        )
    if faults:
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
