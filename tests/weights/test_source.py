from __future__ import annotations

from pathlib import Path

import pytest

from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.source import best_of_run, checkpoint_of, resolve_source


@pytest.mark.parametrize("missing", ["outputs/nothing", "nothing.ckpt"])
def test_a_missing_path_says_all_that_is_expected(missing: str) -> None:
    """The message named files only, but a run's folder and a name of weights are valid, too."""
    message = f"no weights, file or folder '{missing}'. Expected a .ckpt .*, the folder of a run or"
    with pytest.raises(UnknownWeightsError, match=message):
        resolve_source(missing)


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
