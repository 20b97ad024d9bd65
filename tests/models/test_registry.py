import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import revzoo
from revzoo.models import ResNet, RevNet, Variant, create_model, list_models
from revzoo.models.registry import MODELS
from revzoo.models.wrapped import LIBRARIES

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))
CIFAR = ["resnet110", "resnet164", "resnet32", "revnet110", "revnet164", "revnet38"]


def test_names_are_sorted_and_hold_the_papers_cifar_networks():
    """Asked at https://github.com/open-mmlab/mmpretrain/issues/1073."""
    names = list_models()
    assert names == sorted(names)
    assert set(CIFAR) <= set(names)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("revnet1?0", ["revnet110"]),
        ("res*16?", ["resnet164"]),
        ("re[sv]net164", ["resnet164", "revnet164"]),
        ("REVNET*", []),
        ("vgg*", []),
    ],
)
def test_patterns(pattern, names):
    assert list_models(pattern) == names


@pytest.mark.parametrize(
    ("filter", "exclude", "names"),
    [
        (["revnet38", "resnet3?"], "", ["resnet32", "revnet38"]),
        (("revnet*", "revnet38"), ["*_memcnn", "revnet1*"], ["revnet38", "revnet56"]),
        (
            "",
            ["*net*", "revbi*", "revcol*", "revmvit*"],
            ["revvit_base", "revvit_cifar", "revvit_large", "revvit_small", "vit_cifar"],
        ),
        ([], ["re*", "i*", "vit*", "momentum*"], []),
    ],
)
def test_several_filters_are_one_set_without_the_excluded(filter, exclude, names):
    assert list_models(filter, exclude_filters=exclude) == names


@pytest.mark.parametrize("name", ["revnet38", "resnet32"])
def test_names_give_their_class(name):
    model = create_model(name)
    assert type(model) is (RevNet if name.startswith("revnet") else ResNet)
    assert model.training
    assert (model.num_classes, model.in_chans) == (10, 3)


def test_creating_a_model_follows_the_callers_random_state():
    first, second, third = (
        (torch.manual_seed(seed), create_model("revnet38"))[1].state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["fc.weight"], third["fc.weight"])


def test_overrides_reach_the_variant_and_the_network():
    model = create_model("revnet38", units=[1, 2, 1], dropout=0.3, drop_rate=0.1)
    assert [len(stage) for stage in model.stages] == [1, 2, 1]
    drops = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert drops == [0.3] * 8 + [0.1]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("revnet83", "'revnet38'"), ("RevNet-110", "'revnet110'"), ("resnet123", "'resnet32'")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"no model '{name}' among .*{nearest}.*\? Register"):
        create_model(name)


def test_a_name_near_nothing_is_refused_with_a_way_to_list_them():
    with pytest.raises(
        ValueError, match=r"no model 'xyz' among the \d+ of list_models\(\)\. Register"
    ):
        create_model("xyz")


@pytest.mark.parametrize(
    ("keyword", "nearest"), [("droput", "dropout"), ("unit", "units"), ("stem_widht", "stem_width")]
)
def test_an_unknown_keyword_is_refused_with_the_nearest(keyword, nearest):
    with pytest.raises(ValueError, match=rf"keyword '{keyword}': .* mean '{nearest}'.*\?$"):
        create_model("revnet38", **{keyword: 1})


def test_there_is_a_config_for_every_network():
    assert {path.stem for path in CONFIGS} == {*list_models(), *LIBRARIES}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_keywords_of_create_model_with_its_defaults(path):
    with initialize_config_dir(str(path.parents[1]), version_base="1.3"):
        config = OmegaConf.to_container(compose(f"model/{path.stem}").model)
    name = config.pop("name")
    assert name.partition(":")[0] == path.stem
    assert "pretrained" in config
    if name.startswith("timm:"):
        pytest.importorskip("timm")
    network, variant = MODELS[name]
    defaults = inspect.signature(create_model).parameters | inspect.signature(network).parameters
    for key, value in config.items():
        default = getattr(variant, key) if hasattr(variant, key) else defaults[key].default
        assert value == default, key


@pytest.fixture
def models(monkeypatch):
    monkeypatch.setattr("revzoo.models.registry.MODELS", table := dict(MODELS))
    return table


def test_a_registered_model_is_one_of_the_zoo(models):
    row = Variant(stem_width=8, widths=(8, 16), units=(1, 2), strides=(1, 2))
    revzoo.register_model("tiny_revnet", RevNet, row)
    assert "tiny_revnet" in list_models("tiny*")
    model = create_model("tiny_revnet", num_classes=3, units=(2, 2))
    assert type(model) is RevNet
    assert model.variant == dataclasses.replace(row, units=(2, 2))
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "network", "variant", "message"),
    [
        ("revnet38", RevNet, MODELS["revnet38"].variant, "'revnet38' is already registered"),
        ("tiny.revnet", RevNet, MODELS["revnet38"].variant, "letters, digits and underscores"),
        ("tiny", torch.nn.Linear, MODELS["revnet38"].variant, "variant is for subclasses of Imag"),
        ("tiny", torch.nn.Linear, None, r"^Linear\(.*expected the keywords num_classes and in_"),
        ("tiny", torch.nn.Linear(2, 2), None, "a function that returns a new module, got Linear"),
        ("tiny", lambda num_classes: None, None, "expected the keywords num_classes and in_chans"),
        ("tiny", lambda num_classes, in_chans, depth: None, None, "and defaults for all others"),
        (
            "tiny",
            lambda num_classes, in_chans, memory="store", pretrained=False: None,
            None,
            "memory, pretrained is a keyword of create_model itself",
        ),
        ("tiny", RevNet, {"units": (1, 1, 1)}, "a dataclass instance"),
        ("tiny", RevNet, Variant, "a dataclass instance"),
    ],
)
def test_what_cannot_be_registered_is_refused(name, network, variant, message, models):
    with pytest.raises((ValueError, TypeError), match=message):
        revzoo.register_model(name, network, variant)
    assert models == MODELS


def test_pretrained_is_not_a_name_of_weights():
    """The string counted as True, so the default weights were loaded."""
    with pytest.raises(ValueError, match=r"pretrained='revnet38\.memcnn': expected True or False"):
        revzoo.create_model("revnet38", pretrained="revnet38.memcnn")
