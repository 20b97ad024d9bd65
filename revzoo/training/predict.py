"""Class probabilities of images, from anything that is a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeAlias, overload

import torch
from PIL import Image
from torch import Tensor

from revzoo.data.decode import open_image
from revzoo.data.errors import DataError
from revzoo.models.network import ImageNetwork
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.checkpoint.restore import restore

Input: TypeAlias = str | Path | Image.Image | Tensor
"""A file, a Pillow image, or a tensor (C, H, W) of bytes or of floats in [0, 1]."""

Probabilities: TypeAlias = dict[str, float]
"""Of each class by its name, the most probable first."""


@overload
def predict(
    images: Input,
    model: str | Path | ImageNetwork,
    *,
    size: int | None = ...,
    top: int | None = ...,
) -> Probabilities: ...


@overload
def predict(
    images: list[Input] | tuple[Input, ...],
    model: str | Path | ImageNetwork,
    *,
    size: int | None = ...,
    top: int | None = ...,
) -> list[Probabilities]: ...


def predict(
    images: Input | list[Input] | tuple[Input, ...],
    model: str | Path | ImageNetwork,
    *,
    size: int | None = None,
    top: int | None = None,
) -> Probabilities | list[Probabilities]:
    """Classify an image, or a list of images.

    Images are prepared as for the evaluation of the weights (:meth:`ImageNetwork.transforms`).

    Args:
        images: a file, a Pillow image, a tensor (C, H, W) of bytes or of floats in [0, 1]; or a
            list of these.
        model: the name of weights (``revnet38.cifar10``), a checkpoint of a run, a safetensors
            file, a folder of ``save_pretrained``; or a model with weights of one of these, which
            stays where and as it is.
        size: side in pixels that images are resized and cropped to; None for the weights'.
        top: how many classes to return; None for all.

    Returns:
        The probability of each class by its name, the most probable first; for a list of images a
        list of these.

    Raises:
        DataError: there is no such file, or it is no image.
        WeightsError, CheckpointError: the weights are not known or cannot be used.
        ValueError: the model has no weights that say their classes and normalisation.

    Example:
        >>> found = revzoo.predict(torch.zeros(3, 40, 40), "revnet38.cifar10", top=2)
        >>> len(found), sum(found.values()) <= 1
        (2, True)
    """
    network = model if isinstance(model, ImageNetwork) else _restored(model)
    given = images if isinstance(images, list | tuple) else [images]
    opened = (opened_image(image, network.in_chans) for image in given)
    found = [dict(islice(p.items(), top)) for p in classify(network, opened, size=size)]
    return found if given is images else found[0]


def _restored(model: str | Path) -> ImageNetwork:
    network = restore(model).module.model
    assert isinstance(network, ImageNetwork), "restore builds models of the zoo"
    return network.to("cuda" if torch.cuda.is_available() else "cpu")


def opened_image(image: Input, channels: int) -> Image.Image | Tensor:
    """An image, decoded if it is a file.

    Raises:
        DataError: there is no such file, or it is no image.
        TypeError: it is something else.
    """
    if isinstance(image, Image.Image | Tensor):
        return image
    if not isinstance(image, str | Path):
        raise TypeError(
            f"got a {type(image).__name__} as image: expected a file, a Pillow image or a tensor "
            "(C, H, W)"
        )
    if not Path(image).is_file():
        folder = "; it is a folder: give a list of its images" if Path(image).is_dir() else ""
        raise DataError(f"there is no image {image}{folder}")
    return open_image(str(image), channels)


def classify(
    network: ImageNetwork,
    images: Iterable[Image.Image | Tensor],
    *,
    size: int | None = None,
    batch_size: int = 64,
) -> Iterator[Probabilities]:
    """The probabilities of opened images, one after the other, on the network's device.

    Args:
        network: with weights whose classes and normalisation are known.
        images: Pillow images or tensors (C, H, W).
        size: side in pixels; None for the weights'.
        batch_size: images at a time.

    Raises:
        CheckpointError: an output is NaN or Inf.
        ValueError: classes or normalisation are not known.
    """
    transforms, classes = network.transforms(size), network.facts.get("classes")
    if classes is None or network.fresh_head or len(classes) != network.num_classes:
        raise ValueError(
            f"this {type(network).__name__} has a classifier whose classes are not known: train it "
            "first, or create it with weights and without num_classes"
        )
    device = next(network.parameters()).device
    modes = {module: module.training for module in network.modules()}
    images = iter(images)
    try:
        while batch := list(islice(images, batch_size)):
            prepared = torch.stack([transforms(image) for image in batch]).to(device)
            network.eval()
            with torch.inference_mode():
                rows = network(prepared).float()
            if not rows.isfinite().all():
                raise CheckpointError(
                    "the network's output is NaN or Inf: its weights or its normalisation are out "
                    "of range; use an earlier checkpoint, or other weights"
                )
            for row in rows.softmax(1).cpu():
                order = row.argsort(descending=True).tolist()
                yield {classes[label]: float(row[label]) for label in order}
    finally:
        for module, training in modes.items():
            module.training = training
