"""Labelled images as map-style datasets that are read a batch at a time.

A ``DataLoader`` reads torch's ``TensorDataset`` image by image and collates. Its fetcher prefers
``__getitems__``, which returns the whole batch here; ``as_is`` is the collate function.

Shapes: N images in all, B in a batch, C channels, H and W pixels.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from revzoo.data.normalise import Normalisation

Batch = tuple[Tensor, Tensor]
"""Images uint8 or uint16 (B, C, H, W), and labels int64 (B,) or masks uint8 (B, H, W), in which 255
does not count; or float32 (B, K): each of K labels (0 or 1), or K targets of a regression. Volumes
have three sizes, (B, C, D, H, W), and may be float32."""

_T = TypeVar("_T")


def as_is(batch: _T) -> _T:
    """Collate function for datasets whose ``__getitems__`` returns a whole batch."""
    return batch


class ImageSet(Dataset[Batch]):
    """A set of images: :class:`TensorImages`, or ``FileImages`` in ``file_images.py``.

    Attributes:
        labels: int64 (N,), or masks uint8 (N, H, W) with a class for each pixel, or float32 (N, K).
        classes: names, by label.
        groups, shards, window, prefetch: as in :class:`~revzoo.data.folders.Files`; groups are
            those of the whole set.
        in_chans: C.
        sizes: H and W, or the sides of the patch of a volume.
        dtype: of the pixels, ``torch.uint8`` or ``torch.uint16``.
        in_memory: True if reading a batch is one indexing operation. Other sets augment training
            images themselves, when they read them.
    """

    labels: Tensor
    classes: list[str]
    groups: Tensor | None = None
    shards: Tensor | None = None
    window: int = 1
    prefetch: int = 0
    in_chans: int
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.uint8
    in_memory: bool
    _rows: Tensor  # of the whole set, int64 (N,)
    _training: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def normalisation(self) -> Normalisation:
        """The mean and the deviation of the pixels."""
        return Normalisation.measure(self.sample())

    @property
    def strata(self) -> Tensor:
        """The class of each image, int64 (N,), whose frequencies a split keeps; 0 without one."""
        return self.labels if self.labels.dim() == 1 else torch.zeros(len(self), dtype=torch.long)

    def __getitem__(self, index: int) -> Batch:
        """One image (C, H, W) and its label ()."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch at once."""
        raise NotImplementedError

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Seed the augmentation of an epoch, if the set augments its images itself."""

    def fetch(self, shards: Sequence[int]) -> None:
        """Start to download shards, if they are elsewhere."""

    def sample(self) -> Tensor:
        """Images (n, C, H, W), not augmented, to measure pixel statistics on."""
        raise NotImplementedError

    def subset(self, indices: Tensor, *, training: bool) -> Self:
        """The images at ``indices``, prepared for training or for evaluation."""
        part = copy(self)  # shares the pixels
        part._rows, part.labels = self._rows[indices], self.labels[indices]
        part.shards = None if self.shards is None else self.shards[indices]
        part._training = training
        return part


class TensorImages(ImageSet):
    """Images held in memory, (N, C, H, W), or volumes; the data module augments whole batches."""

    in_memory = True

    def __init__(self, images: Tensor, labels: Tensor, *, classes: list[str]) -> None:
        assert images.dtype in (torch.uint8, torch.uint16)
        assert images.dim() in (4, 5)
        assert len(images) == len(labels)
        self._images, self._rows = images, torch.arange(len(images))
        self.labels, self.classes = labels, classes
        self.in_chans, self.sizes = images.shape[1], tuple(images.shape[2:])
        self.dtype = images.dtype

    def __getitem__(self, index: int) -> Batch:
        return self._images[self._rows[index]], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        wanted = torch.as_tensor(indices)
        return self._images[self._rows[wanted]], self.labels[wanted]

    def sample(self) -> Tensor:
        # indexing would copy the whole set
        return self._images[self._rows] if len(self) < len(self._images) else self._images
