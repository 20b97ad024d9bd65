"""The figures in TensorBoard, and the options of the other loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_task import TINY, loader, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from revzoo.training import Classifier, Footprint, loggers
from revzoo.training.callbacks import registry
from revzoo.training.callbacks.figures import DriftLogger
from revzoo.training.loggers import LOGGERS, TensorBoard

RUN = {
    "model": "revnet38",
    "data": "Digits",
    "optimizer": "sgd",
    "lr": 0.2,
    "weight_decay": 5e-4,
    "batch": 64,
    "seed": 0,
}


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "revnet38-digits"))
    found.Reload()
    return found


def test_groups_other_than_losses_and_accuracies_come_after_val(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path, RUN, None)
    callbacks = [Footprint(), registry.learning_rate(), DriftLogger(every_n_steps=1)]
    module = Classifier(TINY, optim={"lr": 0.01, "schedule": {"name": "constant"}})
    trainer(tmp_path, logger=logger, callbacks=callbacks).fit(module, loader(), loader())
    tags = events(tmp_path).Tags()["scalars"]
    groups = {tag.partition("/")[0] for tag in tags}
    assert sorted(groups) == ["train", "val", "watch"]
    watched = {tag for tag in tags if tag.startswith("watch/")}
    assert {"watch/memory_MiB", "watch/images_per_second", "watch/lr", "watch/drift"} <= watched
    assert len([tag for tag in tags if "drift" in tag]) == 1
    memory = events(tmp_path).Scalars("watch/memory_MiB")[-1].value
    assert 50 < memory < 50_000


def test_different_rates_have_separate_charts(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path, RUN, None)
    optim = {"name": "muon", "lr": 0.01, "sgd_lr": 0.1, "schedule": {"name": "constant"}}
    module = Classifier(TINY, optim=optim)
    trainer(tmp_path, logger=logger, callbacks=[registry.learning_rate()]).fit(module, loader())
    tags = events(tmp_path).Tags()["scalars"]
    assert [t for t in tags if "lr" in t] == ["watch/lr_hidden_weights", "watch/lr_others"]


def test_the_test_has_only_the_chart_that_hparams_needs(tmp_path: Path) -> None:
    """The chart of test/loss was empty: TensorBoard's axis ends at 1 if a chart has two points."""
    logger = TensorBoard(tmp_path, RUN, None)
    logger.log_metrics({"test/acc": 0.9, "test/acc5": 1.0, "test/loss": 1.2}, 3)
    logger.save()
    assert events(tmp_path).Tags()["scalars"] == ["watch/test/acc"]


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [
        ("irevnet13", "Digits", "irevnet13-digits"),
        ("torchvision:resnet18", "ImageFolder my pets", "torchvision-resnet18-imagefolder-my-pets"),
    ],
)
def test_tensorboard_names_a_run_by_model_and_data(
    model: str, data: str, name: str, tmp_path: Path
) -> None:
    """``tensorboard --logdir RUN`` named every run "tensorboard"."""
    logger = TensorBoard(tmp_path, {"model": model, "data": data}, None)
    assert Path(logger.log_dir) == tmp_path / name


def test_hyperparameters_describe_the_run_with_its_accuracies(tmp_path: Path) -> None:
    """TensorBoard showed ``hp_metric -1`` and every option of the optimiser."""
    from tensorboard.plugins.hparams import metadata

    logger = TensorBoard(tmp_path, RUN, None)
    trainer(tmp_path, logger=logger, max_epochs=1).fit(Classifier(TINY), loader(), loader())
    found = events(tmp_path)
    assert "hp_metric" not in found.Tags()["scalars"]
    content = found.PluginTagToContent("hparams")
    begun = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert set(begun.hparams) == set(RUN)
    # numbers, which TensorBoard sorts and filters by their range
    kinds = {name: value.WhichOneof("kind") for name, value in begun.hparams.items()}
    words = {"model", "data", "optimizer"}
    assert {name for name, kind in kinds.items() if kind == "string_value"} == words
    assert {name for name, kind in kinds.items() if kind == "number_value"} == set(RUN) - words
    assert {name: begun.hparams[name].number_value for name in ("lr", "weight_decay")} == {
        "lr": 0.2,
        "weight_decay": 5e-4,
    }
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    assert [info.name.tag for info in experiment.metric_infos] == ["val/acc", "watch/test/acc"]


