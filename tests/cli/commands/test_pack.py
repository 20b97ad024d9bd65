"""``revzoo pack``: from a run's folder to published weights."""

import json

import pytest
import torch
from PIL import Image
from small_task import TINY
from small_weights import undescribed

from revzoo.cli.main import main
from revzoo.models import create_model, from_pretrained
from revzoo.training import Classifier
from revzoo.weights.entry import read_entry
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.table import WeightsTable

DESCRIPTION = ["--license", "MIT", "--recipe", "python train.py", "--measured-on", "64 images"]


@pytest.fixture
def run_dir(tmp_path):
    """A folder with Lightning's checkpoint of a classifier and the state of its data."""
    torch.manual_seed(0)
    module = Classifier(TINY)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    content = {
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "Digits": {
            "classes": ["left", "right"],
            "pixel_max": 16,
            "normalisation": {"mean": [4.0], "std": [8.0]},
            "image_size": 8,
        },
    }
    torch.save(content, run / "checkpoints" / "best.ckpt")
    figures = {"checkpoint": "checkpoints/best.ckpt"}
    figures["metrics"] = {"test/acc": 0.75, "train/loss": 0.1}
    (run / "summary.json").write_text(json.dumps(figures))
    return run


def pack(run_dir, out, *options, name="revnet38.halves"):
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    main(["pack", str(checkpoint), name, "--output", str(out), *DESCRIPTION, *options])


def test_the_folder_of_a_run_stands_for_its_best_checkpoint(run_dir, tmp_path):
    for source, out in ((run_dir, "a"), (run_dir / "checkpoints" / "best.ckpt", "b")):
        main(
            ["pack", str(source), "revnet38.halves", "--output", str(tmp_path / out), *DESCRIPTION]
        )
        file = str(tmp_path / out / "exported.safetensors")
        main(["export", str(source), "--format", "safetensors", "--output", file])
    for name in ("revnet38.halves.safetensors", "exported.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_checkpoint_becomes_weights_with_their_entry(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    pack(run_dir, out, "--metric", "test/acc5=1", "--default")
    names = ["revnet38.halves.json", "revnet38.halves.safetensors"]
    assert sorted(p.name for p in out.iterdir()) == names
    assert sorted(capsys.readouterr().out.split()[:2]) == [str(out / name) for name in names]
    entry = read_entry(out / names[0])
    assert (entry.mean, entry.std) == ((0.25,), (0.5,))
    assert entry.metrics == {"test/acc": 0.75, "test/acc5": 1}
    assert (entry.input_size, entry.classes) == ((1, 8, 8), ("left", "right"))
    assert (entry.license, entry.recipe, entry.default) == ("MIT", "python train.py", True)
    assert undescribed(entry) == []
    model = create_model("revnet38", pretrained=True, table=WeightsTable(out))
    torch.manual_seed(0)
    expected = Classifier(TINY).model.state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in found)


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ((), "revnet110.halves", r"revnet38\.NAME"),
        (("--metric", "acc=high"), "revnet38.halves", "--metric acc=high: expected NAME=VALUE"),
        (("--url", "ftp://x"), "revnet38.halves", "expected https"),
    ],
)
def test_wrong_arguments_write_no_file(run_dir, tmp_path, options, name, message):
    with pytest.raises(SystemExit, match=message):
        pack(run_dir, tmp_path / "out", *options, name=name)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_a_checkpoint_of_training_is_refused(tmp_path):
    path = tmp_path / "w.ckpt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(SystemExit, match="has no hyperparameters of a model"):
        main(["pack", str(path), "revnet38.x", *DESCRIPTION])


def test_the_recipe_is_the_command_of_the_run(run_dir, tmp_path):
    """A user had to type it again."""
    first = {"imports": ["mine"], "overrides": ["model=revnet38", "data.root=my images"]}
    lines = [first, {"imports": [], "overrides": ["--resume", "run"]}]
    (run_dir / "sessions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = [str(run_dir), "revnet38.mine", "--license", "MIT", "--output", str(tmp_path)]
    main(["pack", *words, "--measured-on", "64 images"])
    recipe = read_entry(tmp_path / "revnet38.mine.json").recipe
    assert recipe == "revzoo train --import mine model=revnet38 'data.root=my images'"


def test_figures_and_what_they_were_measured_on_belong_together(run_dir, tmp_path, capsys):
    words = [str(run_dir), "revnet38.mine", "--license", "MIT", "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match="--measured-on is needed to describe the run's figures"):
        main(["pack", *words, "--recipe", "x"])
    (run_dir / "summary.json").unlink()
    main(["pack", *words, "--recipe", "x"])
    assert capsys.readouterr().err.startswith("no figures: ")
    assert not read_entry(tmp_path / "revnet38.mine.json").metrics


def test_figures_of_another_checkpoint_are_left_out(run_dir, tmp_path):
    """last.ckpt got the test accuracy of the best checkpoint."""
    last = run_dir / "checkpoints" / "last.ckpt"
    last.write_bytes((run_dir / "checkpoints" / "best.ckpt").read_bytes())
    out = tmp_path / "out"
    main(["pack", str(last), "revnet38.halves", "--output", str(out), *DESCRIPTION])
    assert read_entry(out / "revnet38.halves.json").metrics == {}


def test_the_printed_command_and_the_folder_use_the_weights(run_dir, tmp_path, capsys):
    """The packed folder was refused, as if it held no weights."""
    out, image = tmp_path / "out", tmp_path / "image.png"
    pack(run_dir, out)
    *_, command = capsys.readouterr().out.splitlines()
    assert command.endswith(f" predict {out}/revnet38.halves.safetensors IMAGES")
    Image.new("L", (8, 8)).save(image)
    main(["predict", str(out / "revnet38.halves.safetensors"), str(image)])
    by_file = capsys.readouterr().out
    main(["predict", str(out), str(image)])
    assert capsys.readouterr().out == by_file
    assert from_pretrained(out).entry == read_entry(out / "revnet38.halves.json")
    pack(run_dir, out, name="revnet38.again")
    message = (
        f"{out} holds 2 files of weights: give one of them, {out}/revnet38.again.safetensors, "
    )
    with pytest.raises(SystemExit, match=message):
        main(["predict", str(out), str(image)])
    with pytest.raises(UnknownWeightsError, match=message):
        from_pretrained(out)


def test_the_printed_command_is_folded_as_a_command(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    pack(run_dir, tmp_path)
    text = capsys.readouterr().out
    assert "to classify images: " in text
    assert text.endswith(f" \\\n    {tmp_path}/revnet38.halves.safetensors \\\n    IMAGES\n")


def test_info_takes_a_run(run_dir, capsys):
    """The folder of a run was "no model"."""
    main(["info", str(run_dir), "--batch-size", "1"])
    output = capsys.readouterr().out
    assert f"checkpoint              {run_dir}/checkpoints/best.ckpt" in output
    assert "<function" not in output
    assert "architecture            revnet38" in output
    assert "classes                 left, right" in output
    assert "forward, 1x8x8" in output
