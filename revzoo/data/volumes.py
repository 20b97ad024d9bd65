"""Volumes with masks, from folders or a table: random patches to train, whole volumes to evaluate.

    ROOT/train/images/NAME.nii.gz   ROOT/train/labels/NAME.nii.gz    and val/, test/
    ROOT/imagesTr/NAME_0000.nii.gz  ROOT/labelsTr/NAME.nii.gz        nnU-Net's, and imagesTs

Before a run starts, each volume is read once and checked, in parts. Its intensities and some of the
voxels of each class are kept in the user's cache, so the next run starts at once. A training reads
only its patches from the disk, so its memory depends on the patch, not on the set.

Half of the patches are centred on a voxel of a random class but the background, the others anywhere
(F. Isensee et al. 2021, "nnU-Net", Nature Methods 18, oversamples a third).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack
from zipfile import BadZipFile

import numpy as np
import torch
from lightning_fabric.utilities.data import suggested_max_num_workers
from torch import Tensor
from torchvision.tv_tensors import Mask

from revzoo._checks import check_count, counts_of, is_number, number_of, package_needed, shortened
from revzoo._files import replacing
from revzoo.data.errors import DataError
from revzoo.data.folders import split_folders
from revzoo.data.images import Batch, ImageSet
from revzoo.data.masks import IGNORED
from revzoo.data.module import ImageData, LoadingOptions, Split
from revzoo.data.normalise import Normalisation
from revzoo.data.order import hash_seed, seeded
from revzoo.data.state import BYTE_MAX, normalisation_for
from revzoo.data.table import Table
from revzoo.data.volume_files import (
    SUFFIXES,
    Volume,
    case_name,
    channels_of,
    files_in,
    hash_of,
    open_volume,
    volumes_in,
)
from revzoo.weights.files import cache_folder

Window = tuple[float, float] | None
FOREGROUND = 0.5  # share of the patches that are centred on foreground
KEPT = 1000  # voxels of each class in each slab
TOLERANCE = 0.01  # of spacings
_NOT_FINITE = "has NaN or infinite voxels: replace them, such as by the background's"
NNUNET: dict[str, Split] = {"Tr": "train", "Ts": "test"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """A volume: the file of each channel, its mask, and its group."""

    images: tuple[Path, ...]
    mask: Path
    group: str = ""


@dataclass(frozen=True)
class Facts:
    """What was measured of a case.

    Attributes:
        means, deviations: of the voxels of each channel that are not 0.
        labels: in the mask, ascending, without 255.
        voxels: int64 (n, 4): a class but the background, and the indices of one of its voxels.
    """

    means: np.ndarray
    deviations: np.ndarray
    labels: np.ndarray
    voxels: np.ndarray


def prepared(values: np.ndarray, window: Window, mean: float, deviation: float) -> np.ndarray:
    """Intensities of a channel for the network, float32: in [0, 1] for a window, else z-scores."""
    if window is None:
        return (values - np.float32(mean)) / np.float32(deviation)
    low, high = map(np.float32, window)
    return ((values - low) / (high - low)).clip(0, 1)


def moments(volume: Volume) -> tuple[float, float]:
    """Mean and deviation of the voxels that are not 0.

    Raises:
        ValueError: a voxel is NaN or infinite.
    """
    sums = np.zeros(3)
    for part in volume.slabs():
        values = volume.read(part).astype(np.float64)
        values = values[values != 0]
        sums += [values.size, values.sum(), np.square(values).sum()]
    if not np.isfinite(sums).all():
        raise ValueError(_NOT_FINITE)
    count, total, squares = sums
    mean = total / max(count, 1)
    variance = squares / max(count, 1) - mean**2
    return mean, variance**0.5 if variance > 1e-12 else 1.0  # a constant volume becomes 0


def measure(case: Case) -> Facts:
    """Read a case once; takes the facts from the cache if its files have not changed.

    Raises:
        DataError: a file cannot be read.
        ValueError: a fault of the voxels, with its remedy.
    """
    file = cache_folder() / "volumes" / f"{hash_of([*case.images, case.mask])}.npz"
    try:
        with np.load(file) as known:
            return Facts(**known)
    except (OSError, ValueError, TypeError, BadZipFile):
        pass  # not yet there, or damaged
    means, deviations = zip(*(moments(open_volume(path)) for path in case.images), strict=True)
    mask = open_volume(case.mask)
    labels: set[float] = set()
    voxels = [np.zeros((0, 4), dtype=np.int64)]
    for part in mask.slabs():
        values = mask.read(part)
        for label in np.unique(values):
            if label != IGNORED:
                labels.add(float(label))
            if label in (0, IGNORED) or np.isnan(label):
                continue
            found = np.argwhere(values == label)
            found = found[:: -(-len(found) // KEPT)]
            found[:, 2] += part[2].start
            voxels.append(np.insert(found, 0, int(label), axis=1))
    facts = Facts(
        np.array(means), np.array(deviations), np.array(sorted(labels)), np.concatenate(voxels)
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as target:
        np.savez_compressed(target, **vars(facts))
    return facts


def fault_of(case: Case, first: Case, *, classes: int | None, patch: Sequence[int] | None) -> str:
    """The fault of a case with the file and the remedy; empty if it has none.

    It is compared with the first case, the number of classes and the patch, if these are known.
    """
    at: Path = case.images[0]
    try:
        if len(case.images) != len(first.images):
            raise ValueError(
                f"has {number_of(len(case.images), 'channel')}, {first.images[0]} has "
                f"{len(first.images)}: add or remove files"
            )
        if not case.mask.exists():
            raise ValueError(f"has no label: expected {case.mask}")
        image, like = open_volume(at), open_volume(first.images[0])
        _check_geometry(image, like, f"{first.images[0]}: resample")
        for at in (*case.images[1:], case.mask):
            other = open_volume(at)
            if other.sizes != image.sizes:
                raise ValueError(
                    f"has {_by(other.sizes)} voxels, {case.images[0]} has {_by(image.sizes)}: "
                    "resample it to the grid of its image"
                )
            _check_geometry(other, image, f"{case.images[0]}: resample it to the grid of its image")
        at = case.images[0]
        if patch and any(n < p for n, p in zip(image.sizes, patch, strict=True)):
            raise ValueError(
                f"has {_by(image.sizes)} voxels, less than the patch: pad it, or set data.patch to "
                f"at most {list(map(min, image.sizes, patch))}"
            )
        facts = measure(case)
        labels, at = facts.labels, case.mask
        wrong = [x for x in labels if x % 1 or not 0 <= x < (classes or IGNORED)]
        if wrong:
            raise ValueError(
                f"has the labels {shortened(f'{x:g}' for x in wrong)}: expected whole numbers from "
                f"0 to {(classes or IGNORED) - 1}, or 255 for voxels that do not count; correct "
                "them, or set data.classes"
            )
    except DataError as error:
        return str(error)
    except ValueError as error:
        return f"{at} {error}"
    return ""


def _by(sizes: Sequence[object]) -> str:
    return "x".join(map(str, sizes))


def _check_geometry(volume: Volume, other: Volume, remedy: str) -> None:
    """Raise a ValueError for another spacing or orientation; ``.npy`` files have none."""
    if volume.affine is None or other.affine is None:
        return
    from nibabel.orientations import aff2axcodes

    affines = (volume.affine, other.affine)
    here, there = ("".join(aff2axcodes(affine)) for affine in affines)  # type: ignore[no-untyped-call]
    if here != there:
        raise ValueError(f"has the orientation {here}, not {there} as {remedy}")
    spacings = (volume.spacing, other.spacing)
    if not np.allclose(*spacings, rtol=TOLERANCE, atol=0):
        here, there = (_by([f"{side:.3g}" for side in spacing]) for spacing in spacings)
        raise ValueError(f"has the spacing {here} mm, not {there} as {remedy}")


class VolumeImages(ImageSet):
    """Volumes in files: patches of them to train with, whole ones otherwise.

    The options are those of :class:`Volumes`. ``transforms`` change patches and their masks, whose
    labels are one higher.
    """

    in_memory = False

    def __init__(
        self,
        cases: Sequence[Case],
        facts: Sequence[Facts],
        *,
        classes: list[str],
        patch: tuple[int, ...],
        patches: int,
        window: Window,
        transforms: Sequence[Callable[..., Any]] = (),
        training: bool = False,
    ) -> None:
        self._cases, self._facts, self._rows = cases, facts, torch.arange(len(cases))
        self.classes, self.in_chans, self.sizes = classes, len(cases[0].images), patch
        self._patches, self._window = patches, window
        self._transforms, self._training = transforms, training
        self.labels = torch.zeros(len(cases), dtype=torch.long)  # the masks stay on the disk
        groups = {name: i for i, name in enumerate(dict.fromkeys(case.group for case in cases))}
        if len(groups) > 1:
            self.groups = torch.tensor([groups[case.group] for case in cases])
        # in shared memory, since workers outlive an epoch; -1 without begin_epoch()
        self._epoch_seed = torch.tensor(-1).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._rows) * (self._patches if self._training else 1)

    def __getitem__(self, index: int) -> Batch:
        """A patch or a volume, float32 (C, D, H, W), and its mask, uint8 (D, H, W)."""
        row = int(self._rows[index % len(self._rows)])
        case, facts = self._cases[row], self._facts[row]
        images, mask = [open_volume(path) for path in case.images], open_volume(case.mask)
        seed = int(self._epoch_seed) if self._training else -1
        # by patch: the number of workers must not change it; -1: torch's own state decides
        with seeded(hash_seed(seed, index)) if seed >= 0 else nullcontext():
            part = self._drawn(facts, mask.sizes) if self._training else ()
            scales = zip(images, facts.means, facts.deviations, strict=True)
            channels = [prepared(v.read(part), self._window, *scale) for v, *scale in scales]
            volume = torch.from_numpy(np.stack(channels))
            labels = torch.from_numpy(mask.read(part).astype(np.uint8))
            for change in self._transforms if self._training else ():
                volume, found = change(volume, Mask(labels + 1))
                labels = found.as_subclass(Tensor) - 1
        return volume.as_subclass(Tensor), labels

    def _drawn(self, facts: Facts, sizes: Sequence[int]) -> tuple[slice, ...]:
        """A random patch; half of them have a foreground voxel in their middle."""
        patch = torch.tensor(self.sizes)
        room = torch.tensor(sizes) - patch
        corner = (torch.rand(3, dtype=torch.double) * (room + 1)).long()
        classes = np.unique(facts.voxels[:, 0])
        if len(classes) and torch.rand(()) < FOREGROUND:
            label = classes[int(torch.randint(len(classes), ()))]
            voxels = facts.voxels[facts.voxels[:, 0] == label, 1:]
            centre = torch.from_numpy(voxels[int(torch.randint(len(voxels), ()))])
            corner = (centre - patch // 2).clamp(min=0).minimum(room)
        return tuple(map(slice, corner.tolist(), (corner + patch).tolist()))

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A whole batch.

        Raises:
            DataError: whole volumes differ in size.
        """
        volumes, masks = zip(*(self[index] for index in indices), strict=True)
        if len({mask.shape for mask in masks}) > 1:
            raise DataError("the volumes differ in size: set data.eval_batch_size=1")
        return torch.stack(volumes), torch.stack(masks)

    def begin_epoch(self, seed: int, epoch: int) -> None:
        self._epoch_seed.fill_(seed)

    def normalisation(self) -> Normalisation:
        """None: each volume is normalised by itself when it is read."""
        return Normalisation([0.0] * self.in_chans, [1.0] * self.in_chans)


