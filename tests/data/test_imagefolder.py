import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from small_images import image_folder
from small_task import trainer
from timm.data.transforms_factory import transforms_imagenet_eval

from revzoo.data import DataError, ImageFolder
from revzoo.data.file_images import FileImages, sizes_in
from revzoo.data.images import TensorImages

MakeFolder = Callable[..., Path]
_TWO = {"cat": 20, "dog": 20}


def _ready(root: Path, **options: Any) -> ImageFolder:
    data = ImageFolder(root, **{"batch_size": 4, "num_workers": 0, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def _colours(loader: Any) -> set[tuple[int, ...]]:
    """(split * 20, class * 20, number) of every image, read from its centre pixel."""
    return {tuple(image[:, 4, 4].tolist()) for images, _ in loader for image in images}


def test_small_sets_are_held_in_memory(make_folder: MakeFolder) -> None:
    data = _ready(make_folder({"train": _TWO, "test": _TWO}))
    assert isinstance(data.train_dataloader().dataset, TensorImages)
    assert (data.num_classes, data.in_chans, data.sizes) == (2, 3, (8, 8))
    assert data.classes == ["cat", "dog"]
    assert len(data.train_dataloader()) == 9
    for images, labels in data.val_dataloader():
        assert torch.equal(images[:, 1, 0, 0].long(), labels * 20)


def test_val_folder_is_used_where_there_is_one(make_folder: MakeFolder) -> None:
    data = _ready(make_folder({"train": _TWO, "val": {"cat": 3, "dog": 3}, "test": _TWO}))
    data.setup("test")
    assert {colour[0] for colour in _colours(data.train_dataloader())} == {0}
    assert {colour[0] for colour in _colours(data.val_dataloader())} == {20}
    assert {colour[0] for colour in _colours(data.test_dataloader())} == {40}
    assert len(_colours(data.train_dataloader())) == 40


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_val_split_is_taken_from_train_by_its_seed(
    make_folder: MakeFolder, cache_bytes: int
) -> None:
    options = {"cache_bytes": cache_bytes, "image_size": 8, "val_fraction": 0.2, "batch_size": 1}
    root = make_folder({"train": _TWO})
    data = _ready(root, **options)
    val, train = _colours(data.val_dataloader()), _colours(data.train_dataloader())
    assert len(val) == 8
    assert not val & train
    assert len(val | train) == 40
    assert _colours(_ready(root, **options).val_dataloader()) == val
    assert _colours(_ready(root, **options, split_seed=1).val_dataloader()) != val


def test_grey_images_become_rgb_unless_one_channel_is_asked_for(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO}, mode="L")
    assert next(iter(_ready(root).train_dataloader()))[0].shape == (4, 3, 8, 8)
    data = _ready(root, in_chans=1)
    assert next(iter(data.train_dataloader()))[0].shape == (4, 1, 8, 8)
    assert data.in_chans == 1


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
@pytest.mark.parametrize(("image_size", "sizes"), [(6, (6, 6)), ([6, 8], (6, 8)), (None, (9, 12))])
def test_oblong_images_become_squares_or_stay_oblong(
    make_folder: MakeFolder, image_size: Any, sizes: tuple[int, int], cache_bytes: int
) -> None:
    root = make_folder({"train": _TWO}, size=(12, 9))
    if image_size is None and not cache_bytes:
        return
    data = _ready(root, image_size=image_size, cache_bytes=cache_bytes)
    assert data.shape["sizes"] == data.sizes == sizes
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert next(iter(loader))[0].shape[1:] == (3, *sizes)
    assert data.transform(next(iter(loader))[0], training=True).shape[1:] == (3, *sizes)
    again = ImageFolder(root, num_workers=0)
    again.load_state_dict(data.state_dict())
    again.setup("validate")
    assert again.sizes == sizes


def test_large_sets_are_read_from_their_files(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO}, size=(24, 16))
    size = 40 * 3 * 8 * 8
    assert isinstance(
        _ready(root, image_size=8, cache_bytes=size).train_dataloader().dataset, TensorImages
    )
    data = _ready(root, image_size=8, cache_bytes=size - 1)
    assert isinstance(data.train_dataloader().dataset, FileImages)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 8, 8)
    assert torch.equal(images[:, 1, 0, 0].long(), labels * 20)
    shutil.copytree(root / "train", root / "test")  # all splits count
    data = _ready(root, image_size=8, cache_bytes=size)
    assert isinstance(data.train_dataloader().dataset, FileImages)


