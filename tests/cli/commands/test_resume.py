import csv
import json
import logging
import os
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml
from resumed import resume
from small_images import image_folder
from small_run import QUICK
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from revzoo.cli.main import main
from revzoo.cli.run import train as train_module
from revzoo.cli.run.folder import locked, moved, newest_run, take_paths
from revzoo.cli.run.train import check_same_run, train
from revzoo.cli.terminal import ConfigError
from revzoo.layers.side_bits import SideBits
from revzoo.models import pretrained
from revzoo.training import resume as stop_module
from revzoo.training.checkpoint.files import CheckpointError, read_checkpoint
from revzoo.training.checkpoint.restore import restore
from revzoo.training.resume import GracefulStop
from revzoo.weights.source import LAST, PREVIOUS

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = (
    *QUICK,
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=4",
    "logger=csv",
    "callbacks.drift.every_n_steps=2",
)
TIMES = ("footprint/epoch_seconds", "footprint/images_per_second", "footprint/peak_bytes")


def go_on(run_dir, *arguments):
    flag = "--allow-precision-change"
    overrides = [argument for argument in arguments if argument != flag]
    return resume(run_dir, overrides, allow_precision_change=flag in arguments)


def refused(run_dir, *arguments):
    with pytest.raises(SystemExit) as end:
        go_on(run_dir, *arguments)
    message = str(end.value)
    assert message.startswith("revzoo: ")
    return message


class StopsInStep5(GracefulStop):
    def on_before_backward(self, trainer, *args):
        if trainer.global_step == 5:
            self.requested = 15


@pytest.fixture(scope="module")
def stopped_runs():
    """Runs by their overrides, for :func:`stopped`."""
    return {}


@pytest.fixture
def stopped(compose, tmp_path, tmp_path_factory, stopped_runs, monkeypatch, request):
    """A run that SIGTERM stopped in the middle of its second epoch; a parameter overrides."""
    overrides = (*SMALL, *getattr(request, "param", ()))
    if overrides not in stopped_runs:
        run_dir = tmp_path_factory.mktemp("stopped")
        with monkeypatch.context() as patch:
            patch.setattr(train_module, "GracefulStop", StopsInStep5)
            with pytest.raises(SystemExit) as end:
                train(compose(*overrides), run_dir=run_dir, overrides=overrides)
        assert end.value.code == 143
        stopped_runs[overrides] = run_dir
    return shutil.copytree(stopped_runs[overrides], tmp_path / "stopped")


