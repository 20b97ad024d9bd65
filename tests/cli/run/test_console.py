"""The first and last lines of a run, and their format."""

import io
import json
import logging
import re
import shlex
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_images import image_folder
from small_run import QUICK, SMALL

from revzoo.cli.config import ConfigFiles, compose, quoted_if_needed
from revzoo.cli.main import main
from revzoo.cli.run.console import (
    LogFormat,
    _emulates_bfloat16,
    _length,
    _notes,
    _step,
    _weights,
    logged_to,
    logged_warnings,
)
from revzoo.cli.run.train import train
from revzoo.cli.terminal import short_path
from revzoo.models import create_model
from revzoo.training import Classifier


def record(level):
    return logging.LogRecord("revzoo.a.long.name", level, "f.py", 1, "step %d", (3,), None)


def test_the_prefix_is_short_and_names_levels_above_info():
    line = LogFormat(date=False).format(record(logging.INFO))
    assert len(line) == len("08:01:30 step 3")
    assert LogFormat(date=False).format(record(logging.WARNING)).endswith(" warning: step 3")
    assert len(LogFormat(date=True).format(record(logging.INFO))) == 26


def test_a_line_that_the_disk_refuses_is_dropped(tmp_path, monkeypatch, capsys):
    """Each line printed a traceback."""

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    root = logging.Logger("a root")
    monkeypatch.setattr(logging, "getLogger", lambda: root)
    monkeypatch.setattr("sys.stdout", Full())
    with logged_to(tmp_path / "train.log"):
        root.error("a line")
        assert capsys.readouterr().err == ""
        root.error("%d", "no number")
        assert "no number" in capsys.readouterr().err
    assert (tmp_path / "train.log").read_text().endswith(" error: a line\n")


def test_a_run_logs_its_description_and_its_figures(compose, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="revzoo"):
        figures = train(compose(*SMALL, "seed=7"), run_dir=tmp_path / "run")
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    opening = {line[:8].strip(): line[9:] for line in lines if len(line) > 9 and line[8] == " "}
    assert opening["model"].startswith("revnet38, ")
    assert opening["data"] == "Digits, 10 classes, images of 1x8x8"
    assert "1,293 to train, 144 to validate" in lines[2]
    assert opening["memory"] == "exact"
    assert opening["device"].startswith("cpu, float32, ")
    assert opening["train"] == "1 epoch, 64 images per step, sgd with lr 0.2, seed 7"
    assert opening["trained"].startswith("1 epoch, 3 steps in ")
    assert f"acc {figures['test/acc']:.4f}" in opening["test"]
    assert "best checkpoint" in opening["test"]
    assert opening["curves"].endswith(f"tensorboard --logdir {tmp_path / 'run'}")
    assert shutil.which(opening["curves"].split()[0])  # an existing program
    assert opening["predict"].endswith(f"predict {tmp_path / 'run'} IMAGES")
    assert all(len(line) <= 71 for line in lines if str(tmp_path) not in line)


def test_a_run_without_a_test_split_ends_with_a_command_that_works(
    compose, tmp_path, caplog, capsys
):
    """Its command lacked split=val, and the figures before it were of the last weights."""
    root = image_folder(tmp_path / "images", splits=("train", "val"))
    data = ("data=imagefolder", f"data.root={root}", "data.batch_size=16")
    run_dir = tmp_path / "run"
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*QUICK, *data, "trainer.limit_val_batches=null"), run_dir=run_dir)
    last = [line for line in caplog.messages if line.startswith(("val", "evaluate"))]
    figures, command = (line[9:] for line in last)
    assert figures.endswith(" (best checkpoint)")
    # nothing but the printed words
    words = shlex.split(command)
    main([*words[words.index("eval") :], "trainer=cpu"])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert figures.startswith(f"loss {printed['val/loss']}, acc {printed['val/acc']}")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["best"]["val/acc"] == pytest.approx(float(printed["val/acc"]), abs=1e-4)


def test_the_opening_says_how_images_are_read_and_shared(compose, tmp_path, caplog):
    """That eight images shared a crop stood in a comment of the configuration."""
    root = image_folder(tmp_path / "images")
    data = ("data=imagefolder", f"data.root={root}", "data.batch_size=16", "test=false")
    with caplog.at_level(logging.INFO, logger="revzoo"):
        options = (*data, "data.augment.chunk=8", "data.on_device=true")
        train(compose(*QUICK, *options), run_dir=tmp_path / "run")
    assert "1 MiB of images are on cpu" in caplog.text
    assert "transparency dropped" in caplog.text
    assert "each 8 images share a crop and a flip" in caplog.text


