"""Reads and checks tensors by name: safetensors, a ``state_dict`` or a training checkpoint.

safetensors files hold only bytes and shapes. Of torch's files, ``torch.load(weights_only=True)``
alone decides what they hold; it runs no code (``docs/decisions/017-one-reader-of-torch-files.md``).
:mod:`revzoo.models.tensor_bundle` reads TensorFlow's.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from revzoo._checks import is_count, shortened
from revzoo.models.tensor_bundle import DATA_SUFFIX, SUFFIX, read_tensor_bundle
from revzoo.weights.entry import entry_beside, metadata_of, with_sorted_strings
from revzoo.weights.errors import (
    REMEDY,
    NotFiniteError,
    StateMismatchError,
    UnreadableWeightsError,
)
from revzoo.weights.files import read_bytes
from revzoo.weights.source import PLAIN_PART, best_of_run, is_distributed, only_file_in

PICKLED = (".pt", ".pth", ".ckpt", ".pyth", ".tar")
ARCHIVE = ".gz"  # of NAME.tar.gz, with a TensorFlow checkpoint
WRAPPERS = ("state_dict", "model", "model_state_dict", "model_state", "net")
"""Keys under which training scripts keep the state dict."""
# names of variables in the TensorFlow release of RevNet
_LEAVES = {
    "w": "weight",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "ema_mean": "running_mean",
    "ema_var": "running_var",
}
_OF_TRAINING = ("Momentum", "global_step", "learn_rate")


class TensorFile(NamedTuple):
    """Tensors by name, the file's name for errors, and the known facts about the network."""

    tensors: dict[str, Tensor]
    where: str
    architecture: str | None = None
    in_chans: int | None = None
    num_classes: int | None = None


def parse_safetensors(data: bytes, where: str) -> TensorFile:
    """The tensors in the bytes of a safetensors file.

    Raises:
        UnreadableWeightsError: the bytes are not a complete safetensors file.
    """
    try:
        tensors, metadata = load(data), metadata_of(data)
    except Exception as error:  # SafetensorError, or a KeyError for a dtype that torch lacks
        raise UnreadableWeightsError(
            f"{where} is not a complete safetensors file: {error}. Fetch it again"
        ) from error
    channels = metadata.get("in_chans", "")
    # any program may write this string
    in_chans = int(channels) if re.fullmatch(r"[1-9]\d{0,5}", channels, re.ASCII) else None
    return TensorFile(tensors, where, metadata.get("architecture"), in_chans)


def read_weights_file(path: Path) -> TensorFile:
    """The tensors of a local file: safetensors, or as :func:`read_published_file`.

    ``path`` may also be a folder: a run's, whose best checkpoint is read, or one with a single
    safetensors file.

    Raises:
        EntryError: the entry beside a safetensors file is not valid.
        HashMismatchError: that entry describes another file.
        UnreadableWeightsError: the file is missing, damaged, of another format, or holds more than
            tensors.
    """
    path = best_of_run(path) or only_file_in(path) or path
    if is_distributed(path):
        return read_state_dict(path)
    if not path.is_file():
        raise UnreadableWeightsError(
            f"there is no file {path}, and no weights in such a folder: check checkpoint_path"
        )
    if path.suffix == ".safetensors":
        entry = entry_beside(path)  # with it, the hash can be verified
        data = path.read_bytes() if entry is None else read_bytes(entry)
        return parse_safetensors(data, str(path))
    if path.suffix not in (known := (*PICKLED, SUFFIX, ARCHIVE)):
        raise UnreadableWeightsError(
            f"{path} has an unknown format; expected .safetensors, {', '.join(known)}"
        )
    return read_published_file(path)


def read_published_file(path: Path) -> TensorFile:
    """The tensors of a file of TensorFlow (``.index``, ``.tar.gz``), else of torch.

    Raises:
        UnreadableWeightsError: see :func:`read_tensorflow` and :func:`read_state_dict`.
    """
    of_tensorflow = path.suffix in (SUFFIX, ARCHIVE)
    return read_tensorflow(path) if of_tensorflow else read_state_dict(path)


