"""``revzoo convert``: its folder loads as the same model; failures leave no files."""

import pytest
import torch

from revzoo import create_model, from_pretrained
from revzoo.cli.main import main


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


def test_the_folder_loads_as_the_same_model(checkpoint, tmp_path, capsys):
    path, model = checkpoint
    main(["convert", "memcnn", str(path), str(tmp_path / "r")])
    assert capsys.readouterr().out == f"{tmp_path / 'r'}: resnet32_memcnn, 10 classes\n"
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(from_pretrained(tmp_path / "r").eval()(x), model(x))


def test_overrides_reach_the_description(checkpoint, tmp_path):
    arguments = ["convert", "memcnn", str(checkpoint[0]), str(tmp_path / "r")]
    main([*arguments, "strides=1,1", "convention=memcnn_fix"])
    variant = from_pretrained(tmp_path / "r").variant
    assert (variant.strides, variant.convention) == ((1, 1), "memcnn_fix")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("irevnet", "60000.pt", "not a checkpoint of 'irevnet'"),
        ("memcnn", "gone.pt", r"revzoo: \S*gone\.pt: No such file"),
    ],
)
def test_failures_name_the_reason_and_leave_no_files(source, name, message, checkpoint, tmp_path):
    with pytest.raises(SystemExit, match=message):
        main(["convert", source, str(tmp_path / name), str(tmp_path / "r")])
    assert [path.name for path in tmp_path.iterdir()] == ["60000.pt"]