def rows(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        found = [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]
    return [row for row in found if any(v for k, v in row.items() if k not in ("step", "epoch"))]


def without_times(figures):
    return {name: value for name, value in figures.items() if name not in TIMES}


def test_a_resumed_run_equals_one_that_was_not_stopped(stopped, compose, tmp_path):
    summary = json.loads((stopped / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (6, "stopped by SIGTERM")
    assert "val/acc" in summary["metrics"]
    figures = go_on(stopped)
    whole = tmp_path / "whole"
    assert without_times(figures) == without_times(train(compose(*SMALL), run_dir=whole))
    for name in (LAST, "best.ckpt"):
        states = [read_checkpoint(d / "checkpoints" / name)["state_dict"] for d in (stopped, whole)]
        assert all(map(torch.equal, states[0].values(), states[1].values()))
    assert rows(stopped) == rows(whole)
    assert json.loads((stopped / "summary.json").read_text())["stopped"] is None
    sessions = [json.loads(line) for line in (stopped / "sessions.jsonl").read_text().splitlines()]
    assert [s["from_step"] for s in sessions] == [0, 6]
    assert sessions[0]["overrides"] == list(SMALL)
    assert sessions[0]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert set(sessions[0]["git"] or {"commit": 0, "changed": 0}) == {"commit", "changed"}


@pytest.mark.parametrize("stopped", [("optim.class_weights=balanced",)], indirect=True)
def test_a_resumed_run_weighs_the_classes_alike(stopped, compose, tmp_path):
    go_on(stopped)
    train(compose(*SMALL, "optim.class_weights=balanced"), run_dir=tmp_path / "whole")
    train(compose(*SMALL), run_dir=tmp_path / "equal")
    folders = (stopped, tmp_path / "whole", tmp_path / "equal")
    states = [read_checkpoint(d / "checkpoints" / LAST)["state_dict"] for d in folders]
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    assert not all(map(torch.equal, states[0].values(), states[2].values()))


ANNEALED = ("model=resnet32", "model.reversible_bits=2", "model.reversible_runs=all")
ANNEALED += ("callbacks.side_bits={epochs: 1}",)


@pytest.mark.parametrize("stopped", [ANNEALED], indirect=True)
def test_a_run_resumes_after_its_side_bits_have_risen(stopped, compose, tmp_path):
    whole = tmp_path / "whole"
    figures = train(compose(*SMALL, *ANNEALED), run_dir=whole)
    assert without_times(go_on(stopped)) == without_times(figures)
    states = [read_checkpoint(run / "checkpoints" / LAST) for run in (stopped, whole)]
    weights = [state["state_dict"].values() for state in states]
    assert all(map(torch.equal, *weights))
    assert [state["hyper_parameters"]["model"]["reversible_bits"] for state in states] == [8, 8]
    # as revzoo eval and predict load it
    bits = {
        step.bits
        for step in restore(stopped / "checkpoints" / LAST).network.modules()
        if isinstance(step, SideBits)
    }
    assert bits == {8}


def test_pictures_of_finished_epochs_are_kept(compose, tmp_path, monkeypatch):
    class StopsAtEpochEnd(GracefulStop):
        def on_train_epoch_end(self, trainer, pl_module):
            self.requested = 15
            super().on_train_epoch_end(trainer, pl_module)

    shown = [f"callbacks.{name}.every_n_epochs=1" for name in ("samples", "reconstructions")]
    short = ("trainer.max_epochs=2", "trainer.limit_train_batches=1", "data.batch_size=16")
    model = ("model=irevnet13", "model.units=[1,1]", "model.channels=[4,16]", "memory=exact")
    others = ("callbacks.footprint=null", "callbacks.confusion=null")
    overrides = (*SMALL[:2], *model, *short, *shown, *others)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "GracefulStop", StopsAtEpochEnd)
        with pytest.raises(SystemExit):
            train(compose(*overrides), run_dir=stopped)
    go_on(stopped)
    train(compose(*overrides), run_dir=whole)
    assert rows(stopped) == rows(whole)
    events = EventAccumulator(str(stopped / "irevnet13-digits"))
    events.Reload()
    for tag in ("watch/samples", "watch/reconstructions"):
        assert [image.step for image in events.Images(tag)] == [0, 1], tag


def change(path, key, value):
    """Replace the value of a checkpoint at ``key``, a path of keys separated by ``/``."""
    state = read_checkpoint(path)
    *parents, name = key.split("/")
    reduce(getitem, parents, state)[name] = value
    torch.save(state, path)


def files(run_dir):
    """The checkpoints of a run, and the configuration."""
    paths = (*(run_dir / "checkpoints").iterdir(), run_dir / "config.yaml")
    return {path.name: path.read_bytes() for path in paths}


DAMAGE = ("state_dict/model.fc.bias", torch.full((10,), float("nan")))


def test_a_state_with_wrong_parts_is_damaged(stopped, caplog):
    last, previous = (stopped / "checkpoints" / name for name in (LAST, PREVIOUS))
    change(last, *DAMAGE)
    good = previous.read_bytes()
    change(previous, "state_dict/model.fc.bias", torch.ones(3))
    before = files(stopped)
    message = refused(stopped)
    assert f"{last} has NaN or Inf in model.fc.bias" in message
    assert f"the one before it, too: the tensors of {previous} do not fit the model" in message
    assert len(message.splitlines()) == 1
    assert files(stopped) == before
    previous.write_bytes(good)
    assert "test/acc" in go_on(stopped)
    assert f"; resuming from {previous}" in caplog.text
    assert last.with_name("last.ckpt.damaged").read_bytes() == before[LAST]
    assert json.loads((stopped / "summary.json").read_text())["steps"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hyper_parameters/_target_": "os.system"}, "hyperparameter _target_ is refused"),
        ({"hyper_parameters/model/_target_": "os.system"}, "takes no keyword '_target_'"),
        ({"hyper_parameters/optim/_target_": "os.system"}, "last.ckpt: optim._target_: no such"),
        ({"hyper_parameters/model/units": [1, 1, 2]}, "differ in model"),
        ({"CIFAR10": {}}, "differ in data: Digits and Digits, CIFAR10"),
        ({"Digits/classes": list("abcdefghij")}, "only in the data: 0, 1, 2"),
        (
            {
                "Digits/in_chans": 3,
                "Digits/normalisation": {"mean": [0.0] * 3, "std": [1.0] * 3},
            },
            "trained on images of 3 channels, these have 1",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_stays(changes, message, stopped):
    for key, value in changes.items():
        change(stopped / "checkpoints" / LAST, key, value)
    before = files(stopped)
    assert message in refused(stopped, "memory=store")
    assert files(stopped) == before


def test_other_images_and_classes_are_refused(compose, tmp_path):
    data, run_dir = image_folder(tmp_path / "data"), tmp_path / "run"
    overrides = (*QUICK, "data=imagefolder", f"data.root={data}", "data.batch_size=8")
    train(compose(*overrides), run_dir=run_dir)
    before = files(run_dir)
    shutil.copy(data / "train/dark/0.png", data / "train/dark/20.png")
    message = refused(run_dir)
    assert "36 to train, now 37" in message
    assert f"train +model.checkpoint_path={run_dir / 'checkpoints' / LAST}" in message
    for split in ("train", "test"):
        shutil.copytree(data / split / "dark", data / split / "grey")
    message = refused(run_dir)
    assert "trained on 2 classes dark, light; this data has 3: dark, grey, light" in message
    assert files(run_dir) == before


def test_the_data_may_move(tmp_path, monkeypatch, capsys):
    """A run recorded a relative root, and neither it nor an evaluation took another one."""
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "data")
    options = ("data=imagefolder", "data.root=data", "data.batch_size=8", "hydra.run.dir=run")
    main(["train", *QUICK, *options])
    run_dir, moved = tmp_path / "run", tmp_path / "moved"
    assert config_of(run_dir)["data"]["root"] == str(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "test/acc" in go_on(run_dir)
    (tmp_path / "data").rename(moved)
    assert "does not exist: set data.root" in refused(run_dir)
    assert "test/acc" in go_on(run_dir, "data.root=../moved")
    moved.rename(tmp_path / "again")
    capsys.readouterr()
    main(["eval", f"ckpt={run_dir}", "data.root=../again", "trainer=cpu"])
    assert "test/acc" in capsys.readouterr().out


CPU_IN_FP32 = ("trainer.accelerator='cpu'", "precision=fp32")


def test_the_run_may_move_to_another_device(stopped):
    """A run that began with trainer=gpu could not go on where there is no GPU."""
    edited = config_of(stopped)
    edited["trainer"]["accelerator"] = "gpu"
    (stopped / "config.yaml").write_text(yaml.safe_dump(edited))
    if not torch.cuda.is_available():
        assert "use trainer.accelerator=cpu or auto" in refused(stopped)
    machine = ("trainer.cuda_graph=false", "data.on_device=true", "data.num_workers=1")
    go_on(stopped, "trainer.accelerator=cpu", *machine)
    edited["trainer"] |= {"accelerator": "cpu", "cuda_graph": False}
    edited["data"] |= {"on_device": True, "num_workers": 1}
    assert config_of(stopped) == edited
    assert "a resumed run keeps its configuration" in refused(stopped, "trainer=cpu")
    message = refused(stopped, "trainer.accelerator=tpu")
    assert message.startswith("revzoo: trainer.accelerator=tpu: expected one of")
    if not torch.cuda.is_available():
        edited["precision"]["trainer"] = "16-mixed"
        (stopped / "config.yaml").write_text(yaml.safe_dump(edited))
        assert "needs a GPU" in refused(stopped)
        assert "--allow-precision-change" in refused(stopped, *CPU_IN_FP32)
        assert "test/acc" in go_on(stopped, *CPU_IN_FP32, "--allow-precision-change")


def test_the_new_place_has_the_grammar_of_overrides(tmp_path):
    given = ["memory=store", "data.root='a,b'", "data.table=c.csv"]
    paths = {"data.root": "a,b", "data.table": "c.csv"}
    assert take_paths(given) == (["memory=store"], paths)
    old = {"_target_": "revzoo.data.Table", "root": "old", "table": "old"}
    new = moved(old, {**paths, "data.root": str(tmp_path / "a,b")})
    assert new == {**old, "root": str(tmp_path / "a,b"), "table": str(Path("c.csv").absolute())}
    assert moved({"root": "old"}, {"data.root": "s3://bucket/x"})["root"] == "s3://bucket/x"
    address = {"data.endpoint_url": "host:9000"}  # it became a path
    assert moved({"endpoint_url": "old"}, address) == {"endpoint_url": "host:9000"}
    with pytest.raises(ConfigError, match="the data of this run have no table"):
        moved({"root": "old"}, {"data.table": "c.csv"})
    for value in ("", "null", "${oc.env:HOME}"):
        with pytest.raises(ConfigError, match=r"expected (the path of a folder|a value after =)"):
            take_paths([f"data.root={value}"])


def test_the_time_covers_all_sessions(stopped, caplog):
    path = stopped / "summary.json"
    summary = json.loads(path.read_text())
    assert 0 < summary["train_seconds"] < 100
    path.write_text(json.dumps({**summary, "train_seconds": 1000.0}))
    go_on(stopped)
    first = json.loads(path.read_text())["train_seconds"]
    assert 1000 < first < 1100
    go_on(stopped)  # all epochs are trained
    assert first <= json.loads(path.read_text())["train_seconds"] < 1100
    path.write_text("{}")
    go_on(stopped)
    assert f"{path} lacks the training time so far" in caplog.text
    assert 0 <= json.loads(path.read_text())["train_seconds"] < 100


def config_of(run_dir):
    return yaml.safe_load((run_dir / "config.yaml").read_text())


def test_the_memory_mode_may_change_and_stays(stopped):
    before = config_of(stopped)
    figures = go_on(stopped, "memory=store")
    assert "test/acc" in figures
    assert config_of(stopped) == {**before, "memory": {"mode": "store"}}
    assert without_times(go_on(stopped)) == without_times(figures)
    assert config_of(stopped)["memory"]["mode"] == "store"


@pytest.mark.parametrize("stopped", [("memory=auto",)], indirect=True)
def test_a_resumed_run_keeps_its_plan(stopped, caplog):
    memory = config_of(stopped)["memory"]
    assert memory["plan"]
    with caplog.at_level("INFO"):
        go_on(stopped)
    assert "resumed  at epoch 2/2, after step 6, from" in caplog.text
    assert "train    2 epochs in all, " in caplog.text
    assert "memory=auto" not in caplog.text, "planned again"
    assert config_of(stopped)["memory"] == memory
    assert pretrained.log.level == logging.NOTSET, "later models would load in silence"


@pytest.mark.parametrize("stopped", [("memory=budget", "memory.bytes=9MiB")], indirect=True)
def test_another_precision_makes_another_plan(stopped, caplog):
    """It kept the plan of the first precision, whose peak was above the budget."""
    before = config_of(stopped)["memory"]
    with caplog.at_level("INFO"):
        go_on(stopped, "precision=fp64", "--allow-precision-change")
    assert "plans again, since the run has a different precision" in caplog.text
    after = config_of(stopped)["memory"]
    assert after["bytes"] == before["bytes"]
    assert after["plan"] != before["plan"]


def test_a_run_resumes_within_a_budget(stopped):
    """``memory.bytes`` was refused with ``memory=budget``, and missed without."""
    assert "memory.bytes is needed" in refused(stopped, "memory=budget")
    assert "add memory=budget" in refused(stopped, "memory=exact", "memory.bytes=5MiB")
    assert "test/acc" in go_on(stopped, "memory=budget", "memory.bytes=5MiB")
    memory = config_of(stopped)["memory"]
    assert (memory["mode"], memory["bytes"]) == ("budget", "5MiB")
    assert memory["plan"]


def test_the_precision_changes_only_with_its_option(stopped):
    before = (stopped / "config.yaml").read_bytes()
    assert "add --allow-precision-change" in refused(stopped, "precision=bf16")
    assert (stopped / "config.yaml").read_bytes() == before
    figures = go_on(stopped, "precision=bf16", "--allow-precision-change")
    assert config_of(stopped)["precision"]["trainer"] == "bf16-mixed"
    assert without_times(go_on(stopped)) == without_times(figures)
    assert config_of(stopped)["precision"]["trainer"] == "bf16-mixed"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=1", "a resumed run keeps its configuration"),
        ("trainer.max_epochs=1", "trainer.max_epochs=1: the run has 2, and can only become longer"),
        ("trainer.max_steps=0", "trainer.max_steps=0: expected"),
        ("memory=nothing", "no such option"),
        ("data.root=DIR", "the data of this run have no folder"),
    ],
)
def test_nothing_else_may_change(override, message, stopped):
    before = sorted(p.name for p in stopped.rglob("*"))
    assert message in refused(stopped, override)
    assert sorted(p.name for p in stopped.rglob("*")) == before


def test_another_number_of_images_in_a_step_is_refused_before_processes_start(stopped, monkeypatch):
    """All processes started, and each printed the error."""
    monkeypatch.setattr(pl.Trainer, "fit", None)
    message = refused(
        stopped, "trainer.accelerator=cpu", "trainer.strategy=ddp", "trainer.devices=2"
    )
    assert "images per step of all processes, this run has" in message


@pytest.mark.parametrize(
    ("stopped", "end", "key"),
    [
        ((), "epoch 2 of 2", "trainer.max_epochs"),
        (("trainer.max_epochs=-1", "trainer.max_steps=7"), "step 7 of 7", "trainer.max_steps"),
    ],
    indirect=["stopped"],
)
def test_a_finished_run_says_so(end, key, stopped, caplog):
    """It said "resuming at step 8", but not that the run had ended."""
    figures = go_on(stopped)
    assert "nothing was trained" not in caplog.text
    before = json.loads((stopped / "summary.json").read_text())
    caplog.clear()
    assert without_times(go_on(stopped)) == without_times(figures)
    after = json.loads((stopped / "summary.json").read_text())
    assert without_times(after["metrics"]) == without_times(before["metrics"])
    assert (after["epochs"], after["steps"]) == (before["epochs"], before["steps"])
    assert after["train_seconds"] >= before["train_seconds"]
    *_, line = caplog.messages
    assert line.startswith(f"the run was finished ({end}): nothing was trained. To train on: ")
    assert line.endswith(f" train --resume {stopped} {key}=N")


def test_a_run_trains_longer(stopped, compose, tmp_path, caplog):
    """A run that went well could only begin again, with other weights and in another folder."""
    with caplog.at_level("INFO"):
        go_on(stopped, "trainer.max_epochs=3")
    assert "stretched from 8 to 12 steps" in caplog.text
    assert json.loads((stopped / "summary.json").read_text())["steps"] == 12
    train(compose(*SMALL, "trainer.max_epochs=3"), run_dir=tmp_path / "whole")
    assert config_of(stopped) == config_of(tmp_path / "whole")
    found, expected = (
        [row["lr/weights"] for row in rows(run) if row.get("lr/weights")][6:]
        for run in (stopped, tmp_path / "whole")
    )
    assert found == expected
    assert "finished (epoch 3 of 3)" not in caplog.text
    with caplog.at_level("INFO"):
        go_on(stopped, "trainer.max_epochs=3")  # as the script of a batch system repeats it
    assert "finished (epoch 3 of 3)" in caplog.text


def test_last_is_the_run_that_was_started_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no run below .*outputs: give the folder"):
        newest_run(Path("last"))
    for age, name in enumerate(("a/1", "b/3", "b/2", "b/broken")):
        (run := tmp_path / "outputs" / name).mkdir(parents=True)
        (run / "sessions.jsonl").touch()
        os.utime(run / "sessions.jsonl", (1000 - age, 1000 - age))
        if name != "b/broken":
            (run / "config.yaml").touch()
    monkeypatch.setattr("sys.argv", ["train.py"])
    outputs = tmp_path / "outputs"
    assert newest_run(Path("last")) == outputs / "a" / "1"
    assert "resuming outputs/a/1, the newest of 3 runs below outputs" in capsys.readouterr().out
    assert newest_run(outputs / "b") == outputs / "b" / "3"
    assert newest_run(outputs / "b" / "2") == outputs / "b" / "2"
    assert newest_run(tmp_path / "nothing") == tmp_path / "nothing"  # an error names it later


def test_a_checkpoint_is_answered_with_the_folder_of_its_run(stopped):
    message = refused(stopped / "checkpoints" / "last.ckpt")
    assert f"last.ckpt: expected the folder of the run, --resume {stopped}" in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: revnet38", "name: revnet110", "differ in model"),
        ("train_batches: 4", "train_batches: 3", "of 8 optimiser steps, this run has 6"),
        ("revzoo.data.Digits", "antigravity.open", "data._target_=antigravity.open: expected one"),
    ],
)
def test_an_edited_configuration_is_refused_and_stays(old, new, message, stopped):
    path = stopped / "config.yaml"
    path.write_text(path.read_text().replace(old, new))
    before = (stopped / "metrics.csv").read_bytes(), path.read_bytes()
    assert message in refused(stopped, "memory=store")
    assert ((stopped / "metrics.csv").read_bytes(), path.read_bytes()) == before


