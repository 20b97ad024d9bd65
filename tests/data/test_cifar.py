import hashlib
import pickle
import re
import shutil
import socket
import tarfile
from pathlib import Path
from typing import NoReturn
from urllib.error import URLError

import pytest
import torch
from torchvision import datasets

from revzoo.data import CIFAR10, CIFAR100, DataError

_BATCH = "cifar-10-batches-py/data_batch_2"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _no_network(*_: object, **__: object) -> NoReturn:
    raise URLError("Network is unreachable")


def test_unpacked_set_is_read_as_torchvision_reads_it(fake_cifar: Path) -> None:
    data = CIFAR10(fake_cifar, batch_size=10, val_fraction=0.2)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    assert (data.num_classes, data.in_chans, data.sizes) == (10, 3, (32, 32))
    assert data.classes == [f"class {n}" for n in range(10)]
    assert len(data.train_dataloader()) == 8
    images, labels = next(iter(data.test_dataloader()))
    reference = datasets.CIFAR10(fake_cifar, train=False)
    assert labels.tolist() == reference.targets
    assert torch.equal(images, torch.from_numpy(reference.data).permute(0, 3, 1, 2))


def test_cifar100_names_its_own_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR100 cannot .*/cifar-100-python/train does not"):
        CIFAR100(tmp_path, download=False).prepare_data()


def test_missing_set_is_downloaded_and_unpacked(fake_cifar: Path) -> None:
    shutil.rmtree(fake_cifar)
    data = CIFAR10(fake_cifar, batch_size=10)
    with pytest.raises(DataError, match=r"prepare_data\(\) downloads it"):
        data.setup("fit")
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_dataloader()) == 9


def test_without_download_the_error_names_path_and_remedy(fake_cifar: Path) -> None:
    (fake_cifar / _BATCH).unlink()
    with pytest.raises(DataError) as caught:
        CIFAR10(fake_cifar, download=False).prepare_data()
    message = str(caught.value)
    assert f"{fake_cifar / _BATCH} does not exist, and data.download is false" in message
    assert "Set data.root to the folder that holds cifar-10-batches-py/" in message
    assert "or take folders of images, data=imagefolder data.root=DIR" in message
    assert "with a network, use data.download=true, or fetch it by hand" in message
    assert f"tar -xz -C {fake_cifar}" in message


def test_offline_there_is_one_error_without_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", _no_network)
    with pytest.raises(DataError, match=r"downloading failed .*Network is unreachable") as caught:
        CIFAR10(tmp_path / "new").prepare_data()
    assert str(tmp_path / "new" / "cifar-10-batches-py") in str(caught.value)
    assert caught.value.__suppress_context__
    assert "\n" not in str(caught.value)


def test_a_silent_network_times_out_and_the_default_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def slow(*_: object, **__: object) -> NoReturn:
        seen.append(socket.getdefaulttimeout())
        raise TimeoutError("timed out")

    monkeypatch.setattr("urllib.request.urlopen", slow)
    with pytest.raises(DataError, match="timed out"):
        CIFAR10(tmp_path).prepare_data()
    assert seen[0] == 30
    assert socket.getdefaulttimeout() is None


def test_a_truncated_download_is_refused_and_removed(fake_cifar: Path, tmp_path: Path) -> None:
    shutil.rmtree(fake_cifar)
    server = tmp_path / "server" / datasets.CIFAR10.filename
    whole = server.read_bytes()
    _truncate(server)
    data = CIFAR10(fake_cifar, batch_size=10)
    with pytest.raises(DataError, match=r"downloading failed .*corrupted.* network, fetch it by"):
        data.prepare_data()
    assert not (fake_cifar / datasets.CIFAR10.filename).exists()
    with pytest.raises(DataError, match="does not exist"):
        data.setup("fit")
    server.write_bytes(whole)
    data.prepare_data()
    data.setup("fit")


def test_a_truncated_file_is_never_taken_for_good(fake_cifar: Path) -> None:
    _truncate(fake_cifar / _BATCH)
    damaged = re.escape(f"{fake_cifar / _BATCH} is damaged")
    with pytest.raises(DataError, match=damaged):
        CIFAR10(fake_cifar).setup("fit")
    with pytest.raises(DataError, match=damaged):
        CIFAR10(fake_cifar, download=False).prepare_data()
    data = CIFAR10(fake_cifar, batch_size=10)
    data.prepare_data()  # unpacks it again
    data.setup("fit")


def test_damaged_class_names_are_noticed_and_repaired(fake_cifar: Path) -> None:
    meta = fake_cifar / "cifar-10-batches-py" / "batches.meta"
    meta.write_bytes(b"")
    with pytest.raises(DataError, match=r"batches\.meta is damaged"):
        CIFAR10(fake_cifar).setup("fit")
    data = CIFAR10(fake_cifar)
    data.prepare_data()
    assert meta.stat().st_size > 0


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [_BATCH, "cifar-10-batches-py/batches.meta"])
def test_a_pickle_that_is_not_the_published_one_is_not_opened(
    name: str, fake_cifar: Path, tmp_path: Path
) -> None:
    (fake_cifar / name).write_bytes(pickle.dumps({"data": Bomb(tmp_path / "ran")}))
    with pytest.raises(DataError, match="is damaged"):
        CIFAR10(fake_cifar, download=False).setup("fit")
    assert not (tmp_path / "ran").exists()
    pickle.loads((fake_cifar / name).read_bytes())
    assert (tmp_path / "ran").exists()  # without the check it runs


def test_an_archive_of_other_content_is_not_unpacked(
    fake_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(fake_cifar)
    server = tmp_path / "server" / datasets.CIFAR10.filename
    with tarfile.open(server, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    with pytest.raises(DataError, match="corrupted"):
        CIFAR10(fake_cifar).prepare_data()
    # and were it published so, it would be refused as well
    md5 = hashlib.md5(server.read_bytes()).hexdigest()
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5)
    with pytest.raises(DataError, match=r"OutsideDestinationError: '\.\./outside'"):
        CIFAR10(fake_cifar).prepare_data()
    assert not (tmp_path / "outside").exists()
    assert [path.name for path in fake_cifar.iterdir()] == [datasets.CIFAR10.filename]
