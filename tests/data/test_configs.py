"""Configuration files and constructors have the same defaults."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import revzoo.data
from revzoo.data import ImageData

_FOLDER = Path(__file__).parents[2] / "configs" / "data"
# imagenet.yaml is imagefolder.yaml with other values
_CONFIGS = sorted(path for path in _FOLDER.glob("*.yaml") if path.stem != "imagenet")


def _needed(path: Path) -> dict[str, str]:
    """Arguments without a default."""
    given = {"imagefolder": {"root": "nowhere"}, "table": {"table": "labels.csv"}}
    given["masks"] = given["imagefolder"]
    given["volumes"] = given["litdata"] = given["webdataset"] = {"root": "nowhere"}
    return given.get(path.stem, {})


def _build(path: Path) -> tuple[dict[str, Any], ImageData]:
    with initialize_config_dir(str(_FOLDER.parent), version_base="1.3"):
        config = compose("train", [f"data={path.stem}"]).data
    for name, value in _needed(path).items():
        config[name] = value
    options = OmegaConf.to_container(config, resolve=True)
    module, _, name = options.pop("_target_").rpartition(".")
    assert module == "revzoo.data"
    return options, getattr(revzoo.data, name)(**options)


def _public(data: ImageData) -> dict[str, Any]:
    names = ("batch_size", "eval_batch_size", "num_workers", "val_fraction", "split_seed")
    names += ("folds", "fold")
    return {name: getattr(data, name) for name in names} | {
        name: vars(data.augment)[name] for name in ("flip", "chunk")
    }


def test_every_set_has_a_configuration() -> None:
    names = ["blobs3d", "cifar10", "cifar100", "digits", "imagefolder", "litdata", "masks"]
    names += ["shapes", "table", "volumes", "webdataset"]
    assert [path.stem for path in _CONFIGS] == names


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_configured_values_are_the_constructors_defaults(path: Path) -> None:
    _, data = _build(path)
    bare = type(data)(**_needed(path))
    assert _public(data) == _public(bare)
    size = 8 if path.stem == "digits" else 32
    assert data.augment.padding((size, size)) == bare.augment.padding((size, size))
    if path.stem == "imagefolder":
        assert vars(data)["cache_bytes"] == vars(bare)["cache_bytes"]


def test_cifar_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(path for path in _CONFIGS if path.stem == "cifar10")
    monkeypatch.delenv("REVZOO_DATA", raising=False)
    assert _build(path)[0]["root"] == "./data"
    monkeypatch.setenv("REVZOO_DATA", "/elsewhere")
    assert _build(path)[0]["root"] == "/elsewhere"
