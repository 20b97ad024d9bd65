"""The GPU kit: each command reports, failures and missing time are named."""

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

import revzoo

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
    code, lines = kit.start("--stages", "1", "--seconds", "1")
    assert code == 1
    assert lines[1] == "bad: skipped, 1 s were left"


def test_the_same_folder_continues(kit, monkeypatch, tmp_path):
    script = tmp_path / "job.py"
    monkeypatch.setattr(kit, "HERE", tmp_path)
    jobs = [kit.Job(name, 30, "job.py", (), ()) for name in ("a", "b")]
    monkeypatch.setattr(kit, "STAGES", {1: (jobs[0],), 2: (jobs[1],)})
    script.write_text("")
    kit.start("--dry", "--stages", "1")
    script.write_text("raise SystemExit(3)")
    assert kit.start("--dry", "--stages", "1")[0] == 0  # not again
    assert kit.start("--stages", "1,2")[0] == 1  # a dry run is no run
    script.write_text("")
    assert kit.start("--stages", "2")[0] == 0
    assert kit.start("--stages", "1,2")[0] == 0


def test_an_unknown_stage(kit, capsys):
    with pytest.raises(SystemExit):
        kit.start("--stages", "6")
    assert "--stages 6: expected some of 1, 2, 3, 4, 5" in capsys.readouterr().err


def test_a_training_needs_images_and_resumes(kit, monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys; print(*sys.argv[1:]); raise SystemExit('--resume' not in sys.argv)"
    )
    monkeypatch.setattr(kit, "HERE", tmp_path)
    job = kit.Job("recipe", 30, "train.py", ("data.root={images}", "hydra.run.dir={run}"), ())
    monkeypatch.setattr(kit, "STAGES", {1: (job,)})
    assert kit.start("--stages", "1")[1] == [
        "recipe: skipped, needs --images DIR with train/CLASS and test/CLASS"
    ]
    assert kit.start("--stages", "1", "--images", "cifar")[0] == 1
    run = tmp_path / "recipe"
    assert (tmp_path / "recipe.md").read_text() == f"data.root=cifar hydra.run.dir={run}\n"
    run.mkdir()
    (run / "config.yaml").touch()
    assert kit.start("--stages", "1", "--images", "cifar")[0] == 0
    assert (tmp_path / "recipe.md").read_text() == f"--resume {run}\n"


class Parsed(Exception):
    """The options that a script got."""


def options_of(script, words, monkeypatch):
    def parse(parser):
        raise Parsed(real(parser))

    real = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [script, *words])
        with pytest.raises(Parsed) as found:
            runpy.run_path(str(SCRIPT.parent / script), run_name="__main__")
    return found.value.args[0]


@pytest.mark.parametrize("stage", [1, 2, 3, 4, 5])
def test_every_job_has_options_that_its_script_takes(kit, stage, compose, monkeypatch):
    """On a GPU and dry; the networks exist, and take the modes."""
    for job in kit.STAGES[stage]:
        for words in (job.arguments, job.dry):
            if job.script == "../train.py":
                compose(*[word.format(images="DIR", run="RUN") for word in words])
            elif job.script:
                options = options_of(job.script, words, monkeypatch)
                for name in getattr(options, "models", []):
                    bits = {"reversible_bits": 4, "reversible_size": 224} if ":" in name else {}
                    for mode in getattr(options, "modes", ["exact"]):
                        with torch.device("meta"):
                            revzoo.create_model(name, memory=mode, **bits)


@pytest.mark.slow
def test_a_dry_run_on_the_cpu(kit):
    code, lines = kit.start("--dry", "--seconds", "3000", "--stages", "1,2,3,4,5")
    assert code == 0, lines