def test_runs_are_compared_by_the_figure_of_their_task_and_by_the_monitored_one(
    tmp_path: Path,
) -> None:
    from tensorboard.plugins.hparams import metadata

    run = {**RUN, "task": "segmentation", "monitor": "val/iou"}
    logger = TensorBoard(tmp_path, run, None)
    logger.log_hyperparams()
    logger.log_metrics({"test/dice": 0.9, "test/iou": 0.8, "test/acc": 1.0, "val/dice": 0.7}, 3)
    logger.save()
    found = events(tmp_path)
    content = found.PluginTagToContent("hparams")
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    compared = ["val/dice", "val/iou", "watch/test/dice", "watch/test/iou"]
    assert [info.name.tag for info in experiment.metric_infos] == compared
    assert {*found.Tags()["scalars"]} == {"val/dice", "watch/test/dice", "watch/test/iou"}


@pytest.mark.parametrize(
    ("kind", "builder", "options", "given"),
    [
        (
            "wandb",
            "WandbLogger",
            {"project": "p", "offline": True},
            {"project": "p", "name": "m-r"},
        ),
        (
            "mlflow",
            "MLFlowLogger",
            {"experiment": "e"},
            {"experiment_name": "e", "run_name": "m-r"},
        ),
        ("mlflow", "MLFlowLogger", {"tracking_uri": "u"}, {"tracking_uri": "u"}),
    ],
)
def test_other_loggers_get_their_options_and_a_description(
    kind: str,
    builder: str,
    options: dict[str, Any],
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    class Fake:
        def __init__(self, **keywords: Any) -> None:
            seen.update(keywords)

        def log_hyperparams(self, params: dict[str, Any]) -> None:
            seen["params"] = params

    monkeypatch.setattr(loggers, builder, Fake)
    LOGGERS[kind](tmp_path / "m" / "r", RUN, None, **options)
    assert given.items() <= seen.items()
    assert seen["params"] == RUN


def test_two_folders_of_one_name_have_two_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials 0003 of two sweeps shared one, since only their names counted."""
    seen: list[str] = []

    class Fake:
        def __init__(self, **keywords: Any) -> None:
            seen.append(keywords["id"])

        def log_hyperparams(self, params: dict[str, Any]) -> None:
            pass

    monkeypatch.setattr(loggers, "WandbLogger", Fake)
    for folder in ("a", "b", "a"):
        LOGGERS["wandb"](tmp_path / folder / "lr" / "0003", RUN, None)
    assert seen[0] == seen[2] != seen[1]


def test_figures_of_other_callbacks_come_after_val_too(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path, RUN, None)
    logger.log_metrics({"private/epsilon": 1.0, "gradients/norm": 2.0, "val/acc": 3.0}, 0)
    logger.save()
    tags = events(tmp_path).Tags()["scalars"]
    assert {*tags} == {"watch/private_epsilon", "watch/gradients_norm", "val/acc"}


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_curves_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback of TensorBoard's writer ended the run."""
    logger = LOGGERS["tensorboard"](tmp_path, RUN, None)
    for step in range(3):
        if step == 1:
            monkeypatch.setattr(SummaryWriter, "flush", full)
        logger.log_metrics({"val/acc": float(step)}, step)
        logger.save()
    logger.finalize("success")
    assert events(tmp_path).Scalars("val/acc")[0].value == 0
    assert [m for m in caplog.messages if "figures are lost" in m] == [caplog.messages[0]]


def test_a_service_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fake:
        def __init__(self, **keywords: Any) -> None:
            self.fails = False

        def log_hyperparams(self, params: dict[str, Any]) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(loggers, "MLFlowLogger", Fake)
    logger = LOGGERS["mlflow"](tmp_path, RUN, None)
    for step in range(3):
        logger.log_metrics({"val/acc": 0.5}, step)
    (line,) = caplog.messages
    assert "no route to host" in line