def test_one_image_of_another_size_needs_a_decision(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO})
    Image.new("RGB", (9, 9)).save(root / "train" / "dog" / "99.png")
    with pytest.raises(DataError, match=r"99\.png has height 9 .* set data.image_size"):
        _ready(root)
    assert _ready(root, image_size=8).sizes == (8, 8)


def test_training_files_are_augmented_also_beside_a_val_folder(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO, "val": _TWO})
    noise = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8).numpy()
    for split in ("train", "val"):
        Image.fromarray(noise).save(root / split / "cat" / "00.png")
    data = _ready(root, image_size=8, cache_bytes=0)
    train, val = data.train_dataloader().dataset, data.val_dataloader().dataset
    assert len({train[0][0].numpy().tobytes() for _ in range(5)}) > 1
    assert len({val[0][0].numpy().tobytes() for _ in range(5)}) == 1


def test_large_sets_need_an_image_size(make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match=r"more than data.cache_bytes=10 .* set data.image_size"):
        _ready(make_folder({"train": _TWO}), cache_bytes=10)


def test_the_processes_of_a_machine_share_its_cpus(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 8 processes on 16 CPUs started 8 workers: 64 in all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    root = make_folder({"train": _TWO, "val": _TWO})
    assert _ready(root, num_workers=None).train_dataloader().num_workers == 0  # in memory
    data = _ready(root, num_workers=None, image_size=8, cache_bytes=0)
    alone = [data.train_dataloader().num_workers, data.val_dataloader().num_workers]
    data.trainer = trainer(devices=4, strategy="ddp")
    together = [data.train_dataloader().num_workers, data.val_dataloader().num_workers]
    assert (alone, together) == ([8, 8], [3, 3])


def _damage(root: Path) -> list[str]:
    """A corrupt image, and one that vanishes."""
    bad = [root / "train" / "cat" / "03.png", root / "train" / "dog" / "07.png"]
    bad[0].write_bytes(b"no image")
    bad[1].unlink()
    return [str(path) for path in bad]


@pytest.mark.parametrize(("cache_bytes", "workers"), [(2**20, 0), (0, 0), (0, 2)])
def test_bad_images_are_skipped_up_to_a_number(
    cache_bytes: int, workers: int, make_folder: MakeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """One corrupt or vanished image ended the run, and the error named only the first."""
    root = make_folder({"train": _TWO, "val": _TWO})
    options = {"on_error": "skip", "image_size": 8, "cache_bytes": cache_bytes}
    options["num_workers"] = workers
    datas = [ImageFolder(root, **options, batch_size=10, max_errors=n) for n in (2, 1)]
    for data in datas:
        data.prepare_data()
    bad = _damage(root)
    data, strict = datas
    data.setup("fit")
    for _ in range(2):  # a file counts once, not once per epoch
        seen = [labels for _, labels in data.train_dataloader()]
        assert sum(map(len, seen)) in ((38,) if cache_bytes == 0 else (30,))  # drop_last
    assert data.skipped_files == bad
    # each is named once
    named = [sum(path in message for message in caplog.messages) for path in bad]
    assert named == [1, 1]
    message = r"more than data\.max_errors=1 images cannot be read: .*cat"
    with pytest.raises(DataError, match=message):
        _read_all(strict)


def _read_all(data: ImageFolder) -> None:
    data.setup("fit")
    for _ in data.train_dataloader():
        pass


def test_the_first_image_may_be_bad_where_some_are_skipped(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO})
    (root / "train" / "cat" / "00.png").write_bytes(b"no image")
    data = _ready(root, on_error="skip")
    assert data.sizes == (8, 8)
    assert data.train_count + len(data.val_dataloader().dataset) == 39  # type: ignore[arg-type]


@pytest.mark.parametrize("cache_bytes", [2**20, 0])
def test_skipping_all_images_of_a_class_is_an_error(
    cache_bytes: int, make_folder: MakeFolder
) -> None:
    """Training went on without the class, with an accuracy of 1.0."""
    root = make_folder({"train": _TWO})
    options = {"on_error": "skip", "image_size": 8, "cache_bytes": cache_bytes, "batch_size": 36}
    for path in (root / "train" / "dog").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of the \d+ images of class dog can be read"):
        _read_all(ImageFolder(root, **options, num_workers=0))


def test_a_training_resumes_with_the_same_images(make_folder: MakeFolder) -> None:
    """One image more, or others under the same names, went unnoticed."""
    root = make_folder({"train": _TWO})
    state = _ready(root).state_dict()
    resumed = _ready(root)
    resumed.load_state_dict(state)
    image = root / "train" / "cat" / "00.png"
    Image.effect_noise((8, 8), 99).save(image)
    with pytest.raises(DataError, match="as many as before, with other names, sizes or labels"):
        _ready(root).load_state_dict(state)
    image.unlink()
    with pytest.raises(DataError, match=r"36 to train, now 35.* Put the former images back"):
        _ready(root).load_state_dict(state)
    data = ImageFolder(root, batch_size=4)
    data.load_state_dict(state)
    data.setup("validate")  # evaluation takes any images
    with pytest.raises(DataError, match="36 to train, now 35"):
        data.setup("fit")
    older = {key: value for key, value in state.items() if key != "images"}
    _ready(root).load_state_dict(older)


def test_a_batch_without_any_good_image_is_an_error(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO, "val": _TWO})
    data = _ready(root, on_error="skip", image_size=8, cache_bytes=0, eval_batch_size=2)
    for name in ("00", "01"):
        (root / "val" / "cat" / f"{name}.png").unlink()
    with pytest.raises(DataError, match="none of the 2 images of a batch can be read"):
        list(data.val_dataloader())


