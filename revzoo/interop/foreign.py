"""Reads tensors from other programs' checkpoints without running code in them.

A checkpoint is a pickle, and a pickle names functions to call. ``torch.load(weights_only=True)``
only calls functions from its own list, so it refuses files with other objects beside the tensors:
an ``argparse.Namespace``, a scheduler, a whole model. A second unpickler reads them. It knows
tensors and ordered dictionaries; every other name becomes an inert :class:`Placeholder` and is
never imported.

It reads torch's zip and pre-1.6 formats. It refuses TorchScript archives, which hold programs, and
the tar files of torch 0.1.
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
    """The file is no checkpoint of the expected kind, or cannot be read safely."""


class Placeholder:
    """Replaces an object without importing its class; keeps the class's name and the state."""

    name = ""
    state: Any = None
    dump_patches = False  # torch.load reads it from pickled modules

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Drop the items of a pickled list."""

    def extend(self, items: Any) -> None:
        """Drop the items of a pickled list."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop the items of a pickled dictionary."""

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"


class _Rebuild:
    """A callable for pickles. Not a function: a pickle could set attributes of a function."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise ConversionError("it tries to change a function of the reader")


class _RebuildTensor(_Rebuild):
    """Like torch's ``_rebuild_tensor`` and ``_rebuild_tensor_v2``, without hooks."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
        flat = torch.empty(0, dtype=storage.dtype).set_(storage.untyped())
        # raises if it exceeds the storage
        return flat.as_strided(tuple(size), tuple(stride), offset)


class _First(_Rebuild):
    """Returns a parameter's tensor."""

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


# the interface of torch.load(pickle_module=)
_RESTRICTED = types.SimpleNamespace(__name__=__name__, Unpickler=_Unpickler, load=_load)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint, on the CPU; other objects beside it are ignored.

    It may be the whole file, an entry of :data:`WRAPPERS`, or the parameters and buffers of a
    pickled model. The prefix ``module.`` of all keys (``DataParallel``) is removed.

    Raises:
        OSError: the file cannot be read.
        ConversionError: it is no checkpoint, or of a refused format.
    """
    path = Path(path)
    found = dict(_state_in(_read(path), path))
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise ConversionError(
                f"{path}: {key!r} is {value!r}, expected a tensor. Load the "
                "file with the program that wrote it and save a plain state_dict"
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
    seen: set[int] = set()  # a dictionary may contain itself
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
    """Parameters and buffers of a pickled ``torch.nn.Module``, by path."""
    pending = [("", 0, module)]
    visits = 0
    while pending:
        prefix, depth, module = pending.pop()
        visits += 1
        if visits > _MOST_MODULES or depth > _DEEPEST:  # shared modules, or a module inside itself
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
