"""Images a second that one core decodes and crops, with revzoo's reader and its alternatives.

    python benchmarks/bench_decoding.py                  # the table
    python benchmarks/bench_decoding.py --write DIR      # photos in class folders, to try a recipe

The photos are generated: noise with the spectrum of natural images (amplitude 1/f, D. Field 1987),
500x375, JPEG quality 90.
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
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from revzoo.data import ImageFolder as Folder
from revzoo.data.decode import IMAGENET_CROP_PCT
from revzoo.weights.transforms import cropped

WIDTH, HEIGHT, QUALITY = 500, 375, 90


def photo(rng: np.random.Generator) -> Image.Image:
    """Noise with amplitude 1/f: 4/5 of it grey, 1/5 in colour."""
    rows, columns = np.fft.fftfreq(HEIGHT), np.fft.rfftfreq(WIDTH)
    frequency = np.hypot(rows[:, None], columns).clip(1 / WIDTH)
    noise = np.fft.rfft2(rng.standard_normal((4, HEIGHT, WIDTH))) / frequency
    planes = np.fft.irfft2(noise, (HEIGHT, WIDTH))
    planes /= planes.std((1, 2), keepdims=True)
    pixels = 128 + 45 * (0.8 * planes[:1] + 0.2 * planes[1:])
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def write_photos(root: Path, images: int) -> None:
    """``train/`` and ``val/`` with two classes of ``images`` photos each."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("n01440764", "n01443537"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(images):
                photo(rng).save(folder / f"{i}.JPEG", quality=QUALITY)


def drafted(path: str, side: int) -> Image.Image:
    """Evaluation's crop, of an image that libjpeg reduces while it decodes (Pillow's ``draft``)."""
    with Image.open(path) as image:
        image.draft("RGB", (round(side / IMAGENET_CROP_PCT),) * 2)
        return cropped(image.convert("RGB"), (side, side), IMAGENET_CROP_PCT)


def readers(root: Path, side: int) -> dict[str, Callable[[], object]]:
    """Each reads all training photos once; the first is the reference."""
    crop = v2.RandomResizedCrop(side, antialias=True)
    shorter = v2.Resize(round(side / IMAGENET_CROP_PCT), antialias=True)
    train = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    evaluated = v2.Compose([shorter, v2.CenterCrop(side), v2.PILToTensor()])
    tensors = {"training": train.transforms[:2], "evaluation": evaluated.transforms[:2]}
    data = Folder(root, image_size=side, cache_bytes=0, batch_size=1, num_workers=0)
    data.setup("fit")
    sets = {"training": data._images("train"), "evaluation": data._images("val")}
    paths = [path for path, _ in ImageFolder(root / "train").samples]
    found: dict[str, Callable[[], object]] = {}
    for kind, transform in (("training", train), ("evaluation", evaluated)):
        folder, ours, steps = ImageFolder(root / "train", transform), sets[kind], tensors[kind]

        def decoded(steps: list[v2.Transform] = steps) -> list[object]:
            run = v2.Compose(steps)
            return [run(decode_image(path, ImageReadMode.RGB)) for path in paths]

        found[f"{kind}, torchvision's ImageFolder"] = lambda f=folder: [f[i] for i in range(len(f))]
        found[f"{kind}, revzoo"] = lambda s=ours: [s[i] for i in range(len(s))]
        found[f"{kind}, torchvision's decode_image"] = decoded
    found["evaluation, Pillow's draft"] = lambda: [drafted(path, side) for path in paths]
    return found


def difference(root: Path, side: int) -> str:
    """How far a drafted crop is from the full one, in levels of 255."""
    paths = [path for path, _ in ImageFolder(root / "train").samples]
    pairs = [(Image.open(path).convert("RGB"), drafted(path, side)) for path in paths]
    full = [np.asarray(cropped(a, (side, side), IMAGENET_CROP_PCT), float) for a, _ in pairs]
    distance = np.abs(full - np.stack([np.asarray(b, float) for _, b in pairs]))
    return f"mean {distance.mean():.2f}, largest {distance.max():.0f}"


def main() -> None:
    """Print the report, or write photos."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="DIR")
    parser.add_argument("--images", type=int, default=20, help="of each class and split")
    parser.add_argument("--sides", type=int, nargs="+", default=[160, 224])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.write:
        write_photos(args.write, args.images)
        return
    torch.set_num_threads(1)
    print("# Decoding on one core\n")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photos(root, args.images)
        sizes = [path.stat().st_size for path in root.rglob("*.JPEG")]
        kilobytes = np.mean(sizes) / 1000
        size = f"{WIDTH}x{HEIGHT}, quality {QUALITY}, {kilobytes:.0f} kB on average"
        print(environment() + f"- {2 * args.images} generated photos, {size}; n = {args.rounds}\n")
        print("| reader | side | images a second | time over the first (quartiles) |")
        print("|---|---|---|---|")
        for side in args.sides:
            for name, t in interleaved(readers(root, side), args.rounds).items():
                ratio = f"{t.ratio:.2f} ({t.low:.2f} to {t.high:.2f})"
                rate = 2 * args.images / t.seconds
                print(f"| {name} | {side} | {rate:.0f} | {ratio} |", flush=True)
        print()
        for side in args.sides:
            print(f"- Draft's pixels at {side}, in levels of 255: {difference(root, side)}")


if __name__ == "__main__":
    main()