class Volumes(ImageData):
    """Volumes with masks: NIfTI (``.nii``, ``.nii.gz``), DICOM series and ``.npy``.

    ``pip install 'revzoo[medical]'`` installs the readers, and MONAI for sliding windows.

    Args:
        root: folder with ``train/images`` and ``train/labels`` of the same names, and optionally
            ``val`` and ``test``; or with nnU-Net's ``imagesTr`` and ``labelsTr``. With a table,
            where its relative paths start.
        table: see :class:`~revzoo.data.Table`; each row has the paths of a volume and of its mask.
        path_column, label_column, split_column, group_column: of the table.
        classes: names by label. None for those of nnU-Net's ``dataset.json``, else numbers up to
            the largest label.
        patch: voxels along each axis of a training patch, and of the windows of an evaluation.
        patches: patches of each volume in an epoch.
        window: smallest and largest intensity, which become 0 and 1, such as ``[-160, 240]`` for
            CT; None to scale each volume to mean 0 and deviation 1 of its voxels that are not 0.
        **loading: see ``ImageData``. By default batches of 2, and volumes are evaluated one by one.

    Raises:
        DataError: from ``prepare_data``: a label is missing, or has another shape or unknown
            classes; volumes differ in spacing or orientation, have NaN or are smaller than a patch.

    Example:
        >>> import numpy as np
        >>> from pathlib import Path
        >>> from revzoo.data import Volumes
        >>> for folder in ("images", "labels"):
        ...     Path("scans/train", folder).mkdir(parents=True)
        ...     for i in range(10):
        ...         np.save(f"scans/train/{folder}/{i}.npy", np.eye(24)[..., None].repeat(16, 2))
        >>> data = Volumes("scans", patch=[16, 16, 16])
        >>> data.setup("fit")
        >>> volumes, masks = next(iter(data.train_dataloader()))
        >>> volumes.shape, masks.shape
        (torch.Size([2, 1, 16, 16, 16]), torch.Size([2, 16, 16, 16]))
    """

    task = "segmentation"
    pixel_max = 1

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        table: str | Path | None = None,
        path_column: str = "path",
        label_column: str = "mask",
        split_column: str | None = None,
        group_column: str | None = None,
        classes: Sequence[str] | None = None,
        patch: Sequence[int] = (64, 64, 64),
        patches: int = 1,
        window: Sequence[float] | None = None,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        loading.setdefault("batch_size", 2)
        loading.setdefault("eval_batch_size", 1)
        super().__init__(**loading)
        if root is None and table is None:
            raise ValueError("root=None: give the folder of the volumes, or data.table=FILE")
        check_count("patches", patches)
        self.root = None if root is None else Path(root).expanduser()
        self.table = None
        if table is not None:
            self.table = Table(
                table,
                root=root,
                path_column=path_column,
                label_column=label_column,
                split_column=split_column,
                group_column=group_column,
            )
        self.patch, self.window = checked_preparation(patch, window)
        self.patches, self._names = patches, None if classes is None else list(map(str, classes))
        self._found: dict[Split, list[Case]] | None = None
        self._facts: dict[Case, Facts] = {}

    @property
    def notes(self) -> list[str]:
        scaled = "z-scores of each volume" if self.window is None else f"window {self.window}"
        return [f"patches of {_by(self.patch)}, {scaled}", *super().notes]

    @property
    def shape(self) -> dict[str, Any]:
        cases = next(iter(self.listing().values()))
        found = {"num_classes": len(self._classes()), "in_chans": len(cases[0].images)}
        return {**found, "sizes": self.patch}

    @property
    def spacing(self) -> tuple[float, ...]:
        """Millimetres between voxels along each axis, of all volumes."""
        cases = next(iter(self.listing().values()))
        return open_volume(cases[0].images[0]).spacing

    def has(self, split: Split) -> bool:
        return split in self.listing()

    def prepare_data(self) -> None:
        """Read and check all volumes, so that errors come before anything else is built."""
        if find_spec("monai") is None:
            raise DataError(package_needed("sliding windows over volumes need", "monai"))
        self.listing()

    def read(self, split: Split) -> VolumeImages | None:
        if split not in self.listing():
            if split == "train":
                place = self.root if self.table is None else self.table.table
                raise DataError(f"no training volumes in {place}: {_LAYOUT}")
            return None
        cases = self.listing()[split]
        # those of a checkpoint win: evaluation must prepare volumes as training did
        state = {"patch": self.patch, "window": self.window, **self._restored}
        patch, window = checked_preparation(state["patch"], state["window"])
        return VolumeImages(
            cases,
            [self._facts_of(case) for case in cases],
            classes=self._classes(),
            patch=patch,
            patches=self.patches,
            window=window,
            transforms=self.augment.single,
            training=split == "train",
        )

    def listing(self) -> dict[Split, list[Case]]:
        if self._found is None:
            found = self._of_table() if self.table is not None else cases_in(self.root or Path())
            cases = [case for part in found.values() for case in part]
            log.info("reading  %s", number_of(len(cases), "volume"))  # takes seconds each
            if self._names is None and self.root is not None:
                self._names = names_in(self.root)
            faults = list(faults_of(found, classes=self._names, patch=self.patch))
            if faults:
                more = f" ({len(faults) - 1} more: revzoo check DIR)" if len(faults) > 1 else ""
                raise DataError(f"{faults[0]}{more}")
            self._found = found
        return self._found

    def _of_table(self) -> dict[Split, list[Case]]:
        assert self.table is not None
        table, found = self.table, {}
        for split, rows in table.rows_by_split().items():
            found[split] = [
                Case(
                    channels_of(Path(row[table.path_column])) or (Path(row[table.path_column]),),
                    table.root / row[table.label_columns[0]],
                    row[table.group_column] if table.group_column else "",
                )
                for row in rows
            ]
        return found

    def _classes(self) -> list[str]:
        if self._names is None:
            cases = [case for part in self.listing().values() for case in part]
            most = max(int(self._facts_of(case).labels.max(initial=1)) for case in cases)
            # an evaluated split may lack the last classes of training
            known = self._restored.get("classes", ())
            return list(known) if most < len(known) else [*map(str, range(most + 1))]
        return self._names

    def digest(self) -> str:
        """A hash of the files to train and to validate with, and of their groups."""
        digest = hashlib.sha256()
        for split in ("train", "val"):
            for case in self.listing().get(split, ()):
                files = [f for path in (*case.images, case.mask) for f in files_in(path)]
                sizes = [(file.name, file.stat().st_size) for file in files]
                digest.update(repr((split, case.group, sizes)).encode())
        return digest.hexdigest()

    def _classes_seen(self) -> list[int]:
        facts = map(self._facts_of, self.listing()["train"])
        return sorted({int(label) for known in facts for label in known.labels})

    def _facts_of(self, case: Case) -> Facts:
        if case not in self._facts:  # each is a file of the cache
            self._facts[case] = measure(case)
        return self._facts[case]

    @property
    def train_labels(self) -> Tensor:
        """Not known: the masks stay on the disk.

        Raises:
            DataError: always.
        """
        raise DataError("the masks of volumes are not counted: give optim.class_weights as a list")

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        assert self.trainer is not None, "Lightning calls this hook"
        if not self.trainer.training:  # of a whole volume, only windows go to the device
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def shown(self, images: Tensor) -> Tensor:
        # two deviations to both sides
        return (images if self.window is not None else images / 4 + 0.5).clamp(0, 1)

    def state_dict(self) -> dict[str, Any]:
        window = None if self.window is None else list(self.window)
        return {**super().state_dict(), "patch": list(self.patch), "window": window}


