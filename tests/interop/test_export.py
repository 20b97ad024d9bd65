"""Exports: their content, equal outputs, and no file after a failure."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_weights import small
from torch import Tensor

from revzoo.core.invertible import Step
from revzoo.interop import export as exporting
from revzoo.interop.export import FORMATS, Export, ExportError, export
from revzoo.models import ImageNetwork, create_model

FACTS = {"classes": tuple("abcde"), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
SMALL_UNET = {"channels": (4, 8), "units": (1, 1)}
SMALL_VIT = {"depth": 1, "width": 8, "heads": 2}


def network_of() -> ImageNetwork:
    """The same model each time, whose last activations are not all zero."""
    network = small()
    torch.nn.init.constant_(network.norm.bias, 2.0)
    return network


def job(**options: Any) -> Export:
    return Export(network=network_of(), image_size=8, facts=FACTS, **options)


def logits(network: ImageNetwork, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network.eval()(images)


def test_pt2_takes_any_batch_and_names_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    assert export(job(), path, kind="pt2") < 1e-6
    extra = {exporting.EXTRA: ""}
    loaded = torch.export.load(path, extra_files=extra).module()
    known = json.loads(extra[exporting.EXTRA])
    assert known["classes"] == list("abcde")
    assert known["mean"] == [0.5, 0.4, 0.3]
    assert known["input_size"] == [3, 8, 8]
    for batch in (1, 2, 7):
        images = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(loaded(images), logits(network_of(), images))


def test_onnx_runs_in_onnxruntime_and_names_the_classes(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "net.onnx"
    assert export(job(opset=18), path, kind="onnx") < 1e-5
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    # the axis had an internal name, such as s77
    assert [v.shape[0] for v in (*session.get_inputs(), *session.get_outputs())] == 2 * ["batch"]
    known = session.get_modelmeta().custom_metadata_map
    assert known["architecture"] == "revnet38"
    assert json.loads(known["classes"]) == list("abcde")
    for batch in (1, 5):
        images = torch.randn(batch, 3, 8, 8)
        (found,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), logits(network_of(), images))


def test_safetensors_describe_themselves(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    assert export(job(), path, kind="safetensors") == 0
    model = create_model(path, pretrained=True)
    assert isinstance(model, ImageNetwork)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(logits(model, images), logits(network_of(), images))
    assert model.entry is not None
    assert {name: getattr(model.entry, name) for name in FACTS} == FACTS


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("pt2", "irevnet13", {"in_chans": 1, "memory": "exact"}),
        ("onnx", "irevnet13", {"in_chans": 1}),
        ("safetensors", "irevnet13", {"in_chans": 1}),
        ("pt2", "revvit_cifar", SMALL_VIT),
        ("onnx", "revvit_cifar", SMALL_VIT),
        ("pt2", "resnet32", {"units": (1, 1, 1)}),
        ("pt2", "iunet2d", SMALL_UNET),
        ("onnx", "iunet2d", SMALL_UNET),
        ("pt2", "iunet3d", {**SMALL_UNET, "channels": (4, 16)}),
    ],
)
def test_other_networks(kind: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A U-Net's batch became a constant, ONNX has no linear solver, volumes had no description."""
    network = create_model(name, **options)
    modes = {step.memory for step in network.stages.modules() if isinstance(step, Step)}
    path = tmp_path / f"net.{kind}"
    side = 16 if "unet" in name else None
    assert export(Export(network=network, image_size=side), path, kind=kind) < 1e-5
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert network.training
    assert {step.memory for step in network.stages.modules() if isinstance(step, Step)} == modes


def test_a_fixed_batch(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    export(job(batch=2), path, kind="pt2")
    predict = FORMATS["pt2"].load(path)
    assert predict(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    with pytest.raises(Exception, match="2"):
        predict(torch.randn(3, 3, 8, 8))


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_file_that_differs_is_not_kept(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS["safetensors"]

    def load(path: Path) -> exporting.Predictor:
        right = form.load(path)
        return lambda images: right(images) + wrong * (len(images) == 3)

    monkeypatch.setitem(FORMATS, "safetensors", form._replace(load=load))
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"the one before")
    with pytest.raises(ExportError, match="nothing was written"):
        export(job(), path, kind="safetensors")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"the one before"


def test_what_torch_cannot_export_names_a_remedy(tmp_path: Path) -> None:
    network = network_of()
    network.register_forward_pre_hook(lambda module, images: (images[0][: len(images[0])],))
    with pytest.raises(ExportError, match=r"as pt2 \(.+\): try a fixed batch, batch=1"):
        export(Export(network=network, image_size=8), tmp_path / "net.pt2", kind="pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({}, "net.pth", r"net\.pth: expected a name that ends in \.pt2"),
        ({}, "nowhere/net.pt2", "there is no folder"),
        ({"opset": 18}, "net.pt2", "leave it out for pt2"),
        ({"batch": 0}, "net.pt2", "whole number >= 1"),
        ({"image_size": 7}, "net.pt2", "7"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export(replace(job(), **change), tmp_path / name, kind="pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ExportError, match="pip install onnx onnxscript onnxruntime"):
        export(job(), tmp_path / "net.onnx", kind="onnx")
    assert list(tmp_path.iterdir()) == []
