"""Images and masks in files: ``ROOT/train/images/*`` beside ``ROOT/train/masks/*``, or a table.

A mask is an image of class numbers. An image and its mask are cropped, flipped and rotated together
by torchvision, which takes the nearest pixel of a mask; colours change in the image alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as v2f

from revzoo._checks import is_count, shortened
from revzoo.data.augment import Augment
from revzoo.data.decode import IN_SET, check_mask_size, read_mask
from revzoo.data.errors import DataError
from revzoo.data.file_images import FileImages
from revzoo.data.folders import MASKS_LAYOUT, Check, Files, Tree, no_masks, scan_masks
from revzoo.data.imagefolder import ImageFolder, ReadingOptions
from revzoo.data.module import Split
from revzoo.data.table import Table

IGNORED = 255
"""The label of pixels that do not count."""

_UNKNOWN = 254  # of a pixel value without a class


class _Mask(tv_tensors.Mask):  # type: ignore[misc]  # torchvision has no types
    """A mask that is resized to the pixels nearest to the new centres.

    torchvision takes the upper left pixel of each new one: half a new pixel beside the image.
    """


@v2f.register_kernel(v2f.resize, _Mask)  # type: ignore[untyped-decorator]
def _resize(mask: _Mask, size: list[int] | None, **_: Any) -> Tensor:
    plain = mask.as_subclass(Tensor)
    found = v2f.resize_image(plain[None], size, InterpolationMode.NEAREST_EXACT, antialias=False)
    return tv_tensors.wrap(found[0], like=mask)


@v2f.register_kernel(v2f.resized_crop, _Mask)  # type: ignore[untyped-decorator]
def _resized_crop(
    mask: _Mask, top: int, left: int, height: int, width: int, size: list[int], **_: Any
) -> Tensor:
    return v2f.resize(v2f.crop(mask, top, left, height, width), size)


class MaskImages(FileImages):
    """Images with masks in files; ``table`` is uint8 (65536,), the label of each pixel value."""

    def __init__(self, files: Files, *, table: np.ndarray[Any, Any], **options: Any) -> None:
        super().__init__(files, **options)
        assert files.masks is not None
        self._masks, self._table = files.masks, table
        # without pixels: masks are read with their images
        self.labels = torch.empty(len(files.paths), 0, 0, dtype=torch.uint8)

    @property
    def label_shape(self) -> tuple[int, ...]:
        return self.sizes

    def _open(self, row: int) -> tuple[Any, ...]:
        """The image, and its mask with labels one higher: 0, of the padding, does not count."""
        (image,) = super()._open(row)
        path = self._masks[row]
        values = read_mask(path, remedy=IN_SET)
        check_mask_size(values, path, image, self._paths[row])
        return image, _Mask(labels_of(values, path, self._table) + np.uint8(1))

    def _label(self, index: int, *parts: Any) -> Tensor:
        (mask,) = parts
        return mask.as_subclass(Tensor) - 1

    def _sources(self) -> tuple[Sequence[str], ...]:
        return self._paths, self._masks

    def _preparation(self) -> tuple[object, ...]:
        return *super()._preparation(), self._table.tobytes()

    def classes_seen(self) -> list[int]:
        """Two or more classes of up to 1,000 evenly spaced masks, or all if there are fewer."""
        few, seen = self._few(), set[int]()
        for _, (_, mask) in few._readable(range(len(few))):
            seen.update(torch.unique(mask).tolist())
            if len(seen - {IGNORED}) > 1:  # mostly the first mask has them
                break
        return sorted(seen - {IGNORED})


class _Rows(Table):
    """The rows of a table with the paths of masks in place of classes."""

    names: ClassVar = {"label_column": "mask_column"}

    @property
    def file_columns(self) -> list[str]:
        return [self.path_column, *self.label_columns]


class Masks(ImageFolder):
    """Images with a mask each: a class for each pixel.

    Masks are PNG, TIFF, GIF or ``.npy`` files of class numbers, in grey or with a palette. The
    value 255 does not count, unless it has a class.

    Args:
        root: folder with ``train/images`` and ``train/masks`` and, optionally, the same below
            ``val`` and ``test``; or with ``images`` and ``masks``. A mask has the name of its
            image, with any suffix, optionally with ``_mask`` after it. With a table: where its
            relative paths start; None for its folder.
        classes: names by pixel value: a list, for 0, 1 and so on, or a mapping such as
            ``{0: "background", 128: "cell"}``. Values of one name are one class.
        table: a file as of :class:`~revzoo.data.Table`, instead of folders.
        path_column: of the images' paths.
        mask_column: of the masks' paths.
        split_column: see :class:`~revzoo.data.Table`.
        group_column: see :class:`~revzoo.data.Table`.
        **options: see :class:`~revzoo.data.ImageFolder`. By default batches of 16, and crops of at
            least half of the area of an image that is read from its file.

    Raises:
        ValueError: neither root nor table is given, or the classes are no list or mapping.
        DataError: from ``prepare_data``: the classes are missing, or an image has no mask. When
            images are read: a mask differs in size from its image, is in colour, or has a value
            without a class.
    """

    task = "segmentation"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        classes: Sequence[str] | Mapping[int, str] | None = None,
        table: str | Path | None = None,
        path_column: str = "path",
        mask_column: str = "mask",
        split_column: str | None = None,
        group_column: str | None = None,
        **options: Unpack[ReadingOptions],
    ) -> None:
        if root is None and table is None:
            raise ValueError(
                f"give data.root=DIR ({MASKS_LAYOUT}), or data.table=FILE with a column of masks"
            )
        options.setdefault("batch_size", 16)
        options.setdefault("eval_batch_size", 16)
        if options.get("augment") is None:
            options["augment"] = Augment(crop_scale=0.5)
        self.rows: Table | None = None
        if table:
            self.rows = _Rows(
                table,
                root=root,
                path_column=path_column,
                label_column=mask_column,
                split_column=split_column,
                group_column=group_column,
            )
        super().__init__(self.rows.root if self.rows else str(root), **options)
        self._values = None if classes is None else values_of(classes)

    @property
    def notes(self) -> list[str]:
        if not self.rows:
            return super().notes
        images, masks = self.rows.path_column, self.rows.label_columns[0]
        line = f"{self.rows.table.name}: images from column {images!r}, masks from {masks!r}"
        return [line, *super().notes]

    @property
    def train_labels(self) -> Tensor:
        """Masks uint8 (n, H, W); of a set read from files, up to 1,000 evenly spaced ones."""
        train = self._images("train")
        return train.sampled()[1] if isinstance(train, MaskImages) else train.labels

    def _classes_seen(self) -> list[int]:
        train = self._images("train")
        return train.classes_seen() if isinstance(train, MaskImages) else super()._classes_seen()

    def _scan(self) -> Tree:
        tree = self._scan_table() if self.rows else scan_masks(self.root)
        if self._values is None:
            masks = next(iter(tree.splits.values())).masks
            assert masks is not None
            values = sorted({*read_mask(masks[0]).flat})
            raise DataError(
                f"data.classes is needed: the pixels of {masks[0]} have the values "
                f"{shortened(map(str, values), 8)}. Name the classes in their order, such as "
                "'data.classes=[background,cell]', or by their values, "
                "'data.classes={0: background, 128: cell}'; 255 does not count without a name"
            )
        return Tree([*dict.fromkeys(self._values.values())], tree.splits)

    def _scan_table(self) -> Tree:
        assert self.rows
        splits: dict[Split, Files] = {}
        by_split, column = self.rows.rows_by_split(), self.rows.label_columns[0]
        for split, rows in by_split.items():
            files = self.rows.files_of(rows, [0] * len(rows))
            splits[split] = replace(files, masks=[row[column] for row in rows])
        self.rows.check_files([row for rows in by_split.values() for row in rows])
        return Tree([], splits)

    def _make(self, files: Files, **options: Any) -> MaskImages:
        assert self._values is not None
        return MaskImages(files, table=table_of(self._values), **options)

    def check_of_values(self) -> Check | None:
        """Finds the pixel values without a class in a mask; None if the classes are not given."""
        return None if self._values is None else partial(labels_of, table=table_of(self._values))

    def _pixel_bytes(self) -> int:
        return super()._pixel_bytes() + 1

    def _no_test(self) -> str:
        return self.rows._no_test() if self.rows else super()._no_test()

    def _no_training(self) -> DataError:
        return self.rows._no_training() if self.rows else no_masks(self.root)


def table_of(names: Mapping[int, str]) -> np.ndarray[Any, Any]:
    """The label of each pixel value, uint8 (65536,), from the names of the classes."""
    table, labels = np.full(2**16, _UNKNOWN, np.uint8), [*dict.fromkeys(names.values())]
    table[IGNORED] = IGNORED
    for value, name in names.items():
        table[value] = labels.index(name)
    return table


def labels_of(
    values: np.ndarray[Any, Any], path: str, table: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The labels of a mask, uint8 (H, W), from its pixel values.

    Raises:
        DataError: a value has no class.
    """
    mask: np.ndarray[Any, Any] = table[values]
    if (unknown := mask == _UNKNOWN).any():
        fault = f"the pixel value {values[unknown][0]}, of no class"
        remedy = f"name it in data.classes, or set it to {IGNORED}, which does not count"
        raise DataError(f"{path} has {fault}: {remedy}", fault)
    return mask


def values_of(classes: Any) -> dict[int, str]:
    """The names of the classes by pixel value.

    Raises:
        ValueError: no list or mapping, or not of two to 254 classes.
    """
    if isinstance(classes, str) or not isinstance(classes, Sequence | Mapping):
        raise ValueError(f"classes={classes!r}: expected names by pixel value, a list or a mapping")
    pairs = classes.items() if isinstance(classes, Mapping) else enumerate(classes)
    found = {value: str(name) for value, name in pairs}
    if wrong := [value for value in found if not is_count(value, 0) or value >= 2**16]:
        raise ValueError(f"classes has the pixel value {wrong[0]!r}: expected 0 to 65535")
    if not 2 <= len({*found.values()}) <= _UNKNOWN:
        raise ValueError(f"classes={found}: expected 2 to {_UNKNOWN} classes")
    return found
