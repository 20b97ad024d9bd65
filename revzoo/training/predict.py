"""Predictions for images, from a checkpoint, weights or a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias, overload

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as v2f

from revzoo._checks import Size, check_choice, check_count, sides_of
from revzoo.core.invertible import evaluation_mode
from revzoo.data.decode import converted, open_image
from revzoo.data.errors import DataError
from revzoo.models.network import ImageNetwork
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.checkpoint.restore import restore
from revzoo.training.tta import CHOICES, flipped_mean
from revzoo.training.windows import by_windows
from revzoo.weights.transforms import covering

Input: TypeAlias = str | Path | Image.Image | Tensor
"""A file, a Pillow image, or a tensor (C, H, W) of bytes or of floats in [0, 1]."""

OVERSHOOT = 0.1
"""Bicubic interpolation exceeds [0, 1] by as much at an edge; such floats are clamped."""

Probabilities: TypeAlias = dict[str, float]
"""Probability of each class or label by its name, the most probable first; of a regression, the
value of each target in its unit. Names that several labels share, as "crane" in ImageNet, get their
label: "crane (134)", "crane (517)"."""


@overload
def predict(
    images: Input,
    model: str | Path | ImageNetwork,
    *,
    size: Size | None = ...,
    top: int | None = ...,
    tta: str | None = ...,
) -> Probabilities: ...


@overload
def predict(
    images: list[Input] | tuple[Input, ...],
    model: str | Path | ImageNetwork,
    *,
    size: Size | None = ...,
    top: int | None = ...,
    tta: str | None = ...,
) -> list[Probabilities]: ...


def predict(
    images: Input | list[Input] | tuple[Input, ...],
    model: str | Path | ImageNetwork,
    *,
    size: Size | None = None,
    top: int | None = None,
    tta: str | None = None,
) -> Probabilities | list[Probabilities]:
    """Classify an image, or a list of images.

    Images are prepared as for the evaluation of the weights (:meth:`ImageNetwork.transforms`).

    Args:
        images: a file, a Pillow image, a tensor (C, H, W) of bytes or of floats in [0, 1]; or a
            list of these.
        model: the name of weights (``revnet38.cifar10``), a checkpoint of a run, or the folder of a
            run, for its best checkpoint; a safetensors file, a folder from ``save_pretrained``; or
            a model with weights from one of these, which keeps its device and mode.
        size: in pixels, the side of a square or (height, width), to which images are resized and
            cropped; None for the weights' size.
        top: number of classes to return; None for all.
        tta: ``"flip"`` for the mean over each image and its mirror image.

    Returns:
        The probability of each class by its name, the most probable first; of a regression, the
        value of each target. For a list of images, a list of these.

    Raises:
        DataError: there is no such file, or it is not an image.
        WeightsError, CheckpointError: the weights are unknown or cannot be used.
        ValueError: the model gives a class for each pixel; its classes and normalisation are
            unknown; a tensor is not (C, H, W), or holds neither bytes nor floats in [0, 1];
            ``size`` or ``top`` is out of range; ``tta`` is unknown.

    Example:
        >>> result = revzoo.predict(torch.zeros(3, 40, 40), "revnet38.cifar10", top=2)
        >>> len(result), sum(result.values()) <= 1
        (2, True)
    """
    if size is not None:
        sides_of("size", size)
    if top is not None:
        check_count("top", top)
    check_choice("tta", tta, (None, *CHOICES))
    if isinstance(model, ImageNetwork):
        network = model
    elif not isinstance(model, str | Path):  # swapped arguments are the usual mistake
        raise TypeError(
            f"model is a {type(model).__name__}: expected the name of weights, a file, a folder or "
            "a model of the zoo; the images come first: predict(images, model)"
        )
    else:
        network = restore(model).network.to("cuda" if torch.cuda.is_available() else "cpu")
    sources = images if isinstance(images, list | tuple) else [images]
    opened = (opened_image(image, network.in_chans) for image in sources)
    predictions = classify(network, opened, size=size, tta=tta)
    results = [dict(islice(p.items(), top)) for p in predictions]
    return results if sources is images else results[0]


def opened_image(image: Input, channels: int) -> Image.Image | Tensor:
    """Open an image if it is a file; check others."""
    if isinstance(image, Tensor):
        return _checked(image, channels)
    if isinstance(image, Image.Image):
        return converted(image, channels, "image")
    if not isinstance(image, str | Path):
        raise TypeError(
            f"image is a {type(image).__name__}: expected a file, a Pillow image or a tensor "
            "(C, H, W); PIL.Image.fromarray(image) makes one of an array"
        )
    if not Path(image).is_file():
        folder = "; it is a folder: give a list of its images" if Path(image).is_dir() else ""
        raise DataError(f"there is no image {image}{folder}")
    return open_image(str(image), channels)


def _checked(image: Tensor, channels: int) -> Tensor:
    """``image``, floats clamped to [0, 1]; raises as :func:`opened_image`."""
    # v2.RGB repeats the single channel of a grey image
    taken = (1, channels) if channels == 3 else (channels,)
    if image.dim() != 3 or image.shape[0] not in taken or not image.numel():
        raise ValueError(
            f"image is a tensor of shape {tuple(image.shape)}: expected (C, H, W) with {channels} "
            "channels; image.permute(2, 0, 1) puts them first, list(images) divides a batch"
        )
    if image.dtype == torch.uint8:
        return image
    low, high = float(image.min()), float(image.max())
    # NaN fails the comparison, too
    if not image.is_floating_point() or not -OVERSHOOT <= low <= high <= 1 + OVERSHOOT:
        raise ValueError(
            f"image is a tensor of {image.dtype} with values from {low:.3g} to {high:.3g}: "
            "expected bytes, or floats from 0 to 1 that are not normalised; for values up to 255 "
            "give bytes: image.to(torch.uint8)"
        )
    return image.clamp(0, 1)


def segment_volume(
    network: ImageNetwork,
    volume: Tensor,
    window: Sequence[int],
    *,
    tta: str | None = None,
    progress: bool = False,
) -> Tensor:
    """The probabilities of the classes, (K, D, H, W) on the CPU, of a prepared volume (C, D, H, W).

    See :func:`~revzoo.training.windows.by_windows`.

    Raises:
        CheckpointError: an output is NaN or Inf.
    """
    device = next(network.parameters()).device
    slide = partial(by_windows, network, window=window, device=device, progress=progress)
    with evaluation_mode(network), torch.inference_mode():
        found = (flipped_mean(slide, volume[None]) if tta == "flip" else slide(volume[None]))[0]
    if not found.isfinite().all():
        raise _not_finite()
    return found.softmax(0)


def segment(
    network: ImageNetwork,
    image: Image.Image | Tensor,
    *,
    size: Size | None = None,
    tta: str | None = None,
) -> Tensor:
    """The class of each pixel of an image, uint8 (H, W), in its own size; see :func:`opened_image`.

    The image is resized as for validation, to cover ``size`` pixels, but not cropped; None keeps
    its size. It is padded to a size that the network takes, by repeating its edge.

    Raises:
        CheckpointError: an output is NaN or Inf.
        ValueError: the normalisation is not known.
    """
    facts, device = network.facts, next(network.parameters()).device
    if not (facts.get("mean") and facts.get("std")):
        raise ValueError("the network's normalisation is unknown: train it first")
    pixels = v2f.to_dtype(v2f.to_image(image), torch.float32, scale=True).to(device)
    own = pixels.shape[-2:]
    if size is not None:
        pixels = covering(pixels, sides_of("size", size), facts.get("crop_pct") or 1)
    height, width = pixels.shape[-2:]
    # at least two positions in the coarsest map, which its norms need
    missing = [
        max(-n % m, 2 * m - n)
        for n, m in zip((width, height), reversed(network.size_multiples), strict=True)
    ]
    prepared = v2f.normalize(pixels, list(facts["mean"]), list(facts["std"]))[None]
    prepared = functional.pad(prepared, (0, missing[0], 0, missing[1]), mode="replicate")
    with evaluation_mode(network), torch.inference_mode():
        found = flipped_mean(network, prepared) if tta == "flip" else network(prepared)
    if not found.isfinite().all():
        raise _not_finite()
    found = found[..., :height, :width]
    if own != found.shape[-2:]:
        found = functional.interpolate(found, own, mode="bilinear")
    return found[0].argmax(0).to(torch.uint8).cpu()


def _not_finite() -> CheckpointError:
    return CheckpointError(
        "the network's output is NaN or Inf: its weights or its normalisation are out of range; "
        "use an earlier checkpoint, or other weights"
    )


def _distinct(classes: Sequence[str]) -> list[str]:
    """The names of the classes; names that occur more than once get their label."""
    counts = Counter(classes)
    labelled = [f"{name} ({label})" for label, name in enumerate(classes)]
    names = [new if counts[old] > 1 else old for old, new in zip(classes, labelled, strict=True)]
    # a class may have the name that another one gets: "crane (1)" beside two cranes
    return names if len({*names}) == len(names) else labelled


def classify(
    network: ImageNetwork,
    images: Iterable[Image.Image | Tensor],
    *,
    size: Size | None = None,
    batch_size: int = 64,
    tta: str | None = None,
) -> Iterator[Probabilities]:
    """Yield the prediction for each image, computed on the network's device; see :func:`predict`.

    Raises:
        CheckpointError: an output is NaN or Inf.
        ValueError: the network gives a class for each pixel; its classes or normalisation are not
            known.
    """
    if network.dense:
        raise ValueError(
            f"this {type(network).__name__} gives a class for each pixel: use revzoo predict "
            "--masks DIR, or network(images).argmax(1) for images prepared by network.transforms()"
        )
    transforms, classes = network.transforms(size), network.facts.get("classes")
    # a new head has random weights, even if its classes have names
    if classes is None or network.fresh_head or len(classes) != network.num_classes:
        raise ValueError(
            f"this {type(network).__name__} has a classifier with unknown classes: train it first, "
            "or create it with weights and without num_classes"
        )
    device, task = next(network.parameters()).device, network.facts.get("task")
    images = iter(images)
    while batch := list(islice(images, batch_size)):
        prepared = torch.stack([transforms(image) for image in batch]).to(device)
        # in a generator: between two batches the caller may use the network
        with evaluation_mode(network), torch.inference_mode():
            # softmax in float32, also for a network in half precision
            rows = flipped_mean(network, prepared, task) if tta == "flip" else network(prepared)
            rows = rows.float().cpu()
        if not rows.isfinite().all():
            raise _not_finite()
        names = _distinct(classes)
        if task == "regression":
            scale, start = (torch.tensor(network.facts[f"target_{n}"]) for n in ("std", "mean"))
            for row in rows * scale + start:
                yield dict(zip(names, row.tolist(), strict=True))
            continue
        for row in rows.sigmoid() if task == "multilabel" else rows.softmax(1):
            order = row.argsort(descending=True).tolist()
            yield {names[label]: float(row[label]) for label in order}
