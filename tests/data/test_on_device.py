"""A set on the training device gives the same batches, without transfers in the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import Recorder, trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from revzoo.data import Augment, Digits, ImageData, ImageFolder
from revzoo.data import on_device as device_module
from revzoo.data.images import TensorImages
from revzoo.data.module import Split
from revzoo.data.on_device import DeviceImages, placed

META = torch.device("meta")  # a device of which no value can be read


def batches(
    path: Path,
    *,
    on_device: bool,
    data: Mapping[str, Any] = {},
    poisson: bool = False,
    **options: Any,
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What reaches each loop in two epochs and a test."""
    digits, model = Digits(on_device=on_device, **data), Recorder()
    digits.poisson = poisson
    pl.seed_everything(0, verbose=False)
    runner = trainer(path, max_epochs=2, **options)
    runner.fit(model, digits)
    runner.test(model, digits, verbose=False)
    assert all(isinstance(s, DeviceImages) == on_device for s in digits._sets.values())
    return model.batches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": {"augment": {"mixup": 0.4, "cutmix": 1.0}}},
        {"data": {"augment": {"chunk": 8, "crop_padding": 3}}},
        {"data": {"augment": {"policy": "randaugment", "erasing": 0.5, "mixup": 0.4}}},
        {"data": {"augment": {"crop_padding": 0, "flip": False, "mixup": 1.0}}},
        {"limit_train_batches": 3, "limit_val_batches": 1, "data": {"eval_batch_size": 50}},
        {"overfit_batches": 2},
        {"poisson": True},
    ],
)
def test_a_run_has_the_same_batches_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    elsewhere = batches(tmp_path, on_device=False, **options)
    found = batches(tmp_path, on_device=True, **options)
    assert found.keys() == elsewhere.keys()
    for name, kept in elsewhere.items():
        for (images, labels), (expected, expected_labels) in zip(found[name], kept, strict=True):
            assert torch.equal(images, expected), name
            assert torch.equal(labels, expected_labels), name


def test_a_transform_of_your_own_runs_on_the_device(tmp_path: Path) -> None:
    class Inverted(Digits):
        def transform(self, images: Tensor, *, training: bool) -> Tensor:
            return -super().transform(images, training=training)

    def images(kind: type[Digits], *, on_device: bool) -> Tensor:
        pl.seed_everything(0, verbose=False)
        model = Recorder()
        trainer(tmp_path, max_epochs=1).fit(model, kind(on_device=on_device))
        return torch.cat([images for images, _ in model.batches["train"]])

    found = images(Inverted, on_device=True)
    assert torch.equal(found, images(Inverted, on_device=False))
    assert torch.equal(found, -images(Digits, on_device=True))


def test_images_of_a_folder_are_placed_if_they_are_decoded_once(make_folder: Any) -> None:
    root = make_folder({"train": {"a": 9, "b": 9}})
    for cache_bytes, line in (
        (2**20, "1 MiB of images are on meta"),
        (0, "each batch is sent to meta: the images are read from their files"),
    ):
        data = ImageFolder(root, image_size=8, cache_bytes=cache_bytes, on_device=True)
        data.setup("fit")
        data.place(META)
        assert any(note.startswith(line) for note in data.notes)
        assert isinstance(data._images("train"), DeviceImages) == bool(cache_bytes)


def pixels(count: int = 64) -> TensorImages:
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8)
    return TensorImages(images, torch.arange(count) % 5, classes=list("abcde"))


def test_a_pass_of_your_own_loop_is_the_same() -> None:
    def passes(on_device: bool) -> list[Tensor]:
        torch.manual_seed(0)
        data = Digits(on_device=on_device)
        data.setup("fit")
        data.place("cpu")
        loader = data.train_dataloader()
        next(iter(loader))  # a pass that ends early
        return [torch.cat([labels for _, labels in loader]) for _ in range(2)]

    first, second = passes(True)
    assert not torch.equal(first, second)
    assert torch.equal(torch.stack([first, second]), torch.stack(passes(False)))


