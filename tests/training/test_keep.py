from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier
from revzoo.training.checkpoints import PlainCheckpointIO, read_checkpoint
from revzoo.training.keep import BestCheckpoint, LastCheckpoint


def saved_steps(tmp_path: Path, *, minutes: float, seconds_a_step: float) -> list[int]:
    """The steps at which a run of two epochs of four batches saves, on a clock of the test's."""
    clock, steps = [0.0], []

    class Tick(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            clock[0] += seconds_a_step

    class Spy(PlainCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
            steps.append(checkpoint["global_step"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock[0])
        runner = trainer(
            tmp_path,
            callbacks=[Tick(), LastCheckpoint(tmp_path, minutes=minutes)],
            plugins=[Spy()],
            enable_checkpointing=True,
        )
        runner.fit(Classifier(TinyNet()), loader(), loader())
    return steps


@pytest.mark.parametrize(
    ("minutes", "seconds", "expected"),
    [
        (10, 1, [4, 8]),  # short epochs: at their ends
        (10, 25, [3, 4, 7, 8]),  # longer ones: before the validation, too
        (1, 45, [2, 4, 6, 8]),  # every minute; 2 and 6 are followed by too little to save again
        (0.5, 31, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_how_often_is_saved(
    minutes: float, seconds: float, expected: list[int], tmp_path: Path
) -> None:
    assert saved_steps(tmp_path, minutes=minutes, seconds_a_step=seconds) == expected


def test_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="minutes=0"):
        LastCheckpoint(tmp_path, minutes=0)


def test_the_best_one_is_known_after_the_folder_has_moved(tmp_path: Path) -> None:
    def best(folder: Path) -> BestCheckpoint:
        return BestCheckpoint(
            dirpath=folder,
            filename="best",
            monitor="val/acc",
            mode="max",
            enable_version_counter=False,
        )

    callback = best(tmp_path / "a")
    runner = trainer(
        tmp_path, callbacks=[callback], plugins=[PlainCheckpointIO()], enable_checkpointing=True
    )
    runner.fit(Classifier(TinyNet()), loader(), loader())
    state = callback.state_dict()
    assert str(tmp_path) not in repr(state)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = best(tmp_path / "b")
    moved.load_state_dict(state)
    assert moved.best_model_score == callback.best_model_score
    assert read_checkpoint(moved.best_model_path)["global_step"] > 0
