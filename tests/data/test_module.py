"""The rules for every data module, on the digits and on small made-up sets."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from several_processes import free_ports
from small_task import Recorder, trainer
from torch import Tensor
from two_processes import start

from revzoo.data import DataError, Digits, ImageData
from revzoo.data.images import TensorImages
from revzoo.data.module import Split

_trainer = partial(trainer, max_epochs=1)


def _stack(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([images for images, _ in batches])


def _shifted(images: Tensor, data: ImageData) -> int:
    """Number of images that differ from every stored training image."""
    known = {image.numpy().tobytes() for image in data.normalisation(data.read("train").sample())}
    return sum(image.numpy().tobytes() not in known for image in images)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Digits, Recorder]:
    data, model = Digits(), Recorder()
    runner = _trainer(tmp_path)
    runner.fit(model, data)
    runner.validate(model, data, verbose=False)
    runner.test(model, data, verbose=False)
    runner.predict(model, data)
    return data, model


def test_only_training_batches_are_augmented(run: tuple[Digits, Recorder]) -> None:
    data, model = run
    train, val = _stack(model.batches["train"]), _stack(model.batches["val"])
    assert _shifted(train, data) > 0.5 * len(train)  # 8 of 9 offsets shift the image
    assert _shifted(val, data) == 0
    expected = data.normalisation(data.read("test").sample())
    assert torch.equal(_stack(model.batches["test"]), expected)
    assert torch.equal(_stack(model.batches["predict"]), expected)


def test_batches_are_normalised_float32_and_int64(run: tuple[Digits, Recorder]) -> None:
    for batches in run[1].batches.values():
        for images, labels in batches:
            assert images.dtype == torch.float32
            assert labels.dtype == torch.int64
            assert images.shape[1:] == (1, 8, 8)
    assert len(run[1].batches["train"]) == 1293 // 64, "an incomplete last batch is dropped"
    val = _stack(run[1].batches["val"])
    assert val.mean().abs() < 0.1
    assert (val.std() - 1).abs() < 0.1


def test_batches_have_the_precision_of_the_run(tmp_path: Path) -> None:
    model = Recorder()
    _trainer(tmp_path, precision="64-true", limit_train_batches=1).fit(model, Digits())
    assert model.batches["train"][0][0].dtype == torch.float64
    assert model.batches["train"][0][1].dtype == torch.int64


def _held_back(data: ImageData) -> list[bytes]:
    data.setup("fit")
    return [batch.numpy().tobytes() for batch, _ in data.val_dataloader()]


def test_validation_split_depends_on_split_seed_alone() -> None:
    pl.seed_everything(1, verbose=False)
    first = _held_back(Digits())
    pl.seed_everything(2, verbose=False)
    assert _held_back(Digits()) == first
    assert _held_back(Digits(split_seed=1)) != first


def test_setup_reads_once_and_only_what_the_stage_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Split] = []
    read = Digits.read

    def spy(self: Digits, split: Split) -> TensorImages | None:
        asked.append(split)
        return read(self, split)

    monkeypatch.setattr(Digits, "read", spy)
    data = Digits()
    data.setup("fit")
    loader = data.val_dataloader()
    data.setup("fit")
    data.setup("validate")
    assert asked == ["train", "val"]
    assert data.val_dataloader().dataset is loader.dataset
    with pytest.raises(DataError, match=r"call setup\('test'\) first"):
        data.test_dataloader()
    data.setup("test")
    data.setup("predict")
    assert asked == ["train", "val", "test"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected a whole number >= 1"),
        ({"batch_size": 2.5}, "batch_size=2.5: expected a whole number"),
        ({"eval_batch_size": -1}, "eval_batch_size=-1"),
        ({"num_workers": -1}, "num_workers=-1: expected a whole number >= 0"),
        ({"val_fraction": 0.0}, "val_fraction=0.0: expected a number in"),
        ({"val_fraction": 1.0}, "val_fraction=1.0: expected a number in"),
        ({"augment": {"chunks": 1}}, "augment.chunks: no such option"),
    ],
)
def test_arguments_are_checked_before_data_is_touched(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Digits, "read", lambda *_: pytest.fail("data was touched"))
    with pytest.raises(ValueError, match=message):
        Digits(**options)


def test_a_batch_larger_than_the_training_set_is_refused() -> None:
    data = Digits(batch_size=2000)
    data.setup("fit")
    with pytest.raises(DataError, match=r"batch_size=2000 .* set data.batch_size to at most 1293"):
        data.train_dataloader()


def test_a_set_too_small_to_hold_images_back_is_refused() -> None:
    class Tiny(ImageData):
        def read(self, split: Split) -> TensorImages | None:
            if split == "val":
                return None
            images = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
            return TensorImages(images, torch.arange(3), classes=list("abc"))

    with pytest.raises(DataError, match=r"leaves no validation image: raise data.val_fraction"):
        Tiny().setup("fit")


def test_a_plain_loop_gets_what_lightning_gets() -> None:
    data = Digits()
    data.setup("fit")
    images, _ = next(iter(data.val_dataloader()))
    assert torch.equal(data.transform(images, training=False), data.normalisation(images))
    assert not torch.equal(data.transform(images, training=True), data.normalisation(images))
    assert images.dtype == torch.uint8


def test_shown_inverts_the_normalisation() -> None:
    data = Digits()
    data.setup("fit")
    pixels, _ = next(iter(data.val_dataloader()))
    shown = data.shown(data.transform(pixels, training=False))
    assert shown.dtype == torch.float32
    assert torch.allclose(shown, pixels / 16, atol=1e-6)
    assert shown.max() <= 1


def test_a_checkpoint_keeps_normalisation_and_refuses_other_classes(tmp_path: Path) -> None:
    runner = _trainer(tmp_path, limit_train_batches=1, limit_val_batches=0)
    data = Digits()
    runner.fit(Recorder(), data)
    path = tmp_path / "run.ckpt"
    runner.save_checkpoint(path)
    torch.load(path, weights_only=True)

    other, model = Digits(), Recorder()
    other.setup("test")
    other.normalisation.mean += 1
    _trainer(tmp_path).test(model, other, ckpt_path=path, verbose=False, weights_only=True)
    assert torch.equal(other.normalisation.mean, data.normalisation.mean)

    other.classes = [*other.classes[1:], "ten"]
    with pytest.raises(DataError, match=r"trained on 10 classes 0, 1.* only in the data: ten"):
        _trainer(tmp_path).test(model, other, ckpt_path=path, verbose=False, weights_only=True)


def _fit(path: Path, data: ImageData, seed: int, model: Recorder | None = None) -> Tensor:
    """The training images of two batches, as the model receives them."""
    model = model or Recorder()
    pl.seed_everything(seed, verbose=False)
    _trainer(path, limit_train_batches=2, limit_val_batches=0).fit(model, data)
    return _stack(model.batches["train"])


def test_each_training_takes_its_seed_anew(tmp_path: Path) -> None:
    data = Digits()
    first, second, third = (_fit(tmp_path, data, seed) for seed in (0, 1, 0))
    assert torch.equal(second, _fit(tmp_path, Digits(), 1))
    assert torch.equal(third, first)
    assert not torch.equal(second, first)


def test_a_training_that_failed_hands_nothing_on(tmp_path: Path) -> None:
    class Fails(Recorder):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ArithmeticError

    data = Digits()
    with pytest.raises(ArithmeticError):
        _fit(tmp_path, data, 0, Fails())
    assert torch.equal(_fit(tmp_path, data, 1), _fit(tmp_path, Digits(), 1))


def test_a_checkpoint_that_was_evaluated_is_not_part_of_the_next_training(tmp_path: Path) -> None:
    runner = _trainer(tmp_path, limit_train_batches=1, limit_val_batches=0)
    runner.fit(Recorder(), other := Digits())
    other.normalisation.mean += 1
    runner.save_checkpoint(path := tmp_path / "other.ckpt")
    data = Digits()
    data.setup("fit")
    for _ in range(2):  # before and after a training
        expected = data.normalisation.mean.clone()
        options: dict[str, Any] = {"ckpt_path": path, "verbose": False, "weights_only": True}
        _trainer(tmp_path).validate(Recorder(), data, **options)
        assert torch.equal(data.normalisation.mean, expected + 1)
        assert torch.equal(_fit(tmp_path, data, 1), _fit(tmp_path, Digits(), 1))
        assert torch.equal(data.normalisation.mean, expected)


def test_a_resumed_run_keeps_the_checkpoints_state(tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 0}
    pl.seed_everything(0, verbose=False)
    runner = _trainer(tmp_path, max_epochs=2, **options)
    runner.fit(whole := Recorder(), data := Digits())
    pl.seed_everything(0, verbose=False)
    runner = _trainer(tmp_path, max_epochs=1, **options)
    runner.fit(Recorder(), data)
    runner.save_checkpoint(path := tmp_path / "run.ckpt")
    pl.seed_everything(5, verbose=False)
    runner, model = _trainer(tmp_path, max_epochs=2, **options), Recorder()
    runner.fit(model, data, ckpt_path=path, weights_only=True)
    assert torch.equal(_stack(model.batches["train"]), _stack(whole.batches["train"][2:]))
    state = {**data.state_dict(), "normalisation": {"mean": [5.0], "std": [6.0]}}
    own = Digits()  # for your own loop
    own.load_state_dict(state)
    own.setup("fit")
    own.setup("test")
    assert own.state_dict() == state


def test_a_checkpoints_normalisation_is_converted_to_the_datas_units() -> None:
    class Bytes(Digits):
        pixel_max = 255

    digits, data = Digits(), Bytes()
    digits.setup("fit")
    data.load_state_dict(digits.state_dict())
    data.setup("test")
    pixels, _ = next(iter(data.test_dataloader()))
    expected = digits.transform(pixels, training=False)
    found = data.transform(pixels * (255 / 16), training=False)
    assert torch.allclose(found, expected, atol=1e-5)
    assert data.state_dict()["pixel_max"] == 255
    again = Digits()
    again.setup("test")
    again.load_state_dict(digits.state_dict())
    assert again.state_dict() == digits.state_dict(), "bit for bit where the unit is the same"


def halves(rank: int, ports: list[int], folder: Path) -> None:
    """Save the training images of a process, with the set in memory and on the device."""
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank))
    plain = {"crop_padding": 0, "flip": False}
    for on_device, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        data, model = Digits(batch_size=32, augment=plain, on_device=bool(on_device)), Recorder()
        options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "limit_val_batches": 0}
        _trainer(folder, **options).fit(model, data)
        torch.save(_stack(model.batches["train"]), folder / f"{rank}.{on_device}")
        torch.distributed.destroy_process_group()
    os._exit(0)  # torch's threads may outlive the interpreter, which then aborts now and then


def test_each_of_two_processes_gets_its_own_half(tmp_path: Path) -> None:
    start(halves, free_ports(2), tmp_path)
    for on_device in (0, 1):
        parts = [torch.load(tmp_path / f"{rank}.{on_device}") for rank in range(2)]
        assert [len(part) for part in parts] == [(1293 // 2) // 32 * 32] * 2
        keys = [{image.numpy().tobytes() for image in part} for part in parts]
        assert not keys[0] & keys[1]
