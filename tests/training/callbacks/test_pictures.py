"""The pictures of a run, read back from TensorBoard's event files."""

from __future__ import annotations

import io
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from small_task import TINY, TinyNet, loader, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from revzoo.data import Digits
from revzoo.training import Classifier, ConfusionMatrix, Reconstructions, Samples
from revzoo.training.callbacks.ema import AveragedWeights
from revzoo.training.callbacks.graceful_stop import RunStopped
from revzoo.training.callbacks.pictures import COLUMNS, GAP, LINE, SIDE, chosen_images

OPTIM = {"lr": 0.05, "schedule": {"name": "constant"}}
IREVNET = {"name": "irevnet13", "num_classes": 10, "in_chans": 1, "units": [1, 1]}


def callbacks(folder: Path, every: int = 2) -> list[pl.Callback]:
    return [
        Samples(count=8, every_n_epochs=every),
        Reconstructions(count=4, every_n_epochs=every),
        ConfusionMatrix(folder / "confusion.csv", every_n_epochs=every),
    ]


def events(folder: Path) -> EventAccumulator:
    (folder / "tb").mkdir(exist_ok=True)  # fast_dev_run writes nothing
    found = EventAccumulator(str(folder / "tb"), size_guidance={"images": 0})
    found.Reload()
    return found


def picture(found: EventAccumulator, tag: str, index: int = -1) -> Tensor:
    encoded = Image.open(io.BytesIO(found.Images(tag)[index].encoded_image_string))
    return torch.from_numpy(np.array(encoded)).permute(2, 0, 1)


