"""The folder of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from revzoo.cli.config import compose
from revzoo.cli.run import train
from revzoo.cli.run.folder import new_folder


def test_runs_of_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs: list[Path] = []

    def run_job(*_: object, config: object, **options: object) -> SimpleNamespace:
        jobs.append(Path(config.hydra.run.dir))  # type: ignore[attr-defined]
        (jobs[-1] / "config.yaml").touch()
        return SimpleNamespace(return_value={})

    monkeypatch.setattr(train, "run_job", run_job)
    # the time stands still
    timed = "hydra.run.dir='runs/${now:x}'"
    for _ in range(3):
        composed = compose([timed])
        train.begin(composed.config, composed.whole, overrides=[])
    assert jobs == [Path("runs", name) for name in ("x", "x-2", "x-3")]
    # a folder that the user names is not replaced by another
    composed = compose(["hydra.run.dir=runs/x"])
    with pytest.raises(SystemExit, match="already holds a run"):
        train.begin(composed.config, composed.whole, overrides=[])
    assert new_folder(tmp_path / "runs" / "x").name == "x-4"


def test_the_default_name_is_short() -> None:
    whole = compose([]).whole
    assert len(str(whole.hydra.run.dir)) == len("outputs/revnet38-digits/2026-01-01_00-00-00")
