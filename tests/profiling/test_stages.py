"""Stages: the parts of a model for which audits and plans add up."""

import pytest
import torch

import revzoo
from revzoo.profiling.stages import OUTSIDE, stages_of


def stages_in(name: str, **options: int) -> list[str]:
    with torch.device("meta"):
        model = revzoo.create_model(name, **options)
    paths = [path for path, _ in model.named_modules() if path]
    return list(dict.fromkeys(stages_of(paths).values()))


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("revnet38", ["stages.0", "stages.1", "stages.2"]),
        ("revnet104", ["stages.0", "stages.1", "stages.2", "stages.3"]),
        (
            "torchvision:resnet50",
            ["net.conv1", "net.layer1", "net.layer2", "net.layer3", "net.layer4", "net.fc"],
        ),
        ("torchvision:resnet101", ["net.layer1", "net.layer2", "net.layer3", "net.layer4"]),
        ("torchvision:vit_b_16", ["net.conv_proj", "net.encoder.layers", "net.heads"]),
        (
            "torchvision:densenet121",
            ["net.features.denseblock1", "net.features.transition1", "net.classifier"],
        ),
    ],
)
def test_a_stage_is_a_part_of_the_network_itself(name, stages):
    """A library's whole network was the stage ``net``."""
    found = stages_in(name)
    assert {*stages} <= {*found}
    assert len(found) < 20


def test_a_network_that_was_made_reversible_has_the_same_stages():
    plain = stages_in("torchvision:resnet50")
    assert stages_in("torchvision:resnet50", reversible_bits=4) == plain


def test_paths_of_steps():
    steps = [f"net.encoder.layers.layer_{i}.reversible" for i in range(12)]
    assert {*stages_of(steps).values()} == {"net.encoder.layers"}
    assert stages_of(["net.layer1.0.a", "net.layer2.0.a"]) == {
        "net.layer1.0.a": "net.layer1",
        "net.layer2.0.a": "net.layer2",
    }
    assert stages_of(["stages.0.a", "stages.1.a"])["stages.1.a"] == "stages.1"
    assert stages_of(["steps.0"]) == {"steps.0": "steps.0"}
    assert stages_of([]) == {}


def test_opened_parts_are_outside():
    names = ["net", "net.body", "net.body.0", "net.body.1", "net.body.1.f"]
    assert stages_of(names) == {
        "net": OUTSIDE,
        "net.body": OUTSIDE,
        "net.body.0": "net.body.0",
        "net.body.1": "net.body.1",
        "net.body.1.f": "net.body.1",
    }
