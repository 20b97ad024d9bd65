"""Volumes in files: formats, patches, faults, nnU-Net's layout, tables, evaluation by windows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import pytorch_lightning as pl
import torch
from small_task import trainer

from revzoo.data import Blobs3d, DataError, Volumes
from revzoo.data.volume_files import open_volume
from revzoo.data.volumes import Case, check_volumes, checked_preparation, read_prepared
from revzoo.training import Segmenter, quiet

SIZES = (12, 10, 9)
MODEL = {"name": "revunet3d", "channels": [4, 8], "units": [1, 1], "groups": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(path: Path, array: np.ndarray, affine: Any = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".npy"):
        np.save(path, array)
    else:
        affine = np.diag([1, 1, 2.5, 1]) if affine is None else affine
        nibabel.save(nibabel.Nifti1Image(array, affine), path)
    return path


def volume(seed: int, sizes: Any = SIZES) -> tuple[np.ndarray, np.ndarray]:
    """Each voxel has another value; the foreground is one voxel of class 1 and one of class 2."""
    random = np.random.default_rng(seed)
    image = random.permutation(np.prod(sizes)).reshape(sizes).astype(np.float32)
    mask = np.zeros(sizes, np.uint8)
    mask[2, 3, 4], mask[-3, -2, 1] = 1, 2
    return image, mask


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for i in range(4):
        for folder, array in zip(("images", "labels"), volume(i), strict=True):
            save(tmp_path / "set" / "train" / folder / f"{i}.nii.gz", array)
    return tmp_path / "set"


def module(root: Path, **options: Any) -> Volumes:
    return Volumes(root, **{"patch": [4, 4, 4], "val_fraction": 0.25, **options})


@pytest.mark.parametrize("suffix", [".npy", ".nii", ".nii.gz"])
def test_every_format_is_read_by_parts(suffix: str, tmp_path: Path, cache: Path) -> None:
    image, _ = volume(0)
    found = open_volume(save(tmp_path / f"a{suffix}", image))
    assert found.sizes == SIZES
    assert not isinstance(found.array, np.ndarray) or isinstance(found.array, np.memmap)
    part = (slice(2, 5), slice(1, 4), slice(3, 9))
    assert np.array_equal(found.read(part), image[part])
    assert len([*cache.glob("volumes/*.nii")]) == (suffix == ".nii.gz")


def test_a_changed_file_is_unpacked_again(tmp_path: Path) -> None:
    for seed, sizes in enumerate([SIZES, (5, 6, 7)]):
        image, _ = volume(seed, sizes)
        path = save(tmp_path / "a.nii.gz", image)
        assert np.array_equal(open_volume(path).read(), image)


def series(folder: Path, image: np.ndarray, *, lost: int | None = None) -> Path:
    """Slices of an image (x, y, z), in files whose names have another order."""
    folder.mkdir(parents=True)
    for z in range(image.shape[2]):
        if z == lost:
            continue
        part = pydicom.Dataset()
        part.file_meta = pydicom.dataset.FileMetaDataset()
        part.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        part.SOPClassUID = pydicom.uid.CTImageStorage
        part.SOPInstanceUID = pydicom.uid.generate_uid()
        part.SeriesInstanceUID = "1.2.3"
        part.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        part.ImagePositionPatient = [-10, -20, 3 * z]
        part.PixelSpacing = [0.5, 0.75]  # of rows, of columns
        part.Columns, part.Rows = image.shape[:2]
        part.BitsAllocated = part.BitsStored = 16
        part.HighBit, part.PixelRepresentation, part.SamplesPerPixel = 15, 0, 1
        part.PhotometricInterpretation = "MONOCHROME2"
        part.RescaleSlope, part.RescaleIntercept = 1, -1024
        part.PixelData = np.ascontiguousarray((image[..., z] + 1024).T.astype(np.uint16)).tobytes()
        part.save_as(folder / f"{9 - z}.dcm", enforce_file_format=True)
    return folder


def test_a_dicom_series_has_its_order_units_and_place(tmp_path: Path) -> None:
    image, _ = volume(0)
    found = open_volume(series(tmp_path / "scan", image))
    assert np.array_equal(found.read(), image)
    # DICOM's left and back are NIfTI's minus
    expected = [[-0.75, 0, 0, 10], [0, -0.5, 0, 20], [0, 0, 3, 0], [0, 0, 0, 1]]
    assert found.affine is not None
    assert np.allclose(found.affine, expected)
    with pytest.raises(DataError, match="not evenly spaced: one may be missing"):
        open_volume(series(tmp_path / "lost", image, lost=4))


def test_half_of_the_patches_are_centred_on_foreground(root: Path) -> None:
    data = module(root, patches=200, batch_size=50)
    data.setup("fit")
    assert (data.train_count, data.val_count, data.num_classes) == (600, 1, 3)
    torch.manual_seed(0)
    masks = torch.cat([masks for _, masks in data.train_dataloader()])
    assert masks.shape == (600, 4, 4, 4)
    # the voxel of class 2 is at the border, where the patch is moved inside
    centred = (masks[:, 2, 2, 2] == 1).float().mean(), (masks[:, 2, 2, 1] == 2).float().mean()
    assert all(0.2 < float(share) < 0.32 for share in centred)


def test_patches_depend_on_the_epoch_alone(root: Path) -> None:
    epochs = []
    for workers in (0, 1):
        data = module(root, num_workers=workers)
        data.setup("fit")
        torch.manual_seed(0)
        loader = data.train_dataloader()
        epochs += [torch.cat([images for images, _ in loader]) for _ in range(2)]
    assert torch.equal(epochs[0], epochs[2])
    assert torch.equal(epochs[1], epochs[3])
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("window", [None, [100, 600]])
def test_intensities_are_z_scores_or_a_window(root: Path, window: Any) -> None:
    data = module(root, window=window)
    data.setup("fit")
    image = data.read("train").subset(torch.tensor([1]), training=False)[0][0][0].numpy()
    raw, _ = volume(1)
    rest = raw[raw != 0]
    expected = (raw - rest.mean()) / rest.std() if window is None else (raw - 100) / 500
    assert image.dtype == np.float32
    assert np.allclose(image, expected if window is None else expected.clip(0, 1), atol=1e-5)
    again, like = read_prepared([root / "train/images/1.nii.gz"], data.state_dict())
    assert np.allclose(again[0], image, atol=1e-5)
    assert like.affine is not None


def test_the_second_run_reads_no_volume(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(root).prepare_data()
    monkeypatch.setattr("revzoo.data.volumes.moments", None)
    module(root).prepare_data()
    save(root / "train" / "images" / "0.nii.gz", volume(7)[0])
    with pytest.raises(TypeError):
        module(root).prepare_data()


def _nan(image: np.ndarray) -> np.ndarray:
    image[3, 3, 3] = np.nan
    return image


FAULTS: dict[str, tuple[str, Any, Any, str]] = {
    # of the second volume: image or label, array, affine
    "missing": ("labels", None, None, "images/1.nii.gz has no label: expected .*labels/1.nii.gz"),
    "shape": ("labels", volume(1, (12, 10, 8))[1], None, "12x10x8 voxels, .* has 12x10x9: resamp"),
    "class": ("labels", volume(1)[1] * 4, None, "has the labels 4, 8: expected whole numbers"),
    "nan label": ("labels", _nan(volume(1)[0] * 0), None, "has the labels nan: expected whole"),
    "half": ("labels", volume(1)[0] / 2, None, "has the labels 0.5"),
    "spacing": ("images", volume(1)[0], np.diag([1, 1, 3, 1]), "has the spacing 1x1x3 mm, not 1x"),
    "turned": ("images", volume(1)[0], np.diag([-1, 1, 2.5, 1]), "orientation LAS, not RAS"),
    "nan": ("images", _nan(volume(1)[0]), None, "has NaN or infinite voxels: replace them"),
    "small": ("both", volume(1, (3, 10, 9)), None, "3x10x9 voxels, less than the patch: pad it, o"),
    "axes": ("images", np.zeros((4, 4, 4, 2), np.float32), None, "expected three axes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_before_training(name: str, root: Path) -> None:
    part, array, affine, message = FAULTS[name]
    arrays = array if part == "both" else (array, array)
    for folder, new in zip(("images", "labels"), arrays, strict=True):
        if part not in (folder, "both"):
            continue
        path = root / "train" / folder / "1.nii.gz"
        if new is None:
            path.unlink()
        else:
            save(path, new, affine)
    with pytest.raises(DataError, match=message) as error:
        module(root, classes=["background", "one", "two"]).prepare_data()
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_named(root: Path) -> None:
    path = root / "train" / "images" / "1.nii.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"1.nii.gz cannot be read .*: replace or remove it"):
        module(root).prepare_data()
    found = check_volumes(root)
    assert found is not None
    assert (found[0], len(found[1])) == (4, 1)


def test_a_folder_without_volumes(tmp_path: Path) -> None:
    assert check_volumes(tmp_path) is None
    with pytest.raises(DataError, match=r"no volumes in .*: expected DIR/train/images/NAME"):
        module(tmp_path).prepare_data()


def test_the_layout_of_nnunet(tmp_path: Path) -> None:
    for i in range(3):
        image, mask = volume(i)
        for channel in range(2):
            save(tmp_path / "imagesTr" / f"case{i}_000{channel}.nii.gz", image + channel)
        save(tmp_path / "labelsTr" / f"case{i}.nii.gz", mask)
    labels = {"background": 0, "edge": 1, "core": 2, "ignore": 255}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels}))
    data = module(tmp_path, val_fraction=0.4)
    assert data.shape == {"num_classes": 3, "in_chans": 2, "sizes": (4, 4, 4)}
    data.setup("fit")
    assert data.classes == ["background", "edge", "core"]
    assert next(iter(data.train_dataloader()))[0].shape == (2, 2, 4, 4, 4)


def test_an_evaluated_split_may_lack_a_class(root: Path, tmp_path: Path) -> None:
    trained = module(root)
    trained.setup("fit")
    image, mask = volume(5)
    mask[mask == 2] = 0
    for folder, array in (("images", image), ("labels", mask)):
        save(tmp_path / "other" / "test" / folder / "a.nii.gz", array)
    data = module(tmp_path / "other")
    data.prepare_data()
    data.load_state_dict(trained.state_dict())
    data.setup("test")
    assert data.classes == ["0", "1", "2"]


def test_labels_of_nnunet_are_numbers(root: Path) -> None:
    (root / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "whole": [1, 2]}}))
    with pytest.raises(DataError, match=r"dataset.json has no labels as nnU-Net writes them"):
        module(root).prepare_data()


def test_a_table_with_patients(root: Path) -> None:
    table = root / "list.csv"
    with table.open("w", newline="") as file:
        rows = [(f"train/images/{i}.nii.gz", f"train/labels/{i}.nii.gz", i // 2) for i in range(4)]
        csv.writer(file).writerows([("path", "mask", "patient"), *rows])
    for seed in range(4):  # one alone may keep patients together by chance
        options: Any = {"patch": [4, 4, 4], "val_fraction": 0.5, "split_seed": seed}
        data = Volumes(table=table, group_column="patient", **options)
        data.setup("fit")
        assert (data.train_count, data.val_count) == (2, 2)
        held = {int(i) // 2 for i in data._images("val")._rows}  # type: ignore[attr-defined]
        assert len(held) == 1


def test_a_cache_that_cannot_be_written_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NotADirectoryError, match="file/cache/volumes"):
        open_volume(root / "train" / "images" / "0.nii.gz")


def test_the_digest_has_the_slices_and_the_groups(tmp_path: Path) -> None:
    data = Volumes(tmp_path, patch=[4, 4, 4])

    def digest(group: str, slices: int) -> str:
        for number in range(slices):
            (tmp_path / f"{number}.dcm").write_bytes(b"1")
        data._found = {"train": [Case((tmp_path,), tmp_path / "0.dcm", group)]}
        return data.digest()

    assert len({digest("a", 2), digest("b", 2), digest("b", 3)}) == 3
    assert digest("b", 3) == digest("b", 3)


@pytest.mark.parametrize(("patch", "window"), [([4, 4], None), ([4] * 3, [3, 1]), ([4] * 3, [1])])
def test_the_preparation_is_checked(patch: Any, window: Any) -> None:
    with pytest.raises(ValueError, match=r"patch=|window="):
        checked_preparation(patch, window)


def fit(model: Segmenter, data: Any, **options: Any) -> pl.Trainer:
    with quiet():
        runner = trainer(**options)
        runner.fit(model, data)
    return runner


def test_whole_volumes_are_evaluated_by_windows(root: Path) -> None:
    """With a network that sees one voxel, windows change nothing."""
    seen: list[torch.Size] = []

    class Voxelwise(torch.nn.Conv3d):
        num_classes = 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape)
            return super().forward(x)

    network = Voxelwise(1, 3, 1)
    model, data = Segmenter(network), module(root)
    runner = fit(model, data)
    assert {*seen} == {torch.Size([2, 1, 4, 4, 4]), torch.Size([1, 1, 4, 4, 4])}
    (volumes, masks), *_ = data.val_dataloader()
    assert volumes.shape == (1, 1, *SIZES)
    logits = network(volumes)
    assert torch.allclose(model.eval()(volumes), logits, atol=1e-5)
    figure = float(runner.callback_metrics["val/acc"])
    assert figure == pytest.approx(float((logits.argmax(1) == masks).float().mean()), abs=1e-6)


def test_a_volume_of_a_patch_is_a_window_if_it_is_not_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Segmenter({**MODEL, "num_classes": 3, "in_chans": 1}).eval()
    model.window, volumes = (4, 4, 4), torch.zeros(1, 1, 4, 4, 4)
    assert model(volumes).shape == (1, 3, 4, 4, 4)
    monkeypatch.setattr("revzoo.training.tasks.segmentation.by_windows", lambda *_, device: device)
    model._device = torch.device("cuda:0")
    assert model(volumes) == torch.device("cuda:0")


def test_networks_of_volumes_keep_the_default_layout() -> None:
    """precision=bf16 asks for channels_last, which torch refuses for five axes."""
    model = Segmenter({**MODEL, "num_classes": 3, "in_chans": 1}, channels_last=True)
    assert model(torch.zeros(1, 1, 4, 4, 4)).shape == (1, 3, 4, 4, 4)


class Coded(Blobs3d):
    """The value of each voxel is its class; the first one marks a corner."""

    counts = {"train": 40, "test": 1}  # noqa: RUF012

    def read(self, split: Any) -> Any:
        found = super().read(split)
        if found is not None:
            found.labels[:, 0, 0, 0] = 255
            found._images = found.labels[:, None].clone()
        return found


@pytest.mark.parametrize("on_device", [False, True])
def test_masks_follow_the_flips_of_volumes(on_device: bool) -> None:
    corners = set()

    class Checks(Segmenter):
        def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if self.training:
                values = (self.images * data.normalisation.std + data.normalisation.mean).round()
                values[values == 255] = -1
                assert torch.equal(values[:, 0].long(), labels)
                corners.update(map(tuple, (labels == -1).nonzero()[:, 1:].tolist()))
            return super().loss(logits, labels)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.images = images
            return super().forward(images)

    data = Coded(on_device=on_device)
    fit(Checks({**MODEL, "num_classes": 3, "in_chans": 1}), data, max_steps=8, limit_val_batches=0)
    assert len(corners) == 8


def test_generated_volumes() -> None:
    volumes, masks = Blobs3d().read("test")[:]  # type: ignore[index]
    assert (volumes.shape, masks.shape) == ((50, 1, 32, 32, 32), (50, 32, 32, 32))
    assert masks.unique().tolist() == [0, 1, 2]
    inside = [
        v[0][m > 0].float().mean() - v[0][m == 0].float().mean()
        for v, m in zip(volumes, masks, strict=True)
    ]
    assert torch.stack(inside).min() > 20


@pytest.mark.parametrize("window", [None, [0, 1]])
def test_a_volume_with_nan_is_named_when_it_is_predicted(tmp_path: Path, window: Any) -> None:
    """With a window, its prediction blamed the weights."""
    np.save(tmp_path / "a.npy", np.full(SIZES, np.nan, np.float32))
    with pytest.raises(DataError, match=r"a\.npy has NaN or infinite voxels: replace them"):
        read_prepared([tmp_path / "a.npy"], {"patch": [4, 4, 4], "window": window})
