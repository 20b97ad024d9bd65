"""Any folder of images: ``ROOT/train/CLASS/*.jpg``, optionally ``ROOT/val/`` and ``ROOT/test/``.

torchvision's ``ImageFolder`` decodes every image again in each epoch. Here a set is decoded once
and kept in memory if, decoded and resized, it takes at most ``cache_bytes`` (60,000 JPEGs of 32x32:
15 to 18 s on 2 busy cores), and the decoded images are kept for the next run
(``decoded_cache.py``). Worker processes read larger sets from their files.
"""

import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import torch
from torchvision.transforms.v2 import functional as v2f

from revzoo._checks import Size, check_choice, check_count, check_number, is_count, sides_of
from revzoo.data.decode import IMAGENET_CROP_PCT, SkippedFiles, first_image, to_tensor
from revzoo.data.decoded_cache import AUTO
from revzoo.data.errors import DataError
from revzoo.data.file_images import FileImages, Points, sizes_in
from revzoo.data.folders import Files, Tree, fingerprint, no_training, scan
from revzoo.data.images import ImageSet
from revzoo.data.module import ImageData, LoadingOptions, Split
from revzoo.data.state import BYTE_MAX

_GIB = 2**30

log = logging.getLogger(__name__)


class ReadingOptions(LoadingOptions, total=False):
    """The options of ``ImageFolder`` besides its folder, which its subclasses pass on."""

    image_size: Size | None
    progressive: Points | None
    crop_pct: float | None
    in_chans: int
    cache_bytes: int
    cache_dir: str | None
    on_error: str
    max_errors: int


