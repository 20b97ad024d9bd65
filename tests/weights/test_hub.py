"""The hub, with a fake library that records the calls."""

import json
import sys
import types

import pytest
from small_weights import write_entry

from revzoo.weights.errors import HubError
from revzoo.weights.files import fetch
from revzoo.weights.source import find_entry


@pytest.fixture
def library(monkeypatch, tmp_path):
    hub = types.ModuleType("huggingface_hub")
    hub.calls = []

    def hf_hub_download(**asked):
        hub.calls.append(asked)
        if asked["filename"] == "none":
            raise OSError("404 not found")
        return str(tmp_path / asked["filename"])

    hub.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_a_file_is_asked_for_by_repository_and_revision(library, tmp_path):
    assert fetch("hf-hub:me/net@v2", "config.json", cache_dir="c") == tmp_path / "config.json"
    asked = {"repo_id": "me/net", "filename": "config.json", "revision": "v2", "cache_dir": "c"}
    assert library.calls == [asked]


@pytest.mark.parametrize("tensors", [True, False])
def test_tensors_are_fetched_only_where_wanted(library, tmp_path, tensors):
    (tmp_path / "config.json").write_text(json.dumps(write_entry(tmp_path).plain()))
    assert find_entry("hf-hub:me/net", tensors=tensors).folder == tmp_path
    files = [asked["filename"] for asked in library.calls]
    assert files == ["config.json", "model.safetensors"][: 1 + tensors]


def test_refusals_of_the_hub_are_reported(library):
    with pytest.raises(HubError, match=r"hf-hub:me/net: none could not be fetched.*404"):
        fetch("hf-hub:me/net", "none")


def test_a_missing_library_raises_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match="pip install huggingface_hub"):
        fetch("hf-hub:me/net", "config.json")
