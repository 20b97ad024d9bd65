"""Writes images into shards of litdata or webdataset, with the index that ``sharded.py`` reads.

The files stay as they are, byte for byte. Training images are written in random order: a class
folder after the other would give shards of one class, and an epoch shuffles only a few shards
together.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch

from revzoo._checks import package_needed
from revzoo.data.errors import DataError
from revzoo.data.folders import Files, Tree
from revzoo.data.sharded import INDEX

Images = Iterator[tuple[str, bytes, int]]  # suffix, content, label
Places = list[tuple[str, list[int], list[int]]]  # a shard's name, starts and sizes of its images


def pack(
    tree: Tree,
    out: Path,
    *,
    form: str,
    shard_bytes: int,
    show: Callable[[str], object] = lambda _: None,
) -> int:
    """Write the images of all splits, all or nothing; return the number of shards.

    Args:
        tree: the images and their classes.
        out: the new folder.
        form: a name of :data:`FORMS`.
        shard_bytes: size of a shard, about.
        show: is called with the progress.

    Raises:
        DataError: ``out`` exists, an image is larger than a shard, or a package is missing.
        OSError: an image cannot be read, or a shard not written.
    """
    if out.exists():
        raise DataError(f"{out} exists: give a new folder, or remove it")
    partial = out.with_name(f".{out.name}.partial")
    rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
    index: dict[str, Any] = {"format": form, "classes": tree.classes, "splits": {}}
    try:
        for split, files in tree.splits.items():
            order = torch.arange(len(files.paths))
            if split == "train":
                order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
            rows = order.tolist()
            folder = partial / split
            folder.mkdir(parents=True)
            images = _read(split, files, rows, shard_bytes, show)
            shards = FORMS[form](folder, images, shard_bytes)
            index["splits"][split] = {
                "shards": [
                    {
                        "file": f"{split}/{name}",
                        "bytes": (folder / name).stat().st_size,
                        # so that the index of other images is never the same
                        "sha256": hashlib.sha256(np.memmap(folder / name).data).hexdigest(),
                        "images": len(starts),
                    }
                    for name, starts, _ in shards
                ],
                "labels": [files.labels[row] for row in rows],
                "groups": files.groups and [files.groups[row] for row in rows],
                "starts": [start for _, starts, _ in shards for start in starts],
                "sizes": [size for _, _, sizes in shards for size in sizes],
            }
        (partial / INDEX).write_text(json.dumps(index, separators=(",", ":")))
        partial.rename(out)
    finally:
        rmtree(partial, ignore_errors=True)
    return sum(len(split["shards"]) for split in index["splits"].values())


def _read(
    split: str, files: Files, rows: list[int], shard_bytes: int, show: Callable[[str], object]
) -> Images:
    for done, row in enumerate(rows):
        if done % 100 == 0:
            show(f"{split}: {done:,} of {len(rows):,} images")
        path = Path(files.paths[row])
        if path.suffix.lower() in (".npy", ".tif", ".tiff"):  # read by the name of their file
            raise DataError(f"{path} cannot be packed: convert it to PNG or JPEG")
        content = path.read_bytes()
        if len(content) > shard_bytes:
            raise DataError(
                f"{path} has {len(content):,} bytes, a shard {shard_bytes:,}: raise --shard-mb"
            )
        yield path.suffix[1:].lower() or "image", content, files.labels[row]


def _litdata(folder: Path, images: Images, shard_bytes: int) -> Places:
    try:
        from litdata.streaming.cache import Cache
    except ImportError:
        raise DataError(package_needed("--format litdata needs", "litdata")) from None
    cache = Cache(str(folder), chunk_bytes=shard_bytes)
    for number, (_, content, label) in enumerate(images):
        # a tuple: of dictionaries litdata writes tables, which have no place for each image
        cache[number] = (content, label)
    cache.done()
    cache.merge(1)
    chunks = json.loads((folder / "index.json").read_text())["chunks"]
    return [_items_of(folder / chunk["filename"]) for chunk in chunks]


def _items_of(path: Path) -> tuple[str, list[int], list[int]]:
    """A chunk: the number of images, where each begins; of each, two sizes, bytes and label."""
    chunk = np.memmap(path, mode="r")
    count = int(chunk[:4].view(np.uint32)[0])
    begins = chunk[4 : 4 + 4 * count].view(np.uint32).tolist()
    sizes = [int.from_bytes(chunk[begin : begin + 4].tobytes(), "little") for begin in begins]
    return path.name, [begin + 8 for begin in begins], sizes


def _webdataset(folder: Path, images: Images, shard_bytes: int) -> Places:
    try:
        from webdataset import ShardWriter
    except ImportError:
        raise DataError(package_needed("--format webdataset needs", "webdataset")) from None
    # absolute: it would take "a:b/c" for an address
    pattern = str(folder.absolute()).replace("%", "%%") + "/%06d.tar"
    options = {"maxsize": shard_bytes, "maxcount": 10**9, "verbose": 0}
    # encoder=False: bytes as they are; mtime=0: equal images, equal shards, and no
    # longer headers for fractions of seconds
    with ShardWriter(pattern, encoder=False, mtime=0, **options) as writer:
        for number, (suffix, content, label) in enumerate(images):
            writer.write({"__key__": f"{number:08d}", suffix: content, "cls": str(label).encode()})
            writer.size += 4 * 512  # it counts neither headers nor padding
    places = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = [member for member in tar if not member.name.endswith(".cls")]
        places.append((path.name, [m.offset_data for m in members], [m.size for m in members]))
    return places


FORMS: dict[str, Callable[[Path, Images, int], Places]] = {
    "litdata": _litdata,
    "webdataset": _webdataset,
}