class ImageFolder(ImageData):
    """Images in class folders.

    Args:
        root: folder with ``train/`` and, optionally, ``val/`` and ``test/``. Without ``val/`` a
            share of the training images is held back. To evaluate a checkpoint, only the evaluated
            split must exist.
        image_size: in pixels, the side of a square or ``[height, width]``; images are resized with
            their aspect until they cover it, and cropped (centre). None for the size in the
            evaluated checkpoint; in training, for the size of the images, if all are equally large.
        progressive: sizes of the training images by epoch, such as ``[(11, 160), (13, 192)]``:
            the shorter side has 160 pixels up to epoch 11 (from 0), 192 from epoch 13, between them
            interpolated; both sides are rounded to multiples of 32. Needs ``image_size``, of the
            evaluation, and reads the files in each epoch. None for ``image_size``.
        crop_pct: for evaluation, an image is resized until it covers ``image_size / crop_pct``, and
            its centre cropped. None for the checkpoint's; in training, for 224/256, or for 1 if
            the set is in memory. Below 1, images are read from their files in each epoch.
        in_chans: 3 for RGB, 1 for grey: images of 8 bits are converted. Any other number must be
            the images'.
        cache_bytes: largest set, over all its splits, to keep in memory.
        cache_dir: folder that keeps the decoded images of such a set for the next run, if decoding
            takes 1 s; ``"auto"`` for ``images`` in the user's cache, None for none. At most 16 GiB
            in all.
        on_error: ``"raise"``, or ``"skip"`` to leave unreadable images out of the batches, with a
            warning for each. ``skipped_files`` lists them.
        max_errors: largest number of skipped images per split and training process.
        **loading: see ``ImageData``. Images read from files get a random resized crop
            (``augment.crop_scale``) instead of a padded one; ``augment.crop_padding=0`` switches it
            off.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        image_size: Size | None = None,
        progressive: Points | None = None,
        crop_pct: float | None = None,
        in_chans: int = 3,
        cache_bytes: int = 4 * _GIB,
        cache_dir: str | None = AUTO,
        on_error: str = "raise",
        max_errors: int = 100,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        super().__init__(**loading)
        wanted = None if image_size is None else sides_of("image_size", image_size)
        if progressive is not None:
            _check_progressive(progressive, wanted)
        if crop_pct is not None:
            check_number("crop_pct", crop_pct, high=1, open_low=True)
        check_count("in_chans", in_chans)
        check_count("cache_bytes", cache_bytes, least=0)
        check_choice("on_error", on_error, ("raise", "skip"))
        check_count("max_errors", max_errors)
        self.root, self.cache_bytes = Path(root).expanduser(), cache_bytes
        self.cache_dir = cache_dir
        self._entries: dict[str, Path | None] = {}  # of each split in the cache
        self.on_error, self.max_errors = on_error, max_errors
        self._skipped: dict[str, SkippedFiles] = {}  # by split; empty for on_error="raise"
        # the base class sets sizes and in_chans once the images are known
        self._wanted_sizes, self._wanted_chans = wanted, in_chans
        self._progressive, self._wanted_crop = progressive, crop_pct
        self._tree: Tree | None = None
        self._found: tuple[list[int], torch.dtype] | None = None  # see _first

    @property
    def notes(self) -> list[str]:
        alpha = ", transparency dropped" if self._wanted_chans in (1, 3) else ""
        deep = ", 16 bits per channel" if self.pixel_max > BYTE_MAX else ""
        kept = {f"{entry.parent}" for entry in self._entries.values() if entry and entry.exists()}
        notes = [f"decoded images are kept in {place}: data.cache_dir" for place in kept]
        return [f"upright by EXIF{alpha}, first frame only{deep}", *notes, *super().notes]

    @property
    def shape(self) -> dict[str, Any]:
        sizes, _ = self.preparation()
        found = {"num_classes": len(self.listing().classes), "in_chans": self._wanted_chans}
        return {**found, "sizes": sizes}

    @property
    def train_sizes(self) -> tuple[int, ...]:
        last = self._progressive[-1][0] if self._progressive else 0
        return sizes_in(last, self._progressive, self.sizes)

    def has(self, split: Split) -> bool:
        return split in self.listing().splits

    def prepare_data(self) -> None:
        """List and check the folders, so that errors come before anything else is built."""
        self.listing()

    def read(self, split: Split) -> ImageSet | None:
        tree = self.listing()
        if split not in tree.splits:
            if split == "train":
                raise self._no_training()
            return None
        sizes, crop_pct = self.preparation()
        fits, resize = crop_pct == 1 and self._fits(sizes), self._target_sizes is not None
        if not (fits or resize):
            why = f"take more than data.cache_bytes={self.cache_bytes} in memory"
            if self._fits(sizes):
                why = f"are evaluated with data.crop_pct={crop_pct}"
            raise DataError(
                f"the images of {self._where} {why} and will be read from their files, cropped to "
                "one size: set data.image_size"
            )
        images = self._make(
            tree.splits[split],
            classes=tree.classes,
            channels=self._wanted_chans,
            sizes=sizes,
            augment=self.augment,
            crop_pct=crop_pct,
            training=split == "train",
            resize=resize,
            dtype=self._first[1],
            progressive=self._progressive,
            skipped=self._skipped.get(split),
        )
        if not fits:
            return images
        self._entries[split] = images.entry(self.cache_dir)
        return images.loaded(self._entries[split])

    def _make(self, files: Files, **options: Any) -> FileImages:
        return FileImages(files, **options)

    def preparation(self) -> tuple[tuple[int, ...], float]:
        sizes = self._target_sizes or tuple(self._first[0])
        # a checkpoint's: evaluation prepares images as training did
        crop_pct = self._wanted_crop or self._restored.get("crop_pct")
        if crop_pct is None:
            crop_pct = 1.0 if self._fits(sizes) else IMAGENET_CROP_PCT
        return sizes, crop_pct

    @property
    def _first(self) -> tuple[list[int], torch.dtype]:
        """Height and width of the first readable image, and the dtype of its pixels."""
        split, files = next(iter(self.listing().splits.items()))
        if self._found is None:
            skipped = self._skipped.get(split)
            image = first_image(files, self._wanted_chans, skipped)
            self._found = v2f.get_size(image), to_tensor(image).dtype
        return self._found

    @property
    def _target_sizes(self) -> tuple[int, ...] | None:
        trained = self._restored.get("image_size")
        return self._wanted_sizes or (sides_of("image_size", trained) if trained else None)

    def listing(self) -> Tree:
        """The images of all splits, without reading them."""
        if self._tree is None:
            self._tree = self._scan()
            for note in self._tree.left_out:
                log.warning("%s", note)
            if self.on_error == "skip":
                classes, most = self._tree.classes, self.max_errors
                alone = self.task == "classification"  # else all images count as one class
                self._skipped = {
                    split: SkippedFiles(
                        files.paths,
                        files.labels if alone else [0] * len(files.paths),
                        classes=classes if alone else ["any"],
                        at_most=most,
                    )
                    for split, files in self._tree.splits.items()
                }
        return self._tree

    def _scan(self) -> Tree:
        return scan(self.root)

    @property
    def _where(self) -> str:
        return str(self.root.absolute())

    @property
    def skipped_files(self) -> list[str]:
        """The unreadable images so far, in this process and its workers."""
        return [path for skipped in self._skipped.values() for path in skipped.files()]

    def _fits(self, sizes: Sequence[int]) -> bool:
        if self._progressive:  # a set in memory has one size
            return False
        # all splits, loaded or not: one stage must not change the preparation of others
        images = sum(len(files.paths) for files in self.listing().splits.values())
        return images * self._pixel_bytes() * math.prod(sizes) <= self.cache_bytes

    def _pixel_bytes(self) -> int:
        """What a pixel with its channels takes in memory."""
        return self._wanted_chans * self._first[1].itemsize

    def digest(self) -> str:
        return fingerprint(self.listing(), self.root)

    def _no_training(self) -> DataError:
        return no_training(self.root)

    def _no_test(self) -> str:
        return f"no folder {self.root.absolute() / 'test'}: put test images there, or set data.root"


def _check_progressive(points: Points, sizes: tuple[int, ...] | None) -> None:
    if sizes is None:
        raise ValueError(
            f"data.progressive={points} without data.image_size: set the size of the images for "
            "evaluation, such as data.image_size=224"
        )
    pairs = all(isinstance(point, Sequence) and len(point) == 2 for point in points)
    numbers = pairs and all(is_count(e, 0) and is_count(s, 32) for e, s in points)
    fits = numbers and all(s % 32 == 0 for _, s in points)
    if not (points and fits and all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))):
        raise ValueError(
            f"data.progressive={points}: expected pairs [epoch, side] in rising order, with sides "
            "that are multiples of 32, such as [[11,160],[13,192]]"
        )