@pytest.mark.parametrize(
    ("choice", "free", "there"),
    [
        ("auto", 4 * 64 * 192, True),
        ("auto", 4 * 64 * 192 - 1, False),
        ("auto", None, False),
        (True, None, True),
        (True, 64 * 192, True),
        (True, 64 * 192 - 1, False),
        (False, 2**40, False),
    ],
)
def test_a_set_must_fit(
    choice: Any, free: int | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "free_bytes", lambda device: free)
    half = pixels().subset(torch.arange(0, 64, 2), training=True)
    rest = pixels().subset(torch.arange(1, 64, 2), training=False)
    sets, line = placed({"train": half, "val": rest}, META, choice)
    assert all(isinstance(s, DeviceImages) == there for s in sets.values())
    assert ("on meta" in line, "each batch is sent to meta" in line) == (
        there,
        not there and choice is not False,
    )
    if there:  # only its own images, and not again
        assert len(sets["train"].sample()) == 32
        monkeypatch.setattr(device_module, "free_bytes", lambda device: 0)
        assert placed(sets, META, choice)[0] == sets or free is None


def test_the_reason_names_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "free_bytes", lambda device: 2 * 2**20)
    monkeypatch.setattr(device_module, "_bytes", lambda images: 3 * 2**20)
    assert placed({"train": pixels()}, META, "auto")[1] == (
        "each batch is sent to meta: the images take 3 MiB, more than 25% of the 2 MiB that are "
        "free"
    )


def test_a_cpu_keeps_its_path_unless_asked_and_sets_come_back() -> None:
    cpu, sets = torch.device("cpu"), {"train": pixels()}
    assert placed(sets, cpu, "auto") == (sets, "")
    there, _ = placed(sets, cpu, True)
    assert isinstance(there["train"], DeviceImages)
    back, line = placed(there, cpu, "auto")
    assert type(back["train"]) is TensorImages
    assert not line
    assert torch.equal(back["train"].sample(), sets["train"].sample())


def test_another_place_is_refused() -> None:
    with pytest.raises(ValueError, match="on_device=yes: expected one of auto, True, False"):
        Digits(on_device="yes")  # type: ignore[arg-type]


# --- no transfers ---


