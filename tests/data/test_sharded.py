"""Images in shards of litdata and webdataset, local and in object storage."""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DistributedSampler

from revzoo.data import DataError, ImageFolder, Shards, file_images
from revzoo.data import sharded as module
from revzoo.data.folders import scan
from revzoo.data.images import as_is
from revzoo.data.loaders import Loader
from revzoo.data.pack import FORMS, pack
from revzoo.data.sharded import Shard, Storage, check_shards

litdata = pytest.importorskip("litdata")
webdataset = pytest.importorskip("webdataset")

MakeFolder = Callable[..., Path]

SET = "s3://images/set"
SPLITS = {"train": {"a": 12, "b": 12}, "val": {"a": 2, "b": 2}}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def packed(make_folder: MakeFolder, tmp_path: Path, form: str) -> Path:
    """Shards of about 5 images."""
    out = tmp_path / "shards"
    pack(scan(make_folder(SPLITS)), out, form=form, shard_bytes=400 if form == "litdata" else 5000)
    return out


@pytest.fixture
def tars(make_folder: MakeFolder, tmp_path: Path) -> Path:
    pack(scan(make_folder(SPLITS)), tmp_path / "shards", form="webdataset", shard_bytes=5000)
    return tmp_path / "shards"


def ready(root: Path | str, *, kind: Any = Shards, **options: Any) -> Any:
    fixed = {"batch_size": 4, "num_workers": 0, "image_size": 8, "cache_bytes": 0}
    data = kind(root, **{**fixed, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def colours(loader: Any) -> list[tuple[int, ...]]:
    """The colours of the images, which number them, and their labels."""
    batches = [torch.cat([images[:, :, 4, 4], labels[:, None]], 1) for images, labels in loader]
    return sorted(map(tuple, torch.cat(batches).tolist()))


def test_the_images_are_those_of_the_folder(packed: Path, tmp_path: Path) -> None:
    folder = ready(tmp_path / "images", kind=ImageFolder)
    data = ready(packed)
    assert (data.classes, data.train_count, data.val_count) == (["a", "b"], 24, 4)
    assert colours(data.train_dataloader()) == colours(folder.train_dataloader())
    assert colours(data.val_dataloader()) == colours(folder.val_dataloader())
    assert len({*data.listing().splits["train"].shards}) > 3
    in_memory = ready(packed, cache_bytes=2**20)
    assert colours(in_memory.train_dataloader()) == colours(folder.train_dataloader())


@pytest.mark.filterwarnings("ignore")  # they leave files open
def test_the_libraries_read_the_shards(packed: Path, form: str, tmp_path: Path) -> None:
    files = sorted((tmp_path / "images" / "train").rglob("*.png"))
    expected = sorted((path.read_bytes(), "ab".index(path.parent.name)) for path in files)
    if form == "litdata":
        items = litdata.StreamingDataset(str(packed / "train"))
        found = [(bytes(content), label) for content, label in items]
    else:
        tars = sorted(map(str, (packed / "train").glob("*.tar")))
        items = webdataset.WebDataset(tars, shardshuffle=False)
        found = [(item["png"], int(item["cls"])) for item in items]
    assert sorted(found) == expected


def test_packing_is_all_or_nothing(make_folder: MakeFolder, tmp_path: Path, form: str) -> None:
    root, out = make_folder(SPLITS), tmp_path / "shards"
    with pytest.raises(DataError, match=r"has \d+ bytes, a shard 10: raise --shard-mb"):
        pack(scan(root), out, form=form, shard_bytes=10)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    (tmp_path / ".shards.partial").mkdir()  # of a packing that was killed
    pack(scan(root), out, form=form, shard_bytes=10**6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "shards"]
    with pytest.raises(DataError, match="shards exists: give a new folder"):
        pack(scan(root), out, form=form, shard_bytes=10**6)


def test_groups_and_classes_are_kept(tars: Path) -> None:
    index = json.loads((tars / "images.json").read_text())
    index["splits"] = {"train": {**index["splits"]["train"], "groups": [i // 6 for i in range(24)]}}
    (tars / "images.json").write_text(json.dumps(index))
    data = ready(tars, val_fraction=0.25)
    assert (data.train_count, data.val_count) == (18, 6)
    state = data.state_dict()
    state["classes"] = ["a", "c"]
    with pytest.raises(DataError, match="only trained on: c"):
        data.load_state_dict(state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "images.json").unlink(), "there is no .*images.json: set data.root"),
        (lambda root: (root / "images.json").write_text("{"), "images.json is damaged"),
        (lambda root: (root / "images.json").write_text("{}"), "not an index of images .KeyError"),
        (lambda root: (root / "train/000001.tar").unlink(), "001.tar is missing: copy it again$"),
        (
            lambda root: [path.unlink() for path in (root / "train").iterdir()],
            r"000000.tar is missing: copy it again; also \d more of \d",
        ),
        (
            lambda root: os.truncate(root / "train/000001.tar", 3000),
            "000001.tar has 3,000 bytes, its index says .*: copy it again",
        ),
    ],
)
def test_bad_shards_are_named(damage: Any, message: str, tars: Path) -> None:
    damage(tars)
    with pytest.raises(DataError, match=message):
        Shards(tars).prepare_data()


def test_a_damaged_image_is_skipped_or_listed(tars: Path) -> None:
    assert check_shards(tars, workers=1).bad == {}
    files = Shards(tars).listing().splits["train"]
    shard = tars / "train" / "000000.tar"
    content = bytearray(shard.read_bytes())
    start, size = files.starts[2], files.sizes[2]
    content[start : start + size] = bytes(size)
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot decode image .*000000.tar, image 2 \(Unid"):
        colours(ready(tars).train_dataloader())
    data = ready(tars, on_error="skip")
    assert len(colours(data.train_dataloader())) == 23
    assert data.skipped_files == [f"{tars}/train/000000.tar, image 2"]
    (paths,) = check_shards(tars, workers=1).bad.values()
    assert paths == data.skipped_files


def test_damage_that_no_decoder_notices(tars: Path) -> None:
    for name in ("000000.tar", "000001.tar"):
        content = bytearray((tars / "train" / name).read_bytes())
        content[-1] = 1  # after the last image
        (tars / "train" / name).write_bytes(content)
    report = check_shards(tars, workers=1)
    assert report.bad == {}
    first, second = report.faults
    assert re.search(r"000000.tar is damaged: its sha256 is \w+, its index says", first)
    assert "000001.tar" in second


class Server(ThreadingHTTPServer):
    """Serves the shards as a bucket; ``fault`` answers a number of the requests for shards."""

    fault, times = "", 0

    def __init__(self, shards: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.shards, self.endpoint = shards, f"http://127.0.0.1:{self.server_address[1]}"
        Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def translate_path(self, path: str) -> str:
        return str(self.server.shards) + path.partition("?")[0].removeprefix("/images/set")

    def do_GET(self) -> None:
        fault, name = self.server.fault, self.translate_path(self.path)
        if not self.server.times or name.endswith(".json"):
            return super().do_GET()
        self.server.times -= 1
        if fault.isdigit():
            return self.send_error(int(fault))
        if fault == "silence":
            return time.sleep(2 * module._TIMEOUT)
        content = Path(name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        self.wfile.write(content[:half])
        if fault == "damage":
            self.wfile.write(bytes(len(content) - half))
        if fault == "silence inside":
            time.sleep(2 * module._TIMEOUT)
        return None  # "break": the connection ends here


@pytest.fixture
def server(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_TIMEOUT", 0.5)
    forget()
    server = Server(tars)
    yield server
    server.stop()
    forget()


def forget() -> None:
    """As in a new process."""
    module._opened.cache_clear()
    module._client_of.cache_clear()


@pytest.fixture
def copies(tmp_path: Path) -> Callable[[], list[int]]:
    """The sizes of the shards in the cache."""
    return lambda: [path.stat().st_size for path in (tmp_path / "cache").rglob("*.tar")]


def remote(server: Server, **options: Any) -> Shards:
    """The set of the server."""
    return ready(SET, endpoint_url=server.endpoint, **options)


def test_shards_that_were_packed_anew_are_downloaded_anew(
    server: Server, tars: Path, tmp_path: Path
) -> None:
    before = colours(remote(server).train_dataloader())
    sizes = {path.name: path.stat().st_size for path in (tars / "train").iterdir()}
    for path in (tmp_path / "images").rglob("*.png"):
        Image.eval(Image.open(path), lambda value: value ^ 64).save(path)
    shutil.rmtree(tars)
    pack(scan(tmp_path / "images"), tars, form="webdataset", shard_bytes=5000)
    assert sizes == {path.name: path.stat().st_size for path in (tars / "train").iterdir()}
    after = colours(remote(server).train_dataloader())
    assert before != after == colours(ready(tars).train_dataloader())


class Client:
    """Downloads a shard of 4 bytes; with a fault at first."""

    def __init__(self, fault: Callable[[], object]) -> None:
        self.faults = [fault]

    def download_fileobj(self, address: str, to: Any) -> None:
        to.write(b"1234")
        while self.faults:
            self.faults.pop()()


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """Reads a shard with a fault in its download."""

    def read(fault: Callable[[], object]) -> bytes:
        client = Client(fault)
        monkeypatch.setattr(module, "_client_of", lambda *_: client)
        shard = Shard("train/0.tar", 4, hashlib.sha256(b"1234").hexdigest())
        return bytes(Storage("s3://images/set", tmp_path / "cache").open(shard))

    return read


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "full"),
            "no space in .*/cache for train/0.tar .*: lower data.shard",
        ),
        (RuntimeError("odd"), "cannot read s3://images/set/train/0.tar .*odd.: check"),
    ],
)
def test_the_shard_that_fails_is_named(
    error: Exception, message: str, shard: Callable[..., bytes]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(DataError, match=message):
        shard(fail)


def test_a_shard_is_downloaded_again_if_another_process_makes_room(
    shard: Callable[..., bytes], tmp_path: Path
) -> None:
    def make_room() -> None:
        for path in tmp_path.rglob("*.tar"):
            path.unlink()

    assert shard(make_room) == b"1234"


FAULTS = {  # of the server: what the run says if they last
    "403": r"403.*check data.root, your credentials .*have they expired",
    "404": r"404.*copy the shard there again",
    "500": r"500.*2 tries.*try again when the service answers",
    "503": r"503.*2 tries",
    "429": r"429.*2 tries",
    "silence": r"Read timeout.*2 tries",
    "silence inside": r"Read timeout.*2 tries",
    "break": r"total bytes expected.*2 tries",
    "damage": r"its sha256 is \w+, its index says \w+; 2 tries.: copy the shard there again",
}


@pytest.mark.parametrize("fault", sorted({*FAULTS} - {"403", "404"}))
def test_a_fault_that_passes_costs_no_image(
    fault: str, server: Server, tars: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault, server.times = fault, 1
    assert colours(remote(server).train_dataloader()) == colours(ready(tars).train_dataloader())
    assert server.times == 0
    assert "train/000000.tar" in caplog.text
    assert re.search("trying again, for up to 1[12]. s", caplog.text)


@pytest.mark.parametrize("fault", sorted({*FAULTS} - {"500", "429"}))
def test_a_fault_that_lasts_ends_the_run_until_it_is_mended(
    fault: str, server: Server, tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if damaged images are skipped."""
    monkeypatch.setattr(module, "_PATIENCE", 2.5)
    server.fault, server.times = fault, 10**9
    begin = time.monotonic()
    message = f"cannot read {SET}/train/00000..tar .*{FAULTS[fault]}"
    with pytest.raises(DataError, match=message):
        colours(remote(server, on_error="skip").train_dataloader())
    assert time.monotonic() - begin < 10
    server.times = 0
    repaired = remote(server, on_error="skip")
    assert colours(repaired.train_dataloader()) == colours(ready(tars).train_dataloader())


def test_a_server_that_starts_again(server: Server, tars: Path) -> None:
    data = remote(server)
    shutil.rmtree(data._storage.cache)  # setup has read all of so few images
    forget()
    server.stop()
    later = Timer(1.5, Server, (tars, server.server_address[1]))
    later.start()
    assert colours(data.train_dataloader()) == colours(ready(tars).train_dataloader())


def test_the_cache_has_a_limit(server: Server, tars: Path, copies: Callable[[], list[int]]) -> None:
    limit = 2 * max(path.stat().st_size for path in tars.rglob("*.tar"))
    data = remote(server, shard_cache_bytes=limit, window=1)
    assert colours(data.train_dataloader()) == colours(ready(tars).train_dataloader())
    assert limit / 2 < sum(copies()) <= limit


@pytest.mark.parametrize(
    ("use", "prefetch"),
    [("training", 2), ("evaluation", 0), ("evaluation", 2), ("evaluation by two processes", 2)],
)
def test_the_next_shards_are_downloaded(
    use: str, prefetch: int, server: Server, tars: Path, copies: Callable[[], list[int]]
) -> None:
    def loader_of(data: Shards) -> Any:
        if use == "training":
            return data.train_dataloader()
        images = data._images("train")
        sampler = DistributedSampler(images, 2, 0, shuffle=False) if "two" in use else None
        return Loader(images, batch_size=1, sampler=sampler, collate_fn=as_is)

    data = remote(server, window=1, batch_size=1, prefetch=prefetch)
    assert data._storage.cache is not None
    shutil.rmtree(data._storage.cache)  # setup has read all of so few images
    forget()
    batches = iter(loader_of(data))
    first, until = next(batches), time.monotonic() + 30
    while len(copies()) < 1 + prefetch and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(copies()) == 1 + prefetch
    assert colours([first, *batches]) == colours(loader_of(ready(tars)))
    assert len(loader_of(data)) == len([first, *loader_of(data)]) - 1


def test_the_pixels_are_measured_on_the_first_shards(
    server: Server, copies: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_images, "_SAMPLE", 1)
    remote(server)
    assert len(copies()) == 1


def test_the_cache_limits_the_downloads(server: Server, tars: Path) -> None:
    size = max(path.stat().st_size for path in tars.rglob("*.tar"))
    prefetch = {}
    for room in (0, 3, 6, 100):
        data = remote(server, window=2, shard_cache_bytes=room * size)
        prefetch[room] = data.listing().splits["train"].prefetch
    assert prefetch == {0: 0, 3: 0, 6: 2, 100: 8}


@pytest.fixture
def bucket(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of S3 as moto imitates it, with the shards in the bucket "images"."""
    boto3 = pytest.importorskip("boto3")
    server_module = pytest.importorskip("moto.server")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "REVZOO_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="images")
    for path in (*tars.rglob("*.tar"), tars / "images.json"):
        client.upload_file(str(path), "images", f"set/{path.relative_to(tars)}")
    yield endpoint
    server.stop()


def test_s3(
    bucket: str, tars: Path, copies: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, remote = ready(tars), ready(f"{SET}/", endpoint_url=bucket)
    assert remote.digest() == local.digest()
    assert colours(remote.train_dataloader()) == colours(local.train_dataloader())
    assert colours(remote.val_dataloader()) == colours(local.val_dataloader())
    assert sum(copies()) == sum(path.stat().st_size for path in tars.rglob("*.tar"))

    def refused(root: str, fault: str) -> None:
        with pytest.raises(DataError, match=f"cannot read {root}/images.json .*{fault}") as caught:
            Shards(root, endpoint_url=bucket).prepare_data()
        assert "check data.root, your credentials" in str(caught.value)
        assert "\n" not in str(caught.value)

    refused("s3://other/set", "NoSuchBucket")
    refused("s3://images/other", "NoSuchKey")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    forget()
    refused(SET, "Credential")
