"""Images in shards: litdata's chunks or webdataset's tar files, in a folder or in object storage.

A file system opens each image by itself; millions of small files are slow there, and in object
storage each is a request. A shard holds thousands of images and is read as one file.

Why not the libraries' own data sets: both are streams with an order and a position of their own.
litdata resumes with as many processes and workers as before, and its reader keeps one chunk open,
so each image of a shuffled batch would map a chunk again. webdataset 1.0 has neither random access
nor a position. Here an index (``images.json``, written by ``revzoo pack-data``) has the place of
each image and the hash of each shard, and ``order.py`` the order. The shards are those of the
libraries, and other programs read them with these.

Threads of the process that draws the order download the next shards; workers read the copies.
botocore downloads from S3: boto3, which litdata uses, repeats botocore's retries in threads that
delay the end of a program. litdata's clients download from other services. Known limits: the first
shards of a pass are downloaded when they are needed; the index takes about 25 bytes an image.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, NamedTuple, Unpack

import numpy as np
from filelock import FileLock

from revzoo._checks import check_count, package_needed
from revzoo._files import remove_oldest, replacing
from revzoo.data.decode import open_image
from revzoo.data.errors import DataError
from revzoo.data.folders import Files, FolderReport, Tree, unreadable
from revzoo.data.imagefolder import ImageFolder, ReadingOptions
from revzoo.data.module import Split
from revzoo.weights.files import cache_folder

INDEX = "images.json"
_GIB = 2**30
_DOWNLOADS = 8  # at once, of a process
_TIMEOUT = 30  # seconds without a byte
_PATIENCE = 120.0  # seconds; a server that starts again takes less
_AT_START = 10.0  # seconds; a wrong address must not wait long
_REMEDY = (
    "check data.root, your credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY; have they expired?) and, for a service other than AWS, "
    "data.endpoint_url"
)

log = logging.getLogger(__name__)


class Shard(NamedTuple):
    """A file of images, as the index has it."""

    name: str
    size: int  # bytes
    sha256: str


class DamagedError(Exception):
    """A download has other bytes than the index says."""


@dataclass(frozen=True)
class Storage:
    """The files of a set: a folder, or an address of which a cache holds copies.

    Attributes:
        root: a folder, or ``s3://BUCKET/FOLDER``.
        cache: folder of the copies; None for a folder, which needs none.
        cache_bytes: size of the cache; the shards that were opened longest ago are removed.
        endpoint_url: of an S3 service other than AWS.
        version: hash of the index. Shards that were packed anew often have the names and sizes of
            the former ones; copies of those must not pass for them.
    """

    root: str
    cache: Path | None = None
    cache_bytes: int = 0
    endpoint_url: str | None = None
    version: str = ""

    def index(self) -> tuple[dict[str, Any], str]:
        """The content of the index, and its hash.

        Raises:
            DataError: it is missing or damaged.
        """
        where = f"{self.root}/{INDEX}"
        try:
            if self.cache is None:
                content = Path(where).read_bytes()
            else:
                self._download(INDEX, buffer := io.BytesIO(), time.monotonic() + _AT_START)
                content = buffer.getvalue()
            found: dict[str, Any] = json.loads(content)
        except FileNotFoundError:
            raise DataError(
                f"there is no {where}: set data.root to the output of `revzoo pack-data`"
            ) from None
        except ValueError as error:
            raise DataError(f"{where} is damaged ({error}): copy it again") from error
        return found, hashlib.sha256(content).hexdigest()[:16]

    def open(self, shard: Shard) -> Any:
        """The bytes of a shard, uint8 (size,), mapped into memory.

        Raises:
            DataError: it is missing, has another size, or cannot be downloaded.
        """
        where = f"{self.root}/{shard.name}"
        while True:
            try:
                path = self.path(shard, _PATIENCE)
                if (found := path.stat().st_size) == shard.size:
                    return np.memmap(path, mode="r")  # stays readable if the file is removed
            except FileNotFoundError:
                if self.cache is not None:  # another process has made room for its shards
                    continue
                raise DataError(f"shard {where} is missing: copy it again") from None
            if self.cache is not None:
                path.unlink(missing_ok=True)
            raise DataError(
                f"shard {where} has {found:,} bytes, its index says {shard.size:,}: copy it again"
            )

    def path(self, shard: Shard, patience: float) -> Path:
        """Where a shard is; downloaded if necessary, see :meth:`_download`."""
        if self.cache is None:
            return Path(self.root, shard.name)
        path = self.cache / self.version / shard.name
        with suppress(FileNotFoundError):
            os.utime(path)  # used now
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + patience  # workers that wait for the lock must not add it up
        with FileLock(f"{path}.lock"):  # one process downloads it, for all
            if not path.exists():
                # FileNotFoundError: another process has removed the file, to make room
                with replacing(path) as copy, copy.open("w+b") as to:
                    self._download(shard.name, to, until, shard.sha256)
        shards = (file for file in self.cache.glob("*/*/*") if file.suffix in (".bin", ".tar"))
        remove_oldest(shards, self.cache_bytes, keep=path)
        return path

    def _download(self, name: str, to: IO[bytes], until: float, sha256: str = "") -> None:
        """Download a file, again and again if the fault may pass, ``until`` a time (monotonic).

        Raises:
            DataError: says which file, the fault and the remedy.
        """
        for tries in count(1):
            try:
                to.seek(0)
                to.truncate()
                _client_of(self, os.getpid()).download_fileobj(f"{self.root}/{name}", to)
                to.seek(0)
                found = hashlib.file_digest(to, "sha256").hexdigest()  # type: ignore[arg-type]
                if sha256 and found != sha256:
                    raise DamagedError(f"its sha256 is {found:.12}, its index says {sha256:.12}")
                return
            except ImportError:
                package = "botocore" if self.root.startswith("s3:") else "litdata"
                raise DataError(package_needed(f"data.root={self.root} needs", package)) from None
            except Exception as error:  # the clients of the services raise many types
                pause = min(2.0 ** (tries - 1), 16.0)
                passes = isinstance(error, (ConnectionError, DamagedError))
                left = until - time.monotonic()
                if not passes or pause > left:
                    raise self._explained(error, name, tries) from error
                if tries == 1:
                    wait = f"trying again, for up to {left:.0f} s"
                    log.warning("cannot read %s/%s (%s): %s", self.root, name, _fault(error), wait)
            time.sleep(pause)

    def _explained(self, error: Exception, name: str, tries: int) -> DataError:
        fault, where = _fault(error), f"{self.root}/{name}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DataError(
                f"no space in {self.cache} for {name} ({fault}): lower data.shard_cache_bytes, or "
                "set REVZOO_CACHE to a folder on a larger disk"
            )
        fault += f"; {tries} tries" if tries > 1 else ""
        if name != INDEX and (isinstance(error, DamagedError) or _status(error) == 404):
            return DataError(f"cannot read {where} ({fault}): copy the shard there again")
        if isinstance(error, ConnectionError):
            remedy = "check data.endpoint_url, and try again when the service answers"
            return DataError(f"cannot read {where} ({fault}): {remedy}")
        return DataError(f"cannot read {where} ({fault}): {_REMEDY}")


def _fault(error: Exception) -> str:
    # botocore's own retries, of which there are none
    text = f"{type(error).__name__}: {error}".replace(" (reached max retries: 0)", "")
    return f"{' '.join(text.split()):.200}"


def _status(error: Exception) -> int:
    """The status of the answer of S3; 0 without one."""
    response = getattr(error, "response", None)
    return int(response["ResponseMetadata"]["HTTPStatusCode"]) if isinstance(response, dict) else 0


class S3:
    """A client of S3 that tries each request once."""

    def __init__(self, endpoint_url: str | None) -> None:
        from botocore.config import Config
        from botocore.session import get_session

        config = Config(
            connect_timeout=_TIMEOUT,
            read_timeout=_TIMEOUT,
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=2 * _DOWNLOADS,
        )
        # its own session: two threads must not make clients from one
        self._client = get_session().create_client("s3", endpoint_url=endpoint_url, config=config)

    def download_fileobj(self, address: str, to: IO[bytes]) -> None:
        """Download a file.

        Raises:
            ConnectionError: the service does not answer, breaks off, or says that it is busy.
            botocore's errors: any other fault.
        """
        from botocore import exceptions

        bucket, _, key = address.removeprefix("s3://").partition("/")
        try:
            shutil.copyfileobj(self._client.get_object(Bucket=bucket, Key=key)["Body"], to)
        except exceptions.ClientError as error:
            if (status := _status(error)) < 500 and status not in (408, 429):
                raise
            raise ConnectionError(str(error)) from error
        except (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
            exceptions.FlexibleChecksumError,
        ) as error:
            raise ConnectionError(str(error)) from error


@lru_cache(maxsize=2)  # a new one takes a tenth of a second
def _client_of(storage: Storage, process: int) -> Any:
    """The client of a process, for all its threads; botocore's must not be shared with a fork."""
    if storage.root.startswith("s3://"):
        return S3(storage.endpoint_url)
    from litdata.streaming.downloader import get_downloader

    return get_downloader(storage.root, str(storage.cache), [], {})


