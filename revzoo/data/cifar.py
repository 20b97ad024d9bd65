"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, 2009): 50,000 training and 10,000 test images of 3x32x32.

torchvision downloads, unpacks and reads them; this module holds the images in memory as bytes
(150 MB) and turns every failure into one ``DataError`` that says where it looked and what to do.

We check the MD5 of the archive and of the unpacked files before we open them, since they are
pickles, which can run code, and since a download may have been interrupted. A bad archive is
removed.
"""

import tarfile
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar, Unpack

import torch
from torchvision import datasets
from torchvision.datasets.utils import check_integrity, download_url

from revzoo.data.errors import DataError
from revzoo.data.images import TensorImages
from revzoo.data.module import ImageData, LoadingOptions, Split
from revzoo.weights.files import socket_timeout

_TIMEOUT = 30.0  # seconds without an answer; torchvision sets none, so a silent network would hang
# OSError, HTTPException: the network and the disk; RuntimeError: torchvision's checksum;
# EOFError, TarError: unpacking
_ERRORS = (OSError, HTTPException, RuntimeError, EOFError, tarfile.TarError)


class CIFAR10(ImageData):
    """CIFAR-10, downloaded on first use.

    Args:
        root: folder that holds, or will hold, the unpacked folder ``cifar-10-batches-py``.
        download: fetch the archive if that folder is missing or damaged.
        **loading: see ``ImageData``.
    """

    source: ClassVar[type[datasets.CIFAR10]] = datasets.CIFAR10

    def __init__(
        self,
        root: str | Path = "./data",
        *,
        download: bool = True,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        super().__init__(**loading)
        self.root = Path(root).expanduser()
        self.download = download

    def prepare_data(self) -> None:
        """Download if needed; Lightning calls it in one process per machine, before ``setup``."""
        bad_file = self._bad_file()
        if bad_file is None:
            return
        if not self.download:
            raise DataError(self._advice(bad_file, "data.download is false"))
        source, archive = self.source, self.root / self.source.filename
        try:
            with socket_timeout(_TIMEOUT):
                download_url(source.url, self.root, source.filename, source.tgz_md5)
            with tarfile.open(archive) as tar:  # torchvision 0.29 unpacks without a filter
                tar.extractall(self.root, filter="data")
        except _ERRORS as error:
            # keep a good archive: unpacking may have failed for lack of space
            if not check_integrity(archive, source.tgz_md5):
                archive.unlink(missing_ok=True)
            reason = f"downloading failed ({type(error).__name__}: {error})"
            # the traceback of a socket adds nothing to the message
            raise DataError(self._advice(bad_file, reason)) from None

    def read(self, split: Split) -> TensorImages | None:
        if split == "val":
            return None
        # again, since without Lightning prepare_data() may not have been called
        bad_file = self._bad_file()
        if bad_file is not None:
            raise DataError(self._advice(bad_file, "prepare_data() downloads it"))
        cifar = self.source(self.root, train=split == "train", download=False)
        # contiguous once; indexing a channels-last view would gather strided pixels in every batch
        images = torch.from_numpy(cifar.data).permute(0, 3, 1, 2).contiguous()
        return TensorImages(images, torch.tensor(cifar.targets), classes=list(cifar.classes))

    def _bad_file(self) -> Path | None:
        """The first file of the unpacked set that is missing or damaged."""
        source = self.source
        meta = (source.meta["filename"], source.meta["md5"])
        for name, md5 in [*source.train_list, *source.test_list, meta]:
            path = self.root / source.base_folder / name
            if not check_integrity(path, md5):
                return path
        return None

    def _advice(self, bad_file: Path, reason: str) -> str:
        source = self.source
        state = "is damaged" if bad_file.exists() else "does not exist"
        root = self.root.absolute()
        # a failed download is not a remedy
        download = "" if self.download else "use data.download=true, or "
        return (
            f"{source.__name__} cannot be read: {bad_file.absolute()} {state}, and {reason}. "
            f"Set data.root to the folder that holds {source.base_folder}/, if you have a copy; or "
            "take folders of images, data=imagefolder data.root=DIR (DIR/train/CLASS/*.png); or, "
            f"with a network, {download}fetch it by hand: "
            f"mkdir -p {root} && curl -L {source.url} | tar -xz -C {root}"
        )


class CIFAR100(CIFAR10):
    """CIFAR-100 with its 100 fine labels; otherwise as CIFAR10. Folder: ``cifar-100-python``."""

    source = datasets.CIFAR100
