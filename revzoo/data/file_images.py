"""Images read from their files batch by batch, for sets that do not fit in memory.

Unlike in ``TensorImages``, transforms run per image, in the loader's workers: images of different
sizes must be cropped before they form a batch. The recipe is ImageNet's (K. He et al.
2016, arXiv 1512.03385, in torchvision's form): random resized crop and flip for training; for
evaluation resize the shorter side to 256/224 of the crop and cut out the centre.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from revzoo.data.augment import Augment
from revzoo.data.decode import IMAGENET_CROP_PCT, SkippedFiles, open_of_set, square_bytes
from revzoo.data.errors import DataError
from revzoo.data.folders import Files
from revzoo.data.images import Batch
from revzoo.data.order import hash_seed, seeded

Transform = Callable[[Image.Image], Tensor]

_SAMPLE = 1000  # evenly spaced images for the pixel statistics


class FileImages(Dataset[Batch]):
    """Images in files.

    Args:
        files: paths and labels.
        classes: names, by label.
        channels: 3 (RGB) or 1 (grey).
        size: side in pixels of the images that are returned.
        augment: of training images; a ``crop_padding`` of 0 switches random crops off.
        crop_pct: of evaluation, as in ``decode.to_square``.
        training: whether this set is read for training.
        rows: the files that belong to this set; None for all.
        skipped: records unreadable files, which batches leave out; None to raise.
    """

    augments_itself = True
    in_memory = False

    def __init__(
        self,
        files: Files,
        *,
        classes: list[str],
        channels: int,
        size: int,
        augment: Augment,
        crop_pct: float = IMAGENET_CROP_PCT,
        training: bool = False,
        rows: Tensor | None = None,
        skipped: SkippedFiles | None = None,
    ) -> None:
        self._files, self._channels, self._size, self._augment = files, channels, size, augment
        self._crop_pct = crop_pct
        evaluated: Transform = partial(square_bytes, size=size, crop_pct=crop_pct)
        self._transform = _training(size, augment, evaluated) if training else evaluated
        self._training = training
        # in shared memory, since workers outlive an epoch; -1 without begin_epoch()
        self._epoch_seed = torch.tensor(-1).share_memory_()  # type: ignore[no-untyped-call]
        self._rows = torch.arange(len(files.paths)) if rows is None else rows
        self._skipped = skipped
        self.labels = torch.tensor(files.labels)[self._rows]
        self.classes = classes

    @property
    def in_chans(self) -> int:
        return self._channels

    @property
    def image_size(self) -> int:
        return self._size

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        """One image (C, S, S), transformed, and its label ()."""
        path = self._files.paths[int(self._rows[index])]
        image = open_of_set(path, self._channels, self._skipped)
        if not self._training or self._epoch_seed < 0:  # torch's own state decides the crop
            return self._transform(image), self.labels[index]
        # by image: the number of workers must not change the crops
        with seeded(hash_seed(int(self._epoch_seed), index)):
            return self._transform(image), self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch, without the unreadable images that ``skipped`` tolerates.

        Raises:
            DataError: an image is unreadable and ``skipped`` is None, or the whole batch is
                unreadable.
        """
        images, kept = [], []
        for index in indices:
            try:
                images.append(self[index][0])
            except DataError as error:
                if self._skipped is None:
                    raise
                among = self._rows if self._training else None  # without those held back
                self._skipped.add(int(self._rows[index]), error, among)
            else:
                kept.append(index)
        if not kept:
            raise DataError(f"none of the {len(indices)} images of a batch can be read")
        return torch.stack(images), self.labels[kept]

    def begin_epoch(self, seed: int) -> None:
        self._epoch_seed.fill_(seed)

    def sample(self) -> Tensor:
        """Up to 1,000 evenly spaced images, prepared for evaluation."""
        step = -(-len(self) // _SAMPLE)  # rounded up
        evaluated = self.subset(torch.arange(0, len(self), step), training=False)
        return evaluated.__getitems__(range(len(evaluated)))[0]

    def subset(self, indices: Tensor, *, training: bool) -> "FileImages":
        return FileImages(
            self._files,
            classes=self.classes,
            channels=self._channels,
            size=self._size,
            augment=self._augment,
            crop_pct=self._crop_pct,
            training=training,
            rows=self._rows[indices],
            skipped=self._skipped,
        )


def _training(size: int, augment: Augment, evaluated: Transform) -> Transform:
    steps: list[Any] = [evaluated]
    if augment.padding(size):
        scale = (augment.crop_scale, 1.0)
        # crop before the conversion, so that only the crop becomes a tensor
        steps = [v2.RandomResizedCrop(size, scale=scale, antialias=True), v2.PILToTensor()]
    if augment.flip:
        steps.append(v2.RandomHorizontalFlip())
    return v2.Compose(steps)
