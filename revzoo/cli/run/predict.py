"""Class probabilities of image files, and their output as a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image

from revzoo.cli.terminal import columns, printable
from revzoo.data import DataError
from revzoo.data.decode import open_image
from revzoo.data.folders import images_below, left_out, no_images
from revzoo.training.checkpoint.restore import Restored
from revzoo.training.predict import classify

log = logging.getLogger(__name__)

Prediction = tuple[str, dict[str, float]]
"""A path, and the probability of each class, the most probable first."""


def predict(
    restored: Restored,
    paths: Sequence[str | Path],
    *,
    batch_size: int = 64,
    image_size: int | None = None,
    device: str | torch.device = "cpu",
    on_error: Callable[[DataError], None] | None = None,
) -> Iterator[Prediction]:
    """Yield the class probabilities of image files, and of all images in folders.

    Images are prepared as for evaluation: the shorter side resized, the centre cropped.

    Args:
        restored: from :func:`revzoo.training.checkpoint.restore.restore`.
        paths: files and folders, which are searched recursively.
        batch_size: images per forward pass.
        image_size: side in pixels; None for the size in the checkpoint.
        device: the device of the network.
        on_error: called for each file that cannot be decoded, which is left out; None to raise.

    Raises:
        CheckpointError: the network's output is NaN or Inf.
        DataError: a path does not exist, or a folder has no images; without ``on_error``, a file
            cannot be decoded.
    """
    # before the first image is read
    if image_size is None and restored.image_size is None:
        raise DataError("the checkpoint has no image size: give --image-size PIXELS")
    # a list: check all paths before the first result
    files = [str(path) for path in image_files(paths)]
    # classify opens a whole batch before its first result
    opened: deque[str] = deque()

    def images() -> Iterator[Image.Image]:
        for path in files:
            try:
                image = open_image(path, restored.in_chans)
            except DataError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            opened.append(path)
            yield image

    network = restored.network.to(device)
    probabilities = classify(network, images(), size=image_size, batch_size=batch_size)
    return ((opened.popleft(), classes) for classes in probabilities)


def image_files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """Yield the files among ``paths``, and the images below the folders, sorted by name.

    Raises:
        DataError: there is no such file, or no image in a folder.
    """
    for path in map(Path, paths):
        if path.is_file():
            yield path
        elif path.is_dir():
            unread: Counter[str] = Counter()
            images = [Path(name) for name in images_below(path, unread)]
            if not images:
                raise no_images(path)
            for note in left_out(path, unread):
                log.warning("%s", note)
            yield from images
        else:
            raise DataError(f"there is no image or folder {path}")


def as_table(predictions: Sequence[Prediction], top: int) -> str:
    """A line per image: its path, then classes with their probabilities."""
    shown = [_in_line(path) for path, _ in predictions]
    width = max(map(len, shown), default=0)
    lines = []
    for path, (_, classes) in zip(shown, predictions, strict=True):
        best = list(classes.items())[:top]
        figures = "  ".join(f"{_in_line(name)} {p:.4f}" for name, p in best)
        line = f"{path:{width}}  {figures}"
        too_long = 0 < columns() < len(line)  # 0 without a terminal
        lines.append(f"{path}\n  {figures}" if too_long else line)
    return "".join(f"{line}\n" for line in lines)


def _in_line(name: str) -> str:
    # the name of a file or class may hold the end of a line
    return printable(name).replace("\n", r"\n")


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
    # each image orders its classes by probability; columns need one order
    names = sorted(predictions[0][1]) if predictions else []
    # csv's default is \r\n, which many tools show as ^M
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "class", *names])
    for path, classes in predictions:
        writer.writerow([path, next(iter(classes)), *(f"{classes[n]:.6f}" for n in names)])
    return text.getvalue()


FORMS = {"table": as_table, "json": as_json, "csv": as_csv}