def tile(shown: Tensor, row: int, column: int, *, lines: int, pixels: int = 8) -> Tensor:
    """The pixels (8, 8) of one image of a picture, in [0, 1]."""
    y, x = GAP + row * (SIDE + LINE * lines + GAP), GAP + column * (SIDE + GAP)
    step = SIDE // pixels
    return shown[0, y : y + SIDE, x : x + SIDE][step // 2 :: step, step // 2 :: step] / 255


def fit(folder: Path, module: Any, data: Any = None, /, **options: Any) -> EventAccumulator:
    log = TensorBoardLogger(folder, name="", version="tb")
    defaults = {"max_epochs": 3, "limit_train_batches": 2, "callbacks": callbacks(folder)}
    runner = trainer(folder, logger=log, **{**defaults, **options})
    if data is None:
        runner.fit(module, loader(), loader(40, seed=1))
    else:
        runner.fit(module, datamodule=data)
    return events(folder)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[EventAccumulator, Path, Digits]:
    folder, data = tmp_path_factory.mktemp("digits"), Digits(eval_batch_size=50)
    torch.manual_seed(0)
    found = fit(folder, Classifier(IREVNET, optim=OPTIM), data)
    return found, folder, data


def test_pictures_come_every_few_epochs_and_at_the_end(digits: Any) -> None:
    found, _, _ = digits
    assert set(found.Tags()["images"]) == {
        "watch/samples",
        "watch/reconstructions",
        "watch/confusion",
    }
    for tag in found.Tags()["images"]:
        assert [image.step for image in found.Images(tag)] == [3, 5]
    assert [event.step for event in found.Scalars("reconstruction/error")] == [3, 5]
    assert [event.step for event in found.Scalars("val/loss")] == [1, 3, 5]


def test_the_sanity_check_is_not_shown(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": callbacks(tmp_path, every=1)}
    found = fit(tmp_path, Classifier(TINY, optim=OPTIM), num_sanity_val_steps=2, **options)
    assert [image.step for image in found.Images("watch/samples")] == [1]


def val_images(data: Digits) -> Tensor:
    batches = list(data.val_dataloader())
    return torch.cat([images for images, _ in batches])


def test_samples_are_fixed_pixels_of_the_validation_split(digits: Any) -> None:
    found, _, data = digits
    images = val_images(data)  # 144: batches of 50, 50 and 44
    chosen = [0, 25, 50, 66, 83, 100, 114, 129]
    for index in (0, 1):
        shown = picture(found, "watch/samples", index)
        for i, place in enumerate(chosen):
            pixels = tile(shown, i // COLUMNS, i % COLUMNS, lines=2)
            assert torch.allclose(pixels, images[place, 0] / 16, atol=1 / 255)


def test_reconstructions_are_the_images_again(digits: Any) -> None:
    found, _, data = digits
    images, shown = val_images(data), picture(found, "watch/reconstructions")
    for column, place in enumerate([0, 50, 100, 122]):
        for row in (0, 1):
            pixels = tile(shown, row, column, lines=1)
            assert torch.allclose(pixels, images[place, 0] / 16, atol=1.5 / 255)
    assert all(event.value < 1e-5 for event in found.Scalars("reconstruction/error"))


def test_differences_are_logged_and_drawn(tmp_path: Path) -> None:
    module, data = Classifier(IREVNET, optim=OPTIM), Digits()
    network: Any = module.model
    inverse = network.inverse

    def wrong(z: Tensor) -> Tensor:
        found: Tensor = inverse(z)
        found[2, 0, 3, 5] += 0.5
        return found

    network.inverse = wrong
    found = fit(tmp_path, module, data, max_epochs=1)
    largest = (16 - data.normalisation.mean) / data.normalisation.std
    (error,) = found.Scalars("reconstruction/error")
    assert error.value == pytest.approx(0.5 / float(largest), rel=1e-3)
    shown = picture(found, "watch/reconstructions")
    drawn = torch.stack([tile(shown, 2, i, lines=1) for i in range(4)])
    expected = torch.zeros(4, 8, 8)
    expected[2, 3, 5] = 1
    assert torch.equal(drawn, expected)


def test_exact_mode_has_no_error(tmp_path: Path) -> None:
    module = Classifier({**IREVNET, "memory": "exact"}, optim=OPTIM)
    found = fit(tmp_path, module, Digits(), max_epochs=1, precision="bf16-mixed")
    assert [event.value for event in found.Scalars("reconstruction/error")] == [0]


def test_a_network_that_loses_information_has_no_picture(tmp_path: Path) -> None:
    found = fit(tmp_path, Classifier(TINY, optim=OPTIM))
    assert set(found.Tags()["images"]) == {"watch/samples", "watch/confusion"}
    assert "reconstruction/error" not in found.Tags()["scalars"]


def test_pictures_come_from_the_validated_weights(tmp_path: Path) -> None:
    class Last(pl.Callback):
        def on_validation_batch_end(self, *arguments: Any) -> None:
            self.logits = arguments[2]

    last, average = Last(), AveragedWeights(decay=0.99, warmup=False)
    shown = Samples(count=8, every_n_epochs=1)
    module = Classifier(TinyNet(), optim={**OPTIM, "lr": 0.5})
    fit(tmp_path, module, callbacks=[shown, last, average], max_epochs=2)
    _, _, logits = shown._seen[-1]
    chosen = [0, 2, 5]  # of the last batch of 8 images: 40 = 16 + 16 + 8
    assert torch.equal(logits, last.logits[chosen])
    with torch.no_grad():  # fit leaves the average in the module
        (*_, (images, _)) = loader(40, seed=1)
        assert torch.allclose(module.eval()(images)[chosen], logits, atol=1e-5)


class Calls:
    """Records the epochs in which a network encodes four images, and in which it inverts."""

    def __init__(self, module: Classifier) -> None:
        self.made: dict[str, list[int]] = {"encode": [], "inverse": []}
        for name, epochs in self.made.items():
            self.watch(module, name, epochs)

    def watch(self, module: Classifier, name: str, epochs: list[int]) -> None:
        network: Any = module.model
        plain = getattr(network, name)

        def counted(given: Tensor) -> Tensor:
            if name == "inverse" or len(given) == 4:  # forward passes encode whole batches
                assert not network.training
                epochs.append(module.trainer.current_epoch)
            found: Tensor = plain(given)
            return found

        setattr(network, name, counted)


def fit_counted(folder: Path, spec: Any, **options: Any) -> tuple[Calls, EventAccumulator]:
    module = Classifier(spec, optim=OPTIM)
    calls, data = Calls(module), Digits(eval_batch_size=144)
    found = fit(folder, module, data, **{"limit_train_batches": 1, **options})
    assert calls.made["encode"] == calls.made["inverse"]
    assert all(part.training for part in module.modules())
    return calls, found


def test_inverses_are_computed_only_where_they_are_shown(tmp_path: Path) -> None:
    calls, found = fit_counted(tmp_path, IREVNET, max_epochs=5)
    assert calls.made["inverse"] == [1, 3, 5]  # after the second, the fourth, and the last
    assert [event.step for event in found.Scalars("reconstruction/error")] == [1, 3, 4]


def test_a_network_that_loses_information_computes_no_inverse(tmp_path: Path) -> None:
    calls, _ = fit_counted(tmp_path, {**TINY, "num_classes": 10}, max_epochs=2)
    assert calls.made["inverse"] == []


class Ended(pl.Callback):
    """Ends a run after its third epoch, like early stopping, or inside the next one."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.way == "signal" and trainer.global_step == 4:
            raise RunStopped(signal.SIGTERM)
        if self.way == "error" and trainer.global_step == 4:
            raise ZeroDivisionError

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.way == "time" and trainer.global_step == 3:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.way == "early stopping" and trainer.current_epoch == 2:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("way", "batches", "step", "now"),
    [("early stopping", 1, 2, 2), ("time", 1, 2, 2), ("signal", 2, 3, 4), ("error", 2, 0, 0)],
)
def test_an_unplanned_end_shows_a_picture(
    tmp_path: Path, way: str, batches: int, step: int, now: int
) -> None:
    ending: dict[str, Any] = {"max_epochs": 9, "limit_train_batches": batches}
    ending["callbacks"] = [*callbacks(tmp_path, every=5), Ended(way)]
    module = Classifier(IREVNET, optim=OPTIM)
    expected = {"signal": RunStopped, "error": ZeroDivisionError}.get(way)
    with pytest.raises(expected) if expected else nullcontext():
        fit(tmp_path, module, Digits(), **ending)
    found = events(tmp_path)
    steps = {tag: [i.step for i in found.Images(tag)] for tag in found.Tags()["images"]}
    if way == "error":
        assert steps == {}
    else:
        assert steps == {
            "watch/samples": [step],
            "watch/confusion": [step],
            "watch/reconstructions": [now],
        }
    assert (tmp_path / "confusion.csv").exists() == (way != "error")


def test_an_interrupted_validation_is_not_shown(tmp_path: Path) -> None:
    class Broken(pl.Callback):
        def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 1:
                raise RunStopped(signal.SIGTERM)

    with pytest.raises(RunStopped):
        fit(
            tmp_path,
            Classifier(IREVNET, optim=OPTIM),
            Digits(eval_batch_size=50),
            callbacks=[*callbacks(tmp_path, every=5), Broken()],
        )
    assert events(tmp_path).Tags()["images"] == []


def test_the_last_reconstruction_is_of_the_average(tmp_path: Path) -> None:
    module = Classifier(IREVNET, optim={**OPTIM, "lr": 0.5})
    network: Any = module.model
    encode, seen = network.encode, []

    def watched(images: Tensor) -> Tensor:
        if len(images) == 2:  # forward passes encode whole batches
            seen.append({name: value.clone() for name, value in network.state_dict().items()})
        found: Tensor = encode(images)
        return found

    network.encode = watched
    data = Digits(eval_batch_size=144)
    average = AveragedWeights(decay=0.9)
    shown = Reconstructions(count=2, every_n_epochs=2)
    fit(tmp_path, module, data, callbacks=[average, shown], max_epochs=1)
    (state,) = seen
    for name, value in network.state_dict().items():  # fit leaves the average in the module
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("spec", [IREVNET, {**IREVNET, "memory": "exact", "dropout": 0.1}])
@pytest.mark.parametrize("every", [1, 5])
def test_a_run_is_bit_for_bit_the_same_without_pictures(
    tmp_path: Path, spec: Any, every: int
) -> None:
    def run(name: str, shown: list[pl.Callback]) -> tuple[dict[str, Tensor], Tensor]:
        pl.seed_everything(3, verbose=False)
        module = Classifier(spec, optim=OPTIM)
        options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 2, "callbacks": shown}
        log = TensorBoardLogger(tmp_path, name="", version=name)
        trainer(tmp_path, logger=log, **options).fit(module, datamodule=Digits())
        return module.state_dict(), torch.get_rng_state()

    (without, plain), (with_, state) = (
        run("plain", []),
        run("tb", callbacks(tmp_path, every=every)),
    )
    assert len(events(tmp_path).Tags()["images"]) == 3
    assert torch.equal(plain, state)
    for name, value in without.items():
        assert torch.equal(value, with_[name]), name


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"limit_val_batches": 0}])
@pytest.mark.filterwarnings("ignore:.*Running in `fast_dev_run` mode:UserWarning")
def test_without_a_real_validation_there_is_no_picture(tmp_path: Path, options: Any) -> None:
    found = fit(tmp_path, Classifier(TINY, optim=OPTIM), **options)
    assert found.Tags()["images"] == []
    assert not (tmp_path / "confusion.csv").exists()


def test_validate_and_test_outside_fit_show_no_picture(tmp_path: Path) -> None:
    log = TensorBoardLogger(tmp_path, name="", version="tb")
    runner = trainer(tmp_path, logger=log, callbacks=callbacks(tmp_path, every=1))
    runner.validate(Classifier(TINY), loader(), verbose=False)
    assert events(tmp_path).Tags()["images"] == []
    assert not (tmp_path / "confusion.csv").exists()


def test_samples_are_spread_over_all_batches() -> None:
    three: Any = SimpleNamespace(num_val_batches=[3])
    chosen = [chosen_images(three, 8, 50, i) for i in range(3)]
    assert chosen == [[0, 25], [0, 16, 33], [0, 16, 33]]
    assert chosen_images(three, 30, 4, 0) == [0, 1, 2, 3]


def test_a_module_that_returns_no_logits_is_refused(tmp_path: Path) -> None:
    class Silent(Classifier):
        def validation_step(self, *_: Any) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ValueError, match=r"NoneType from validation_step of Silent.*return them"):
        fit(tmp_path, Silent(TINY, optim=OPTIM))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_wrong_counts_are_refused(value: Any, tmp_path: Path) -> None:
    for build in (
        lambda: Samples(every_n_epochs=value),
        lambda: Samples(count=value),
        lambda: Reconstructions(count=value),
        lambda: ConfusionMatrix(tmp_path, every_n_epochs=value),
    ):
        with pytest.raises(ValueError, match="expected a whole number >= 1"):
            build()