def test_an_image_corrupt_in_a_worker_is_named(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO, "val": _TWO})
    data = _ready(root, image_size=8, cache_bytes=0, num_workers=1)
    (root / "val" / "dog" / "07.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"^cannot decode image .*val/dog/07\.png") as caught:
        list(data.val_dataloader())
    assert "set data.on_error=skip" in str(caught.value)
    assert "\n" not in str(caught.value), "a worker's traceback is not a message"


def test_test_split_is_optional_and_missed_by_name(make_folder: MakeFolder) -> None:
    data = _ready(root := make_folder({"train": _TWO}))
    assert not data.has("test")
    assert ImageFolder(root).has("train")
    data.setup("test")
    with pytest.raises(DataError, match=r"no folder .*/test: put test images there"):
        data.test_dataloader()


@pytest.mark.parametrize(
    ("split", "stage", "cache_bytes"), [("test", "test", 2**30), ("val", "validate", 0)]
)
def test_a_checkpoints_state_replaces_the_training_images(
    make_folder: MakeFolder, split: str, stage: str, cache_bytes: int
) -> None:
    root = make_folder({"train": _TWO, split: _TWO})
    state = _ready(root).state_dict()
    shutil.rmtree(root / "train")
    options: dict[str, Any] = {"image_size": 8, "cache_bytes": cache_bytes, "num_workers": 0}
    data = ImageFolder(root, **options)
    data.prepare_data()
    data.load_state_dict(state)
    for _ in range(2):
        data.setup(stage)
    assert (data.classes, data.in_chans, data.sizes) == (["cat", "dog"], 3, (8, 8))
    assert data.normalisation.state_dict() == state["normalisation"]
    loader = data.val_dataloader() if split == "val" else data.test_dataloader()
    assert len(_colours(loader)) == 40
    with pytest.raises(DataError, match=rf"no folder .*/train \(found: {split}\): expected ROOT"):
        data.setup("fit")
    with pytest.raises(DataError, match=r"no folder .*/train"):
        ImageFolder(data.root, **options).setup(stage)  # the normalisation is unknown


def _test_pixels(data: ImageFolder) -> torch.Tensor:
    data.setup("test")
    return torch.cat([images for images, _ in data.test_dataloader()])


@pytest.mark.parametrize("crop_pct", [1.0, 224 / 256])
def test_a_split_alone_is_cut_as_in_training(tmp_path: Path, crop_pct: float) -> None:
    """Training may read files and evaluation memory, or the reverse: the set's size may differ."""
    root, one_split = image_folder(tmp_path / "a", side=12), 40 * 3 * 8 * 8
    in_memory = crop_pct == 1
    whole = _ready(root, image_size=8, cache_bytes=(2 if in_memory else 1) * one_split)
    expected, state = _test_pixels(whole), whole.state_dict()
    assert state["crop_pct"] == crop_pct
    shutil.rmtree(root / "train")
    for cache_bytes in (0, one_split):
        data = ImageFolder(root, image_size=8, cache_bytes=cache_bytes, num_workers=0)
        data.load_state_dict(state)
        assert torch.equal(_test_pixels(data), expected)
        assert data.state_dict() == state


def test_a_crop_of_the_evaluation_is_timms(tmp_path: Path) -> None:
    """A3: --crop-pct 0.95, of images of 224 pixels."""
    root = image_folder(tmp_path / "a", side=12)
    noise = np.random.default_rng(0).integers(256, size=(301, 250, 3), dtype=np.uint8)
    for path in (root / "test").rglob("*.png"):
        Image.fromarray(noise).save(path)
    theirs = transforms_imagenet_eval(224, crop_pct=0.95, interpolation="bilinear", normalize=False)
    data = ImageFolder(root, image_size=224, crop_pct=0.95, num_workers=0)
    data.prepare_data()
    data.setup("fit")
    assert torch.equal(_test_pixels(data)[0], theirs(Image.fromarray(noise)))
    for given, expected in ((None, 0.95), (1.0, 1.0)):
        other = ImageFolder(root, image_size=224, crop_pct=given, num_workers=0)
        other.load_state_dict(data.state_dict())
        other.setup("test")
        assert other.state_dict()["crop_pct"] == expected
    with pytest.raises(DataError, match=r"are evaluated with data.crop_pct=0.95 and will be read"):
        ImageFolder(root, crop_pct=0.95).setup("fit")
    with pytest.raises(ValueError, match=r"crop_pct=0: expected a number in \(0, 1\]"):
        ImageFolder(root, crop_pct=0)


def test_images_are_read_again_where_a_checkpoint_asks_for_others(tmp_path: Path) -> None:
    """Lightning loads a checkpoint's state after ``setup``."""
    root = image_folder(tmp_path / "a", side=12)
    files = _ready(root, image_size=8, cache_bytes=0)
    data = ImageFolder(root, num_workers=0)
    assert _test_pixels(data).shape == (40, 3, 12, 12)
    data.load_state_dict(files.state_dict())
    (found, _), *_ = data.test_dataloader()
    assert torch.equal(found, _test_pixels(files))
    read = data.test_dataloader().dataset
    data.load_state_dict(files.state_dict())
    assert data.test_dataloader().dataset is read, "once, if nothing is new"


def test_the_size_comes_from_the_checkpoint_by_default(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "a", side=12)
    state = _ready(root, image_size=8).state_dict()
    for given, expected in ((None, 8), (10, 10)):
        data = ImageFolder(root, image_size=given, num_workers=0)
        data.load_state_dict(state)
        assert _test_pixels(data).shape == (40, 3, expected, expected)
        assert data.sizes == (expected, expected)


def test_a_checkpoint_with_other_classes_is_refused(make_folder: MakeFolder) -> None:
    state = _ready(root := make_folder({"train": _TWO})).state_dict()
    shutil.rmtree(root / "train")
    data = ImageFolder(make_folder({"test": {"ant": 2, "cat": 2}}))
    data.load_state_dict(state)
    with pytest.raises(DataError, match=r"only trained on: dog; only in the data: ant"):
        data.setup("test")


def test_a_refused_checkpoint_leaves_nothing(make_folder: MakeFolder) -> None:
    data = _ready(make_folder({"train": _TWO, "test": _TWO}))
    before = data.state_dict()
    with pytest.raises(DataError, match="only trained on: ant"):
        data.load_state_dict({**before, "classes": ["ant", "cat"], "image_size": 4})
    data.setup("test")
    assert data.state_dict() == before


def test_a_split_taken_from_the_training_images_needs_them(make_folder: MakeFolder) -> None:
    root = make_folder({"train": _TWO})
    whole = _ready(root)
    data = ImageFolder(root, batch_size=4, num_workers=0)
    data.load_state_dict(whole.state_dict())
    data.setup("validate")
    assert _colours(data.val_dataloader()) == _colours(whole.val_dataloader())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, r"image_size=0: expected a whole number >= 1, or \[height, width\]"),
        ({"image_size": [8, 8, 8]}, r"image_size=\[8, 8, 8\]: expected a whole number"),
        ({"in_chans": 0}, "in_chans=0: expected a whole number >= 1"),
        ({"on_error": "ignore"}, "on_error=ignore: expected one of raise, skip"),
        ({"max_errors": 0}, "max_errors=0: expected a whole number"),
        ({"cache_bytes": -1}, "cache_bytes=-1: expected a whole number >= 0"),
        ({"progressive": [[1, 32]]}, "without data.image_size"),
        ({"progressive": [[1, 40]], "image_size": 48}, "multiples of 32"),
        ({"progressive": [[3, 32], [1, 64]], "image_size": 48}, "rising order"),
        ({"progressive": [32, 64], "image_size": 48}, r"expected pairs \[epoch, side\]"),
        ({"progressive": [], "image_size": 48}, "expected pairs"),
    ],
)
def test_arguments_are_checked_before_data_is_touched(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ImageFolder("nowhere", **options)


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_images_are_augmented_once(make_folder: MakeFolder, cache_bytes: int) -> None:
    data = _ready(make_folder({"train": _TWO}), image_size=8, cache_bytes=cache_bytes)
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8)
    augmented = not torch.equal(data.transform(images, training=True), data.normalisation(images))
    assert augmented == (cache_bytes > 0), "files are augmented when read"