def read_tensorflow(path: Path) -> TensorFile:
    """The network's variables in a TensorFlow checkpoint, in torch's layout.

    A variable ``Model/SCOPES/LAYER/w`` becomes ``SCOPES/LAYER.weight``, as the release of RevNet
    names them; those of its optimiser are left out.

    Args:
        path: ``NAME.index``, with ``NAME.data-00000-of-00001`` beside it, or a ``.tar.gz`` archive
            of one checkpoint.

    Raises:
        OSError: a file cannot be opened.
        UnreadableWeightsError: the archive is damaged, or holds no or several checkpoints; or see
            :func:`~revzoo.models.tensor_bundle.read_tensor_bundle`.
    """
    if path.suffix != ARCHIVE:
        variables = read_tensor_bundle(path)
    else:
        with TemporaryDirectory() as folder:
            variables = read_tensor_bundle(_unpacked(path, Path(folder)))
    tensors = {}
    for name, array in variables.items():
        module, _, leaf = name.removeprefix("Model/").rpartition("/")
        if leaf in _OF_TRAINING:
            continue
        tensor = torch.from_numpy(array)
        if tensor.dim() == 4:  # kernels: height, width, in, out
            tensor = tensor.permute(3, 2, 0, 1)
        elif tensor.dim() == 2:  # the classifier: in, out
            tensor = tensor.T
        tensors[f"{module}.{_LEAVES.get(leaf, leaf)}"] = tensor.contiguous()
    return TensorFile(tensors, str(path))


def _unpacked(path: Path, folder: Path) -> Path:
    """The index of the checkpoint in an archive, after writing its two files to ``folder``."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name  # without folders, so nothing lands outside
                if name.endswith((SUFFIX, DATA_SUFFIX)) and (file := archive.extractfile(member)):
                    (folder / name).write_bytes(file.read())
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UnreadableWeightsError(
            f"{path} is damaged, cut off or not a .tar.gz archive ({error}): fetch it again"
        ) from None
    found = (file for file in folder.glob(f"*{SUFFIX}") if file.with_suffix(DATA_SUFFIX).exists())
    names = sorted(file.name for file in found)
    if len(names) != 1:
        raise UnreadableWeightsError(
            f"{path} holds {len(names)} TensorFlow checkpoints ({shortened(names)}): expected one, "
            f"NAME{SUFFIX} with NAME{DATA_SUFFIX}. Unpack it, and give the path of one index"
        )
    return folder / names[0]


def read_state_dict(path: Path) -> TensorFile:
    """The state dict in a file of ``torch.save``, of this or another program.

    It may be the whole file or under a key of :data:`WRAPPERS`; other values beside it are ignored.
    We remove the prefixes ``model.`` (of a training checkpoint), ``module.`` (``DataParallel``) and
    ``_orig_mod.`` (``torch.compile``).

    Raises:
        UnreadableWeightsError: the file is missing or damaged, or its state dict holds more than
            dense tensors.
    """
    content = read_torch_file(path)
    tensors = content
    while isinstance(tensors, Mapping):
        inner = next((key for key in WRAPPERS if isinstance(tensors.get(key), Mapping)), None)
        if inner is None:
            break
        tensors = tensors[inner]
    if not (isinstance(tensors, Mapping) and any(isinstance(t, Tensor) for t in tensors.values())):
        raise UnreadableWeightsError(
            f"{path} holds no state_dict: expected one, as model.state_dict() gives, or a "
            f"dictionary with one under {' or '.join(map(repr, WRAPPERS))}"
        )
    if "hyper_parameters" in content:  # a Classifier's: model.*, and states of metrics
        own = [key for key in tensors if str(key).startswith("model.")]
        tensors = {key.removeprefix("model."): tensors[key] for key in own}
    check_dense(tensors, str(path))
    tensors = {key.replace("_orig_mod.", ""): t for key, t in tensors.items()}
    # a loop: a model wrapped in DataParallel twice has the prefix twice
    while tensors and all(key.startswith("module.") for key in tensors):
        tensors = {key.removeprefix("module."): t for key, t in tensors.items()}
    return TensorFile(tensors, str(path), *_model_in(content))


def read_torch_file(path: Path, *, map_location: Any = "cpu", values: bool = True) -> Any:
    """The content of a file of ``torch.save``: plain values and tensors. No code in it runs.

    Also of a distributed checkpoint; without ``values``, its divided tensors are empty.

    Raises:
        UnreadableWeightsError: the file is missing or damaged, or holds other objects.
        OSError: the system does not open the file.
    """
    if is_distributed(path):
        from revzoo.models.checkpoint_folder import (
            check_whole,
            filled,
            whole,
        )  # loads torch.distributed

        state = check_whole(path, read_torch_file(path / PLAIN_PART, map_location=map_location))
        return filled(state, path, partial(whole, map_location)) if values else state
    if not path.is_file():  # a pipe would block
        raise UnreadableWeightsError(f"there is no file {path}: give the path of a checkpoint")
    # a file that the system refuses, for now perhaps, is not a damaged one
    path.open("rb").close()
    try:
        _check_sums(path)
        # no mmap: saving a state again under its own name would then end the process (SIGBUS)
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # damaged files raise many types
        raise UnreadableWeightsError(f"{path} {_reason(error)}") from None


def _check_sums(path: Path) -> None:
    """Refuse damage, which torch's reader ignores."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            # none before torch 1.6 and after torch.serialization.set_crc32_options(False)
            with_sums = any(record.CRC for record in archive.infolist())
            if with_sums and (damaged := archive.testzip()):
                raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")


