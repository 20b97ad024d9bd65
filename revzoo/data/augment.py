"""Augmentation of whole batches, on their device.

Crops and flips work on bytes and follow the recipe of the CIFAR papers: zero-pad by 4, crop at
random, flip at random. ``torchvision.transforms.v2`` draws one offset and one flip per *call*; here
index arithmetic crops and flips all images in one ``gather``.

Mixup averages two images (Zhang et al. 2018, arXiv 1710.09412); CutMix pastes a box of one image
into another (Yun et al. 2019, arXiv 1905.04899). Both mix the labels in the same proportion, drawn
once per batch.

Policies, rotation, colour and blur are torchvision's transforms, or timm's RandAugment, each image
by itself: torchvision's take 0.1 to 0.6 ms an image of 32 pixels on a CPU, and many small kernels
on a GPU.

Known limit: the padding is black (zero bytes), as in torchvision's recipes, not the mean colour.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as v2f
from torchvision.tv_tensors import Image, Mask

from revzoo._checks import (
    build_dataclass,
    check_choice,
    check_count,
    check_number,
    did_you_mean,
    package_needed,
)

POLICIES: dict[str, Callable[[], Callable[..., Any]]] = {
    "randaugment": v2.RandAugment,
    "trivialaugment": v2.TrivialAugmentWide,
    "augmix": v2.AugMix,
}
"""torchvision's transforms, with its defaults: E. Cubuk et al. 2020, arXiv 1909.13719; S. Mueller
and F. Hutter 2021, arXiv 2103.10158; D. Hendrycks et al. 2020, arXiv 1912.02781. Users add theirs
with ``register_transform``."""

_OF_TORCHVISION = frozenset(POLICIES)
_OF_TIMM = re.compile(r"rand(-(m|n|mmax|inc)\d+|-(p|mstd)\d*\.?\d+|-t\w+)+")


class TimmRandAugment:
    """timm's RandAugment by its description there, such as ``rand-m9-mstd0.5-inc1``.

    Published recipes mean this one (R. Wightman 2021, arXiv 2110.00476). torchvision's makes each
    of its two changes, timm's with probability 1/2; timm draws the magnitude, 9 of 10, with a
    deviation of 0.5; it has more changes, stronger ones (``Posterize``), and fills corners with
    ImageNet's mean colour, not black.

    timm draws from Python's and NumPy's random numbers: each call seeds them by torch's, and
    restores them.

    Known limit: images of 16 bits keep 8 bits.

    Raises:
        ValueError: timm is not installed.
    """

    def __init__(self, description: str) -> None:
        try:
            from timm.data.auto_augment import rand_augment_transform
        except ImportError:
            what = f"data.augment.policy={description} needs the package"
            raise ValueError(package_needed(what, "timm")) from None
        self._change = rand_augment_transform(description, {"img_mean": (124, 116, 104)})

    def __call__(self, image: Any) -> Any:
        """Change a Pillow image, or a tensor (C, H, W) of 1 or 3 channels."""
        seed = int(torch.randint(2**32, ()))
        picture = v2f.to_pil_image(image) if isinstance(image, Tensor) else image
        with isolate_rng(include_cuda=False):
            random.seed(seed)
            np.random.seed(seed)
            changed = self._change(picture.convert("RGB")).convert(picture.mode)
        return v2f.to_image(changed) if isinstance(image, Tensor) else changed


class DictTransform:
    """A transform of dictionaries, such as MONAI's, as one of images and their masks.

    The dictionary holds float32 images ``(C, *sizes)``, from 0 to 1 or, of volumes in files, as
    they were normalised; and masks ``(1, *sizes)`` of labels one higher, in which 0 does not count.

    Args:
        transform: takes and returns a dictionary. MONAI's draw from NumPy, so each call seeds them
            by torch's random numbers (``set_random_state``).
        keys: of the image and of its mask.

    Example:
        >>> from revzoo.data import DictTransform
        >>> brighter = DictTransform(lambda found: {**found, "image": found["image"] + 0.2})
        >>> brighter(torch.zeros(3, 8, 8, dtype=torch.uint8)).max()
        tensor(51, dtype=torch.uint8)
    """

    def __init__(
        self,
        transform: Callable[[dict[str, Any]], Mapping[str, Any]],
        keys: Sequence[str] = ("image", "label"),
    ) -> None:
        self.transform, self.keys = transform, tuple(keys)

    def __call__(self, image: Any, *masks: Tensor) -> Any:
        pixels = v2f.to_image(image).as_subclass(Tensor)
        # a mask in a file has no dimension of channels
        parts = [v2f.to_dtype(pixels, torch.float32, scale=not pixels.is_floating_point())]
        parts += [mask.as_subclass(Tensor).reshape(1, *pixels.shape[1:]) for mask in masks]
        if (reseed := getattr(self.transform, "set_random_state", None)) is not None:
            reseed(seed=int(torch.randint(2**31, ())))
        found = self.transform(dict(zip(self.keys, parts, strict=False)))
        new, *others = (found[key].as_subclass(Tensor) for key in self.keys[: len(parts)])
        if not pixels.is_floating_point():
            new = v2f.to_dtype(Image(new.clamp(0, 1)), pixels.dtype, scale=True).as_subclass(Tensor)
        changed = [
            Mask(other.reshape(mask.shape).to(mask.dtype))
            for other, mask in zip(others, masks, strict=True)
        ]
        return (Image(new), *changed) if changed else Image(new)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes of the training images.

    Attributes:
        crop_padding: pixels of padding on each side before the random crop; 0 for no crop, None
            for an eighth of the shorter side (the papers' 4 for 32 pixels).
        crop_scale: for images read from files: smallest share of the area in a random resized
            crop. 0.08, from GoogLeNet (Szegedy et al. 2015, arXiv 1409.4842), suits a hundred
            epochs.
        flip: mirror left and right with probability 1/2; volumes along each axis.
        policy: name in :data:`POLICIES`, timm's description of a RandAugment (see
            :class:`TimmRandAugment`), or None.
        magnitude: of torchvision's RandAugment, 0 to 30.
        rotation: largest angle in degrees, to both sides.
        color: largest relative change of brightness, contrast and saturation; of the hue, a quarter
            of it.
        blur: probability of a Gaussian blur.
        erasing: probability that a random box of the image becomes the mean colour (Zhong et al.
            2017, arXiv 1708.04896).
        erasing_noise: fill the box with normal noise, as timm's recipes do (``pixel``).
        chunk: images that share one crop offset and one flip; 1 draws for each image.
        mixup: alpha of the Beta distribution of Mixup's proportion; 0 for no Mixup.
        cutmix: the same for CutMix. With both, each batch draws one of them.

    Raises:
        ValueError: a value is out of range.
    """

    crop_padding: int | None = None
    crop_scale: float = 0.08
    flip: bool = True
    policy: str | None = None
    magnitude: int = 9
    rotation: float = 0.0
    color: float = 0.0
    blur: float = 0.0
    erasing: float = 0.0
    erasing_noise: bool = False
    chunk: int = 1
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        # messages name the keys of the configuration, data.augment.*
        check_count("augment.crop_padding", self.crop_padding or 0, least=0)
        check_number("augment.crop_scale", self.crop_scale, high=1, open_low=True)
        if self.policy not in (None, *POLICIES) and not self._is_timms:
            raise ValueError(
                f"augment.policy={self.policy}: expected one of {', '.join(POLICIES)}, or timm's "
                f"RandAugment as rand-m9-mstd0.5-inc1{did_you_mean(self.policy, POLICIES)}"
            )
        check_choice("augment.magnitude", self.magnitude, range(31))
        check_number("augment.rotation", self.rotation, high=180)
        check_number("augment.color", self.color, high=1)
        check_number("augment.blur", self.blur, high=1)
        check_number("augment.erasing", self.erasing, high=1)
        check_count("augment.chunk", self.chunk)
        check_number("augment.mixup", self.mixup, open_high=True)
        check_number("augment.cutmix", self.cutmix, open_high=True)

    @classmethod
    def of(cls, options: "Augment | Mapping[str, Any] | None") -> "Augment":
        """Build from the options of a configuration file.

        Raises:
            ValueError: an unknown option, or a value out of range.
        """
        if isinstance(options, Augment):
            return options
        return build_dataclass(cls, options or {}, where="augment")

    def padding(self, sizes: Sequence[int]) -> int:
        """Padding in pixels for images of ``sizes`` pixels."""
        return min(sizes) // 8 if self.crop_padding is None else self.crop_padding

    @property
    def _is_timms(self) -> bool:
        return bool(self.policy and _OF_TIMM.fullmatch(self.policy))

    @property
    def of_pictures(self) -> bool:
        """Whether the policy takes images of 1 or 3 channels only, without masks."""
        return self.policy in _OF_TORCHVISION or self._is_timms

    @property
    def mixes(self) -> bool:
        """Whether Mixup or CutMix is on."""
        return bool(self.mixup or self.cutmix)

    def transforms(self, dtype: torch.dtype) -> list[v2.Transform]:
        """:attr:`single` for images of ``dtype``."""
        if dtype != torch.uint16 or not self.single:
            return self.single
        # torchvision's changes of colour take no 16 bits
        before, after = (v2.ToDtype(kind, scale=True) for kind in (torch.float32, dtype))
        return [before, *self.single, after]

    @cached_property
    def single(self) -> list[v2.Transform]:
        """The transforms of each image by itself, of bytes or Pillow images."""
        options = {"magnitude": self.magnitude} if self.policy == "randaugment" else {}
        policy: list[Any] = []
        if self._is_timms:
            policy = [TimmRandAugment(str(self.policy))]
        elif self.policy:
            policy = [POLICIES[self.policy](**options)]
        return [
            *policy,
            *([v2.RandomRotation(self.rotation)] if self.rotation else []),
            *([v2.ColorJitter(*[self.color] * 3, self.color / 4)] if self.color else []),
            *([v2.RandomApply([v2.GaussianBlur(5, (0.1, 2.0))], self.blur)] if self.blur else []),
        ]

    def each(self, pixel_max: int, images: Tensor, *masks: Tensor) -> list[Tensor]:
        """Apply :attr:`single` to each image, with its mask.

        Args:
            pixel_max: largest value of the images.
            images: pixels (B, C, H, W).
            masks: none, or uint8 (B, 1, H, W), which rotate with the images; 0 fills their corners.

        Returns:
            The images, and the masks.
        """
        if not (transforms := self.transforms(images.dtype)):
            return [images, *masks]
        change = v2.Compose(transforms)
        scale = max(255 // pixel_max, 1)  # torchvision takes 255 for white
        scaled = images * scale if scale > 1 else images  # uint16 cannot be multiplied
        pairs = zip(scaled, *(map(Mask, part) for part in masks), strict=True)
        changed = [change(*pair) if masks else (change(*pair),) for pair in pairs]
        images, *masks = map(torch.stack, zip(*changed, strict=True))  # type: ignore[assignment]
        if scale > 1:
            images = images.div(scale, rounding_mode="floor").clamp(max=pixel_max)
        return [images, *masks]

    def erase(self, images: Tensor) -> Tensor:
        """Erase boxes of normalised images (B, C, H, W)."""
        if not self.erasing:
            return images
        erasing = v2.RandomErasing(self.erasing, value="random" if self.erasing_noise else 0)
        return torch.stack([erasing(image) for image in images])

    def draw(
        self, count: int, sizes: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw crops and flips for a batch, on the CPU.

        Args:
            count: images in the batch.
            sizes: their height and width in pixels.
            generator: None for torch's global one.

        Returns:
            int64 (3, D): offset of the rows, offset of the columns and flip (0 or 1), for each
            ``chunk`` of images.
        """
        draws = -(-count // self.chunk)  # rounded up
        offsets = torch.randint(2 * self.padding(sizes) + 1, (2, draws), generator=generator)
        flips = torch.rand(1, draws, generator=generator) < 0.5 * self.flip
        return torch.cat([offsets, flips.long()])

    def changes(self, sizes: Sequence[int]) -> bool:
        """Whether images of ``sizes`` pixels are cropped or flipped at all."""
        return bool(self.padding(sizes) or self.flip)

    def __call__(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Crop and flip a batch.

        Args:
            images: (B, C, H, W); or volumes (B, C, D, H, W), which are flipped along each axis.
            draws: of :meth:`draw`, on the device of the images; None to draw them now.

        Returns:
            The same shape, dtype and device.
        """
        if images.dim() == 5:
            return self._flipped(images)
        count, channels, *sizes = images.shape
        if not self.changes(sizes):
            return images
        if draws is None:
            # drawn on the CPU: `order.seeded` seeds only its generator
            draws = self.draw(count, sizes).to(images.device)
        padding = self.padding(sizes)
        rows, columns, flips = draws[:, :, None]
        down, across = (torch.arange(n, device=images.device) for n in sizes)
        rows = rows + down
        columns = columns + torch.where(flips.bool(), across.flip(0), across)
        # of each pixel in its padded image, which has rows of this width
        source = (rows * (sizes[1] + 2 * padding))[:, :, None] + columns[:, None, :]
        source = source.flatten(1).repeat_interleave(self.chunk, 0)[:count]
        padded = pad(images, (padding,) * 4).flatten(2)
        index = source[:, None].expand(-1, channels, -1)
        return padded.gather(2, index).view(images.shape)

    def _flipped(self, volumes: Tensor) -> Tensor:
        """Mirror volumes along each axis by itself, with probability 1/2."""
        draws = torch.rand(-(-len(volumes) // self.chunk), 3) < 0.5 * self.flip
        flips = draws.repeat_interleave(self.chunk, 0)[: len(volumes)].tolist()
        axes = [[axis for axis, flip in enumerate(row, 1) if flip] for row in flips]
        return torch.stack([volume.flip(a) for volume, a in zip(volumes, axes, strict=True)])

    def mix(self, images: Tensor, labels: Tensor, *, num_classes: int) -> tuple[Tensor, Tensor]:
        """Apply Mixup or CutMix; with both on, draw one of them. With neither, change nothing.

        Args:
            images: float (B, C, H, W).
            labels: int64 (B,).
            num_classes: number of classes.

        Returns:
            Images of the same shape, and class probabilities (B, num_classes) in their dtype.
        """
        chosen = [
            kind(alpha=float(alpha), num_classes=num_classes)
            for kind, alpha in ((v2.MixUp, self.mixup), (v2.CutMix, self.cutmix))
            if alpha
        ]
        if not chosen:
            return images, labels
        # torch.randint, not random.choice: `order.seeded` seeds only torch's generator
        images, labels = chosen[int(torch.randint(len(chosen), ()))](images, labels)
        return images, labels.to(images.dtype)  # v2 gives float32 for images of any precision
