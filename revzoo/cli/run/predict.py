"""Class probabilities of image files, and how they are printed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from revzoo.data import DataError
from revzoo.data.decode import open_image
from revzoo.models.network import ImageNetwork
from revzoo.training.checkpoint.restore import Restored
from revzoo.training.predict import classify

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

    Images are resized and cropped as in training; without ``crop_pct`` they stay whole.

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
    if image_size is None and restored.image_size is None:
        raise DataError("the checkpoint does not say how large its images were: give --size PIXELS")
    network = restored.module.model.to(device)
    assert isinstance(network, ImageNetwork), "restore builds models of the zoo"
    files = [str(path) for path in image_files(paths)]
    images = (open_image(path, restored.in_chans) for path in files)
    found = classify(network, images, size=image_size, batch_size=batch_size)
    return zip(files, found, strict=True)


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


FORMS = {"table": as_table, "json": as_json, "csv": as_csv}
