"""Images a second from shards against the files of an image folder, and the wait for S3.

    python benchmarks/bench_streaming.py DIR --size 32
    python benchmarks/bench_streaming.py DIR --size 32 --delay 0.2

DIR has train/CLASS/*.jpg; ``--generate N`` first writes N smooth JPEGs of 256 pixels there. Each
candidate reads an epoch of training images with ``--workers`` workers, decoded and augmented, and
not from memory (``cache_bytes=0``). The files are in the page cache: the first epoch is not timed.
CPU time adds up all processes of a run; other programs hardly change it.

``--delay`` reads shards for the first time, in training and in evaluation, from a local S3 server
(moto) that waits so many seconds before each answer, with and without ``prefetch``.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from bench_training import Times, quartiles
from measure import environment
from PIL import Image

from revzoo.data import ImageData, ImageFolder, Shards, sharded
from revzoo.data.folders import scan
from revzoo.data.loaders import eval_loader
from revzoo.data.pack import FORMS, pack

MIB = 2**20
BATCH = 128


def generate(root: Path, count: int) -> None:
    """Write JPEGs of 256x256 pixels, enlarged from noise of 32x32."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = root / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)


def epoch(data: ImageData, *, evaluated: bool = False) -> Callable[[], object]:
    """A function that reads all training images, in the order of an epoch or of an evaluation."""
    data.setup("fit")
    loader = data.train_dataloader()
    if evaluated:
        options = {"batch_size": BATCH, "workers": data.num_workers, "trainer": None}
        loader = eval_loader(data._images("train"), **options)

    def read() -> None:
        for _ in loader:
            pass

    return read


def now() -> Times:
    """The CPU time of this process and its workers, and the time on the wall."""
    ticks = 0
    for pid in [os.getpid(), *(child.pid for child in active_children())]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in the program and in the kernel
    return Times(ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter())


def timed(read: Callable[[], object]) -> Times:
    """Seconds of a call by each clock."""
    start = now()
    read()
    return Times(*(end - begin for begin, end in zip(start, now(), strict=True)))


def compare(sets: dict[str, ImageData], rounds: int) -> None:
    """Print the rows of all sets; ratios are to the first set in the same round."""
    epochs = {name: epoch(data) for name, data in sets.items()}
    seconds: dict[str, list[Times]] = {name: [] for name in sets}
    for number in range(rounds + 1):
        for name, read in epochs.items():
            taken = timed(read)
            if number:  # the first epoch fills the page cache
                seconds[name].append(taken)
    base = next(iter(seconds.values()))
    images = sets["imagefolder"].train_count // BATCH * BATCH
    print(f"- {images:,} images an epoch; n = {rounds} interleaved rounds\n")
    print("| data | images a second | of imagefolder, by CPU time | by the wall |")
    print("|---|---|---|---|")
    for name, times in seconds.items():
        pairs = list(zip(base, times, strict=True))
        cpu, wall = (quartiles([folder[i] / t[i] for folder, t in pairs]) for i in range(2))
        print(
            f"| {name} | {images / statistics.median(t.wall for t in times):.0f} | {cpu} | {wall} |"
        )


def from_storage(shards: Path, delay: float, rounds: int, options: dict[str, Any]) -> None:
    """Print the seconds of the first passes over ``shards`` on a slow S3 server."""
    import boto3  # of the extra "dev", as moto
    from moto import server

    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    answer = server.DomainDispatcherApplication.__call__

    def late(self: Any, request: dict[str, Any], start: Any) -> Any:
        time.sleep(delay if request["REQUEST_METHOD"] in ("GET", "HEAD") else 0)
        return answer(self, request, start)

    server.DomainDispatcherApplication.__call__ = late
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    endpoint = "http://{}:{}".format(*running.get_host_and_port())
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="images")
    files = [path for path in shards.rglob("*") if path.is_file()]
    for path in files:
        client.upload_file(str(path), "images", f"set/{path.relative_to(shards)}")
    seconds: dict[tuple[str, int], list[float]] = {
        (use, prefetch): [] for use in ("training", "evaluation") for prefetch in (0, 8)
    }
    for _ in range(rounds):
        for (use, prefetch), samples in seconds.items():
            with tempfile.TemporaryDirectory() as cache:
                os.environ["REVZOO_CACHE"] = cache
                root = "s3://images/set"
                data = Shards(root, endpoint_url=endpoint, prefetch=prefetch, window=2, **options)
                read = epoch(data, evaluated=use == "evaluation")
                rmtree(cache)  # setup has read the first 1,000 images
                sharded._opened.cache_clear()
                Path(cache).mkdir()
                samples.append(timed(read).wall)
    running.stop()
    print(f"- {len(files) - 1} shards in windows of 2, {delay} s a request; n = {rounds} rounds\n")
    print("| pass | prefetch | seconds of the first one (quartiles) |")
    print("|---|---|---|")
    for (use, prefetch), samples in seconds.items():
        print(f"| {use} | {prefetch} | {quartiles(samples)} |")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--generate", type=int, metavar="N")
    parser.add_argument("--size", type=int, default=32, help="of the training images")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-mb", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delay", type=float, metavar="SECONDS")
    args = parser.parse_args()
    if args.generate:
        generate(args.root, args.generate)
    options = {"image_size": args.size, "batch_size": BATCH, "num_workers": args.workers}
    options |= {"cache_bytes": 0}
    with tempfile.TemporaryDirectory() as folder:
        sets: dict[str, ImageData] = {"imagefolder": ImageFolder(args.root, **options)}
        for form in FORMS:
            out, shard_bytes = Path(folder, form), int(args.shard_mb * MIB)
            pack(scan(args.root), out, form=form, shard_bytes=shard_bytes)
            sets[form] = Shards(out, **options)
        print(environment(root=args.root), end="")
        if args.delay is None:
            compare(sets, args.rounds)
        else:
            from_storage(out, args.delay, args.rounds, options)


if __name__ == "__main__":
    main()
