"""Weights in the files of their publishers, from a local server and from a path."""

from __future__ import annotations

import hashlib
import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import revzoo
from revzoo.weights.errors import DownloadError, HashMismatchError, UnreadableWeightsError

ENTRY = {
    "name": "revvit_cifar.published",
    "architecture": "revvit_cifar",
    "num_classes": 7,
    "input_size": [3, 32, 32],
    "license": "Apache-2.0",
}


def as_published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A RevViT's ``state_dict`` with PySlowFast's names."""
    theirs = {"0.branch": "F", "1.branch": "G"}
    renamed = {}
    for key, t in state.items():
        if key.startswith("stages.0.steps."):
            block, _, step, _, layer, leaf = key.removeprefix("stages.0.steps.").split(".")
            start = f"rev_backbone.layers.{block}.{theirs[f'{step}.branch']}"
            if layer == "qkv":
                for name, part in zip("qkv", t.chunk(3), strict=True):
                    renamed[f"{start}.attn.{name}.{leaf}"] = part.clone()
                continue
            inside = {"proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}.get(layer, layer)
            renamed[f"{start}.{inside}.{leaf}"] = t
        else:
            name = key.replace("stem.steps.0.conv", "patch_embed.proj")
            name = name.replace("stem.steps.0.positions", "pos_embed")
            renamed[name.replace("fc.", "head.projection.")] = t
    return renamed


@pytest.fixture
def shelf(tmp_path: Path):
    """A function that writes an entry and serves its file."""
    (tmp_path / "site").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "site"))
    handler.log_message = lambda *args: None  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def write(content: Any, **fields: Any) -> revzoo.WeightsTable:
        file = tmp_path / "site" / "REV.pyth"
        torch.save(content, file)
        address = {"url": f"http://127.0.0.1:{server.server_port}/REV.pyth"}
        entry = {**ENTRY, **address, **fields}
        (tmp_path / "table").mkdir(exist_ok=True)
        (tmp_path / "table" / f"{entry['name']}.json").write_text(json.dumps(entry))
        return revzoo.WeightsTable(tmp_path / "table")

    yield write
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def network() -> revzoo.models.ImageNetwork:
    torch.manual_seed(0)
    return revzoo.create_model("revvit_cifar", num_classes=7, memory="store").eval()


def test_a_publishers_file_is_fetched_once_and_gives_the_same_network(shelf, network, tmp_path):
    table = shelf({"model_state": as_published(network.state_dict()), "epoch": 3})
    keywords = {"pretrained": True, "table": table, "cache_dir": tmp_path / "cache"}
    x = torch.rand(2, 3, 32, 32)
    model = revzoo.create_model("revvit_cifar.published", memory="store", **keywords).eval()
    torch.testing.assert_close(model(x), network(x), rtol=0, atol=0)
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".json", ".safetensors"]

    (tmp_path / "site" / "REV.pyth").unlink()  # from the cache from now on
    again = revzoo.create_model("revvit_cifar", num_classes=3, **keywords)
    assert again.num_classes == 3
    assert torch.equal(again.stem[0].conv.weight, network.stem[0].conv.weight)


def test_a_published_backbone_predicts_the_names_of_imagenet(shelf, tmp_path):
    state = revzoo.create_model("revvit_cifar", num_classes=1000).state_dict()
    facts = {"num_classes": 1000, "class_set": "imagenet-1k", "mean": [0.5] * 3, "std": [0.2] * 3}
    table = shelf({"model_state": as_published(state)}, **facts)
    keywords = {"pretrained": True, "table": table, "cache_dir": tmp_path / "cache"}
    model = revzoo.create_model("revvit_cifar", **keywords)
    assert {"tench", "toilet tissue"} < revzoo.predict(torch.rand(3, 32, 32), model).keys()
    model.save_pretrained(tmp_path / "saved")  # the names are in its own entry
    saved = revzoo.from_pretrained(tmp_path / "saved")
    assert (saved.entry.classes[0], saved.entry.class_set) == ("tench", None)


def test_a_file_by_its_path_works_the_same(network, tmp_path):
    for name in ("REV.pyth", "rev.pth.tar"):
        torch.save({"model_state": as_published(network.state_dict())}, tmp_path / name)
        model = revzoo.create_model("revvit_cifar", checkpoint_path=tmp_path / name)
        assert model.num_classes == 7
        assert torch.equal(model.fc.weight, network.fc.weight)


def test_another_file_than_the_publisher_states_is_refused(shelf, network, tmp_path):
    wrong = hashlib.sha256(b"another").hexdigest()
    table = shelf(as_published(network.state_dict()), sha256=wrong)
    with pytest.raises(HashMismatchError, match=wrong):
        revzoo.create_model(
            "revvit_cifar", pretrained=True, table=table, cache_dir=tmp_path / "cache"
        )
    assert not (tmp_path / "cache").exists()


def test_a_file_with_code_is_refused(shelf, network, tmp_path):
    table = shelf({"model_state": as_published(network.state_dict()), "args": Path("x")})
    with pytest.raises(UnreadableWeightsError, match="could run code"):
        revzoo.create_model(
            "revvit_cifar", pretrained=True, table=table, cache_dir=tmp_path / "cache"
        )


def test_an_absent_file_is_reported(shelf, network, tmp_path):
    table = shelf({})
    (tmp_path / "site" / "REV.pyth").unlink()
    with pytest.raises(DownloadError, match="404"):
        revzoo.create_model(
            "revvit_cifar", pretrained=True, table=table, cache_dir=tmp_path / "cache"
        )
