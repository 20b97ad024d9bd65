"""Images in files: read batch by batch, or all at once into memory.

Unlike in ``TensorImages``, transforms run per image, in the loader's workers: images of different
sizes must be cropped before they form a batch. The recipe is ImageNet's (K. He et al.
2016, arXiv 1512.03385, in torchvision's form): random resized crop and flip for training; for
evaluation resize to 256/224 of the crop and cut out the centre, or as ``crop_pct`` says.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from lightning_fabric.utilities.data import suggested_max_num_workers
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as v2f
from tqdm import tqdm

from revzoo._checks import is_first_process
from revzoo.data import decoded_cache
from revzoo.data.augment import Augment
from revzoo.data.decode import (
    IMAGENET_CROP_PCT,
    IN_SET,
    SkippedFiles,
    open_image,
    to_tensor,
)
from revzoo.data.errors import DataError
from revzoo.data.folders import Files
from revzoo.data.images import Batch, ImageSet, TensorImages
from revzoo.data.order import hash_seed, seeded
from revzoo.weights.transforms import cropped

_SAMPLE = 1000  # evenly spaced images for the pixel statistics
_BLOCK = 256  # images per task of a thread

Points = Sequence[tuple[int, int]]
"""Epochs and sides of the training images in pixels, both rising."""


def sizes_in(epoch: int, points: Points | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width of the training images in ``epoch``; those of the evaluation are ``sizes``.

    ``points`` have the shorter side, between them interpolated; the other one keeps the aspect.
    Both are rounded to multiples of 32, as FFCV's ``get_resolution`` does (G. Leclerc et al. 2022,
    libffcv/ffcv-imagenet). Without ``points``: ``sizes``.
    """
    if not points:
        return sizes
    epochs, sides = zip(*points, strict=True)
    side = 32 * round(float(np.interp(epoch, epochs, sides)) / 32)
    return tuple(32 * round(n * side / min(sizes) / 32) for n in sizes)