# in each process: a batch needs a window of shards
@lru_cache(maxsize=64)
def _opened(storage: Storage, shard: Shard) -> Any:
    return storage.open(shard)


@lru_cache(maxsize=1)  # in each process, for all sets
def _downloads() -> SimpleQueue[tuple[Storage, Shard]]:
    """The shards that threads download, one after the other."""
    queue: SimpleQueue[tuple[Storage, Shard]] = SimpleQueue()

    def run() -> None:
        while True:
            storage, shard = queue.get()
            with suppress(DataError, OSError):  # who needs the shard tries again, and raises
                storage.path(shard, patience=0)

    for _ in range(_DOWNLOADS):
        Thread(target=run, daemon=True).start()  # a run that ends does not wait for them
    return queue


@dataclass(frozen=True)
class ShardFiles(Files):
    """One split in shards.

    Attributes:
        storage: where the shards are.
        all_shards: of the split.
        starts, sizes: place of each image in its shard, in bytes, int64 (N,).
    """

    storage: Storage = Storage("")
    all_shards: tuple[Shard, ...] = ()
    starts: Any = None
    sizes: Any = None

    @classmethod
    def of(
        cls, split: Mapping[str, Any], storage: Storage, window: int, prefetch: int
    ) -> ShardFiles:
        """The files of a split in the index."""
        shards = tuple(
            Shard(str(shard["file"]), int(shard["bytes"]), str(shard["sha256"]))
            for shard in split["shards"]
        )
        room = storage.cache_bytes // max((shard.size for shard in shards), default=1)
        counts = [int(shard["images"]) for shard in split["shards"]]
        places = [(shard, i) for shard, count in enumerate(counts) for i in range(count)]
        return cls(
            [f"{storage.root}/{shards[shard].name}, image {i}" for shard, i in places],
            [int(label) for label in split["labels"]],
            split["groups"],
            shards=[shard for shard, _ in places],
            window=window,
            prefetch=max(0, min(prefetch, room - 2 * window)),  # two: at the end of a window
            storage=storage,
            all_shards=shards,
            starts=np.array(split["starts"]),
            sizes=np.array(split["sizes"]),
        )

    def fetch(self, shards: Sequence[int]) -> None:
        for number in shards:
            _downloads().put((self.storage, self.all_shards[number]))

    def source(self, row: int) -> io.BytesIO:
        assert self.shards is not None
        shard = _opened(self.storage, self.all_shards[self.shards[row]])
        start = self.starts[row]
        return io.BytesIO(shard[start : start + self.sizes[row]].tobytes())


