"""Images and masks in files: folders and tables, in memory and read by workers."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_task import trainer

import revzoo
from revzoo.cli.main import main
from revzoo.data import DataError, Masks
from revzoo.data.file_images import FileImages
from revzoo.training import Segmenter, quiet

NAMES = ["background", "cell", "border"]
SIDE = 24


def _pair(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A mask of three classes in blocks of 8 pixels, and an image whose red is 80 a class."""
    mask = np.kron(rng.integers(0, 3, (3, 3), dtype=np.uint8), np.ones((8, 8), np.uint8))
    return np.dstack([mask * 80 + 40, mask * 0, mask * 0]), mask


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split in ("train", "Validation"):
        for part in ("images", "masks"):
            (tmp_path / split / part).mkdir(parents=True)
        for n in range(12):
            image, mask = _pair(rng)
            Image.fromarray(image).save(tmp_path / split / "images" / f"{n}.bmp")
            Image.fromarray(mask).save(tmp_path / split / "masks" / f"{n}_mask.png")
    return tmp_path


def _ready(root: Path | None, **options: Any) -> Masks:
    data = Masks(root, **{"classes": NAMES, "batch_size": 4, "num_workers": 0, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def _agree(images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The share of the pixels that count whose colour is that of their class."""
    near = (images[:, 0].float() - (masks.float() * 80 + 40)).abs() < 30
    return near[(masks >= 0) & (masks != 255)].float().mean()


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_a_smaller_mask_lies_upon_its_image(tmp_path: Path, cache_bytes: int) -> None:
    """torchvision's nearest pixel is the upper left one: half a pixel beside the image."""
    rows, columns = np.mgrid[:72, :72] - 36
    disc = (rows**2 + columns**2 < 24**2).astype(np.uint8)
    for part, pixels in (("images", disc * 255), ("masks", disc)):
        (tmp_path / "train" / part).mkdir(parents=True)
        for n in range(8):
            Image.fromarray(pixels).save(tmp_path / "train" / part / f"{n}.png")
    options = {"classes": NAMES[:2], "image_size": 8, "augment": {"flip": False}}
    data = _ready(tmp_path, cache_bytes=cache_bytes, val_fraction=0.25, **options)
    images, masks = data._images("train").__getitems__(range(6))
    place = torch.arange(8.0)

    def centres(values: torch.Tensor) -> torch.Tensor:
        inner = values.float().where(values != 255, 0) if values.dtype == torch.uint8 else values
        return torch.stack([(inner.sum(1) * place).sum(1), (inner.sum(2) * place).sum(1)]) / (
            inner.sum((1, 2))
        )

    shift = (centres(masks) - centres(images[:, 0] / 255)).mean(1)
    assert shift.abs().max() < 0.2


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_masks_belong_to_their_images(root: Path, cache_bytes: int) -> None:
    data = _ready(root, cache_bytes=cache_bytes, image_size=24)
    assert (data.train_count, data.val_count, data.num_classes) == (12, 12, 3)
    assert data.train_dataloader().dataset.in_memory == bool(cache_bytes)
    images, masks = next(iter(data.val_dataloader()))
    assert (images.shape, masks.shape) == ((12, 3, 24, 24), (12, 24, 24))
    assert masks.dtype == torch.uint8
    assert _agree(images, masks) > (0.99 if cache_bytes else 0.85)  # the latter are resized
    assert data.train_labels.flatten().bincount().min() > 500


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
@pytest.mark.parametrize("change", [{"rotation": 45}, {"flip": True}, {"crop_padding": 4}])
def test_masks_follow_their_images(root: Path, cache_bytes: int, change: dict[str, Any]) -> None:
    """Crops of files, padded crops, flips and rotations, as a training sees them."""
    plain = {"crop_padding": 0, "flip": False}
    options = {"augment": {**plain, **change}, "cache_bytes": cache_bytes, "image_size": [16, 24]}
    data, seen = _ready(root, **options), []

    class Sees(Segmenter):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(batch)
            return super().training_step(batch, batch_idx)

    with quiet():
        module = Sees({"name": "iunet2d", "num_classes": 3, "channels": [8], "units": [1]})
        trainer(limit_val_batches=0).fit(module, data)
    images, masks = (torch.cat(parts) for parts in zip(*seen, strict=True))
    pixels = data.shown(images) * 255
    # the borders of blocks mix colours if files are resized
    assert _agree(pixels, masks) > (0.99 if cache_bytes else 0.85)
    assert _agree(pixels, masks.roll(1, 0)) < 0.6
    padded = change.get("rotation") or (change.get("crop_padding") and cache_bytes)
    assert bool((masks == -1).any()) == bool(padded)


def test_colours_change_in_the_image_alone(root: Path) -> None:
    plain = {"crop_padding": 0, "flip": False}
    data = _ready(root, augment={**plain, "color": 0.9}, cache_bytes=0, image_size=24)
    evaluated = _ready(root, augment=plain, cache_bytes=0, image_size=24)
    torch.manual_seed(0)
    (image, mask), (old, same) = (d._images("train")[0] for d in (data, evaluated))
    assert torch.equal(mask, same)
    assert not torch.equal(image, old)


def test_values_of_pixels_are_classes_by_a_mapping(root: Path) -> None:
    for path in root.rglob("*_mask.png"):
        Image.fromarray(np.asarray(Image.open(path)) * 127).save(path)  # 0, 127, 254
    data = _ready(root, classes={254: "cell", 0: "background", 127: "cell"})
    assert data.classes == ["cell", "background"]
    masks = data.train_labels
    assert masks.unique().tolist() == [0, 1]
    stored = np.asarray(Image.open(root / "train" / "masks" / "0_mask.png"))
    assert torch.equal(masks[0], torch.from_numpy(stored == 0).byte())


@pytest.mark.parametrize("kind", ["palette", "gif", "tif16", "npy", "bits"])
def test_masks_of_each_kind_are_read(root: Path, kind: str) -> None:
    for path in root.rglob("*_mask.png"):
        mask = np.asarray(Image.open(path)).clip(max=1 if kind == "bits" else 2)
        image = Image.fromarray(mask)
        if kind == "palette":
            image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
            image.save(path)
            continue
        path.unlink()
        if kind == "npy":
            np.save(path.with_suffix(".npy"), mask)
        elif kind == "tif16":
            Image.fromarray(mask.astype(np.uint16)).save(path.with_suffix(".tif"))
        elif kind == "gif":
            image.save(path.with_suffix(".gif"), optimize=False)
        else:
            Image.fromarray(mask.astype(bool)).save(path)
    images, masks = next(iter(_ready(root).val_dataloader()))
    if kind == "bits":
        images = images.clamp(max=120)
    assert _agree(images, masks) == 1


def test_masks_of_0_and_255_are_not_all_background(root: Path) -> None:
    """A list of two names left every 255 out, and a network of background had an accuracy of 1."""
    for path in root.rglob("*_mask.png"):
        mask = np.array(Image.open(path))
        Image.fromarray(np.where(mask == 0, 0, 255).astype(np.uint8)).save(path)
    for cache_bytes in (2**30, 0):  # in memory, and read by workers
        options = {"image_size": SIDE, "cache_bytes": cache_bytes}
        with pytest.raises(DataError, match=r"only \['background'\] of the classes; .* 255: cell"):
            _ready(root, classes=["background", "cell"], **options)
    assert _ready(root, classes={0: "background", 255: "cell"}).num_classes == 2


def test_a_pixel_of_255_does_not_count_unless_it_has_a_class(root: Path) -> None:
    path = root / "train" / "masks" / "0_mask.png"
    mask = np.asarray(Image.open(path)).copy()
    mask[0] = 255
    Image.fromarray(mask).save(path)
    assert (_ready(root).train_labels[0, 0] == 255).all()
    classes = {**dict(enumerate(NAMES)), 255: "sky"}
    assert (_ready(root, classes=classes).train_labels[0, 0] == 3).all()


def _table(root: Path, *rows: tuple[Any, ...]) -> Path:
    with (root / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "mask", "patient"), *rows])
    return root / "pairs.csv"


def _rows(root: Path) -> list[tuple[str, str, int]]:
    return [(f"train/images/{n}.bmp", f"train/masks/{n}_mask.png", n // 3) for n in range(12)]


def test_pairs_may_come_from_a_table(root: Path) -> None:
    data = _ready(None, table=_table(root, *_rows(root)), group_column="patient", val_fraction=0.25)
    assert (data.train_count, data.val_count) == (9, 3)
    assert _agree(*next(iter(data.val_dataloader()))) == 1
    assert "masks from 'mask'" in data.notes[0]
    assert data.identity["digest"]
    table = _table(root, *_rows(root), ("train/images/1.bmp", "elsewhere.png", 9))
    with pytest.raises(DataError, match=r"lists .*1\.bmp 2 times"):
        _ready(None, table=table)
    table = _table(root, *_rows(root)[1:], ("train/images/0.bmp", "elsewhere.png", 9))
    with pytest.raises(DataError, match=r"pairs\.csv: 1 of .* missing: .*elsewhere\.png"):
        _ready(None, table=table)
    with pytest.raises(DataError, match=r"no column 'label'.* Set data\.mask_column"):
        _ready(None, table=table, mask_column="label")
    (root / "link.bmp").symlink_to(root / "train/images/0.bmp")
    table = _table(root, *_rows(root), ("link.bmp", "train/masks/0_mask.png", 99))
    with pytest.raises(DataError, match="are one file"):
        _ready(None, table=table)


def test_a_damaged_set_is_refused_with_the_name_of_the_file(root: Path) -> None:
    mask, lost = root / "train" / "masks" / "3_mask.png", root / "train" / "masks" / "4_mask.png"
    whole, other = mask.read_bytes(), lost.read_bytes()

    def refused(message: str, **options: Any) -> None:
        for cache_bytes in (2**30, 0):
            with pytest.raises(DataError, match=message):
                _ready(root, **{"cache_bytes": cache_bytes, "image_size": 24, **options})

    refused("masks/0_mask.png have the values 0, 1, 2.* 'data.classes=", classes=None)
    Image.new("RGB", (24, 24)).save(mask)
    refused(r"3_mask\.png is a mask in colour \(Pillow mode RGB\): expected class numbers, in")
    Image.new("L", (20, 24)).save(mask)
    refused(r"3_mask\.png has 20x24 pixels, its image 24x24 \(.*images/3\.bmp\): give both")
    Image.new("L", (24, 24), 7).save(mask)
    refused(r"3_mask\.png has the pixel value 7, of no class: name it in data\.classes")
    mask.write_bytes(whole[:20])
    refused(r"cannot decode image .*3_mask\.png")
    mask.write_bytes(whole)
    lost.unlink()
    refused(r"1 image of .*train without a mask: .*4\.bmp; expected a file of the same name")
    lost.write_bytes(other)
    (root / "train" / "masks" / "4.gif").write_bytes(b"")
    refused(r"4\.gif and .*4_mask\.png have one name|4_mask\.png and .*4\.gif have one name")


def test_an_evaluation_needs_one_split_alone(root: Path) -> None:
    """The set was refused without train/."""
    state = _ready(root).state_dict()
    shutil.rmtree(root / "train")
    data = Masks(root, classes=NAMES, num_workers=0)
    data.load_state_dict(state)
    data.setup("validate")
    assert len(data.val_dataloader().dataset) == 12  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"no images and masks in .*: expected ROOT/train/images"):
        data.setup("fit")


def test_check_compares_masks_with_their_images(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", str(root), "--workers", "1"])
    assert "all 48 images can be read" in capsys.readouterr().out
    Image.new("L", (20, 24)).save(root / "train" / "masks" / "3_mask.png")
    with pytest.raises(SystemExit, match="1 of 48 images cannot be read"):
        main(["check", str(root), "--workers", "1"])
    assert "a mask of 20x24 pixels, its image 24x24" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": None}, r"give data\.root=DIR \(expected ROOT/train/images"),
        ({"classes": "cell"}, "expected names by pixel value, a list or a mapping"),
        ({"classes": ["cell"]}, "expected 2 to 254 classes"),
        ({"classes": {-1: "a", 0: "b"}}, "has the pixel value -1: expected 0 to 65535"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Masks(**{"root": "nowhere", **options})


def test_a_run_trains_evaluates_and_predicts(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    data = ["data=masks", f"data.root={root}", "data.classes={0: background, 1: cell, 2: border}"]
    model = ["model=iunet2d", "model.channels=[8,16]", "model.units=[1,1]"]
    limits = ["trainer.max_epochs=1", "test=false", "data.batch_size=4", "trainer.accelerator=cpu"]
    monitor = ["callbacks.best_checkpoint.monitor=val/dice", f"hydra.run.dir={run}"]
    main(["train", *data, *model, *limits, *monitor])
    capsys.readouterr()
    main(["eval", f"ckpt={run}", "split=val", "trainer=cpu"])
    assert "val/dice" in capsys.readouterr().out
    main(["predict", str(run), str(root / "train" / "images"), "--masks", str(tmp_path / "out")])
    assert "12 masks" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--csv is for whole images: leave it out with --masks"):
        main(["predict", str(run), str(root), "--masks", str(tmp_path / "more"), "--csv"])
    assert "IMAGES --masks DIR\n" in (run / "train.log").read_text()
    with pytest.raises(ValueError, match="a class for each pixel: use revzoo predict --masks"):
        revzoo.predict(torch.zeros(3, 32, 32), run)


def test_files_are_read_by_workers(root: Path) -> None:
    data = _ready(root, cache_bytes=0, image_size=16, num_workers=2)
    assert isinstance(data._images("train"), FileImages)
    loader = data.train_dataloader()
    batches = list(loader)
    loader.sampler.epoch = 0
    for (images, masks), (again, same) in zip(batches, loader, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(masks, same)
