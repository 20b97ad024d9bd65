"""Small sets in the memory of the training device: a batch is one ``index_select`` there.

Decoded images of CIFAR's size take less memory than one training step, but sending each batch from
the CPU makes Python wait. Here the bytes go to the device once; the order of an epoch, and its
crops and flips, once per epoch. No step reads a value of the device, or copies one from the CPU.

Order, crops, flips, Mixup and CutMix are drawn on the CPU, from the same seeds as elsewhere
(``order.py``). So a run has the same images wherever its set is, bit for bit, and may resume on a
device without room for the set.

Known limits: each process of a distributed run holds the whole set on its device. Private training
(``callbacks.private``), whose batches vary in size, and data modules that override ``transform``
draw crops and flips in each step, and send them to the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import Tensor

from revzoo.data.augment import Augment
from revzoo.data.images import Batch, ImageSet, TensorImages

OnDevice = Literal["auto"] | bool
CHOICES = ("auto", True, False)
SHARE = 0.25  # of the free memory, at most, with "auto"; the rest is for training

Split = TypeVar("Split", bound=str)


class DeviceImages(TensorImages):
    """Images on a device, as bytes; pixels that the set shares with other sets are copied."""

    def __init__(self, images: TensorImages, device: torch.device) -> None:
        super().__init__(images.sample().to(device), images.labels, classes=images.classes)
        self.device = device

    def batches(self, indices: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """The batches of a pass, on the device; ``indices`` of the images in each."""
        sizes, order = [len(batch) for batch in indices], torch.tensor([*chain(*indices)])
        both = (self._rows, self.labels)
        rows, labels = (torch.split(t[order].to(self.device), sizes) for t in both)
        for of_batch, labels_of_batch in zip(rows, labels, strict=True):
            yield self._images.index_select(0, of_batch), labels_of_batch


def placed(
    sets: Mapping[Split, ImageSet], device: torch.device, choice: OnDevice
) -> tuple[dict[Split, ImageSet], str]:
    """The sets of a training on ``device``: all of them there, or none.

    Also returns a line that says where they are; empty for the usual place.
    """
    unasked = not choice or (choice == "auto" and device.type == "cpu")
    reason = "" if unasked else _why_not(sets, device, choice)
    if unasked or reason:
        # those of an earlier training on a device
        back = {split: _moved(images, None) for split, images in sets.items()}
        return back, f"each batch is sent to {device}: {reason}" if reason else ""
    total = _mib(sum(_bytes(images) for images in sets.values()))
    there = {split: _moved(images, device) for split, images in sets.items()}
    return there, f"{total} of images are on {device}"


def draws_of_epoch(
    augment: Augment, count: int, sizes: Sequence[int], seeds: Sequence[int]
) -> Tensor:
    """The crops and flips of an epoch, ``(batches, 3, draws)``, from the seed of each batch."""
    generator = torch.Generator()
    return torch.stack([augment.draw(count, sizes, generator.manual_seed(s)) for s in seeds])


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU in bytes; None for other devices, which do not report it."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _why_not(sets: Mapping[Split, ImageSet], device: torch.device, choice: OnDevice) -> str:
    """Why the sets cannot be on the device; empty if they can."""
    if not all(images.in_memory for images in sets.values()):
        return "the images are read from their files, since they exceed data.cache_bytes"
    # those of an earlier training that are there already take no more
    new = sum(_bytes(s) for s in sets.values() if not _is_on(s, device))
    free = free_bytes(device)
    if choice == "auto" and free is None:
        return f"{device.type} does not report its free memory; data.on_device=true puts them there"
    if free is not None and new > free * (share := SHARE if choice == "auto" else 1):
        limit = f"{share:.0%} of the {_mib(free)} that are free"
        return f"the images take {_mib(new)}, more than {limit}"
    return ""


def _moved(images: ImageSet, device: torch.device | None) -> ImageSet:
    """The set on ``device``; for None, in the CPU's memory as usual."""
    if device is not None and isinstance(images, TensorImages) and not _is_on(images, device):
        return DeviceImages(images, device)
    if device is None and isinstance(images, DeviceImages):
        return TensorImages(images.sample().cpu(), images.labels, classes=images.classes)
    return images


def _is_on(images: ImageSet, device: torch.device) -> bool:
    return isinstance(images, DeviceImages) and images.device == device


def _bytes(images: ImageSet) -> int:
    return len(images) * images.in_chans * math.prod(images.sizes) * images.dtype.itemsize


def _mib(count: int) -> str:
    return f"{max(1, round(count / 2**20)):,} MiB"
