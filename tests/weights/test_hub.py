"""The hub, with a fake library that records the calls."""

import sys
import types

import pytest

from revzoo.weights.errors import HubError
from revzoo.weights.files import fetch, fetch_folder, push_folder


@pytest.fixture
def library(monkeypatch, tmp_path):
    hub = types.ModuleType("huggingface_hub")
    hub.calls = []

    def hf_hub_download(**asked):
        hub.calls.append(asked)
        if asked["filename"] == "none":
            raise OSError("404 not found")
        return str(tmp_path / asked["filename"])

    class HfApi:
        def create_repo(self, **asked):
            hub.calls.append(asked)

        def upload_folder(self, **asked):
            hub.calls.append(asked)
            if asked["repo_id"] == "me/full":
                raise ValueError("no space")

    hub.hf_hub_download, hub.HfApi = hf_hub_download, HfApi
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_a_file_is_asked_for_by_repository_and_revision(library, tmp_path):
    assert fetch("hf-hub:me/net@v2", "config.json", cache_dir="c") == tmp_path / "config.json"
    asked = {"repo_id": "me/net", "filename": "config.json", "revision": "v2", "cache_dir": "c"}
    assert library.calls == [asked]


@pytest.mark.parametrize("tensors", [True, False])
def test_tensors_are_fetched_only_where_wanted(library, tmp_path, tensors):
    assert fetch_folder("hf-hub:me/net", tensors=tensors) == tmp_path
    files = [asked["filename"] for asked in library.calls]
    assert files == ["config.json", "model.safetensors"][: 1 + tensors]


def test_a_push_makes_the_repository_and_uploads_the_folder(library, tmp_path):
    address = push_folder(tmp_path, "me/net", private=True, message="Add it")
    assert address == "https://huggingface.co/me/net"
    assert library.calls == [
        {"repo_id": "me/net", "private": True, "exist_ok": True},
        {"repo_id": "me/net", "folder_path": str(tmp_path), "commit_message": "Add it"},
    ]


def test_refusals_of_the_hub_are_reported(library, tmp_path):
    with pytest.raises(HubError, match=r"hf-hub:me/net: none could not be fetched.*404"):
        fetch("hf-hub:me/net", "none")
    with pytest.raises(HubError, match="refused the upload: no space"):
        push_folder(tmp_path, "me/full", private=False, message="")


def test_a_missing_library_raises_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match="pip install huggingface_hub"):
        fetch("hf-hub:me/net", "config.json")