def test_a_part_of_an_evaluation_has_images_of_all_classes(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    """The first batches held only the first class, so their figures ignored the others."""
    data = _ready(make_folder({"train": _TWO, "test": _TWO}), eval_batch_size=8)
    data.setup("test")

    def labels(loader: Any) -> list[list[int]]:
        return [labels.tolist() for _, labels in loader]

    assert labels(data.test_dataloader())[0] == [0] * 8
    for limit, mixed in ((2, True), (0.5, True), (None, False)):
        data.trainer = trainer(tmp_path, limit_test_batches=limit)
        found = labels(data.test_dataloader())
        assert (set(found[0]) == {0, 1}) is mixed
        assert sorted(label for batch in found for label in batch) == [0] * 20 + [1] * 20
        assert labels(data.test_dataloader()) == found
        assert labels(data.predict_dataloader())[0] == [0] * 8


def _deep_folder(root: Path, channels: int = 4) -> Path:
    """Arrays of 16 bits: dark ones up to 20,000, light ones above 40,000."""
    rng = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 40_000)):
        (root / "train" / name).mkdir(parents=True)
        for n in range(20):
            values = rng.integers(low, low + 20_000, (channels, 8, 8), dtype=np.uint16)
            np.save(root / "train" / name / f"{n}.npy", values)
    return root


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
@pytest.mark.parametrize("augment", [{}, {"rotation": 90, "blur": 1.0}])
def test_images_of_16_bits_and_4_channels_keep_their_precision(
    tmp_path: Path, cache_bytes: int, augment: dict[str, Any]
) -> None:
    options = {"cache_bytes": cache_bytes, "image_size": 8, "in_chans": 4, "augment": augment}
    data = _ready(_deep_folder(tmp_path), **options)
    assert (data.pixel_max, data.in_chans) == (65535, 4)
    images, labels = next(iter(data.val_dataloader()))
    assert images.dtype == torch.uint16
    stored = [np.load(path) for path in sorted(tmp_path.rglob("*.npy"))]
    if cache_bytes:  # otherwise the centre is cropped
        first = np.mean([values[0] for values in stored])
        assert data.normalisation.mean[0].item() == pytest.approx(first, rel=1e-5)
        pixels = {image.numpy().tobytes() for image in images}
        assert pixels < {values.tobytes() for values in stored}
    images, labels = next(iter(data.train_dataloader()))
    ready = data.transform(images, training=True)
    assert ready.shape == (4, 4, 8, 8)
    assert ((ready.amax((1, 2, 3)) > 0.5) == labels.bool()).all()
    assert 0 <= data.shown(ready).min() <= data.shown(ready).max() <= 1
    state = data.state_dict()
    assert state["pixel_max"] == 65535


