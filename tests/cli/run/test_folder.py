"""The folder of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from revzoo.cli.config import compose
from revzoo.cli.run import train
from revzoo.cli.run.folder import new_folder
from revzoo.cli.terminal import ConfigError


def test_runs_of_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs: list[Path] = []

    def run(config: object, *, run_dir: Path, **options: object) -> dict[str, float]:
        jobs.append(run_dir.relative_to(tmp_path))
        (run_dir / "config.yaml").touch()
        return {}

    monkeypatch.setattr(train, "train", run)
    monkeypatch.setattr("sys.argv", ["train.py"])
    # the time stands still
    timed = "hydra.run.dir='runs/${now:x}'"
    for _ in range(3):
        composed = compose([timed])
        train.begin(composed.config, composed.whole, overrides=[])
    assert jobs == [Path("runs", name) for name in ("x", "x-2", "x-3")]
    # for the further processes of a distributed run
    assert sys.argv == ["train.py", *(f"hydra.run.dir='{job}'" for job in jobs)]
    # a folder that the user names is not replaced by another
    composed = compose(["hydra.run.dir=runs/x"])
    with pytest.raises(ConfigError, match="already holds a run"):
        train.begin(composed.config, composed.whole, overrides=[])
    assert new_folder(tmp_path / "runs" / "x").name == "x-4"


def test_the_default_name_is_short() -> None:
    whole = compose([]).whole
    assert len(str(whole.hydra.run.dir)) == len("outputs/revnet38-digits/2026-01-01_00-00-00")
