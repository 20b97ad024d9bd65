"""``revzoo check data DIR``: decode every image of a folder and list those that fail."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", choices=["data"], help="data")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of images")
    parser.add_argument("--workers", type=int, help="processes; the CPUs but one by default")


def run(args: argparse.Namespace) -> None:
    """Print a line for each unreadable image and each fault of the folders.

    Raises:
        ValueError: an image cannot be read, or the folders are no data set.
        DataError: there is no such folder, or it has no images.
    """
    from revzoo._checks import check_count
    from revzoo.data.folders import check_folder

    if args.workers is not None:
        check_count("--workers", args.workers)
    report = check_folder(args.folder, workers=args.workers)
    # unreadable images first, then the fault of the folders
    faults = report.bad + ([report.layout] if report.layout else [])
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    if report.bad:
        raise ValueError(f"{len(report.bad)} of {report.images} images cannot be read")
    if faults:
        raise ValueError(
            f"all {report.images} images can be read, but their folders are no data set: see above"
        )
    sys.stdout.write(f"all {report.images} images can be read\n")