def _reason(error: Exception) -> str:
    """Why a file cannot be loaded, and what to do."""
    text = str(error)
    if found := re.search(r"GLOBAL \S+|TorchScript archive|legacy .tar format", text):
        return (
            f"was not loaded, since it could run code ({found[0]}): expected a state_dict, a dense "
            "tensor by each name. If you trust the file, load it with the program that wrote it "
            "(weights_only=False), and torch.save its state_dict()"
        )
    # not torch's whole message, which recommends weights_only=False
    text = " ".join(text.rpartition("WeightsUnpickler error: ")[2].split())[:200]
    return f"is damaged, cut off or not a checkpoint ({type(error).__name__}: {text}): {REMEDY}"


def _model_in(content: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Architecture and image channels in a training checkpoint; None in other files."""
    parameters = content.get("hyper_parameters")  # Lightning's key
    spec = parameters.get("model") if isinstance(parameters, Mapping) else None
    if not isinstance(spec, Mapping):
        return None, None
    name, in_chans = spec.get("name"), spec.get("in_chans")
    return name if isinstance(name, str) else None, in_chans if is_count(in_chans) else None


def check_dense(tensors: Mapping[Any, Any], where: str) -> None:
    """Refuse a ``state_dict`` in which an item is not a dense tensor under a string.

    Raises:
        UnreadableWeightsError: names these items.
    """

    def is_dense(key: Any, t: Any) -> bool:
        dense = isinstance(t, Tensor) and t.layout is torch.strided and not t.is_meta
        return dense and isinstance(key, str)

    if others := sorted(str(key) for key, value in tensors.items() if not is_dense(key, value)):
        raise UnreadableWeightsError(
            f"{where} does not hold only tensors: {shortened(others)}; expected a "
            "state_dict: a dense tensor by each name"
        )


def check_finite(
    tensors: Mapping[str, Tensor], where: str, expected: Mapping[str, Tensor] | None = None
) -> None:
    """Refuse weights with NaN or Inf, which would make every output NaN.

    ``expected`` are the tensors that they replace, whose dtype may be too narrow for the values.

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


def check_fit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors whose names, shapes or kinds (float or not) differ from the ``expected`` ones.

    Raises:
        StateMismatchError: lists them.
    """

    def kind(t: Tensor) -> str:
        return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"

    shared = expected.keys() & tensors.keys()
    # load_state_dict would convert integers to floats silently
    misshapen = [
        f"{key} (file: {kind(tensors[key])}, model: {kind(expected[key])})"
        for key in shared
        if tensors[key].shape != expected[key].shape
        or tensors[key].is_floating_point() != expected[key].is_floating_point()
    ]
    missing, unexpected = expected.keys() - shared, tensors.keys() - shared
    if missing or unexpected or misshapen:
        raise StateMismatchError(where, missing=missing, unexpected=unexpected, misshapen=misshapen)


def check_module(
    module: nn.Module,
    state: Mapping[str, Any],
    where: str,
    *,
    strict: bool = True,
    values: bool = True,
) -> None:
    """Check the names, shapes and values of a ``state_dict`` before ``module`` loads it.

    torch's ``load_state_dict`` accepts NaN, and complex numbers for real ones. Without ``strict``,
    names may differ; without ``values``, only names and shapes count. What a module adds by
    ``get_extra_state`` is not checked.

    Raises:
        WeightsError: names the tensors of the file ``where`` that do not fit.
    """
    known = module.state_dict()
    expected = {key: value for key, value in known.items() if isinstance(value, Tensor)}
    tensors = {key: value for key, value in state.items() if key in expected or key not in known}
    if not strict:
        shared = expected.keys() & tensors.keys()
        expected, tensors = ({key: d[key] for key in shared} for d in (expected, tensors))
    if values:
        check_dense(tensors, where)
    check_fit(expected, tensors, where)
    if values:
        check_finite(tensors, where, expected)


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with ``metadata`` in its header (see :mod:`revzoo.weights.entry`).

    The same tensors and metadata give the same bytes.
    """
    # clones: safetensors refuses tensors that share memory
    copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    return with_sorted_strings(save(copies, metadata=dict(metadata)))