_LAYOUT = (
    f"expected DIR/train/images/NAME and DIR/train/labels/NAME ({', '.join(SUFFIXES)}, or folders "
    "of .dcm files), or nnU-Net's imagesTr and labelsTr"
)


def checked_preparation(patch: Any, window: Any) -> tuple[tuple[int, ...], Window]:
    """``patch`` and ``window`` of :class:`Volumes` as tuples.

    Raises:
        ValueError: a number is missing or out of range.
    """
    sides = counts_of(patch, repeat=0)
    if len(sides) != 3:
        raise ValueError(f"patch={patch}: expected three whole numbers >= 1, such as [64,64,64]")
    if window is None:
        return sides, None
    ends = tuple(window) if isinstance(window, Sequence) else ()
    if len(ends) != 2 or not all(map(is_number, ends)) or not -np.inf < ends[0] < ends[1] < np.inf:
        raise ValueError(f"window={window}: expected two numbers, the lower first, or null")
    return sides, (float(ends[0]), float(ends[1]))


def cases_in(root: Path) -> dict[Split, list[Case]]:
    """The cases of each split below a folder.

    Raises:
        DataError: there are none.
    """
    folders = {
        split: (root / f"images{end}", root / f"labels{end}")
        for end, split in NNUNET.items()
        # nnU-Net's test volumes may have no labels
        if (root / f"images{end}").is_dir() and (root / f"labels{end}").is_dir()
    }
    for split, folder in split_folders(root).items():
        if (folder / "images").is_dir():
            folders[split] = (folder / "images", folder / "labels")
    found = {
        split: [_with_mask(channels, labels) for channels in volumes_in(images)]
        for split, (images, labels) in folders.items()
    }
    if not any(found.values()):
        raise DataError(f"no volumes in {root.absolute()}: {_LAYOUT}; set data.root")
    return {split: cases for split, cases in found.items() if cases}


