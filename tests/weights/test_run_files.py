from __future__ import annotations

from pathlib import Path

import pytest

from revzoo.weights.source import best_of_run, checkpoint_of


@pytest.mark.parametrize("name", ["run", "checkpoints"])
def test_the_folder_of_a_run_and_the_one_inside_stand_for_the_best_checkpoint(
    name: str, tmp_path: Path
) -> None:
    best = tmp_path / name / "checkpoints" / "best.ckpt"
    best.parent.mkdir(parents=True)
    best.touch()
    assert best_of_run(tmp_path / name) == best
    assert best_of_run(best.parent) == best
    assert best_of_run(best) is None
    assert checkpoint_of(best) == best
    assert checkpoint_of(tmp_path / name) == best
    assert best_of_run(tmp_path / "other") is None