def test_colours_of_many_channels_cannot_change(tmp_path: Path) -> None:
    options = {"in_chans": 4, "augment": {"color": 0.5}}
    with pytest.raises(DataError, match="color take images of 1 or 3 channels, these have 4"):
        _ready(_deep_folder(tmp_path), **options)


def test_images_of_different_depths_are_refused(tmp_path: Path) -> None:
    root = _deep_folder(tmp_path)
    np.save(root / "train" / "light" / "1.npy", np.zeros((4, 8, 8), np.uint8))
    with pytest.raises(DataError, match=r"light/1\.npy has 8 bits per channel, others 16"):
        _ready(root, in_chans=4)


GROWING = {"image_size": 48, "progressive": [[1, 32], [3, 96]]}


@pytest.mark.parametrize("augment", [{}, {"crop_padding": 0}])
@pytest.mark.parametrize("workers", [0, 1])
def test_training_images_grow_with_the_epochs(
    make_folder: MakeFolder, workers: int, augment: dict[str, int]
) -> None:
    root = make_folder({"train": _TWO})
    data = _ready(root, **GROWING, num_workers=workers, augment=augment)
    loader = data.train_dataloader()
    sides = [{images.shape[-1] for images, _ in loader} for _ in range(5)]
    assert sides == [{32}, {32}, {64}, {96}, {96}]
    assert {images.shape[-1] for images, _ in data.val_dataloader()} == {48}


