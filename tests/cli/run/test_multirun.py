from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from revzoo.cli.run import multirun


def test_jobs_have_the_configuration_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(multirun, "run_program", lambda command: started.append(command) or 0)
    named = ["--config-dir", "mine", "--config-name=own"]
    monkeypatch.setattr("sys.argv", ["train.py", *named, "-m", "seed=0,1"])
    overrides = {"task": ["seed=1"], "hydra": ["hydra.mode=MULTIRUN", "hydra.verbose=true"]}
    hydra_cfg: Any = OmegaConf.create({"overrides": overrides})
    multirun.run_job(hydra_cfg, tmp_path)
    ((*_, name_option, name, dir_option, folder, job, own, run_dir),) = started
    assert (name_option, name, dir_option, folder) == (
        "--config-name",
        "own",
        "--config-dir",
        "mine",
    )
    assert (job, own) == ("seed=1", "hydra.verbose=true")
    assert run_dir == f"hydra.run.dir='{tmp_path}'"