def check_volumes(root: Path) -> tuple[int, list[str]] | None:
    """The number of volumes of a set and their faults; None if the folder has no set of volumes."""
    try:
        found = cases_in(root)
    except DataError:
        return None
    return sum(map(len, found.values())), list(faults_of(found, classes=names_in(root)))


def read_prepared(paths: Sequence[Path], state: Mapping[str, Any]) -> tuple[Tensor, Volume]:
    """A volume, float32 (C, D, H, W), prepared as for training, and its first file.

    There is a file for each channel; the state is that of the training's data module.

    Raises:
        DataError: a file cannot be read, or has NaN.
        ValueError: the state is not valid.
    """
    volumes = [open_volume(path) for path in paths]
    channels = [volume.read() for volume in volumes]
    if wrong := [p for p, c in zip(paths, channels, strict=True) if not np.isfinite(c).all()]:
        raise DataError(f"{wrong[0]} {_NOT_FINITE}")
    if "patch" in state:
        _, window = checked_preparation(state["patch"], state.get("window"))
        scales = [(0.0, 1.0) if window else moments(volume) for volume in volumes]
        channels = [prepared(c, window, *s) for c, s in zip(channels, scales, strict=True)]
    normalise = Normalisation(**normalisation_for(state, state.get("pixel_max", BYTE_MAX)))
    return normalise(torch.from_numpy(np.stack(channels))[None])[0], volumes[0]


