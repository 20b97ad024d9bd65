"""Handwritten digits, 1,797 real images of 8x8 that ship with the package.

They are the test part of the UCI set "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, 1998; CC BY 4.0, see digits.md beside this file), which scikit-learn also distributes.
Pixels are counts from 0 to 16.

The split is fixed and stored in the file: 1,437 training and 360 test images, stratified by class,
drawn once by ``stratified_split(labels, fraction=360 / 1797, seed=0)``. Known limit: the file does
not name the 13 writers, so both parts may contain the same writer. Use the accuracy to check a
training run, not to compare with the literature.
"""

from importlib.resources import files
from typing import Unpack

import numpy as np
import torch

from revzoo.data.augment import Augment
from revzoo.data.images import TensorImages
from revzoo.data.module import ImageData, LoadingOptions, Split


class Digits(ImageData):
    """The embedded set: 10 classes, 1 channel, 8x8 pixels, no download.

    Args:
        **loading: see ``ImageData``. By default batches of 64, and for augmentation shifts by one
            pixel without flips, since a mirrored 2 is not a 2.
    """

    pixel_max = 16

    def __init__(self, **loading: Unpack[LoadingOptions]) -> None:
        loading.setdefault("batch_size", 64)
        if loading.get("augment") is None:
            loading["augment"] = Augment(crop_padding=1, flip=False)
        super().__init__(**loading)

    def read(self, split: Split) -> TensorImages | None:
        if split == "val":
            return None
        with (files("revzoo.data") / "digits.npz").open("rb") as file, np.load(file) as archive:
            rows = archive["test"] == (split == "test")  # "test" is a flag for each image
            images = torch.from_numpy(archive["images"][rows])
            labels = torch.from_numpy(archive["labels"][rows]).long()
        return TensorImages(images[:, None], labels, classes=[str(digit) for digit in range(10)])