def test_growing_images_keep_the_aspect(make_folder: MakeFolder) -> None:
    data = _ready(make_folder({"train": _TWO}), **{**GROWING, "image_size": [48, 96]})
    loader = data.train_dataloader()
    sizes = [{tuple(images.shape[2:]) for images, _ in loader} for _ in range(4)]
    assert sizes == [{(32, 64)}, {(32, 64)}, {(64, 128)}, {(96, 192)}]
    assert data.train_sizes == (96, 192)


def test_sizes_between_two_points_are_ffcvs() -> None:
    """``get_resolution`` of rn50_88_epochs.yaml, with an epoch on each side of the step."""
    points = [(65, 160), (76, 192)]
    sides = [sizes_in(epoch, points, (224, 224))[0] for epoch in (0, 65, 70, 71, 76, 87)]
    assert sides == [160, 160, 160, 192, 192, 192]


class Sides(pl.LightningModule):
    """Records the epoch, the batch and the side of each training step; saves itself after 22."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []
        self.path, self.weight = path, torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, index, batch[0].shape[-1]))
        return self.weight * batch[0].mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 22:
            self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch: Any, index: int) -> None:
        """Lightning warns without one."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_resumed_run_has_the_sizes_of_an_uninterrupted_one(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    root, path = make_folder({"train": _TWO}), tmp_path / "middle.ckpt"

    def seen(start: Path | None = None) -> list[tuple[int, int, int]]:
        module = Sides(path)
        data = ImageFolder(root, batch_size=4, num_workers=0, **GROWING)
        trainer(tmp_path, max_epochs=5).fit(module, datamodule=data, ckpt_path=start)
        return module.seen

    whole = seen()
    assert whole[21:23] == [(2, 3, 64), (2, 4, 64)]
    assert seen(path) == whole[22:]
