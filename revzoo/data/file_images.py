"""Images in files: read batch by batch, or all at once into memory.

Unlike in ``TensorImages``, transforms run per image, in the loader's workers: images of different
sizes must be cropped before they form a batch. The recipe is ImageNet's (K. He et al.
2016, arXiv 1512.03385, in torchvision's form): random resized crop and flip for training; for
evaluation resize the shorter side to 256/224 of the crop and cut out the centre.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Self

import numpy as np
import torch
from lightning_fabric.utilities.data import suggested_max_num_workers
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from revzoo.data.augment import Augment
from revzoo.data.decode import IMAGENET_CROP_PCT, IN_SET, SkippedFiles, open_image, to_square
from revzoo.data.errors import DataError
from revzoo.data.folders import Files
from revzoo.data.images import Batch, ImageSet, TensorImages
from revzoo.data.order import hash_seed, seeded

_SAMPLE = 1000  # evenly spaced images for the pixel statistics
_BLOCK = 256  # images per task of a thread


class FileImages(ImageSet):
    """Images in files.

    Args:
        files: paths and labels.
        classes: names, by label.
        channels: 3 (RGB) or 1 (grey).
        size: side in pixels of the images that are returned.
        augment: of training images; a ``crop_padding`` of 0 switches random crops off.
        crop_pct: of evaluation, as in ``decode.to_square``.
        training: whether this set is read for training.
        resize: whether images of other sizes are resized; if False, they raise.
        skipped: records unreadable files, which batches leave out; None to raise.
    """

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
        resize: bool = True,
        skipped: SkippedFiles | None = None,
    ) -> None:
        self.labels, self.classes = torch.tensor(files.labels), classes
        self.groups = None if files.groups is None else torch.tensor(files.groups)
        self.in_chans, self.image_size = channels, size
        self._paths, self._rows = files.paths, torch.arange(len(files.paths))
        self._crop_pct, self._resize = crop_pct, resize
        self._training, self._skipped = training, skipped
        # in shared memory, since workers outlive an epoch; -1 without begin_epoch()
        self._epoch_seed = torch.tensor(-1).share_memory_()  # type: ignore[no-untyped-call]
        # on Pillow images: only the crop becomes a tensor
        self._augmented = v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=(augment.crop_scale, 1.0), antialias=True)
                if augment.padding(size)
                else self._evaluated,
                v2.RandomHorizontalFlip(0.5 * augment.flip),
                *augment.single,
            ]
        )

    def _evaluated(self, image: Image.Image) -> Image.Image:
        return to_square(image, self.image_size, self._crop_pct)

    def __getitem__(self, index: int) -> Batch:
        """One image (C, S, S), transformed, and its label ()."""
        path, size = self._paths[int(self._rows[index])], (self.image_size,) * 2
        image = open_image(path, self.in_chans, remedy=IN_SET)
        if not self._resize and image.size != size:
            raise DataError(
                f"images differ in size: {path} has {image.width}x{image.height} pixels, "
                f"{self._paths[0]} {size[0]}x{size[1]}: set data.image_size to resize them all"
            )
        seed = int(self._epoch_seed)
        if not self._training:
            image = self._evaluated(image)
        elif seed < 0:  # torch's own state decides the crop
            image = self._augmented(image)
        else:  # by image: the number of workers must not change the crops
            with seeded(hash_seed(seed, index)):
                image = self._augmented(image)
        # torchvision's conversion costs more than decoding a small image
        pixels = torch.from_numpy(np.array(image)).view(*size, self.in_chans)
        return pixels.permute(2, 0, 1), self.labels[index]

    def _readable(self, indices: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """The images at ``indices``, without those that ``skipped`` tolerates."""
        for index in indices:
            try:
                yield index, self[index][0]
            except DataError as error:
                if self._skipped is None:
                    raise
                among = self._rows if self._training else None  # without those held back
                self._skipped.add(int(self._rows[index]), error, among)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch, without the unreadable images that ``skipped`` tolerates.

        Raises:
            DataError: an image is unreadable and ``skipped`` is None, or the whole batch is
                unreadable.
        """
        found = list(self._readable(indices))
        if not found:
            raise DataError(f"none of the {len(indices)} images of a batch can be read")
        return torch.stack([image for _, image in found]), self.labels[[i for i, _ in found]]

    def loaded(self) -> TensorImages:
        """All readable images in memory, decoded by a few threads and not augmented."""
        whole = self.subset(torch.arange(len(self)), training=False)
        # filled in place: stacking a list of images would take twice the memory
        images = np.empty((len(self), self.in_chans, *(self.image_size,) * 2), dtype=np.uint8)
        kept = torch.zeros(len(self), dtype=torch.bool)

        def read(start: int) -> None:
            for index, image in whole._readable(range(start, min(start + _BLOCK, len(self)))):
                images[index], kept[index] = image.numpy(), True

        pool = ThreadPoolExecutor(max_workers=min(4, suggested_max_num_workers(1)))
        try:
            # iterating raises the first error
            list(pool.map(read, range(0, len(self), _BLOCK)))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error: do not decode the rest
        pixels = torch.from_numpy(images)
        # indexing copies the set, so only if a file was skipped
        pixels = pixels if kept.all() else pixels[kept]
        loaded = TensorImages(pixels, self.labels[kept], classes=self.classes)
        loaded.groups = None if self.groups is None else self.groups[kept]
        return loaded

    def begin_epoch(self, seed: int) -> None:
        self._epoch_seed.fill_(seed)

    def sample(self) -> Tensor:
        """Up to 1,000 evenly spaced images, prepared for evaluation."""
        step = -(-len(self) // _SAMPLE)  # rounded up
        evaluated = self.subset(torch.arange(0, len(self), step), training=False)
        return evaluated.__getitems__(range(len(evaluated)))[0]

    def subset(self, indices: Tensor, *, training: bool) -> Self:
        part = copy(self)
        part._rows, part.labels = self._rows[indices], self.labels[indices]
        part._training = training
        return part
