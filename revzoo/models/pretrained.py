"""Finds, verifies, adapts and loads trained weights.

Three things may differ from the training of the weights, for transfer to other data:

* image channels: the first convolution's weights are summed to one channel, or repeated and
  scaled, so that activations keep their size (timm's rule);
* classes: everything but the classifier is loaded;
* image size of a transformer: the position embeddings are resized (timm's rule, too).

All other names and shapes must match.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from torch.nn import functional

from revzoo._files import file_name, json_bytes, write_together
from revzoo.models.components import adapt_channels
from revzoo.models.network import ImageNetwork
from revzoo.models.weights_file import (
    TensorFile,
    check_finite,
    check_fit,
    parse_safetensors,
    read_published_file,
    safetensors_bytes,
)
from revzoo.models.wrapped import is_library_name, weights_address
from revzoo.weights.entry import WeightsEntry, entry_beside, metadata_for
from revzoo.weights.errors import (
    ArchitectureMismatchError,
    EntryError,
    StateMismatchError,
    UnknownWeightsError,
)
from revzoo.weights.files import cache_folder, download, read_bytes
from revzoo.weights.source import CHECKPOINTS, SUFFIX, find_entry, is_distributed
from revzoo.weights.table import SHIPPED, WeightsTable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedModel:
    """The architecture, entry and options that a name of ``create_model`` stands for."""

    architecture: str
    entry: WeightsEntry | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def find_model(
    name: str | Path,
    *,
    known: Container[str],
    pretrained: bool,
    cache_dir: str | Path | None = None,
    table: WeightsTable | None = None,
) -> NamedModel:
    """Resolve ``architecture[.tag]``, ``hf-hub:owner/name``, a safetensors file or its folder.

    An architecture (one of ``known``) precedes a folder of the same name. If ``pretrained``, an
    architecture alone means its default weights.

    Raises:
        ValueError: the name belongs to a Python file.
        WeightsError: the weights are unknown, or their entry is not valid.
    """
    text = str(name)
    if text.endswith(".py"):
        raise ValueError(
            f"{text} is a Python file, not a model: expected a name. Call revzoo.register_model("
            "NAME, NETWORK) in that file, import it, and use NAME; on the command line: "
            f"--import {Path(text).stem} NAME"
        )
    is_known = text.partition(".")[0] in known
    # a folder "revnet38" in the working directory must not hide the architecture
    if text.endswith(SUFFIX) or not is_known:
        entry = find_entry(name, cache_dir=cache_dir, tensors=pretrained)
        if entry is not None:
            return NamedModel(entry.architecture, entry, entry.options)
    if is_library_name(text) and pretrained:
        weights_address(text)  # raises if the library has none
        return NamedModel(text, options={"pretrained": True})  # the library loads its weights
    if is_library_name(text) or (not pretrained and "." not in text):
        return NamedModel(text)
    path = Path(text)
    if path.suffix == ".ckpt" or is_distributed(path) or (path / CHECKPOINTS).is_dir():
        raise UnknownWeightsError(
            f"{text} is a run or its checkpoint, not weights: "
            "revzoo.training.Classifier.load_from_checkpoint(RUN).model is its network; "
            "revzoo export RUN --format safetensors writes its weights"
        )
    shelf = SHIPPED if table is None else table
    try:
        entry = shelf.find(text)
    except UnknownWeightsError:
        if text in known and not shelf.names(text):
            raise UnknownWeightsError(
                f"there are no weights for {text}: use pretrained=False (model.pretrained=false), "
                "or your own file as checkpoint_path (+model.checkpoint_path=FILE); "
                "list_models(pretrained=True) (revzoo list --pretrained) lists all weights"
            ) from None
        raise
    return NamedModel(entry.architecture, entry, entry.options)


def read_weights(entry: WeightsEntry, *, cache_dir: str | Path | None = None) -> TensorFile:
    """The tensors of ``entry``, after verification of the file.

    Raises:
        WeightsError: the file is missing, cannot be fetched, has another hash, or holds more than
            tensors.
    """
    known = _cached_copy(entry, cache_dir) if entry.is_published_file else entry
    file = parse_safetensors(read_bytes(known, cache_dir=cache_dir), entry.name)
    in_chans = file.in_chans or entry.in_chans
    return file._replace(in_chans=in_chans, num_classes=entry.num_classes)


def _cached_copy(entry: WeightsEntry, cache_dir: str | Path | None) -> WeightsEntry:
    """The entry of a safetensors file in the cache, made once from a publisher's file.

    The tensors keep the publisher's names, which ``ImageNetwork.adapt_state_dict`` translates.
    """
    url = str(entry.url)
    kept_apart = hashlib.sha256(f"{url} {entry.sha256}".encode()).hexdigest()[:16]
    path = cache_folder(cache_dir) / f"{file_name(entry.name)}-{kept_apart}{SUFFIX}"
    if path.is_file() and (known := entry_beside(path)) is not None:
        return known
    with TemporaryDirectory() as folder:
        downloaded = Path(folder) / Path(urlsplit(url).path).name
        download(url, downloaded, sha256=entry.sha256)
        tensors = read_published_file(downloaded).tensors
    data = safetensors_bytes(tensors, metadata_for(entry))
    digest = hashlib.sha256(data).hexdigest()
    known = replace(entry, sha256=digest, file=path.name, url=None, folder=path.parent)
    write_together({path: data, path.with_suffix(".json"): json_bytes(known.plain())})
    return known


def load_weights(
    network: ImageNetwork,
    file: TensorFile,
    *,
    architecture: str = "",
    allow_nonfinite: bool = False,
) -> None:
    """Load ``file`` into ``network``, adapted to its classes and image channels.

    Raises:
        ArchitectureMismatchError: the file names another architecture.
        EntryError: the entry of the file names another number of classes.
        NotFiniteError: a tensor holds NaN or Inf and ``allow_nonfinite`` is False.
        StateMismatchError: lists the tensors that do not fit.
    """
    if file.architecture not in (None, architecture):
        raise ArchitectureMismatchError(
            f"{file.where} holds weights of {file.architecture}, expected {architecture}: create "
            f"{file.architecture!r} instead"
        )
    expected = network.state_dict()
    tensors = dict(network.adapt_state_dict(file.tensors))
    # Files from before torch 0.4.1, such as torchvision's ResNets, lack BatchNorm's counts. torch
    # does the same.
    counts = {key: t for key, t in expected.items() if key.endswith(".num_batches_tracked")}
    if not counts.keys() & tensors.keys():
        tensors |= counts
    _adapt_input(network, tensors, file)
    _adapt_positions(network, expected, tensors)
    _adapt_classifier(network, expected, tensors, file)
    check_fit(expected, tensors, file.where)
    # after the shapes: it needs memory, and a wrong file may be large
    if not allow_nonfinite:
        check_finite(tensors, file.where, expected)
    network.load_state_dict(tensors)


def shape_of_weights(
    network: type[ImageNetwork] | ImageNetwork, file: TensorFile
) -> dict[str, int]:
    """``num_classes`` and ``in_chans`` of the weights, as far as known."""
    tensors = file.tensors
    if isinstance(network, ImageNetwork):  # a publisher's file, or a user's module alone
        tensors = dict(network.adapt_state_dict(tensors))
    head = tensors.get(f"{network.classifier}.weight")
    first = tensors.get(f"{network.input_layer}.weight")
    shape = {} if file.in_chans is None else {"in_chans": file.in_chans}
    if head is not None and head.dim() == 2 and head.shape[1]:
        shape["num_classes"] = head.shape[0]
    if first is not None and first.dim() == 4 and first.numel():
        shape["in_chans"] = first.shape[1]
    return shape


def _adapt_input(network: ImageNetwork, tensors: dict[str, Tensor], file: TensorFile) -> None:
    if network.input_layer is None:
        if file.in_chans not in (None, network.in_chans):
            why = "this architecture has no first convolution to adapt: convert the images"
            line = f"images (file: {file.in_chans} channels, model: {network.in_chans}; {why})"
            raise StateMismatchError(file.where, misshapen=[line])
        return
    key = f"{network.input_layer}.weight"
    weight = tensors.get(key)
    # other shapes do not change: check_fit names them
    if weight is not None and weight.dim() == 4 and weight.shape[1] not in (0, network.in_chans):
        log.info(
            "%s is for images of %d channels: the first layer is adapted to %d",
            file.where,
            weight.shape[1],
            network.in_chans,
        )
        tensors[key] = adapt_channels(weight, network.in_chans)


def _adapt_positions(
    network: ImageNetwork, expected: Mapping[str, Tensor], tensors: dict[str, Tensor]
) -> None:
    """Resize position embeddings ``(1, N, D)`` of a square of patches to another square."""
    key = network.positions
    if key is None or key not in expected or key not in tensors:
        return
    positions, (_, count, width) = tensors[key], expected[key].shape
    if positions.dim() != 3 or (positions.shape[0], positions.shape[2]) != (1, width):
        return
    old, side = math.isqrt(positions.shape[1]), math.isqrt(count)
    if old in (0, side) or old**2 != positions.shape[1]:
        return
    # (1, N, D) -> (1, D, side, side), as interpolate expects images; float for half precision
    grid = positions.float().reshape(1, old, old, width).permute(0, 3, 1, 2)
    # bicubic and antialiased, like timm's resample_abs_pos_embed
    resized = functional.interpolate(grid, size=(side, side), mode="bicubic", antialias=True)
    tensors[key] = resized.permute(0, 2, 3, 1).reshape(1, count, width).to(positions.dtype)


def _adapt_classifier(
    network: ImageNetwork,
    expected: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    file: TensorFile,
) -> None:
    """Leave the network's initial classifier if it has another number of classes, or none."""
    weight = tensors.get(f"{network.classifier}.weight")
    if weight is not None and file.num_classes not in (None, len(weight)):
        raise EntryError(
            f"{file.where} holds a classifier of {len(weight)} classes, but its entry says "
            f"num_classes={file.num_classes}"
        )
    if network.num_classes:
        # a missing or misshapen classifier is an error of the file, which check_fit reports
        if weight is None or weight.dim() != 2 or len(weight) == network.num_classes:
            return
        # no warning: the caller asked for other classes
        log.info(
            "%s does not have %d classes: the classifier starts from random weights",
            file.where,
            network.num_classes,
        )
    heads = tuple(f"{path}." for path in network.classifiers)
    for key in [key for key in tensors if key.startswith(heads)]:
        del tensors[key]
    tensors |= {key: t for key, t in expected.items() if key.startswith(heads)}
