from pathlib import Path

import pytest

from revzoo.weights.entry import WeightsEntry
from revzoo.weights.errors import DownloadError, HashMismatchError, UnknownWeightsError
from revzoo.weights.files import cache_folder, read_bytes


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))


def entry(served, **fields):
    values = {
        "name": "revnet38.small",
        "architecture": "revnet38",
        "num_classes": 2,
        "input_size": (3, 8, 8),
        "sha256": served.sha256,
        "url": served.url,
    }
    return WeightsEntry(**{**values, **fields})


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"REVZOO_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"REVZOO_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/revzoo"),
        ({"REVZOO_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/revzoo"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, folder):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)
    assert cache_folder("/given") == Path("/given")


def test_a_download_is_kept_and_used_again(served, tmp_path):
    assert read_bytes(entry(served)) == served.content
    assert read_bytes(entry(served)) == served.content
    assert len(served.requests) == 1
    assert read_bytes(entry(served), cache_dir=tmp_path / "other") == served.content
    assert len(served.requests) == 2


def test_a_damaged_file_in_the_cache_is_fetched_again(served, tmp_path):
    read_bytes(entry(served))
    (cached,) = (tmp_path / "cache").glob("*.safetensors")
    cached.write_bytes(served.content[:-1])
    assert read_bytes(entry(served)) == served.content
    assert cached.read_bytes() == served.content


def test_other_weights_of_the_same_name_are_another_file(served):
    old = entry(served)
    read_bytes(old)
    served.content = b"new"
    assert read_bytes(entry(served)) == b"new"
    assert read_bytes(old) != b"new"


def test_a_file_beside_the_entry_comes_first(served, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(served.content)
    found = read_bytes(entry(served, file="w.safetensors", folder=tmp_path))
    assert found == served.content
    assert served.requests == []


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"y" + b[1:]])
def test_a_damaged_file_beside_the_entry_is_refused(served, tmp_path, damage):
    (tmp_path / "w.safetensors").write_bytes(damage(served.content))
    with pytest.raises(HashMismatchError, match=served.sha256):
        read_bytes(entry(served, file="w.safetensors", folder=tmp_path))


def test_a_missing_file_raises(served, tmp_path):
    with pytest.raises(UnknownWeightsError, match="has no url"):
        read_bytes(entry(served, url=None, file="w.safetensors", folder=tmp_path))


def test_a_failed_download_raises(served):
    served.status = 404
    with pytest.raises(DownloadError, match="404"):
        read_bytes(entry(served))
