"""``revzoo pack-data DIR OUT --format litdata``: images as shards, for data that are streamed.

Copies the files of an image folder or of a table, as they are, into shards of litdata or
webdataset, a folder for each split, with an index of all images. OUT appears when it is complete.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from revzoo._checks import check_number, number_of
from revzoo._files import TABLES
from revzoo.cli.terminal import command_line, folded_command, show_status, status_of

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    source = "folder with train/CLASS/*.jpg, or a table: CSV or Parquet"
    parser.add_argument("source", type=Path, metavar="SOURCE", help=source)
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder for the shards")
    formats = ("litdata", "webdataset")
    parser.add_argument("--format", choices=formats, default="litdata", help="default litdata")
    parser.add_argument(
        "--shard-mb", type=float, default=64, metavar="N", help="MiB of a shard, default 64"
    )
    table = parser.add_argument_group("of a table, as data=table")
    for name in ("root", "path-column", "label-column", "split-column", "group-column"):
        table.add_argument(f"--{name}", metavar="NAME", help=f"data.{name.replace('-', '_')}")


def run(args: argparse.Namespace) -> None:
    """Write the shards; print their number and a command that trains on them."""
    # litdata counts the bytes of a shard with 32 bits
    check_number("--shard-mb", args.shard_mb, high=4000, open_low=True)
    with status_of("loading torch"):  # only now: it takes seconds
        from revzoo.data.folders import scan
        from revzoo.data.pack import pack
        from revzoo.data.table import Table

    columns = {
        name: value
        for name in ("root", "path_column", "label_column", "split_column", "group_column")
        if (value := getattr(args, name)) is not None
    }
    is_table = args.source.suffix.lower() in TABLES
    if columns and not is_table:
        option = next(iter(columns)).replace("_", "-")
        raise ValueError(f"--{option} needs a table as SOURCE: {', '.join(TABLES)}")
    tree = (
        Table(args.source, task="classification", **columns).listing()
        if is_table
        else scan(args.source.expanduser())
    )
    for note in tree.left_out:
        sys.stderr.write(f"{note}\n")
    shard_bytes = int(args.shard_mb * MIB)
    try:
        shards = pack(tree, args.out, form=args.format, shard_bytes=shard_bytes, show=show_status)
    finally:
        show_status("")
    images = number_of(sum(len(files.paths) for files in tree.splits.values()), "image")
    sys.stdout.write(f"{images} in {number_of(shards, 'shard')}: {args.out}\n")
    words = (f"data={args.format}", f"data.root={args.out}", "data.image_size=224")
    command = command_line("train", "model=revnet38", *words)
    sys.stdout.write(f"{folded_command(f'to train: {command}', indent=4)}\n")
