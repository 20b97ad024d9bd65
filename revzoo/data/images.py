"""Labelled images as map-style datasets that are read a batch at a time.

A ``DataLoader`` reads torch's ``TensorDataset`` image by image and collates: 128 Python calls and a
``stack`` instead of one indexing operation. Its fetcher prefers ``__getitems__``, which returns the
whole batch here; ``as_is`` is the collate function. Samplers work as usual, including those that
Lightning inserts for several processes.

Shapes: N images in all, B in a batch, C channels, S pixels a side.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

Batch = tuple[Tensor, Tensor]
"""Images uint8 (B, C, S, S) and labels int64 (B,)."""

_T = TypeVar("_T")


def as_is(batch: _T) -> _T:
    """Collate function for datasets whose ``__getitems__`` returns a whole batch."""
    return batch


class ImageSet(Protocol):
    """The interface of a set of images, in memory or in files.

    Attributes:
        labels: int64 (N,).
        classes: names, by label.
        in_chans: C.
        image_size: S, in pixels.
        augments_itself: True if reading a training image augments it.
        in_memory: True if reading a batch is one indexing operation.
    """

    labels: Tensor
    classes: list[str]
    augments_itself: bool
    in_memory: bool

    @property
    def in_chans(self) -> int: ...

    @property
    def image_size(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int]) -> Batch: ...

    def begin_epoch(self, seed: int) -> None:
        """Seed the augmentation of an epoch, if the set ``augments_itself``."""
        ...

    def sample(self) -> Tensor:
        """Images uint8 (n, C, S, S), not augmented, to measure pixel statistics on."""
        ...

    def subset(self, indices: Tensor, *, training: bool) -> "ImageSet":
        """The images at ``indices``, prepared for training or for evaluation."""
        ...


class TensorImages(Dataset[Batch]):
    """Images held in memory as bytes.

    Args:
        images: uint8 (N, C, S, S).
        labels: int64 (N,).
        classes: names, by label.
        indices: the images that belong to this set; None for all. Subsets share the pixels.
    """

    augments_itself = False
    in_memory = True

    def __init__(
        self, images: Tensor, labels: Tensor, *, classes: list[str], indices: Tensor | None = None
    ) -> None:
        assert images.dtype == torch.uint8
        assert images.dim() == 4
        assert len(images) == len(labels)
        self._images = images
        self._all_labels = labels
        self._indices = torch.arange(len(images)) if indices is None else indices
        self.labels = labels[self._indices]
        self.classes = classes

    @property
    def in_chans(self) -> int:
        return self._images.shape[1]

    @property
    def image_size(self) -> int:
        return self._images.shape[-1]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Batch:
        """One image (C, S, S) and its label ()."""
        return self._images[self._indices[index]], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch at once."""
        wanted = torch.as_tensor(indices)
        return self._images[self._indices[wanted]], self.labels[wanted]

    def begin_epoch(self, seed: int) -> None:
        """Do nothing: the data module augments whole batches."""

    def sample(self) -> Tensor:
        # indexing would copy the whole set
        return self._images[self._indices] if len(self) < len(self._images) else self._images

    def subset(self, indices: Tensor, *, training: bool) -> "TensorImages":
        return TensorImages(
            self._images, self._all_labels, classes=self.classes, indices=self._indices[indices]
        )
