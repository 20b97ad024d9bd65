"""The base class of all data modules: splits, loaders, augmentation, normalisation.

The images of a small set stay in memory as bytes, and one indexing operation gives a batch. We move
the bytes to the device, each batch or the whole set at once (``on_device.py``), and augment and
normalise them there as a batch.

The rules, for every set:

1. The validation split is a folder, or a share or a fold of the training images that depends only
   on ``split_seed``.
2. Only ``setup("test")`` and ``setup("predict")`` read the test split.
3. Only batches of the training loop are augmented.
4. The order of the images and their augmentation depend on torch's seed, the epoch and the number
   of the batch (``order.py``). Each training reads the seed again, unless it resumes.
5. Normalisation is measured on the training images. A checkpoint keeps it, with the class names and
   the crop: evaluation prepares images as training did, and refuses other classes.
6. A checkpoint also keeps the number of images and a hash (``digest``). A training that resumes
   with other images is refused.

Known limits: each process of a distributed run holds its own copy of an in-memory set; ``predict``
runs on the test split.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal, NoReturn, TypedDict

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from revzoo._checks import check_choice, check_count, check_number, short_size, shortened
from revzoo.data.augment import Augment
from revzoo.data.errors import DataError
from revzoo.data.images import Batch, ImageSet
from revzoo.data.loaders import eval_loader, train_loader
from revzoo.data.normalise import Normalisation
from revzoo.data.on_device import CHOICES, DeviceImages, OnDevice, draws_of_epoch, placed
from revzoo.data.order import batch_seed, batches_of_epoch, held_back, seeded
from revzoo.data.state import (
    BYTE_MAX,
    check_same_classes,
    check_same_images,
    check_same_task,
    check_state,
    normalisation_for,
)

Split = Literal["train", "val", "test"]
_EVALUATED: dict[str | None, Split] = {"validate": "val", "test": "test", "predict": "test"}


class LoadingOptions(TypedDict, total=False):
    """The options of ``ImageData``, which its subclasses pass on."""

    batch_size: int
    eval_batch_size: int
    num_workers: int | None
    val_fraction: float
    split_seed: int
    folds: int
    fold: int
    augment: Augment | Mapping[str, Any] | None
    on_device: OnDevice


class ImageData(pl.LightningDataModule, ABC):
    """Classification images for Lightning, or for a plain loop.

    The loaders give bytes. ``on_after_batch_transfer`` (called by Lightning) or ``transform`` (in
    your own loop) turns them into normalised float32.

    Example:
        >>> from revzoo.data import Digits
        >>> data = Digits(batch_size=32)
        >>> data.prepare_data()
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> data.transform(images, training=True).shape
        torch.Size([32, 1, 8, 8])

    Args:
        batch_size: training images per step and process; an incomplete last batch is dropped.
        eval_batch_size: images per validation, test and prediction step.
        num_workers: loader processes per training process. None for 0 if the set is in memory;
            otherwise the machine's CPUs minus one, divided among its training processes, at most
            8 each.
        val_fraction: share of the training images held back for validation, if the set has no
            validation split.
        split_seed: decides which images are held back, independent of other seeds.
        folds: for cross-validation: parts of the training images. 1 for none.
        fold: the part to validate with, from 0.
        augment: an ``Augment`` or its options.
        on_device: whether a set in memory lives on the training device, which changes nothing but
            the speed. ``"auto"``: on a GPU, if it takes at most a quarter of the free memory; True:
            on any device, if it fits.

    Attributes:
        classes: class names by label, after ``setup("fit")``.
        num_classes, in_chans, sizes: also after ``setup("fit")``; sizes are height and width in
            pixels, or the three sides of a volume's patch.
        identity: number of images to train with, to validate with, and their :meth:`digest`; also
            after ``setup("fit")``.
        poisson: whether training batches are drawn independently, for private training; set it
            before the loader is made.

    Raises:
        ValueError: an argument is out of range; raised before any data is read.
    """

    pixel_max: int = BYTE_MAX
    """Largest value of a stored pixel; 65,535 after ``setup("fit")`` of images of 16 bits."""

    task: str = "classification"
    """``"segmentation"`` if labels are masks, ``"multilabel"`` or ``"regression"`` if they are
    float32 (N, K); ``classes`` then names the K labels or targets."""

    classes: list[str]
    in_chans: int
    sizes: tuple[int, ...]
    normalisation: Normalisation
    _measured: Normalisation
    identity: dict[str, Any]

    def __init__(
        self,
        *,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        folds: int = 1,
        fold: int = 0,
        augment: Augment | Mapping[str, Any] | None = None,
        on_device: OnDevice = "auto",
    ) -> None:
        super().__init__()
        check_count("batch_size", batch_size)
        check_count("eval_batch_size", eval_batch_size)
        check_count("num_workers", num_workers or 0, least=0)
        check_number("val_fraction", val_fraction, high=1, open_low=True, open_high=True)
        check_count("folds", folds)
        check_count("fold", fold, least=0)
        check_number("fold", fold, high=folds, open_high=True)
        check_choice("on_device", on_device, CHOICES)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_workers = num_workers
        self.val_fraction, self.split_seed = val_fraction, split_seed
        self.folds, self.fold = folds, fold
        self.augment = Augment.of(augment)
        self.poisson, self.on_device = False, on_device
        self._place = ""  # the line about the place of the images
        self._epoch_draws: tuple[Any, Tensor] | None = None  # of which epoch, and its draws
        self._sets: dict[Split, ImageSet] = {}
        self._read_with: tuple[Any, float] | None = None  # the preparation of these sets
        self._stage: str | None = None  # of the last setup
        # The state of a run. Evaluation after training needs it, so it lasts until the next
        # training begins.
        self._order_seed: int | None = None
        self._order_processes: int | None = None  # with which the run began
        self._restored: dict[str, Any] = {}  # from a checkpoint; empty without one
        self._run_is_over = False

    @abstractmethod
    def read(self, split: Split) -> ImageSet | None:
        """Read one split; None if the set has no such split.

        Raises:
            DataError: its files are missing or damaged.
        """

    def digest(self) -> str:
        """A hash of the images to train and to validate with, cheap to compute.

        A resumed training compares it. By default it is a hash of the labels.
        """
        labels = (self._images(split).labels.numpy().tobytes() for split in ("train", "val"))
        return hashlib.sha256(b"".join(labels)).hexdigest()

    def preparation(self) -> tuple[tuple[int, ...] | None, float]:
        """The arguments of ``transforms.cropped``, which brings images to one size.

        Returns:
            Sizes in pixels (None: the images keep theirs), and ``crop_pct``.
        """
        return None, 1.0

    @property
    def shape(self) -> dict[str, Any]:
        """``num_classes``, ``in_chans`` and ``sizes`` in pixels: what a model is built for.

        Empty before ``setup("fit")``, unless ``prepare_data`` finds them without reading images.
        """
        if not hasattr(self, "classes"):
            return {}
        found = {"num_classes": self.num_classes, "in_chans": self.in_chans}
        return {**found, "sizes": self.sizes}

    @property
    def train_sizes(self) -> tuple[int, ...]:
        """``sizes`` of the largest training images, which a plan of memory counts."""
        return self.sizes

    @property
    def num_classes(self) -> int:
        """Number of classes, after ``setup("fit")``."""
        return len(self.classes)

    @property
    def train_count(self) -> int:
        """Number of training images without the held-back share, after ``setup("fit")``."""
        return len(self._images("train"))

    @property
    def train_labels(self) -> Tensor:
        """Their labels, int64 (train_count,), or as the task has them."""
        return self._images("train").labels

    @property
    def targets(self) -> dict[str, list[float]] | None:
        """Of a regression, ``mean`` and ``std`` of each target in the training; else None."""
        if self.task != "regression":
            return None
        if "targets" in self._restored:
            return self._restored["targets"]
        labels = self.train_labels.double()
        return {"mean": labels.mean(0).tolist(), "std": labels.std(0, correction=0).tolist()}

    @property
    def val_count(self) -> int:
        """Number of validation images, after ``setup("fit")``."""
        return len(self._images("val"))

    @property
    def notes(self) -> list[str]:
        """How images are read and augmented, a line each for the opening of a run."""
        notes, chunk = [self._place] if self._place else [], self.augment.chunk
        if chunk > 1 and self._images("train").in_memory:
            notes.append(f"each {chunk} images share a crop and a flip: data.augment.chunk={chunk}")
        return notes

    def has(self, split: Split) -> bool:
        """Whether the set has this split. Reads no images."""
        return split != "val"

    def setup(self, stage: str | None = None) -> None:
        """Read the splits that ``stage`` ("fit", "validate", "test", "predict") needs, each once.

        Every stage reads the training images, since they define classes and normalisation. It
        skips them if a checkpoint has set these (``load_state_dict``) and its split exists.

        Raises:
            DataError: data is missing, damaged, too small to be split, or has other classes.
        """
        self._stage = stage
        if stage == "fit" and self._run_is_over:
            self._forget_run()
        # a checkpoint may have brought another size or crop: read the images again
        if self._read_with != (wanted := self.preparation()):
            self._sets, self._read_with = {}, wanted
        evaluated = self._read_once(_EVALUATED[stage]) if stage in _EVALUATED else None
        if "train" not in self._sets:
            # with a checkpoint's normalisation, the training images need not exist
            if self._restored and evaluated is not None:
                self._describe(evaluated)
            else:
                self._setup_training()
        if self._restored:
            check_same_task(self._restored.get("task", self.task), self.task)
            check_same_classes(self._restored["classes"], self.classes)
            if stage == "fit":
                check_same_images(self._restored, self.identity)
            # last, so that it replaces the normalisation measured above
            self.normalisation = Normalisation(**normalisation_for(self._restored, self.pixel_max))
            self._order_seed = self._restored.get("order_seed")
            self._order_processes = self._restored.get("order_processes")

    def _read_once(self, split: Split) -> ImageSet | None:
        if split not in self._sets and (images := self.read(split)) is not None:
            # a new dict: copies of this module share the old one
            self._sets = {**self._sets, split: images}
        return self._sets.get(split)

    def _images(self, split: Split) -> ImageSet:
        assert split in self._sets, "setup() comes first"
        return self._sets[split]

    def _setup_training(self) -> None:
        source = self.read("train")
        assert source is not None, "every set has training images"
        self._describe(source)
        self._check_augment(source)
        self.normalisation = self._measured = source.normalisation()
        val = self._read_once("val")
        if val is not None and self.folds > 1:
            raise DataError(
                f"data.folds={self.folds}, but the set has a validation split: fold the training "
                "images only if there is none, or leave data.folds out"
            )
        if val is None:
            rest, held = held_back(
                source.strata,
                source.groups,
                self.val_fraction,
                self.split_seed,
                folds=self.folds,
                fold=self.fold,
            )
            self._check_parts(source, rest, held)
            val = source.subset(held, training=False)
            source = source.subset(rest, training=True)
        self._sets = {**self._sets, "train": source, "val": val}
        if self.task == "segmentation" and len(seen := self._classes_seen()) < 2:
            raise DataError(
                f"the training masks have only {[self.classes[i] for i in seen]} of the classes; "
                "255 does not count. If 255 is a class, name it: "
                "'data.classes={0: background, 255: cell}' of data=masks; in other sets, write 1"
            )
        if (targets := self.targets) and 0 in targets["std"]:
            name = self.classes[targets["std"].index(0)]
            raise DataError(
                f"{name} has the same value in all training images, so there is nothing to learn: "
                "leave its column out"
            )
        # now, not when a checkpoint is saved: the files may change in between
        digest = self.digest()
        if self.folds > 1:  # other folds may have as many images
            digest += f", fold {self.fold} of {self.folds}, seed {self.split_seed}"
        self.identity = {"train": len(source), "val": len(val), "digest": digest}

    def _check_parts(self, source: ImageSet, rest: Tensor, held: Tensor) -> None:
        """Raise a DataError for an empty part, or a class without a training image."""
        what = f"val_fraction={self.val_fraction}"
        if self.folds > 1:
            what = f"fold {self.fold} of folds={self.folds}"
        of = f"{what} of {len(source)} training images in {len(source.classes)} classes"
        if len(held) == 0:
            raise DataError(
                f"{of} leaves no validation image: raise data.val_fraction, or lower data.folds"
            )
        if self.task == "regression":
            return
        # of the classes that the set has: its files may lack others
        parts = [source.labels, source.labels[rest]]
        if source.labels.is_floating_point():  # the labels that an image has
            parts = [labels.nonzero()[:, 1] for labels in parts]
        there, left = (set(torch.unique(labels).tolist()) for labels in parts)
        if lost := [n for i, n in enumerate(source.classes) if i in there - left]:
            which = "they" if source.groups is None else "their groups"
            raise DataError(
                f"{of} leaves no image of {shortened(lost)} to train with: {which} are all held "
                "back. Change data.split_seed, add images, or give them a split of their own"
            )

    def _classes_seen(self) -> list[int]:
        """Two classes of the training masks, or all if there are fewer."""
        labels = self.train_labels
        return [*islice((i for i in range(self.num_classes) if (labels == i).any()), 2)]

    def _describe(self, images: ImageSet) -> None:
        self.classes, self.in_chans, self.sizes = images.classes, images.in_chans, images.sizes
        if images.dtype == torch.uint16:
            self.pixel_max = 2**16 - 1

    def teardown(self, stage: str) -> None:
        self._run_is_over = True

    def on_exception(self, exception: BaseException) -> None:  # Lightning then skips teardown
        self._run_is_over = True

    def _forget_run(self) -> None:
        if self._restored and "train" in self._sets:
            self.normalisation = self._measured
        self._restored, self._run_is_over = {}, False
        self._order_seed = self._order_processes = None

    def place(self, device: torch.device | str) -> None:
        """Move the images that were read to the device of a training, as ``on_device`` says.

        Loaders do so for Lightning; in your own loop, call it after ``setup``.
        """
        self._sets, self._place = placed(self._sets, torch.device(device), self.on_device)

    def train_dataloader(self) -> DataLoader[Batch]:
        trainer = self.trainer
        if trainer is not None:
            self.place(trainer.strategy.root_device)
        images = self._images("train")
        if self._order_seed is None:  # otherwise a checkpoint has set it
            # all processes need one order, but their seeds may differ
            seed = torch.initial_seed()
            self._order_seed = seed if trainer is None else trainer.strategy.broadcast(seed)
        if self._order_processes is None:
            self._order_processes = 1 if trainer is None else trainer.world_size
        return train_loader(
            images,
            batch_size=self.batch_size,
            workers=self.num_workers,
            seed=self._order_seed,
            trainer=trainer,
            poisson=self.poisson,
            stretches=self._order_processes,
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._eval_loader("test", in_order=True)

    def _no_test(self) -> str:
        return "there is no test split: call setup('test') first"

    def _eval_loader(self, split: Split, *, in_order: bool = False) -> DataLoader[Batch]:
        """The loader of a split for evaluation.

        Sets are sorted by class, so the first batches hold one or two classes. If the trainer
        evaluates only some batches, a shuffle with a fixed seed gives them images of all classes.
        """
        if split == "test" and split not in self._sets:
            raise DataError(self._no_test())
        if self.trainer is not None:
            self.place(self.trainer.strategy.root_device)
        images, size = self._images(split), self.eval_batch_size
        # Lightning: the float 1.0 means all batches, the integer 1 one batch
        limit = getattr(self.trainer, f"limit_{split}_batches", 1.0)
        if not in_order and not (isinstance(limit, float) and limit == 1.0):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
            images = images.subset(order, training=False)
        return eval_loader(images, batch_size=size, workers=self.num_workers, trainer=self.trainer)

    def transform(self, images: Tensor, *, training: bool) -> Tensor:
        """Pixels (B, C, H, W) to normalised float32, same device; augmented if ``training``."""
        train = self._sets.get("train")
        # images from files are cropped and flipped when they are read
        if training and (train is None or train.in_memory):
            (images,) = self.augment.each(self.pixel_max, self.augment(images))
        images = self.normalisation(images)
        return self.augment.erase(images) if training else images

    def shown(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) as pixels in [0, 1], for pictures."""
        return (self.normalisation.inverse(images) / self.pixel_max).clamp(0, 1)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        assert self.trainer is not None, "Lightning calls this hook"
        images, labels = batch
        if self.trainer.training:
            images, labels = self._augmented(images, labels)
        else:
            images = self.transform(images, training=False)
            labels = _classes_of(labels)
        # Lightning converts floats before the transfer, when these images were still bytes
        images = self.trainer.precision_plugin.convert_input(images)
        return images, labels.to(images.dtype) if labels.is_floating_point() else labels

    def _augmented(self, images: Tensor, labels: Tensor) -> Batch:
        """A training batch, augmented, mixed and normalised."""
        assert self.trainer is not None
        draws = self._draws(images)
        if labels.dim() > 2:
            with seeded(batch_seed(self._order_seed or 0, self.trainer)):
                return self._augmented_masks(images, labels, draws)
        if draws is not None:
            images = self.normalisation(self.augment(images, draws))
            if not self.augment.mixes:
                return images, labels
        # by batch: a resumed run draws the same crops as an uninterrupted one
        with seeded(batch_seed(self._order_seed or 0, self.trainer)):
            if draws is None:
                images = self.transform(images, training=True)
            else:  # again, so that the numbers of Mixup and CutMix follow them as elsewhere
                self.augment.draw(len(images), self.sizes)
            return self.augment.mix(images, labels, num_classes=self.num_classes)

    def _augmented_masks(self, images: Tensor, masks: Tensor, draws: Tensor | None) -> Batch:
        """Images and masks with the same crops and flips; pixels of the padding do not count."""
        in_memory = self._images("train").in_memory
        if in_memory or images.dim() == 5:  # volumes in files are flipped here, too
            # one more than the class: 0 is the padding, and wraps 255
            marked = (masks + 1).unsqueeze(1).to(images.dtype)
            both = self.augment(torch.cat([images, marked], 1), draws)
            images, masks = both[:, :-1], both[:, -1:].to(torch.uint8)
            if in_memory:
                images, masks = self.augment.each(self.pixel_max, images, masks)
            masks = masks.squeeze(1) - 1
        return self.normalisation(images), _classes_of(masks)

    def _draws(self, images: Tensor) -> Tensor | None:
        """The crops and flips of this batch, drawn with those of its epoch; None to draw now."""
        trainer, augment = self.trainer, self.augment
        assert trainer is not None
        draws_now = self.poisson or augment.single or augment.erasing or len(self.sizes) > 2
        draws_now = draws_now or type(self).transform is not ImageData.transform
        resident = isinstance(self._sets.get("train"), DeviceImages)
        if not resident or draws_now or not augment.changes(self.sizes):
            return None
        seed, batches = self._order_seed or 0, int(trainer.num_training_batches)
        epoch = (seed, trainer.current_epoch, batches, len(images), images.device)
        if self._epoch_draws is None or self._epoch_draws[0] != epoch:
            seeds = [batch_seed(seed, trainer, batch) for batch in range(batches)]
            draws = draws_of_epoch(augment, len(images), self.sizes, seeds)
            self._epoch_draws = epoch, draws.to(images.device)
        return self._epoch_draws[1][batches_of_epoch(trainer)]

    def _check_augment(self, images: ImageSet) -> None:
        """Raise a DataError for changes that the images or their masks do not take."""
        augment = self.augment
        augment.transforms(images.dtype)  # before training: a policy's package may be missing
        fixed = augment.of_pictures
        if images.in_chans not in (1, 3) and (fixed or augment.color):
            raise DataError(
                f"data.augment.policy and color take images of 1 or 3 channels, these have "
                f"{images.in_chans}: leave them out"
            )
        flat = augment.rotation or augment.color or augment.blur or augment.erasing or augment.mixes
        if len(images.sizes) > 2 and (flat or fixed):
            raise DataError(
                "volumes are flipped, and changed by a registered data.augment.policy: leave out "
                "all else of data.augment"
            )
        if self.task == "segmentation" and (fixed or augment.erasing or augment.mixes):
            raise DataError(
                "the set has masks, which do not follow data.augment.policy, erasing, mixup and "
                "cutmix: leave them out"
            )

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise a NotImplementedError: a checkpoint must not choose the files that we read."""
        raise NotImplementedError(
            f"{cls.__name__} cannot be made from a checkpoint: make {cls.__name__}(...) with its "
            "options, and pass the checkpoint to the trainer (ckpt_path=...)"
        )

    def state_dict(self) -> dict[str, Any]:
        assert self._read_with is not None, "setup() comes first"
        return {
            "task": self.task,
            "classes": list(self.classes),
            **({"targets": targets} if (targets := self.targets) else {}),
            "pixel_max": self.pixel_max,
            "normalisation": self.normalisation.state_dict(),
            "image_size": short_size(self.sizes),
            "in_chans": self.in_chans,
            "crop_pct": self._read_with[1],
            "order_seed": self._order_seed,
            "order_processes": self._order_processes,
            # after an evaluation alone: that of the training
            "images": getattr(self, "identity", self._restored.get("images")),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use a checkpoint's classes, normalisation and crop until the run ends."""
        check_state(state_dict)
        # Lightning restores after setup(), a plain loop may do so before
        if hasattr(self, "classes"):
            check_same_classes(state_dict["classes"], self.classes)
        self._restored, self._run_is_over = state_dict, False
        if hasattr(self, "classes"):
            self.setup(self._stage)


def _classes_of(labels: Tensor) -> Tensor:
    """Labels as they are; masks as int64, with -1 for 255."""
    return (labels + 1).long() - 1 if labels.dim() > 2 else labels