def test_a_run_with_unequal_classes_shows_the_balanced_accuracy(compose, tmp_path, caplog, capsys):
    root = image_folder(tmp_path / "images", splits=("train", "val"))
    for i in range(7, 20):
        (root / "train" / "light" / f"{i}.png").unlink()
    data = ("data=imagefolder", f"data.root={root}", "data.batch_size=8")
    options = ("optim.class_weights=balanced", "callbacks.best_checkpoint.monitor=val/balanced_acc")
    run_dir = tmp_path / "run"
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*QUICK, *data, *options), run_dir=run_dir)
    (line,) = [line for line in caplog.messages if line.startswith("val ")]
    assert re.fullmatch(r"val +loss [\d.]+, acc [\d.]+, balanced [\d.]+ \(best .*\)", line)
    assert len(line) <= 71
    main(["eval", f"ckpt={run_dir}", "split=val", "trainer=cpu"])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    best = json.loads((run_dir / "summary.json").read_text())["best"]
    assert best["val/balanced_acc"] == pytest.approx(float(printed["val/balanced_acc"]), abs=1e-4)
    assert list(printed)[:3] == ["val/loss", "val/acc", "val/balanced_acc"]
    module = Classifier.load_from_checkpoint(run_dir)
    assert module.optim.class_weights == "balanced"


@pytest.mark.parametrize(
    ("size", "told"),
    [(24, ["each epoch leaves out 16 (40 %), an incomplete batch; a smaller "]), (8, [])],
)
def test_a_run_says_how_many_images_it_leaves_out(size, told, compose, tmp_path, caplog):
    """Each epoch left out 16 of 40 images without a warning."""
    root = image_folder(tmp_path / "images", splits=("train", "val"))
    data = ("data=imagefolder", f"data.root={root}", f"data.batch_size={size}")
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*QUICK, *data), run_dir=tmp_path / "run")
    lines = [line.strip() for line in caplog.messages if "leaves out" in line]
    assert [line.partition("data.")[0] for line in lines] == told


@pytest.mark.parametrize(("images", "told"), [(3, "fewer images to validate"), (4, ""), (0, "")])
def test_a_run_says_if_it_validates_with_too_few_images(images, told):
    """One image of 60 chose the best checkpoint."""
    counts = {"num_classes": 4, "train_count": 64, "batch_size": 64}
    data = SimpleNamespace(val_count=images, task="classification", **counts)
    (*notes,) = _notes({"callbacks": {}}, SimpleNamespace(world_size=1), data)
    assert [note[: len(told)] for note in notes] == [told] * bool(told)


@pytest.mark.parametrize(
    ("group", "limit", "text"),
    [
        (1, 1.0, "64 images per step"),
        (4, 1.0, "256 images per step"),
        (8, 1.0, "512 images per step (256 in the last of an epoch)"),
        (64, 1.0, "1,280 images per step"),
        (64, 3, "192 images per step"),
        (2, 0.25, "128 images per step (64 in the last of an epoch)"),
    ],
)
def test_the_opening_tells_the_images_of_a_step(group, limit, text):
    """It multiplied by accumulate_grad_batches although an epoch has only 20 batches."""
    data = SimpleNamespace(batch_size=32, train_count=1293)
    trainer = SimpleNamespace(
        world_size=2, accumulate_grad_batches=group, limit_train_batches=limit
    )
    assert _step(trainer, data) == text


def test_the_weights_that_a_run_starts_from_are_named(compose, caplog):
    """It said ``from pretrained``."""
    model = create_model("irevnet13.digits", pretrained=True)
    spec = {"name": "irevnet13", "pretrained": True}
    assert _weights(spec, model) == "irevnet13.digits"
    assert _weights({**spec, "pretrained": False}, model) == ""
    assert _weights({**spec, "checkpoint_path": "a.safetensors"}, model) == "a.safetensors"
    model.entry = None  # of a network of a library
    spec = {"name": "torchvision:resnet50", "pretrained": True}
    assert _weights(spec, model).startswith("resnet50-")


