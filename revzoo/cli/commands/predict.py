"""Classify images: ``revzoo-predict ckpt=RUN_DIR/checkpoints/best.ckpt IMAGE_OR_FOLDER...``.

``ckpt`` may also be weights, as for ``revzoo-eval``: ``ckpt=revnet38.cifar10``. Images are read as
they are for evaluation (converted to the model's channels, resized, the middle cut out) and
normalised with the numbers of the checkpoint: no data set is needed. Prints the ``--top`` most
probable classes of each image as a table, or all of them with ``--json``, ``--csv``.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from revzoo.cli.run.errors import quiet, told_plainly
from revzoo.data import DataError
from revzoo.data.decode import open_image, square_bytes
from revzoo.data.normalise import Normalisation
from revzoo.data.state import BYTE_MAX, crop_of, normalisation_for
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.checkpoint.restore import Restored, restore

Prediction = tuple[str, dict[str, float]]
"""A path, and the probability of each class, the most probable first."""


def predict(
    restored: Restored,
    paths: Sequence[str | Path],
    *,
    batch_size: int = 64,
    image_size: int | None = None,
    device: str | torch.device = "cpu",
) -> Iterator[Prediction]:
    """Class probabilities of image files, and of all images in folders.

    Images are cut to size as those of the training, whole (``crop_pct`` 1) where it does not say.

    Args:
        restored: from :func:`revzoo.training.checkpoint.restore.restore`.
        paths: files and folders, which are searched in depth.
        batch_size: images per step.
        image_size: side in pixels; None for the checkpoint's.
        device: where to compute.

    Raises:
        CheckpointError: if a network's output is NaN or Inf.
        DataError: if a path does not exist or is no image, or a folder has none.
    """
    size = image_size or restored.image_size
    if size is None:
        raise DataError("the checkpoint does not say how large its images were: give --size PIXELS")
    files = list(image_files(paths))
    crop_pct = crop_of(restored.data_state) or 1.0
    module = restored.module.to(device).eval()
    normalise = Normalisation(**normalisation_for(restored.data_state, BYTE_MAX))
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        opened = (open_image(str(path), restored.in_chans) for path in batch)
        images = torch.stack([square_bytes(image, size, crop_pct) for image in opened])
        with torch.inference_mode():
            logits = module(normalise(images.to(device))).float()
        _check_finite(batch, logits)
        for path, row in zip(batch, logits.softmax(1).cpu(), strict=True):
            order = row.argsort(descending=True).tolist()
            yield str(path), {restored.classes[label]: float(row[label]) for label in order}


def _check_finite(paths: Sequence[Path], logits: Tensor) -> None:
    for path, row in zip(paths, logits, strict=True):
        if not row.isfinite().all():
            raise CheckpointError(
                f"the network's output for {path} is NaN or Inf: its weights or its normalisation "
                "are out of range; use an earlier checkpoint, or other weights"
            )


def image_files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """The files among ``paths`` and the images below the folders, sorted by name.

    Raises:
        DataError: if there is no such file, or no image in a folder.
    """
    for given in map(Path, paths):
        if given.is_file():
            yield given
        elif given.is_dir():
            found = [p for p in sorted(given.rglob("*")) if p.suffix.lower() in IMG_EXTENSIONS]
            if not found:
                raise DataError(f"no images in {given}: expected {', '.join(IMG_EXTENSIONS)}")
            yield from found
        else:
            raise DataError(f"there is no image or folder {given}")


def as_table(predictions: Sequence[Prediction], top: int) -> str:
    """A line per image: its path, then classes with their probabilities."""
    width = max(len(path) for path, _ in predictions)
    lines = []
    for path, classes in predictions:
        best = list(classes.items())[:top]
        lines.append(f"{path:{width}}  " + "  ".join(f"{name} {p:.4f}" for name, p in best))
    return "\n".join(lines) + "\n"


def as_json(predictions: Sequence[Prediction], top: int) -> str:
    """A list of objects with path, class and probabilities by class name."""
    rows = [
        {"path": path, "class": next(iter(classes)), "probabilities": classes}
        for path, classes in predictions
    ]
    return json.dumps(rows, indent=1) + "\n"


def as_csv(predictions: Sequence[Prediction], top: int) -> str:
    """Columns path, class, and the probability of each class by its name."""
    text = io.StringIO()
    names = sorted(predictions[0][1])
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "class", *names])
    for path, classes in predictions:
        writer.writerow([path, next(iter(classes)), *(f"{classes[n]:.6f}" for n in names)])
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script ``revzoo-predict``."""
    args = _parser().parse_intermixed_args(arguments)
    with quiet(), told_plainly():
        restored = restore(args.ckpt)
        options = {"batch_size": args.batch_size, "image_size": args.size, "device": args.device}
        predictions = list(predict(restored, args.images, **options))
    sys.stdout.write(args.form(predictions, args.top))


def _parser() -> ArgumentParser:
    parser = ArgumentParser("revzoo-predict", description=__doc__, allow_abbrev=False)
    parser.add_argument("ckpt", type=_checkpoint, metavar="ckpt=PATH_OR_NAME")
    parser.add_argument("images", nargs="+", metavar="IMAGE_OR_FOLDER")
    parser.add_argument("--top", type=_positive, default=3, help="classes per line (3)")
    parser.add_argument("--size", type=_positive, help="side of the images in pixels")
    parser.add_argument("--batch-size", type=_positive, default=64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=device)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_const", dest="form", const=as_json)
    form.add_argument("--csv", action="store_const", dest="form", const=as_csv)
    parser.set_defaults(form=as_table)
    return parser


def _device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentTypeError(f"{text} ({reason}): expected a device that is here") from None


def _checkpoint(text: str) -> str:
    if not text.startswith("ckpt="):
        raise ArgumentTypeError(f"{text}: expected ckpt=PATH or ckpt=NAME first, then images")
    return text.removeprefix("ckpt=")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text}: expected a whole number >= 1")
    return int(text)


if __name__ == "__main__":
    main()