class Shards(ImageFolder):
    """Images in shards that ``revzoo pack-data`` has written, for litdata or webdataset.

    Args:
        root: a folder, or an address such as ``s3://BUCKET/FOLDER``. Other addresses that litdata
            reads (``gs://``, ``azure://``) need its packages for them.
        endpoint_url: of an S3 service other than AWS. boto3 also reads ``AWS_ENDPOINT_URL``.
        shard_cache_bytes: of an address: largest size of the copies in ``$REVZOO_CACHE/shards``.
        window: number of shards whose images are shuffled together.
        prefetch: of an address: shards that are downloaded before they are needed; as many as
            ``shard_cache_bytes`` has room for beside two windows.
        **options: see :class:`~revzoo.data.ImageFolder`; with ``cache_bytes=0`` images are always
            read from their shards.

    Raises:
        DataError: from ``prepare_data``: the index or a shard of a folder is missing or damaged;
            an address cannot be read.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        endpoint_url: str | None = None,
        shard_cache_bytes: int = 64 * _GIB,
        window: int = 8,
        prefetch: int = 8,
        **options: Unpack[ReadingOptions],
    ) -> None:
        super().__init__(root, **options)
        check_count("shard_cache_bytes", shard_cache_bytes, least=0)
        check_count("window", window)
        check_count("prefetch", prefetch, least=0)
        self.window, self.prefetch = window, prefetch
        if "://" in str(root):
            address = str(root).rstrip("/")
            cache = cache_folder() / "shards" / hashlib.sha256(address.encode()).hexdigest()[:16]
            self._storage = Storage(address, cache, shard_cache_bytes, endpoint_url)
        else:
            self._storage = Storage(str(self.root.absolute()))

    @property
    def notes(self) -> list[str]:
        return [f"the images of {self.window} shards shuffled together", *super().notes]

    def digest(self) -> str:
        return self._digest

    def _scan(self) -> Tree:
        tree, self._digest = listed(self._storage, self.window, self.prefetch)
        return tree

    @property
    def _where(self) -> str:
        return self._storage.root

    def _no_training(self) -> DataError:
        return DataError(f"{self._where} has no training images: pack a set that has some")

    def _no_test(self) -> str:
        return f"{self._where} has no test split: pack a set with test/"


def listed(storage: Storage, window: int = 1, prefetch: int = 0) -> tuple[Tree, str]:
    """The splits in the index, and a hash of the images to train and to validate with.

    Raises:
        DataError: the index is missing or damaged, or a shard of a folder is missing.
    """
    index, version = storage.index()
    storage = replace(storage, version=version)
    try:
        names: tuple[Split, ...] = ("train", "val", "test")
        found = {name: index["splits"][name] for name in names if name in index["splits"]}
        splits: dict[Split, ShardFiles] = {}
        for name, split in found.items():
            splits[name] = files = ShardFiles.of(split, storage, window, prefetch)
            lengths = {len(files.paths), len(files.labels), len(files.starts), len(files.sizes)}
            if len(lengths) > 1 or not {*files.labels} <= {*range(len(index["classes"]))}:
                raise ValueError(f"the numbers of {name} do not fit together")
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{storage.root}/{INDEX} is not an index of images ({what}): copy it again, or pack "
            "the images again"
        ) from error
    if storage.cache is None:  # before anything is built
        shards, faults = [shard for files in splits.values() for shard in files.all_shards], []
        for shard in shards:
            try:
                storage.open(shard)
            except DataError as error:
                faults.append(str(error))
        if faults:  # a copy that was broken off lacks many
            others = f"; also {len(faults) - 1} more of {len(shards)}" if faults[1:] else ""
            raise DataError(f"{faults[0]}{others}")
    trained = {name: split for name, split in found.items() if name != "test"}
    digest = hashlib.sha256(json.dumps([index["classes"], trained]).encode()).hexdigest()
    return Tree(list(index["classes"]), {**splits}), digest


def check_shards(root: str | Path, *, workers: int | None = None) -> FolderReport:
    """Decode every image of the shards in a folder, and compare the shards with their hashes.

    Args:
        root: the output of ``revzoo pack-data``.
        workers: number of processes; None for the CPUs minus one.

    Raises:
        DataError: the index is missing or damaged, or a shard is missing or has another size.
    """
    storage = Storage(str(Path(root).expanduser().absolute()))
    tree, _ = listed(storage)
    splits = {name: files for name, files in tree.splits.items() if isinstance(files, ShardFiles)}
    paths = [path for files in splits.values() for path in files.paths]
    images = [(split, row) for split, files in splits.items() for row in range(len(files.paths))]
    bad = unreadable(paths, partial(_read, storage), images, workers=workers)
    faults = []
    for shard in (shard for files in splits.values() for shard in files.all_shards):
        found = hashlib.sha256(storage.open(shard).data).hexdigest()
        if found != shard.sha256:  # a JPEG with a wrong byte is often decoded
            faults.append(
                f"shard {storage.root}/{shard.name} is damaged: its sha256 is {found:.12}, its "
                f"index says {shard.sha256:.12}: copy it again"
            )
    return FolderReport(len(paths), bad, faults)


_listed = lru_cache(maxsize=1)(listed)  # once in each worker


def _read(storage: Storage, image: tuple[Split, int]) -> None:
    split, row = image
    files = _listed(storage)[0].splits[split]
    open_image(files.paths[row], None, source=files.source(row))
