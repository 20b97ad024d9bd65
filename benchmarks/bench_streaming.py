"""Images a second from shards against the files of an image folder.

    python benchmarks/bench_streaming.py DIR --size 32

DIR has train/CLASS/*.jpg; ``--generate N`` first writes N smooth JPEGs of 256 pixels there. Each
candidate reads an epoch of training images with ``--workers`` workers, decoded and augmented, and
not from memory (``cache_bytes=0``). The files are in the page cache: the first epoch is not timed.
With ``--workers 0`` and one thread, the seconds are those of the thread, without other programs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import environment, interleaved
from PIL import Image

from revzoo.data import ImageData, ImageFolder, Shards
from revzoo.data.folders import scan
from revzoo.data.pack import FORMS, pack

MIB = 2**20


def generate(root: Path, count: int) -> None:
    """Write JPEGs of 256x256 pixels, enlarged from noise of 32x32."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = root / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)


def epoch(data: ImageData) -> Callable[[], object]:
    """A function that reads all batches of an epoch."""
    data.setup("fit")
    loader = data.train_dataloader()

    def read() -> None:
        for _ in loader:
            pass

    return read


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--generate", type=int, metavar="N")
    parser.add_argument("--size", type=int, default=32, help="of the training images")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-mb", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.workers:  # with one thread, interleaved() would take the clock of this thread alone
        torch.set_num_threads(2)
    if args.generate:
        generate(args.root, args.generate)
    options = {"image_size": args.size, "batch_size": 128, "num_workers": args.workers}
    options |= {"cache_bytes": 0}
    with tempfile.TemporaryDirectory() as folder:
        sets: dict[str, ImageData] = {"imagefolder": ImageFolder(args.root, **options)}
        for form in FORMS:
            out, shard_bytes = Path(folder, form), int(args.shard_mb * MIB)
            shards = pack(scan(args.root), out, form=form, shard_bytes=shard_bytes)
            sets[form] = Shards(out, **options)
        timings = interleaved({name: epoch(data) for name, data in sets.items()}, args.rounds)
    images = sets["imagefolder"].train_count // 128 * 128
    print(environment(root=args.root), end="")
    print(f"- {images:,} images an epoch, {shards} shards; n = {args.rounds} interleaved rounds\n")
    print("| data | images a second | of imagefolder (quartiles) |")
    print("|---|---|---|")
    for name, t in timings.items():
        # interleaved() compares seconds; here images a second
        ratio = f"{1 / t.ratio:.2f} ({1 / t.high:.2f} to {1 / t.low:.2f})"
        print(f"| {name} | {images / t.seconds:.0f} | {ratio} |")


if __name__ == "__main__":
    main()
