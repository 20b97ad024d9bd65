"""Small real data sets on disk: image folders and CIFAR archives in torchvision's layout."""

import hashlib
import pickle
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchvision import datasets

MakeFolder = Callable[..., Path]


@pytest.fixture(autouse=True, scope="package")
def impatient_loaders() -> Iterator[None]:
    """torch looks for lost workers, and waits for workers that end, up to 5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
        patch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.5,))
        yield


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Write ROOT/SPLIT/CLASS/NN.png; the colour of an image encodes split, class and number."""

    def make(
        splits: dict[str, dict[str, int]],
        size: tuple[int, int] = (8, 8),
        mode: str = "RGB",
        suffix: str = "png",
    ) -> Path:
        root = tmp_path / "images"
        for s, (split, classes) in enumerate(splits.items()):
            for c, (name, count) in enumerate(classes.items()):
                folder = root / split / name
                folder.mkdir(parents=True)
                for n in range(count):
                    image = Image.new("RGB", size, (s * 20, c * 20, n)).convert(mode)
                    image.save(folder / f"{n:02d}.{suffix}")
        return root

    return make


def _pickle(path: Path, content: dict[str, object]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def fake_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root with a CIFAR-10 of 5 x 20 + 20 images, unpacked and as an archive, with its MD5s."""
    root = tmp_path / "root"
    base = root / "cifar-10-batches-py"
    rng = np.random.default_rng(0)

    def batch(name: str) -> list[str]:
        pixels = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        return [name, _pickle(base / name, {"data": pixels, "labels": [*range(10)] * 2})]

    cifar = datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [batch(f"data_batch_{n}") for n in range(1, 6)])
    monkeypatch.setattr(cifar, "test_list", [batch("test_batch")])
    names = [f"class {n}" for n in range(10)]
    md5 = _pickle(base / "batches.meta", {"label_names": names})
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": md5})
    archive = tmp_path / "server" / cifar.filename
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base, cifar.base_folder)
    monkeypatch.setattr(cifar, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    with _serve(archive.parent) as address:
        monkeypatch.setattr(cifar, "url", f"{address}/{cifar.filename}")
        yield root


@contextmanager
def _serve(folder: Path) -> Iterator[str]:
    """A web server for the files of ``folder`` on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
