"""Reads a model's weights from safetensors, a ``state_dict`` or a training checkpoint.

safetensors files hold only bytes and shapes. :mod:`revzoo.weights.torch_file` reads torch's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from revzoo._checks import is_count, shortened
from revzoo.weights.errors import NotFiniteError, StateMismatchError, UnreadableWeightsError
from revzoo.weights.files import read_bytes
from revzoo.weights.header import entry_beside, metadata_of, with_sorted_strings
from revzoo.weights.torch_file import is_dense, read_torch_file

PICKLED = (".pt", ".pth", ".ckpt")
# how far a network may exceed its file: a new classifier, or layers that the constructor replaces
MORE_PARAMETERS, MORE_VALUES = 1000, 2**28


class TensorFile(NamedTuple):
    """Tensors by name, the file's name for errors, and the file's facts about the network."""

    tensors: dict[str, Tensor]
    where: str
    architecture: str | None = None
    in_chans: int | None = None


def parse_safetensors(data: bytes, where: str) -> TensorFile:
    """The tensors in the bytes of a safetensors file.

    Raises:
        UnreadableWeightsError: the bytes are not a complete safetensors file.
    """
    try:
        tensors = load(data)
    except Exception as error:  # SafetensorError, or a KeyError for a dtype that torch lacks
        raise UnreadableWeightsError(
            f"{where} is not a complete safetensors file: {error}. Fetch it again"
        ) from error
    metadata = metadata_of(data, where)
    channels = metadata.get("in_chans", "")
    # any program may write this string, and a network of 10**9 channels would fill the memory
    in_chans = int(channels) if re.fullmatch(r"[1-9]\d{0,5}", channels, re.ASCII) else None
    return TensorFile(tensors, where, metadata.get("architecture"), in_chans)


def read_weights_file(path: Path) -> TensorFile:
    """The tensors of a local file: safetensors, a ``state_dict``, or a checkpoint of training.

    Raises:
        EntryError: the entry beside a safetensors file is not valid.
        HashMismatchError: that entry describes another file.
        UnreadableWeightsError: the file is missing, damaged, of another format, or holds more than
            tensors.
    """
    if not path.is_file():
        raise UnreadableWeightsError(f"there is no file {path}: check checkpoint_path")
    if path.suffix == ".safetensors":
        entry = entry_beside(path)  # with it, the hash can be verified
        data = path.read_bytes() if entry is None else read_bytes(entry)
        return parse_safetensors(data, str(path))
    if path.suffix not in PICKLED:
        raise UnreadableWeightsError(
            f"{path} has an unknown format; expected .safetensors, {', '.join(PICKLED)}"
        )
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise UnreadableWeightsError(
            f"{path} holds a {type(content).__name__}, expected tensors by name: save "
            "model.state_dict()"
        )
    tensors = tensors_in(content, str(path))
    return TensorFile(tensors, str(path), *_model_in(content, str(path)))


def _model_in(content: Mapping[str, Any], where: str) -> tuple[str | None, int | None]:
    """Architecture and image channels in a training checkpoint; None in other files."""
    parameters = content.get("hyper_parameters")  # Lightning's key
    spec = parameters.get("model") if isinstance(parameters, Mapping) else None
    if not isinstance(spec, Mapping):
        return None, None
    name, in_chans = spec.get("name"), spec.get("in_chans")
    if not (name is None or isinstance(name, str)) or not (in_chans is None or is_count(in_chans)):
        raise UnreadableWeightsError(
            f"{where} is of a model with name={name!r:.80} and in_chans={in_chans!r:.80}; expected "
            "a word and a positive whole number: save model.state_dict() alone"
        )
    return name, in_chans


def tensors_in(content: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """The model's tensors, without the prefixes of wrappers (Lightning, DDP, compilation).

    Raises:
        UnreadableWeightsError: an item is not a tensor.
    """
    tensors = content.get("state_dict", content)
    if not isinstance(tensors, Mapping) or not all(isinstance(key, str) for key in tensors):
        raise UnreadableWeightsError(
            f"{where} holds no tensors by name: expected a state_dict, as model.state_dict() gives"
        )
    if "hyper_parameters" in content:  # a Classifier's checkpoint: model.*, and states of metrics
        tensors = {
            k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")
        }
    # module. from DistributedDataParallel, _orig_mod. from torch.compile, on any level
    tensors = {k.removeprefix("module.").replace("_orig_mod.", ""): v for k, v in tensors.items()}
    check_dense(tensors, where)
    return tensors


def check_dense(tensors: Mapping[Any, Any], where: str) -> None:
    """Refuse a ``state_dict`` in which an item is not a dense tensor.

    Raises:
        UnreadableWeightsError: names these items.
    """
    others = sorted(str(k) for k, v in tensors.items() if not (isinstance(k, str) and is_dense(v)))
    if others:
        raise UnreadableWeightsError(
            f"{where} does not hold only tensors: {shortened(others)}; expected a "
            "state_dict: a dense tensor by each name"
        )


def check_finite(
    tensors: Mapping[str, Tensor], where: str, expected: Mapping[str, Tensor] | None = None
) -> None:
    """Refuse weights with NaN or Inf, which would make every output NaN.

    Args:
        tensors: the weights.
        where: their file, for errors.
        expected: the tensors that they replace, whose dtype may be too narrow for the values.

    Raises:
        NotFiniteError: names the tensors.
    """
    dtypes = {key: t.dtype for key, t in (expected or {}).items()}
    counts = {k: int((~t.to(dtypes.get(k, t.dtype)).isfinite()).sum()) for k, t in tensors.items()}
    if bad := [f"{k} ({n} of {tensors[k].numel()} values)" for k, n in counts.items() if n]:
        raise NotFiniteError(
            f"{where} has NaN or Inf in {shortened(bad)}: the training diverged or the file is "
            "damaged. Use an earlier checkpoint, or create_model(..., allow_nonfinite=True) to "
            "examine it"
        )


@contextmanager
def within_size_of(tensors: Mapping[str, Any], where: str) -> Iterator[None]:
    """Stop the construction of a network that is much larger than the weights of a file.

    The file's options may describe 10**9 blocks, or layers of terabytes. A parameter is registered
    before its memory is filled.

    Raises:
        UnreadableWeightsError: the network has too many parameters.
    """
    count, values = MORE_PARAMETERS, MORE_VALUES
    for tensor in tensors.values():
        count += 1
        values += tensor.numel() if isinstance(tensor, Tensor) else 0

    def subtract(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, values
        count -= 1
        values -= 0 if parameter is None else parameter.numel()
        if min(count, values) < 0:
            raise UnreadableWeightsError(
                f"{where} describes a network that is much larger than its {len(tensors)} tensors: "
                "use another copy of it"
            )

    hook = register_module_parameter_registration_hook(subtract)
    try:
        yield
    finally:
        hook.remove()


def check_fit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors whose names, shapes or kinds (float or not) differ from the ``expected`` ones.

    Raises:
        StateMismatchError: lists them.
    """
    shared = expected.keys() & tensors.keys()
    # load_state_dict would convert integers to floats silently
    misshapen = [
        f"{key} (file: {_kind(tensors[key])}, model: {_kind(expected[key])})"
        for key in shared
        if tensors[key].shape != expected[key].shape
        or tensors[key].is_floating_point() != expected[key].is_floating_point()
    ]
    missing, unexpected = expected.keys() - shared, tensors.keys() - shared
    if missing or unexpected or misshapen:
        raise StateMismatchError(where, missing=missing, unexpected=unexpected, misshapen=misshapen)


def _kind(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with ``metadata`` in its header (see :mod:`revzoo.weights.header`).

    The same tensors and metadata give the same bytes.
    """
    # clones: safetensors refuses tensors that share memory
    copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    return with_sorted_strings(save(copies, metadata=dict(metadata)))
