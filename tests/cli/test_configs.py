"""Every option of every group makes a valid configuration on its hardware."""

from pathlib import Path

import pytest

from revzoo.cli.config import check_machine
from revzoo.cli.run.build import check_parts, model_spec
from revzoo.cli.schema import RUN
from revzoo.models import create_model, list_models

CONFIGS = Path(__file__).parents[2] / "configs"
OPTIONS = sorted(f"{p.parent.name}={p.stem}" for p in CONFIGS.glob("*/*.yaml"))

NEEDED = {
    "data=imagefolder": ("data.root=images",),
    "data=imagenet": ("data.root=images",),
    "data=masks": ("data.root=images",),
    "data=litdata": ("data.root=shards",),
    "data=webdataset": ("data.root=shards",),
    "data=table": ("data.table=labels.csv",),
    "data=volumes": ("data.root=volumes",),
    **{
        f"experiment=imagenet{name}": ("data.root=images",)
        for name in ("", "_short", "_long", "_a3", "_revcol", "_revvit")
    },
    "experiment=finetune_backbone": ("data.root=images",),
    "memory=budget": ("memory.bytes=4GiB",),
    "experiment=finetune": ("+model.checkpoint_path=revnet38.safetensors",),
}


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_passes_the_checks(option, compose):
    config = compose(option, *NEEDED.get(option, ()))
    check_machine(config)
    check_parts(config)


def test_groups_are_the_sections():
    groups = {option.partition("=")[0] for option in OPTIONS}
    assert groups == {*RUN.parts, "experiment", "debug"}


def test_model_options_are_models():
    models = {option.partition("=")[2] for option in OPTIONS if option.startswith("model=")}
    assert models <= {*list_models(), "timm", "torchvision"}
    assert {"resnet32", "resnet110", "resnet164", "revnet38", "revnet110", "revnet164"} <= models


def test_the_default_is_digits_with_revnet38(compose):
    config = compose()
    assert config["model"]["name"] == "revnet38"
    assert config["data"]["_target_"] == "revzoo.data.Digits"
    assert config["memory"]["mode"] == "auto"


def test_the_command_line_overrides_the_files(compose):
    config = compose("experiment=cifar10_revnet38", "model=revnet110", "data.batch_size=50")
    assert (config["model"]["name"], config["data"]["batch_size"]) == ("revnet110", 50)


def test_experiments_and_debug_configs_open_with_a_comment():
    for path in (*CONFIGS.glob("experiment/*.yaml"), *CONFIGS.glob("debug/*.yaml")):
        assert path.read_text().startswith("# @package _global_\n# "), path.name


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ((), "exact"),
        (("precision=bf16",), "exact"),
        (("precision=fp16", "model=irevnet13"), "exact"),
        (("precision=bf16", "memory=invert"), "invert"),
        (("precision=bf16", "model=resnet32"), "store"),
    ],
)
def test_narrow_precisions_are_exact(compose, overrides, mode):
    """In mode invert under bfloat16, activations drifted beyond the limit and ended the run."""
    config = compose(*overrides)
    own = create_model(config["model"]["name"]).default_memory
    assert (model_spec(config, num_classes=2, in_chans=3)["memory"] or own) == mode


def test_no_callbacks_names_every_callback(compose):
    """A key that it lacks cannot be set with ``callbacks.NAME.OPTION``."""
    none = compose("callbacks=none")["callbacks"]
    assert set(none) == set(compose()["callbacks"])
    assert set(none.values()) == {None}