def test_options_newer_than_the_checkpoint_are_ignored(compose, tmp_path):
    config = compose()
    model = {**config["model"], "num_classes": 10, "in_chans": 1}
    optim = {key: value for key, value in config["optim"].items() if key != "decay_all"}
    state, paths = {"model": model, "optim": optim}, (tmp_path / "last.ckpt", tmp_path)
    check_same_run(config, {"hyper_parameters": state}, *paths)
    kept = {"model": model, "optim": {**optim, "weight_decay": 0.1}}
    with pytest.raises(CheckpointError, match="differ in optim"):
        check_same_run(config, {"hyper_parameters": kept}, *paths)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no "),
        ("a: [", "not YAML"),
        ("[1]", "holds no configuration"),
        ("a: 1", "there is no option 'a'"),
        ("model: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_a_folder_without_a_configuration_is_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert message in refused(tmp_path)


def test_a_run_without_a_checkpoint_starts_from_the_beginning(stopped, compose, tmp_path, caplog):
    """Without last.ckpt alone, the first epoch overwrote best.ckpt."""
    best = stopped / "checkpoints" / "best.ckpt"
    content = best.read_bytes()
    for path in {*best.parent.iterdir()} - {best}:
        path.unlink()
    figures = go_on(stopped, "memory=store")
    assert "the run starts from the beginning" in caplog.text
    assert best.with_name("best.ckpt.earlier").read_bytes() == content
    whole = train(compose(*SMALL, "memory=store"), run_dir=tmp_path / "whole")
    assert without_times(figures) == without_times(whole)
    assert rows(stopped) == rows(tmp_path / "whole")
    assert config_of(stopped) == config_of(tmp_path / "whole")


def test_a_stop_before_the_first_checkpoint_says_so(compose, tmp_path, monkeypatch, caplog):
    class StopsInValidation(GracefulStop):
        def on_validation_start(self, *args):
            self.requested = 15

    monkeypatch.setattr(stop_module, "PATIENCE", 0.0)
    monkeypatch.setattr(train_module, "GracefulStop", StopsInValidation)
    with pytest.raises(SystemExit) as end:
        train(compose(*SMALL), run_dir=tmp_path)
    assert end.value.code == 143
    assert list(tmp_path.glob("checkpoints/*.ckpt")) == []
    assert f"--resume {tmp_path} (no checkpoint yet: from the start)" in caplog.text


def test_a_folder_is_used_by_one_program_at_a_time(stopped):
    with locked(stopped):
        message = refused(stopped)
    assert f"{stopped} is in use by process {os.getpid()} on " in message
    assert f"kill {os.getpid()}" in message
    assert "test/acc" in go_on(stopped)


@pytest.mark.parametrize("option", ["--cfg=job", "-m", "--config-name=other"])
def test_options_of_new_runs_are_refused(option, tmp_path):
    """They were ignored: --cfg job trained instead of printing."""
    with pytest.raises(SystemExit, match="a resumed run has its configuration in its folder"):
        main(["train", "--resume", str(tmp_path), option])


def test_a_repeated_command_begins_the_run_and_resumes_it(tmp_path, monkeypatch):
    """As torchrun and SLURM start a program again."""
    run_dir = tmp_path / "run"
    command = ["train", "--auto-resume", f"hydra.run.dir={run_dir}", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "GracefulStop", StopsInStep5)
        with pytest.raises(SystemExit, match="143"):
            main(command)
    with pytest.raises(SystemExit, match="holds a run of other options"):
        main([*command, "seed=1"])
    main(command)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (8, None)
    _, again = (run_dir / "sessions.jsonl").read_text().splitlines()
    assert json.loads(again)["from_step"] == 6
