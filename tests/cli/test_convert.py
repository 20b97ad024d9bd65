"""``revzoo convert``: the files it writes make the model again; failures leave nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from revzoo import create_model
from revzoo.cli.convert import main


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny network under the names of MemCNN."""
    torch.manual_seed(0)
    model = create_model(
        "resnet32_memcnn", stem_width=4, widths=(4, 8), units=(1, 1), strides=(1, 2)
    )
    names = {
        "stem.steps.0.conv": "conv1",
        "stem.steps.0.norm": "bn1",
        "norm.": "bn_final.",
        "stages.0.steps.0.branch.norm": "layer1.0.basicblock_sub.bn",
        "stages.0.steps.0.branch.": "layer1.0.basicblock_sub.",
        "stages.1.steps.0.branch.norm": "layer2.0.basicblock_sub.bn",
        "stages.1.steps.0.branch.": "layer2.0.basicblock_sub.",
        "stages.1.steps.0.shortcut": "layer2.0.downsample",
    }
    state = {}
    for key, value in model.state_dict().items():
        ours = next((name for name in names if key.startswith(name)), "")
        state[names.get(ours, "") + key.removeprefix(ours)] = value
    path = tmp_path / "60000.pt"
    torch.save(state, path)
    return path, model.eval()


def test_the_files_make_the_model_again(checkpoint, tmp_path):
    path, model = checkpoint
    assert main(["memcnn", str(path), str(tmp_path / "r.safetensors")]) == 0
    spec = json.loads((tmp_path / "r.json").read_text())
    assert spec["name"] == "resnet32_memcnn"
    again = create_model(**spec).eval()
    again.load_state_dict(load_file(tmp_path / "r.safetensors"))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))


def test_overrides_reach_the_description(checkpoint, tmp_path):
    arguments = ["memcnn", str(checkpoint[0]), str(tmp_path / "r.safetensors")]
    assert main([*arguments, "strides=1,1", "convention=memcnn_fix"]) == 0
    spec = json.loads((tmp_path / "r.json").read_text())
    assert (spec["strides"], spec["convention"]) == ([1, 1], "memcnn_fix")


@pytest.mark.parametrize(
    ("source", "name", "output", "message"),
    [
        ("irevnet", "60000.pt", "r.safetensors", "no checkpoint of 'irevnet'"),
        ("memcnn", "gone.pt", "r.safetensors", "No such file"),
        ("memcnn", "60000.pt", "r.pt", r"ends in .safetensors"),
        ("memcnn", "60000.pt", "gone/r.safetensors", "No such file"),
    ],
)
def test_failures_say_why_and_leave_nothing(
    source, name, output, message, checkpoint, tmp_path, capsys
):
    assert main([source, str(tmp_path / name), str(tmp_path / output)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["60000.pt"]


def test_a_write_that_fails_leaves_the_old_file(checkpoint, tmp_path, monkeypatch):
    path, _ = checkpoint
    output = tmp_path / "r.safetensors"
    output.write_text("old")

    def full(tensors, path):
        path.write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr("revzoo.cli.convert.save_file", full)
    assert main(["memcnn", str(path), str(output)]) == 2
    assert output.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["60000.pt", "r.safetensors"]