class Transfers(TorchDispatchMode):
    """Counts the operations that read a value of META, or that join it with the CPU's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        out = func(*args, **(kwargs or {}))
        # a number without dimensions is an argument of a kernel
        kinds = {t.device.type for t in [*tensors, *tree_leaves(out)] if getattr(t, "ndim", 0)}
        reads = func is torch.ops.aten._local_scalar_dense.default and META in {
            t.device for t in tensors
        }
        if len(kinds) > 1 or reads:
            self.found[str(func)] += 1
        return out


class Noise(ImageData):
    def read(self, split: Split) -> TensorImages | None:
        return pixels(256) if split != "val" else None


def fed(steps: int, *, on_device: bool, **augment: float) -> tuple[Counter[str], Any]:
    """The transfers of later training steps and validations on META, and the last batch."""
    data = Noise(batch_size=8, eval_batch_size=8, augment=augment, on_device=on_device)
    data.setup("fit")
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    runner: Any = SimpleNamespace(
        training=True,
        current_epoch=0,
        num_training_batches=28,
        global_rank=0,
        world_size=1,
        num_devices=1,
        overfit_batches=0,
        limit_val_batches=1.0,
        fit_loop=loop,
        strategy=SimpleNamespace(root_device=META, broadcast=lambda value: value),
        precision_plugin=SimpleNamespace(convert_input=lambda images: images),
    )
    data.trainer = runner
    transfers, batch = Transfers(), None
    for runner.training, loader in (
        (True, data.train_dataloader()),
        (False, data.val_dataloader()),
    ):
        feed = iter(loader)
        for step in range(steps + 1):
            watched = transfers if step else Transfers()  # the first sends the epoch's order
            with watched:
                batch = tuple(t.to(META) for t in next(feed))
                batch = data.on_after_batch_transfer(batch, 0)
            progress.current.ready += 1
    return transfers.found, batch


@pytest.mark.parametrize("augment", [{}, {"mixup": 0.4}, {"cutmix": 1.0}, {"chunk": 8}])
def test_steps_read_and_send_nothing(augment: dict[str, float]) -> None:
    found, (images, labels) = fed(2, on_device=True, **augment)
    assert not found
    assert images.device == labels.device == META
    assert images.dtype == torch.float32
    # the same check sees the transfers of the other path
    assert fed(2, on_device=False, **augment)[0]


# --- statistics ---


@pytest.fixture(scope="module")
def draws() -> Tensor:
    """Rows, columns and flips of many batches: (3, 200 * 64)."""
    found = device_module.draws_of_epoch(Augment(crop_padding=2), 64, (8, 8), range(200))
    return found.permute(1, 0, 2).flatten(1)


def test_offsets_are_uniform_for_each_image(draws: Tensor) -> None:
    assert draws.shape == (3, 200 * 64)  # by default, no two images share a draw
    for offsets in draws[:2]:
        counts = torch.bincount(offsets, minlength=5)
        expected = len(offsets) / 5
        assert len(counts) == 5
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 18.5  # of 4 degrees of freedom: once in 1,000
    rows, columns = draws[:2].double()
    for one, other in ((rows, columns), (rows[1:], rows[:-1]), (columns[1:], columns[:-1])):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 4 / len(rows) ** 0.5


def test_half_of_the_images_are_flipped(draws: Tensor) -> None:
    flips = draws[2].double()
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / len(flips) ** 0.5
    assert abs(torch.corrcoef(torch.stack([flips[1:], flips[:-1]]))[0, 1]) < 4 / len(flips) ** 0.5


def test_pixels_keep_mean_and_deviation(tmp_path: Path) -> None:
    """Of two runs with different seeds, since with one they would be equal."""

    def moments(seed: int, *, on_device: bool) -> tuple[float, float]:
        data, model = Digits(on_device=on_device, augment={"crop_padding": 2}), Recorder()
        pl.seed_everything(seed, verbose=False)
        trainer(tmp_path, max_epochs=3, limit_val_batches=0).fit(model, data)
        images = torch.cat([images for images, _ in model.batches["train"]])
        return float(images.mean()), float(images.std())

    mean, std = moments(1, on_device=True)
    expected = moments(2, on_device=False)
    assert mean == pytest.approx(expected[0], abs=0.01)
    assert std == pytest.approx(expected[1], abs=0.01)


def test_mixups_share_has_its_distribution(tmp_path: Path) -> None:
    alpha = 0.4
    found = batches(
        tmp_path,
        on_device=True,
        data={"batch_size": 8, "augment": {"mixup": alpha}},
        limit_val_batches=0,
    )
    # two labels share an image; equal labels of neighbours tell nothing
    shares = torch.cat(
        [labels.amax(1)[(labels > 0).sum(1) == 2][:1] for _, labels in found["train"]]
    )
    assert len(shares) > 250
    # which of the two is larger is lost
    sample = torch.distributions.Beta(alpha, alpha).sample((100_000,))
    expected = torch.maximum(sample, 1 - sample)
    assert float(shares.mean()) == pytest.approx(float(expected.mean()), abs=4 * 0.15 / 250**0.5)
    assert float(shares.std()) == pytest.approx(float(expected.std()), abs=0.03)


@pytest.mark.gpu
def test_a_gpu_gets_the_images_of_the_cpu_without_waiting(tmp_path: Path) -> None:
    def fit(accelerator: str) -> tuple[Digits, list[tuple[Tensor, Tensor]]]:
        class Watched(Recorder):
            def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
                if accelerator == "gpu" and self.batches.get("train"):  # not the epoch's order
                    torch.cuda.set_sync_debug_mode("error")
                return batch

            def training_step(self, batch: Any) -> Tensor:
                if accelerator == "gpu":
                    torch.cuda.set_sync_debug_mode("default")
                return super().training_step(batch)

        data, model = Digits(augment={"mixup": 0.4}), Watched()
        pl.seed_everything(0, verbose=False)
        runner = trainer(
            tmp_path, accelerator=accelerator, devices=1, max_epochs=1, limit_val_batches=0
        )
        runner.fit(model, data)
        return data, model.batches["train"]

    data, found = fit("gpu")
    assert data.notes == ["1 MiB of images are on cuda:0"]
    for (images, labels), (expected, expected_labels) in zip(found, fit("cpu")[1], strict=True):
        torch.testing.assert_close(images.cpu(), expected)
        torch.testing.assert_close(labels.cpu(), expected_labels)
