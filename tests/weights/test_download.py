"""Downloads against a server on this machine that fails in every way a server can."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from revzoo.weights.download import download
from revzoo.weights.errors import DownloadError, HashMismatchError


def leftovers(target: Path) -> list[str]:
    return sorted(p.name for p in target.parent.iterdir() if p.suffix != ".lock")


def interrupted(served, target):
    served.cut = 4000
    with pytest.raises(DownloadError, match="ended after 4000 of 10240 bytes; try again"):
        download(served.url, target, sha256=served.sha256)
    served.cut = None
    assert not target.exists()
    assert target.with_name(target.name + ".part").stat().st_size == 4000


def test_a_file_arrives_whole_and_alone(served, tmp_path):
    target = tmp_path / "new" / "w"
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content
    assert leftovers(target) == ["w"]


def test_an_interrupted_download_goes_on_where_it_stopped(served, tmp_path):
    target = tmp_path / "w"
    interrupted(served, target)
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content
    assert served.requests[1]["Range"] == "bytes=4000-"
    assert served.requests[1]["If-Range"] == '"one"'
    assert leftovers(target) == ["w"]


def test_another_file_on_the_server_is_fetched_from_its_beginning(served, tmp_path):
    target = tmp_path / "w"
    interrupted(served, target)
    served.content, served.etag = served.content[::-1], '"two"'
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_validator_nothing_is_resumed(served, tmp_path, etag):
    target = tmp_path / "w"
    served.etag = etag
    interrupted(served, target)
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content
    assert "Range" not in served.requests[1]


def test_what_came_from_another_address_is_not_continued(served, tmp_path):
    target = tmp_path / "w"
    interrupted(served, target)
    download(served.url + "?new", target, sha256=served.sha256)
    assert "Range" not in served.requests[1]


def test_a_shorter_file_on_the_server_is_fetched_anew(served, tmp_path):
    target = tmp_path / "w"
    interrupted(served, target)
    served.content = served.content[:3000]
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content


def test_another_part_than_asked_for_is_refused(served, tmp_path):
    target = tmp_path / "w"
    interrupted(served, target)
    served.wrong_part = True
    with pytest.raises(DownloadError, match="another part than asked for"):
        download(served.url, target, sha256=served.sha256)
    served.wrong_part = False
    download(served.url, target, sha256=served.sha256)
    assert target.read_bytes() == served.content


def test_a_wrong_hash_leaves_nothing(served, tmp_path):
    target = tmp_path / "w"
    with pytest.raises(HashMismatchError, match=f"{served.sha256}, expected {'0' * 64}"):
        download(served.url, target, sha256="0" * 64)
    assert leftovers(target) == []


def test_an_old_file_stays_until_the_new_one_is_verified(served, tmp_path):
    target = tmp_path / "w"
    target.write_bytes(b"old")
    with pytest.raises(HashMismatchError):
        download(served.url, target, sha256="0" * 64)
    assert target.read_bytes() == b"old"


def test_an_error_answer_is_told(served, tmp_path):
    served.status = 404
    with pytest.raises(DownloadError, match="answered 404 Not Found"):
        download(served.url, tmp_path / "w", sha256=served.sha256)


def test_a_server_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DownloadError, match="refused"):
        download("http://127.0.0.1:9/w", tmp_path / "w", sha256="0" * 64, timeout=2)


@pytest.mark.parametrize("url", ["file:///etc/hosts", "ftp://host/w", "weights.safetensors"])
def test_only_http_is_spoken(tmp_path, url):
    with pytest.raises(DownloadError, match="expected an address"):
        download(url, tmp_path / "w", sha256="0" * 64)


def test_downloads_at_the_same_time_fetch_once(served, tmp_path):
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
    assert len(served.requests) == 1