class FileImages(ImageSet):
    """Images in files.

    Args:
        files, classes: paths and labels, and the names of the labels.
        channels, sizes, dtype: of the images that are returned.
        augment: of training images; a ``crop_padding`` of 0 switches random crops off.
        crop_pct: of evaluation, as in ``transforms.cropped``.
        training: whether this set is read for training.
        resize: whether images of other sizes are resized; if False, they raise.
        progressive: sizes of the training images by epoch, see :func:`sizes_in`, or None.
        skipped: records unreadable files, which batches leave out; None to raise.
    """

    in_memory = False

    def __init__(
        self,
        files: Files,
        *,
        classes: list[str],
        channels: int,
        sizes: tuple[int, ...],
        augment: Augment,
        crop_pct: float = IMAGENET_CROP_PCT,
        training: bool = False,
        resize: bool = True,
        dtype: torch.dtype = torch.uint8,
        progressive: Points | None = None,
        skipped: SkippedFiles | None = None,
    ) -> None:
        self.labels, self.classes = torch.tensor(files.labels), classes
        self.groups = None if files.groups is None else torch.tensor(files.groups)
        self.in_chans, self.sizes, self.dtype = channels, sizes, dtype
        self._files, self._paths = files, files.paths
        self._rows = torch.arange(len(files.paths))
        if files.shards is not None:
            self.shards, self.window = torch.tensor(files.shards), files.window
            self.prefetch = files.prefetch
        self._crop_pct, self._resize = crop_pct, resize
        self._training, self._skipped = training, skipped
        self._progressive = progressive
        # seed (-1 without begin_epoch()) and sizes, in shared memory: workers outlive an epoch
        self._epoch = torch.tensor([-1, *self._sizes(0)]).share_memory_()  # type: ignore[no-untyped-call]
        aspect = sizes[1] / sizes[0]
        self._crop = v2.RandomResizedCrop(
            sizes,
            scale=(augment.crop_scale, 1.0),
            ratio=(3 / 4 * aspect, 4 / 3 * aspect),  # torchvision's, of a square
            antialias=True,
        )
        # Pillow images stay so: only the crop becomes a tensor
        self._augmented = v2.Compose(
            [
                self._crop if augment.padding(sizes) else self._uncropped,
                v2.RandomHorizontalFlip(0.5 * augment.flip),
                *augment.transforms(dtype),
            ]
        )

    def _sizes(self, epoch: int) -> tuple[int, ...]:
        return sizes_in(epoch, self._progressive, self.sizes)

    def _evaluated(self, *parts: Any, sizes: Sequence[int]) -> Any:
        """The parts of an image for evaluation; a single one as it is, as v2 returns it."""
        out = tuple(cropped(part, sizes, self._crop_pct) for part in parts)
        return out if len(out) > 1 else out[0]

    def _uncropped(self, *parts: Any) -> Any:
        return self._evaluated(*parts, sizes=self._epoch[1:].tolist())

    def _open(self, row: int) -> tuple[Any, ...]:
        """The parts of an image that are cropped and flipped alike, decoded."""
        path, source = self._paths[row], self._files.source(row)
        return (open_image(path, self.in_chans, source=source, remedy=IN_SET),)

    def _label(self, index: int, *parts: Any) -> Tensor:
        """The label of an image, from its parts besides the pixels."""
        return self.labels[index]

    def __getitem__(self, index: int) -> Batch:
        """One image (C, H, W), transformed, and its label () or mask (H, W)."""
        row, (seed, *sizes) = int(self._rows[index]), self._epoch.tolist()
        parts = self._open(row)
        height, width = v2f.get_size(parts[0])
        if not self._resize and (height, width) != self.sizes:
            raise DataError(
                f"images differ in size: {self._paths[row]} has height {height} and width {width}, "
                f"{self._paths[0]} has {self.sizes[0]} and {self.sizes[1]}: set data.image_size to "
                "a number, or [height,width], to resize and crop them all"
            )
        self._crop.size = sizes
        if not self._training:
            out = self._evaluated(*parts, sizes=self.sizes)
        elif seed < 0:  # torch's own state decides the crop
            out = self._augmented(*parts)
        else:  # by image: the number of workers must not change the crops
            with seeded(hash_seed(seed, index)):
                out = self._augmented(*parts)
        image, *others = out if len(parts) > 1 else (out,)
        pixels = to_tensor(image)
        if pixels.dtype != self.dtype:
            bits = {torch.uint8: 8, torch.uint16: 16}
            raise DataError(
                f"images differ in depth: {self._paths[row]} has {bits[pixels.dtype]} bits per "
                f"channel, others {bits[self.dtype]}: convert them to one depth"
            )
        return pixels, self._label(index, *others)

    def _readable(self, indices: Iterable[int]) -> Iterator[tuple[int, Batch]]:
        """The images at ``indices``, without those that ``skipped`` tolerates."""
        for index in indices:
            try:
                yield index, self[index]
            except DataError as error:
                # without a reason, it is a fault of the set or its storage, not of the file
                if self._skipped is None or not error.reason:
                    raise
                among = self._rows if self._training else None  # without those held back
                self._skipped.add(int(self._rows[index]), error, among)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch, without the unreadable images that ``skipped`` tolerates.

        Raises:
            DataError: an image is unreadable and ``skipped`` is None, or the whole batch is
                unreadable.
        """
        found = [batch for _, batch in self._readable(indices)]
        if not found:
            raise DataError(f"none of the {len(indices)} images of a batch can be read")
        images, labels = zip(*found, strict=True)
        return torch.stack(images), torch.stack(labels)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a label: () of a class."""
        return ()

    def entry(self, cache_dir: str | None) -> Path | None:
        """The place of these images, decoded, in the cache; None for images in shards."""
        if self.shards is not None:
            return None
        paths = (paths[row] for paths in self._sources() for row in self._rows.tolist())
        return decoded_cache.entry_of(cache_dir, paths, self._preparation())

    def _sources(self) -> tuple[Sequence[str], ...]:
        """The files that an image is made of, each by row."""
        return (self._paths,)

    def _preparation(self) -> tuple[object, ...]:
        """What decides the pixels besides the files."""
        return self.in_chans, self.sizes, self._crop_pct, str(self.dtype)

    def loaded(self, entry: Path | None = None) -> TensorImages:
        """All readable images in memory, not augmented.

        Args:
            entry: from :meth:`entry`: the images are read from there, or decoded and kept there.
        """
        found = decoded_cache.load(entry)
        if len(found.get("images", ())) != len(self):
            found = self._decoded(entry)
        kept = found.get("kept", slice(None))  # the labels of a file may change without it
        loaded = TensorImages(
            found["images"], found.get("masks", self.labels)[kept], classes=self.classes
        )
        loaded.groups = None if self.groups is None else self.groups[kept]
        return loaded

    def _decoded(self, entry: Path | None) -> dict[str, Tensor]:
        """All images, decoded by a few threads: ``images``, perhaps ``masks``, and ``kept``."""
        start = time.perf_counter()
        whole = self.subset(torch.arange(len(self)), training=False)
        # filled in place: stacking a list of images would take twice the memory
        images = torch.empty(len(self), self.in_chans, *self.sizes, dtype=self.dtype)
        shape = self.label_shape or self.labels.shape[1:]  # of a mask, or several labels
        labels = torch.empty(len(self), *shape, dtype=self.labels.dtype)
        kept = torch.zeros(len(self), dtype=torch.bool)

        def read(start: int) -> int:
            block = range(start, min(start + _BLOCK, len(self)))
            for index, batch in whole._readable(block):
                images[index], labels[index] = batch
                kept[index] = True
            return len(block)

        pool = ThreadPoolExecutor(max_workers=min(4, suggested_max_num_workers(1)))
        # None: only on a terminal
        hidden = None if is_first_process() else True
        bar = tqdm(desc="decoding images", total=len(self), delay=1, leave=False, disable=hidden)
        try:
            # iterating raises the first error
            for count in pool.map(read, range(0, len(self), _BLOCK)):
                bar.update(count)
        finally:
            bar.close()
            pool.shutdown(cancel_futures=True)  # after an error: do not decode the rest
        found = {"images": images, "masks": labels} if self.label_shape else {"images": images}
        if kept.all():
            if time.perf_counter() - start >= decoded_cache.WORTH:
                decoded_cache.store(entry, found)
            return found
        # indexing copies the set; files that were skipped may be repaired: not for the cache
        return {**found, "images": images[kept], "kept": kept}

    def begin_epoch(self, seed: int, epoch: int) -> None:
        self._epoch.copy_(torch.tensor([seed, *self._sizes(epoch)]))

    def fetch(self, shards: Sequence[int]) -> None:
        self._files.fetch(shards)

    def sample(self) -> Tensor:
        return self.sampled()[0]

    def sampled(self) -> Batch:
        """Up to 1,000 images, prepared for evaluation: evenly spaced, or the first in shards."""
        few = self._few()
        return few.__getitems__(range(len(few)))

    def _few(self) -> Self:
        step = -(-len(self) // _SAMPLE)  # rounded up
        if self.shards is not None:  # the first: each shard may be a download, its order is random
            step = 1
        return self.subset(torch.arange(0, len(self), step)[:_SAMPLE], training=False)
