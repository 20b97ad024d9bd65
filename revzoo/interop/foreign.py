"""Checkpoints of other programs: their tensors, and nothing that they would execute.

A checkpoint is a pickle, and a pickle names functions to call. ``torch.load(weights_only=True)``
calls none but its own, and so refuses files in which anything else lies beside the tensors: an
``argparse.Namespace``, a scheduler, a model saved whole. Those are read here by a second unpickler
that knows tensors and ordered dictionaries; every other name becomes a :class:`Placeholder`, inert
and never imported.

Read are torch's zip and pre-1.6 formats; refused TorchScript archives, which hold programs, and the
tar files of torch 0.1.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revzoo.weights.errors import UnreadableWeightsError
from revzoo.weights.pickles import BoundedUnpickler, listed, ordered
from revzoo.weights.torch_file import check_tensors, read_torch_file

Weights = Mapping[str, Tensor]

WRAPPERS = ("state_dict", "model", "model_state_dict", "net")
"""Keys under which training scripts keep the state dict, or the model itself."""


class ConversionError(ValueError):
    """A file that is no checkpoint of the expected kind, or that cannot be read safely."""


class Placeholder:
    """Stands for an object of a class that is not imported; remembers its name and state."""

    name = ""
    state: Any = None
    dump_patches = False  # torch.load asks pickled modules whether to write their source's diff

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """A pickled list's items are dropped."""

    def extend(self, items: Any) -> None:
        """A pickled list's items are dropped."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """A pickled dictionary's items are dropped."""

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"


class _Rebuild:
    """A call that a pickle may make. No plain function: a pickle may set the attributes of one."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise ConversionError("it changes a function of the reader")


class _RebuildTensor(_Rebuild):
    """As torch's ``_rebuild_tensor`` and ``_rebuild_tensor_v2``, without hooks."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
        flat = torch.empty(0, dtype=storage.dtype).set_(storage.untyped())
        return flat.as_strided(tuple(size), tuple(stride), offset)  # refuses to leave the storage


class _First(_Rebuild):
    """The tensor that a parameter is made from."""

    __slots__ = ()

    def __call__(self, data: Any, *_: Any) -> Any:
        return data


KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): ordered,
    ("torch", "Size"): listed,
    ("torch._utils", "_rebuild_tensor"): _RebuildTensor(),
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _First(),
    ("torch.nn.parameter", "Parameter"): _First(),
}


WRAPPED = (Mapping, Placeholder)
_MOST_MODULES, _DEEPEST = 100_000, 50


class _Unpickler(BoundedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        return type("Placeholder", (Placeholder,), {"name": f"{module}.{name}"})


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


# As torch.load expects a pickle module to be.
_RESTRICTED = types.SimpleNamespace(__name__=__name__, Unpickler=_Unpickler, load=_load)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint, whatever lies beside it; on the CPU.

    It may be the whole file, an entry of :data:`WRAPPERS`, or the parameters and buffers of a
    model that was pickled whole. A prefix ``module.`` of all keys (``DataParallel``) is left out.

    Raises:
        OSError: the file cannot be read.
        ConversionError: it is no checkpoint, or of a kind that is refused.
    """
    path = Path(path)
    found = dict(_state_in(_read(path), path))
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise ConversionError(
                f"{path}: {key!r} is {value!r}, expected a tensor; this way of storing one cannot "
                "be read. Load the file with the program that wrote it and save a plain state_dict"
            )
    try:
        check_tensors(found.items(), path)
    except UnreadableWeightsError as error:
        raise ConversionError(str(error)) from None
    while found and all(key.startswith("module.") for key in found):
        found = {key.removeprefix("module."): value for key, value in found.items()}
    return found


def _read(path: Path) -> Any:
    path.stat()  # a missing file is an OSError
    try:
        return read_torch_file(path, fallback_pickle=_RESTRICTED)
    except UnreadableWeightsError as error:
        raise ConversionError(str(error)) from None


def _state_in(content: Any, path: Path) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()  # a dictionary may hold itself
    while isinstance(content, Mapping) and id(content) not in seen:
        seen.add(id(content))
        inner = next((k for k in WRAPPERS if isinstance(content.get(k), WRAPPED)), None)
        if inner is None:
            break
        content = content[inner]
    if isinstance(content, Placeholder):
        found = list(_module_state(content, path))
        if found:
            yield from found
            return
    if not isinstance(content, Mapping) or not _is_state(content):
        raise ConversionError(
            f"{path} holds no state_dict: expected one, or a dictionary with one under "
            f"{' or '.join(map(repr, WRAPPERS))}"
        )
    yield from content.items()


def _is_state(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(v, Tensor) for v in content.values()) and all(
        isinstance(key, str) for key in content
    )


def _module_state(module: Placeholder, path: Path) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers of a pickled ``torch.nn.Module``, by their path."""
    pending = [("", 0, module)]
    visits = 0
    while pending:
        prefix, depth, module = pending.pop()
        visits += 1
        if visits > _MOST_MODULES or depth > _DEEPEST:  # shared modules, or one inside itself
            raise ConversionError(
                f"{path} holds more than {_MOST_MODULES:,} modules, or modules more than "
                f"{_DEEPEST} deep: save the model's state_dict instead"
            )
        state = module.state if isinstance(module.state, Mapping) else {}
        for kind in ("_parameters", "_buffers"):
            for name, value in _items(state, kind):
                if value is not None:
                    yield f"{prefix}{name}", value
        children = [(n, m) for n, m in _items(state, "_modules") if isinstance(m, Placeholder)]
        pending += [(f"{prefix}{name}.", depth + 1, child) for name, child in reversed(children)]


def _items(state: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    found = state.get(kind)
    return list(found.items()) if isinstance(found, Mapping) else []
