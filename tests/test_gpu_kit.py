"""The GPU kit: each command reports, failures and missing time are named."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_kit.py"


@pytest.fixture
def kit(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_kit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_kit", module)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_kit.py", "--out", str(tmp_path), *arguments])
        code = module.main()
        return code, (tmp_path / "summary.txt").read_text().splitlines()

    module.start = run
    return module


def test_every_outcome_is_named(kit, monkeypatch, tmp_path):
    (tmp_path / "good.py").write_text("print('a report')")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "long.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    monkeypatch.setattr(kit, "HERE", tmp_path)
    jobs = [kit.Job(n, s, f"{n}.py", (), ()) for n, s in (("good", 30), ("bad", 30), ("long", 2))]
    monkeypatch.setattr(kit, "STAGES", {1: tuple(jobs), 2: (jobs[0],)})
    code, lines = kit.start("--stages", "1")
    assert code == 1
    assert [line.rpartition(", ")[0].rpartition(", ")[0] for line in lines] == [
        "good: ok",
        "bad: exit code 3",
        "long: stopped after 2 s",
    ]
    assert (tmp_path / "good.md").read_text() == "a report\n"
    assert (tmp_path / "long.md").read_text() == "begun\n"
    assert kit.start("--stages", "2")[0] == 0
    code, lines = kit.start("--stages", "2", "--seconds", "1")
    assert (code, lines) == (1, ["good: skipped, 1 s were left"])


def test_an_unknown_stage(kit, capsys):
    with pytest.raises(SystemExit):
        kit.start("--stages", "6")
    assert "--stages 6: expected some of 1, 2, 3, 4, 5" in capsys.readouterr().err


def test_a_training_needs_images_and_resumes(kit, monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(*sys.argv[1:])")
    monkeypatch.setattr(kit, "HERE", tmp_path)
    job = kit.Job("recipe", 30, "train.py", ("data.root={images}", "hydra.run.dir={run}"), ())
    monkeypatch.setattr(kit, "STAGES", {1: (job,)})
    assert kit.start("--stages", "1")[1] == [
        "recipe: skipped, needs --images DIR with train/CLASS and test/CLASS"
    ]
    assert kit.start("--stages", "1", "--images", "cifar")[0] == 0
    run = tmp_path / "recipe"
    assert (tmp_path / "recipe.md").read_text() == f"data.root=cifar hydra.run.dir={run}\n"
    run.mkdir()
    (run / "config.yaml").touch()
    kit.start("--stages", "1", "--images", "cifar")
    assert (tmp_path / "recipe.md").read_text() == f"--resume {run}\n"


def test_scripts_exist(kit):
    for jobs in kit.STAGES.values():
        for job in jobs:
            assert not job.script or (SCRIPT.parent / job.script).exists()


@pytest.mark.slow
def test_a_dry_run_on_the_cpu(kit):
    code, lines = kit.start("--dry", "--seconds", "3000", "--stages", "1,2,3,4,5")
    assert code == 0, lines
