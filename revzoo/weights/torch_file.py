"""Reads files of ``torch.save``: plain values and dense tensors, in bounded time and memory.

``torch.load(weights_only=True)`` is the only reader, so that no check can see another content than
the reader. It runs no code of a file. But it trusts the sizes in it: a hundred bytes can hold a
tuple of 2**60 items as a key of a dictionary (hashing it never ends), or a record that inflates to
gigabytes. Nothing in Python can interrupt that.

So on Linux a fork loads each file first, with limits of CPU time and memory that follow from the
file's size (``docs/decisions/017-one-reader-of-torch-files.md``). It also checks what torch does
not: the checksums of the archive, and shapes that are larger than the stored values.

:mod:`revzoo.weights` does not import this module, since it works without torch.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import reprlib
import signal
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from revzoo.weights.errors import UnreadableWeightsError

PLAIN = (str, int, float, bool, type(None), bytes)
MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, torch.Size)
MAX_DEPTH, MAX_VALUES = 50, 2_000_000  # random states of 1,000 processes fit
SECONDS, MEMORY = 10, 2**28  # of the fork, besides those for the file's bytes
REMEDY = "use another copy of it, or another checkpoint of the run"

_SHORT = reprlib.Repr()
_SHORT.maxstring = 100  # names of layers stay whole

log = logging.getLogger(__name__)


def read_torch_file(path: Path, *, map_location: Any = "cpu") -> Any:
    """The content of a file: containers of plain values and dense tensors.

    Args:
        path: a regular file.
        map_location: the device of the tensors, as in ``torch.load``.

    Raises:
        UnreadableWeightsError: the file is missing or damaged, holds other objects, or takes much
            more time or memory than its size suggests.
        OSError: the system does not open the file.
    """
    # a pipe would block
    if not path.is_file():
        raise UnreadableWeightsError(f"there is no file {path}: give the path of a checkpoint")
    # a file that the system refuses, for now perhaps, is not a damaged one
    path.open("rb").close()
    # elsewhere the system does not limit memory
    if not (_examine_in_fork if sys.platform == "linux" else _examine)(path):
        log.warning(
            "%s has no checksums, so damage would go unnoticed: save it again with a recent torch",
            path,
        )
    return torch.load(path, map_location=map_location, weights_only=True)


def leaves(content: Any, name: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (keys, value) for each value in nested containers that is not a container.

    Args:
        content: the containers.
        name: of the content, for errors.

    Raises:
        UnreadableWeightsError: more than :data:`MAX_VALUES` values or :data:`MAX_DEPTH` levels, so
            that a walk through them takes forever, or a key that is not plain.
    """
    pending: list[tuple[tuple[Any, ...], Any]] = [((), content)]
    count = 0
    while pending:
        keys, value = pending.pop()
        # type() instead of isinstance: pickle writes a subclass by its name
        if type(value) in MAPPINGS:
            for key in value:
                if not all(type(part) in PLAIN for part in (key if _is_tuple(key) else (key,))):
                    raise UnreadableWeightsError(f"{place(name, keys)}: the key {described(key)}")
            items = value.items()
        elif type(value) in SEQUENCES:
            items = enumerate(value)
        else:
            yield keys, value
            continue
        # counted on each path: a list may hold another one ten times, at no cost to the file
        count += len(value)
        if count > MAX_VALUES or len(keys) == MAX_DEPTH:
            raise UnreadableWeightsError(
                f"{place(name, keys)} holds more than {MAX_VALUES:,} values, or containers more "
                f"than {MAX_DEPTH} deep"
            )
        pending += [((*keys, key), item) for key, item in items]


def place(name: str, keys: Sequence[Any]) -> str:
    """Where a value is: ``name['key'][0]``."""
    return name + "".join(f"[{_SHORT.repr(key)}]" for key in keys[:8])


def described(value: Any) -> str:
    """A value and its type, for errors."""
    kind = type(value)
    return f"{_SHORT.repr(value)} is a {kind.__module__}.{kind.__qualname__}"


def _is_tuple(value: Any) -> bool:
    return type(value) in (tuple, torch.Size)