def _with_mask(channels: tuple[Path, ...], labels: Path) -> Case:
    name = case_name(channels)
    masks = [labels / f"{name}{suffix}" for suffix in SUFFIXES]
    mask = next((path for path in masks if path.exists()), labels / f"{name}.nii.gz")
    return Case(channels, mask)


def names_in(root: Path) -> list[str] | None:
    """The names in nnU-Net's ``dataset.json``, by label; None without this file.

    Raises:
        DataError: it cannot be read, or has regions of several labels.
    """
    file = root / "dataset.json"
    if not file.is_file():
        return None
    try:
        labels = {n: int(x) for n, x in json.loads(file.read_text())["labels"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file} has no labels as nnU-Net writes them, NAME: NUMBER ({error!r:.100}): set "
            "data.classes"
        ) from error
    return sorted((name for name in labels if name != "ignore"), key=lambda name: labels[name])


def faults_of(
    found: Mapping[Split, Sequence[Case]],
    *,
    classes: Sequence[str] | None = None,
    patch: Sequence[int] | None = None,
) -> Iterator[str]:
    """The fault of each case that has one; patches are for training volumes."""
    first = next(iter(found.values()))[0]
    count = None if classes is None else len(classes)
    for split, cases in found.items():
        sides = patch if split == "train" else None
        check = partial(fault_of, first=first, classes=count, patch=sides)
        with ThreadPoolExecutor(min(4, suggested_max_num_workers(1))) as pool:
            yield from filter(None, pool.map(check, cases))
