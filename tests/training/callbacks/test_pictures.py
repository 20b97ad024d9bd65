"""The pictures of a run, read back from TensorBoard's event files."""

from __future__ import annotations

import re
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from small_task import TINY, TinyNet, loader, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from revzoo.data import Digits
from revzoo.training import Classifier, ConfusionMatrix, Reconstructions, Samples
from revzoo.training.callbacks.ema import AveragedWeights
from revzoo.training.callbacks.pictures import images_figure, matrix, to_pixels

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


@pytest.mark.parametrize(("channels", "shown"), [(1, 1), (2, 1), (3, 3), (4, 3), (7, 3)])
def test_images_of_any_channels_are_drawn(channels: int, shown: int) -> None:
    pixels = to_pixels(pl.Trainer(logger=False), torch.randn(2, channels, 8, 8))
    assert pixels.shape == (2, shown, 8, 8)
    assert len(images_figure(pixels, ["a", "b"]).axes) == 2


def test_the_sanity_check_is_not_shown(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": callbacks(tmp_path, every=1)}
    found = fit(tmp_path, Classifier(TINY, optim=OPTIM), num_sanity_val_steps=2, **options)
    assert [image.step for image in found.Images("watch/samples")] == [1]


class Drawn:
    """Keeps what the pictures show, instead of the pixels of a figure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.figures: list[tuple[Tensor, list[str]]] = []

        def kept(images: Tensor, captions: list[str], **options: Any) -> Any:
            self.figures.append((images, captions))
            return images_figure(images, captions, **options)

        monkeypatch.setattr("revzoo.training.callbacks.pictures.images_figure", kept)


def val_images(data: Digits) -> Tensor:
    return torch.cat([images for images, _ in data.val_dataloader()]) / 16


def test_samples_are_the_same_images_spread_over_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, data = Drawn(monkeypatch), Digits(eval_batch_size=50)
    shown = Samples(count=8, every_n_epochs=1)
    fit(tmp_path, Classifier(IREVNET, optim=OPTIM), data, callbacks=[shown], max_epochs=2)
    chosen = [0, 25, 50, 66, 83, 100, 114, 129]  # 144: batches of 50, 50 and 44
    assert len(drawn.figures) == 2
    labels = torch.cat([labels for _, labels in data.val_dataloader()])[chosen]
    for images, captions in drawn.figures:
        assert torch.allclose(images, val_images(data)[chosen], atol=1e-6)
        for caption, label in zip(captions, labels, strict=True):
            assert re.fullmatch(rf"\d [01]\.\d\d\ntrue: {label}", caption)


def test_differences_are_logged_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, module, data = Drawn(monkeypatch), Classifier(IREVNET, optim=OPTIM), Digits()
    network: Any = module.model
    inverse = network.inverse

    def wrong(z: Tensor) -> Tensor:
        found: Tensor = inverse(z)
        found[2, 0, 3, 5] += 0.5
        return found

    network.inverse = wrong
    shown = Reconstructions(count=4, every_n_epochs=1)
    found = fit(tmp_path, module, data, callbacks=[shown], max_epochs=1)
    largest = (16 - data.normalisation.mean) / data.normalisation.std
    (error,) = found.Scalars("reconstruction/error")
    assert error.value == pytest.approx(0.5 / float(largest), rel=1e-3)
    ((rows, captions),) = drawn.figures
    images, back, difference = rows.chunk(3)
    assert torch.allclose(images[:, 0], val_images(data)[[0, 36, 72, 108], 0], atol=1e-6)
    right = [0, 1, 3]
    assert torch.allclose(back[right], images[right], atol=1e-5)
    assert difference[2, 0, 3, 5] == 1
    assert (difference > 0.01).sum() == 1
    assert captions[-2] == f"error {error.value:.1g}"


def test_exact_mode_has_no_error(tmp_path: Path) -> None:
    module = Classifier({**IREVNET, "memory": "exact"}, optim=OPTIM)
    found = fit(tmp_path, module, Digits(), max_epochs=1, precision="bf16-mixed")
    assert [event.value for event in found.Scalars("reconstruction/error")] == [0]


def test_a_network_that_loses_information_has_no_picture(tmp_path: Path) -> None:
    found = fit(tmp_path, Classifier(TINY, optim=OPTIM))
    assert set(found.Tags()["images"]) == {"watch/samples", "watch/confusion"}
    assert "reconstruction/error" not in found.Tags()["scalars"]


def test_pictures_come_from_the_validated_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, average = Drawn(monkeypatch), AveragedWeights(decay=0.99, warmup=False)
    module = Classifier(TinyNet(), optim={**OPTIM, "lr": 0.5})
    shown = Samples(count=8, every_n_epochs=1)
    fit(tmp_path, module, callbacks=[average, shown], max_epochs=2)
    # 40 images in batches of 16, 16 and 8; fit leaves the average in the module
    images = loader(40, seed=1).dataset.tensors[0][[0, 8, 16, 21, 26, 32, 34, 37]]  # type: ignore[attr-defined]
    with torch.no_grad():
        shares = module.eval()(images).softmax(1).max(1).values
    words = [caption.split()[1] for caption in drawn.figures[-1][1]]
    assert words == [f"{share:.2f}" for share in shares]


class Ended(pl.Callback):
    """Ends a run after its third epoch, like early stopping, or by an error in the next one."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.way == "error" and trainer.global_step == 4:
            raise ZeroDivisionError

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.way == "time" and trainer.global_step == 3:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.way == "early stopping" and trainer.current_epoch == 2:
            trainer.should_stop = True


@pytest.mark.parametrize("way", ["early stopping", "time", "error"])
def test_an_unplanned_end_shows_the_last_validation(tmp_path: Path, way: str) -> None:
    ending: dict[str, Any] = {"max_epochs": 9, "limit_train_batches": 1 if way == "time" else 2}
    ending["callbacks"] = [*callbacks(tmp_path, every=5), Ended(way)]
    failed = pytest.raises(ZeroDivisionError) if way == "error" else nullcontext()
    with failed:
        fit(tmp_path, Classifier(IREVNET, optim=OPTIM), Digits(), **ending)
    found = events(tmp_path)
    steps = {step.step for tag in found.Tags()["images"] for step in found.Images(tag)}
    assert steps == {"early stopping": {5}, "time": {2}, "error": set()}[way]
    assert (tmp_path / "confusion.csv").exists() == (way != "error")


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


def test_without_a_logger_of_pictures_the_numbers_are_written_and_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run without a logger drew for a third of its time, and showed nothing."""
    for draw in ("images_figure", "matrix"):
        monkeypatch.delattr(f"revzoo.training.callbacks.pictures.{draw}")
    log = CSVLogger(tmp_path, name="", version="csv")
    runner = trainer(tmp_path, logger=log, callbacks=callbacks(tmp_path), max_epochs=1)
    runner.fit(Classifier(IREVNET, optim=OPTIM), datamodule=Digits())
    assert (tmp_path / "confusion.csv").exists()
    assert "reconstruction/error" in (tmp_path / "csv" / "metrics.csv").read_text()


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


def test_a_module_that_returns_no_logits_is_refused(tmp_path: Path) -> None:
    class Silent(Classifier):
        def validation_step(self, *_: Any) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ValueError, match=r"got NoneType: return them"):
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


def whole(figure: Figure) -> bool:
    """Whether nothing is cut off at the edges."""
    FigureCanvasAgg(figure).draw()  # lays it out
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return bool(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height)


@pytest.mark.parametrize("count", [1, 6])
def test_long_captions_are_whole(count: int) -> None:
    """``automobile: 0.97`` was cut at the edge of its image."""
    figure = images_figure(torch.rand(count, 3, 8, 8), ["automobile 0.97, of all things"] * count)
    assert whole(figure)
    boxes = [axes.title.get_window_extent() for axes in figure.axes[:count]]
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def test_the_matrix_shows_shares_of_the_true_class_in_rows() -> None:
    counts = torch.tensor([[9, 1, 0], [0, 5, 0], [0, 0, 0]])
    figure = matrix(counts, ["cat", "dog", "a horse with a long name, of a kind with many names"])
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.texts] == ["90", "10", "0", "0", "100", "0", "0", "0", "0"]
    assert axes.get_ylabel() == "True class"
    assert whole(figure)


def test_a_matrix_of_many_classes_has_no_names() -> None:
    figure = matrix(torch.eye(1000).long(), [f"class {i}" for i in range(1000)])
    (axes,) = figure.axes
    assert not axes.texts
    assert not len(axes.get_xticks())
    assert whole(figure)