def is_dense(value: Any) -> bool:
    """Whether ``value`` is a strided tensor in memory, not quantised, meta or nested."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )


def _examine(path: Path) -> bool:
    """Load the file, and check what torch does not; returns whether it has checksums."""
    try:
        has_sums = _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise many types
        raise UnreadableWeightsError(f"{path} {_reason(error, path)}") from None
    try:
        for keys, value in leaves(content, str(path)):
            if isinstance(value, Tensor):
                _check_tensor(value, place(str(path), keys))
    except UnreadableWeightsError as error:
        raise UnreadableWeightsError(f"{error}: {REMEDY}") from None
    return has_sums


def _check_tensor(tensor: Tensor, where: str) -> None:
    if not is_dense(tensor):
        raise UnreadableWeightsError(
            f"{where} is {tensor.layout} {tensor.dtype} on {tensor.device}, expected a "
            "state_dict: a dense tensor by each name"
        )
    needed, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed > held:  # expand() makes a tensor of any size from one number
        raise UnreadableWeightsError(
            f"{where} of shape {tuple(tensor.shape)} takes {needed:,} bytes, more than the "
            f"{held:,} stored for it; if you made it with expand(), save tensor.clone()"
        )


def _check_sums(path: Path) -> bool:
    """Refuse damage, which torch's reader ignores. Torch alone decides what the file holds.

    Files from before torch 1.6 have no checksums, nor those of ``set_crc32_options(False)``.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        if not any(entry.CRC for entry in archive.infolist()):
            return False
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
    return True


def _reason(error: Exception, path: Path) -> str:
    """Why a file cannot be loaded, and what to do."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)|(TorchScript) archive|legacy .tar format", text):
        name, program = found.groups()
        kind = "holds a program" if program else f"names {name}" if name else "is a tar file"
        load = "torch.jit.load(PATH)" if program else "torch.load(PATH, weights_only=False)"
        return (
            f"{kind}: it was not loaded, since that could run code; expected a state_dict, a dense "
            f"tensor by each name. If you trust the file, use {load} where the program that wrote "
            "it is installed, and torch.save its state_dict()"
        )
    # not torch's whole message, which recommends weights_only=False
    text = " ".join(text.rpartition("WeightsUnpickler error: ")[2].split())[:200]
    kind = f"{path.stat().st_size:,} bytes, {type(error).__name__}: {text}"
    return f"is damaged, cut off or not a checkpoint ({kind}): {REMEDY}"


def _examine_in_fork(path: Path) -> bool:
    """Like :func:`_examine`, within limits. A new program would first have to import torch."""
    size = path.stat().st_size
    seconds, memory = SECONDS + size // 50_000_000, MEMORY + 2 * size
    answers = os.memfd_create("answer")
    with warnings.catch_warnings(), os.fdopen(answers, "rb") as file:
        # Python warns of threads, whose locks stay locked in a fork: ours takes none of them
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            _answer(path, answers, seconds, memory)
        try:
            os.waitpid(child, 0)
        except BaseException:  # such as Ctrl-C
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        file.seek(0)
        kind, _, reason = file.read().decode(errors="replace").partition(" ")
    if not kind:
        raise UnreadableWeightsError(
            f"{path} has {size:,} bytes, but takes more than {seconds} s or {memory:,} bytes of "
            f"memory to load: {REMEDY}"
        )
    if kind == "refused":
        raise UnreadableWeightsError(reason)
    return kind == "sums"


def _answer(path: Path, answers: int, seconds: int, memory: int) -> NoReturn:
    """Examine the file in the fork, which ends without cleaning up what is its parent's."""
    import resource  # only Linux gets here

    try:
        gc.disable()  # it would free objects of the parent, such as tensors of a GPU
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crash is no news
        torch.set_num_threads(1)  # a fork has no other threads
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        for kind, limit in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, pages * resource.getpagesize() + memory),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))
        try:
            answer = "sums " if _examine(path) else "none "
        except UnreadableWeightsError as error:
            answer = f"refused {error}"
        os.write(answers, answer.encode(errors="replace"))
    finally:
        os._exit(0)
