"""Downloads from a local server that fails in every way a server can."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from revzoo.weights.errors import DownloadError, HashMismatchError
from revzoo.weights.files import download


def leftovers(target: Path) -> list[str]:
    return sorted(p.name for p in target.parent.iterdir())


def test_a_file_arrives_whole_and_alone(served, tmp_path):
    target = tmp_path / "new" / "w"
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content
    assert leftovers(target) == ["w"]


def test_an_interrupted_download_leaves_nothing_and_can_be_repeated(served, tmp_path):
    target = tmp_path / "w"
    served.cut = 4000
    with pytest.raises((HashMismatchError, DownloadError), match=served.url):
        download(served.url, target, sha256=served.sha256)
    assert leftovers(target) == []
    served.cut = None
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content


def test_a_wrong_hash_leaves_nothing(served, tmp_path):
    target = tmp_path / "w"
    wrong = served.sha256[:63] + ("0" if served.sha256[63] != "0" else "1")
    with pytest.raises(HashMismatchError, match=f"{wrong}.*{served.sha256}") as caught:
        download(served.url, target, sha256=wrong)
    assert "\n" not in str(caught.value)
    assert leftovers(target) == []


def test_an_old_file_stays_until_the_new_one_is_verified(served, tmp_path):
    target = tmp_path / "w"
    target.write_bytes(b"old")
    with pytest.raises(HashMismatchError):
        download(served.url, target, sha256="0" * 64)
    assert target.read_bytes() == b"old"


def test_an_error_answer_is_reported(served, tmp_path):
    served.status = 404
    with pytest.raises(DownloadError, match=r"weights\.safetensors .*404: Not Found"):
        download(served.url, tmp_path / "w", sha256=served.sha256)
    assert leftovers(tmp_path / "w") == []


def test_a_server_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(DownloadError, match=r"^http://127.0.0.1:9/w .*refused.*$") as caught:
        download("http://127.0.0.1:9/w", tmp_path / "w", sha256="0" * 64, timeout=2)
    assert caught.value.__cause__ is None


def test_a_silent_server_times_out(served, tmp_path):
    served.silent = threading.Event()
    with pytest.raises(DownloadError, match="timed out"):
        download(served.url, tmp_path / "w", sha256=served.sha256, timeout=0.2)
    served.silent.set()
    assert socket.getdefaulttimeout() is None
    assert leftovers(tmp_path / "w") == []


@pytest.mark.parametrize("url", ["file:///etc/hosts", "ftp://host/w", "weights.safetensors"])
def test_only_http_is_spoken(tmp_path, url):
    with pytest.raises(DownloadError, match="expected an address"):
        download(url, tmp_path / "w", sha256="0" * 64)
    assert leftovers(tmp_path / "w") == []


def test_downloads_at_the_same_time_leave_one_whole_file(served, tmp_path):
    target = tmp_path / "w"
    arguments = {"sha256": served.sha256}
    threads = [
        threading.Thread(target=download, args=(served.url, target), kwargs=arguments)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == served.content
    assert leftovers(target) == ["w"]


def test_the_rooms_of_weights_do_not_load_torch():
    script = "import sys, revzoo.weights.files; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
