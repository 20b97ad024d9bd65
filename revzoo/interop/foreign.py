"""Reads tensors from other programs' checkpoints without running code in them.

A checkpoint is a pickle, and a pickle names functions to call. ``torch.load(weights_only=True)``
only calls functions from its own list, so it refuses files with other objects besides the tensors:
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
    """The file is not a checkpoint of the expected kind, or cannot be read safely."""


class Placeholder:
    """Replaces an object without importing its class; keeps the class's name and the state."""

    name = ""
    state: Any = None
    # torch.load reads this attribute of pickled modules, to warn of changed sources
    dump_patches = False

    # a pickle calls the class with any arguments, then fills lists and dictionaries item by item
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
        # size, stride and offset come from the file: as_strided raises if they exceed the storage
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


_WRAPPED = (Mapping, Placeholder)
# one shared child, pickled once, can appear exponentially often: 2 children on 50 levels
_MAX_MODULES, _MAX_DEPTH = 100_000, 50


class _Unpickler(BoundedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        # not super().find_class, which imports `module` and so runs its code
        return type("Placeholder", (Placeholder,), {"name": f"{module}.{name}"})


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


# torch.load(pickle_module=) uses `Unpickler`, and `load` for the header of the format before 1.6
_RESTRICTED = types.SimpleNamespace(__name__=__name__, Unpickler=_Unpickler, load=_load)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint, on the CPU; other objects in it are ignored.

    It may be the whole file, an entry of :data:`WRAPPERS`, or the parameters and buffers of a
    pickled model. The prefix ``module.`` of all keys (``DataParallel``) is removed.

    Raises:
        OSError: the file cannot be read.
        ConversionError: it is not a checkpoint, or its format is refused.
    """
    path = Path(path)
    path.stat()  # a missing file is an OSError, an unreadable one a ConversionError
    try:
        tensors = dict(_state_dict(read_torch_file(path, fallback_pickle=_RESTRICTED), path))
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise ConversionError(
                    f"{path}: {key!r} is {value!r}, expected a tensor. Load the "
                    "file with the program that wrote it and save a plain state_dict"
                )
        check_tensors(tensors.items(), path)
    except UnreadableWeightsError as error:
        raise ConversionError(str(error)) from None
    # a loop: a model wrapped in DataParallel twice has the prefix twice
    while tensors and all(key.startswith("module.") for key in tensors):
        tensors = {key.removeprefix("module."): value for key, value in tensors.items()}
    return tensors


def _state_dict(content: Any, path: Path) -> Mapping[str, Any]:
    seen: set[int] = set()  # a pickled dictionary can contain itself
    while isinstance(content, Mapping) and id(content) not in seen:
        seen.add(id(content))
        inner = next((k for k in WRAPPERS if isinstance(content.get(k), _WRAPPED)), None)
        if inner is None:
            break
        content = content[inner]
    if isinstance(content, Placeholder):
        content = dict(_module_state(content, path))
    # only some values must be tensors: the caller names the first that is not a tensor
    if not (
        isinstance(content, Mapping)
        and any(isinstance(value, Tensor) for value in content.values())
        and all(isinstance(key, str) for key in content)
    ):
        raise ConversionError(
            f"{path} holds no state_dict: expected one, or a dictionary with one under "
            f"{' or '.join(map(repr, WRAPPERS))}"
        )
    return content


def _module_state(module: Placeholder, path: Path) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers of a pickled ``torch.nn.Module``, by path."""
    pending = [("", 0, module)]  # a stack: recursion would follow a module inside itself
    visits = 0
    while pending:
        prefix, depth, module = pending.pop()
        visits += 1
        if visits > _MAX_MODULES or depth > _MAX_DEPTH:
            raise ConversionError(
                f"{path} holds more than {_MAX_MODULES:,} modules, or modules more than "
                f"{_MAX_DEPTH} deep: save the model's state_dict instead"
            )
        for kind in ("_parameters", "_buffers"):
            for name, value in _items(module.state, kind):
                if value is not None:  # an absent bias is a parameter None
                    yield f"{prefix}{name}", value
        children = [
            (n, m) for n, m in _items(module.state, "_modules") if isinstance(m, Placeholder)
        ]
        # reversed: pop() takes the last, and a state_dict lists the first child first
        pending += [(f"{prefix}{name}.", depth + 1, child) for name, child in reversed(children)]


def _items(state: Any, kind: str) -> list[tuple[str, Any]]:
    # the file decides every type here
    items = state.get(kind) if isinstance(state, Mapping) else None
    return list(items.items()) if isinstance(items, Mapping) else []