@pytest.mark.parametrize(
    ("bits", "text"), [("4", "4 bits"), ("auto", "([1-8] to )?8 bits, chosen on random images")]
)
def test_a_network_made_reversible_says_so(compose, tmp_path, caplog, bits, text):
    options = ("model=resnet32", f"model.reversible_bits={bits}", "test=false")
    options += ("model.units=[3,3,3]",)
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*QUICK, *options), run_dir=tmp_path / "run")
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("model  ")]
    opening = r"model    resnet32, [\d,]+ parameters, 5 blocks reversible with "
    assert re.fullmatch(opening + text, line)
    lists = [m.split(None, 1)[0] for m in caplog.messages if "MiB an image, now" in m]
    assert lists == [f"stages.{i}.steps:" for i in range(3)]
    (saved,) = [m for m in caplog.messages if "training keeps" in m]
    assert saved.endswith("; model.reversible_runs=checkpoint recomputes the plain blocks, too")


def test_a_run_says_what_side_bits_and_recalibration_do(compose, tmp_path, caplog):
    options = ("model=resnet32", "model.reversible_bits=4", "test=false", "trainer.max_epochs=3")
    options += ("model.reversible_runs=all",)  # of single blocks, so none pays
    callbacks = ("callbacks.side_bits={epochs: 2}", "callbacks.batch_norm.recalibrate=2")
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*QUICK, *options, *callbacks), run_dir=tmp_path / "run")
    lines = [line for line in caplog.messages if line.startswith(("side bits", "BatchNorm"))]
    assert lines == [
        "BatchNorm: statistics of 2 batches of training images replace the loaded ones "
        "(callbacks.batch_norm.recalibrate)",
        "side bits: 6 in epoch 2/3 (callbacks.side_bits raises them to 8)",
        "side bits: 8 in epoch 3/3 (callbacks.side_bits raises them to 8)",
    ]


def test_a_warning_is_logged_once(caplog):
    with warnings.catch_warnings(), logged_warnings():
        for _ in range(2):
            with warnings.catch_warnings():  # as revzoo.training.quiet
                warnings.simplefilter("always")
                warnings.warn("first\n  line", RuntimeWarning, stacklevel=1)
                warnings.warn("second", stacklevel=1)
    assert caplog.messages == ["first line", "second"]


def test_a_plan_is_logged_by_its_modes(compose, tmp_path, caplog):
    """The first line listed auto's modes, the second one only invert."""
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*QUICK, "memory=auto", "test=false"), run_dir=tmp_path / "run")
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory  ")]
    assert re.fullmatch(r"memory   auto \((\d+ \w+(, )?)+\)", line), line


def test_threads_are_set_for_the_run(compose, tmp_path):
    seen = []
    wanted = 1 if torch.get_num_threads() > 1 else 2
    config = compose(*QUICK, f"threads={wanted}", "test=false")

    def record(*_):
        seen.append(torch.get_num_threads())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(record)
    try:
        train(config, run_dir=tmp_path / "run")
    finally:
        hook.remove()
    assert seen[-1] == wanted


def test_paths_are_short_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "outputs" / "a") == Path("outputs/a")
    assert short_path(Path("/etc")) == Path("/etc")


@pytest.mark.parametrize(
    ("epochs", "steps", "text"),
    [
        (30, 2000, "30 epochs or 2,000 steps"),
        (1, -1, "1 epoch"),
        (-1, 5, "5 steps"),
        (None, -1, "00:01:00:00 of time"),
    ],
)
def test_the_length_of_a_run(epochs, steps, text):
    """With both limits, only the epochs were named; with a time alone, -1 steps."""
    trainer = SimpleNamespace(max_epochs=epochs, max_steps=steps)
    assert _length(trainer, "00:01:00:00") == text


@pytest.mark.parametrize(
    "path",
    [
        *("a=1 b", "x,y", "run(1)", "it's", "r[2]", "r{3}", "${p}", "~r", "é", "plain/best.ckpt"),
        *("run", "2026", "1e3", "1_0", "null", "True", "Nan", r"a\'b", "a\\", "2026/1"),
    ],
)
def test_a_printed_override_gives_the_path_again(path):
    """Hydra reads many signs of a path in its own way."""
    override = f"ckpt={quoted_if_needed(path)}"
    assert compose([override], ConfigFiles("eval")).whole.ckpt == path


@pytest.mark.parametrize(
    ("found", "slow"),
    [
        ({"avx512_bf16": False, "amx_bf16": False}, True),
        ({"avx512_bf16": True, "amx_bf16": False}, False),
        ({"bf16": False}, True),  # ARM
        ({}, False),  # unknown
    ],
)
def test_bfloat16_that_a_cpu_emulates_is_noticed(found, slow, monkeypatch):
    """It is about eight times slower than float32 there, and nothing said so."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: found, raising=False)
    assert _emulates_bfloat16({"trainer": "bf16-mixed"}) is slow
    assert not _emulates_bfloat16({"trainer": "32-true"})
