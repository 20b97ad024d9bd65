"""Finds, verifies, adapts and loads trained weights.

Three things may differ from the training of the weights, for transfer to other data:

* image channels: the first convolution's weights are summed to one channel, or repeated and
  scaled, so that activations keep their size (timm's rule);
* classes: everything but the classifier is loaded;
* image size of a transformer: the position embeddings are resized (timm's rule, too).

All other names and shapes must match.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from revzoo._libraries import library_hint
from revzoo.models.adapt import adapt_channels, adapt_positions
from revzoo.models.library import is_library_name, weights_address
from revzoo.models.network import ImageNetwork
from revzoo.models.weights_file import TensorFile, check_finite, check_fit, parse_safetensors
from revzoo.weights.entry import WeightsEntry
from revzoo.weights.errors import (
    ArchitectureMismatchError,
    StateMismatchError,
    UnknownWeightsError,
)
from revzoo.weights.files import read_bytes
from revzoo.weights.source import CHECKPOINTS, SUFFIX, find_entry
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
    """Resolve ``architecture[.tag]``, ``hf-hub:owner/name``, a file or a folder of weights.

    Args:
        name: one of these. A file must be safetensors; an architecture precedes a folder of the
            same name.
        known: the architectures.
        pretrained: whether to look for weights; an architecture alone means its default weights.
        cache_dir: for files from the hub.
        table: the entries to search; None for the package's.

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
    entry = None
    # a folder "revnet38" in the working directory must not hide the architecture
    if text.endswith(SUFFIX) or not is_known:
        entry = find_entry(name, cache_dir=cache_dir, tensors=pretrained)
    if entry is None:
        if is_library_name(text) or (not pretrained and "." not in text):
            if not pretrained:
                return NamedModel(text)
            weights_address(text)  # raises if the library has none
            return NamedModel(text, options={"pretrained": True})  # the library loads its weights
        if text.endswith(".ckpt") or Path(text, CHECKPOINTS).is_dir():
            raise UnknownWeightsError(
                f"{text} is a run or its checkpoint, not weights: "
                "revzoo.training.Classifier.load_from_checkpoint(RUN).model is its network; "
                "revzoo export RUN --format safetensors writes its weights"
            )
        shelf = SHIPPED if table is None else table
        try:
            entry = shelf.find(text)
        except UnknownWeightsError as error:
            if text in known and not shelf.names(text):
                raise UnknownWeightsError(
                    f"there are no weights for {text}: use pretrained=False "
                    "(model.pretrained=false), or your own file as checkpoint_path "
                    "(+model.checkpoint_path=FILE); list_models(pretrained=True) (revzoo list "
                    "--pretrained) lists all weights"
                ) from None
            hint = "" if is_known else library_hint(text)
            in_programs = error.in_programs and f"{error.in_programs}{hint}"
            raise UnknownWeightsError(f"{error}{hint}", in_programs=in_programs) from None
    return NamedModel(entry.architecture, entry, entry.options)


def read_weights(entry: WeightsEntry, *, cache_dir: str | Path | None = None) -> TensorFile:
    """The tensors of ``entry``, after verification of the file.

    Raises:
        WeightsError: the file is missing, cannot be fetched, or has another hash.
    """
    return parse_safetensors(read_bytes(entry, cache_dir=cache_dir), entry.name)


def load_weights(
    network: ImageNetwork, file: TensorFile, *, architecture: str, allow_nonfinite: bool = False
) -> None:
    """Load ``file`` into ``network``, adapted to its classes and image channels.

    Raises:
        ArchitectureMismatchError: the file names another architecture.
        NotFiniteError: a tensor holds NaN or Inf and ``allow_nonfinite`` is False; nothing is
            loaded.
        StateMismatchError: lists the tensors that do not fit; nothing is loaded.
    """
    if file.architecture not in (None, architecture):
        raise ArchitectureMismatchError(
            f"{file.where} holds weights of {file.architecture}, expected {architecture}: create "
            f"{file.architecture!r} instead"
        )
    expected = network.state_dict()
    tensors = dict(network.adapt_state_dict(file.tensors))
    tensors = missing_counts(expected, tensors) | tensors
    _adapt_input(network, tensors, file.where)
    _adapt_positions(network, expected, tensors)
    if not network.num_classes:  # no classifier: drop the file's classifier
        prefixes = _prefixes(network)
        tensors = {key: t for key, t in tensors.items() if not key.startswith(prefixes)}
    head = _fresh_head(network, expected, tensors)
    if head:
        # no warning: the caller asked for other classes
        log.info(
            "%s does not have %d classes: the classifier starts from random weights",
            file.where,
            network.num_classes,
        )
    tensors |= head
    check_fit(expected, tensors, file.where)
    # after the shapes: it needs memory, and a wrong file may be large
    if not allow_nonfinite:
        check_finite(tensors, file.where, expected)
    network.load_state_dict(tensors)


def check_channels(network: ImageNetwork, trained: int | None, where: str) -> None:
    """Refuse weights for other image channels if the network has no layer to adapt.

    Raises:
        StateMismatchError: ``trained`` differs from the network's channels.
    """
    if network.input_layer is None and trained not in (None, network.in_chans):
        raise StateMismatchError(
            where,
            misshapen=[
                f"images (file: {trained} channels, model: {network.in_chans}; this architecture "
                "has no first convolution to adapt: convert the images)"
            ],
        )


def shape_of_weights(
    network: type[ImageNetwork] | ImageNetwork, file: TensorFile
) -> dict[str, int]:
    """``num_classes`` and ``in_chans`` of the weights, as far as known."""
    tensors = file.tensors
    if isinstance(network, ImageNetwork):  # a user's module may be saved alone
        tensors = dict(network.adapt_state_dict(tensors))
    head = tensors.get(f"{network.classifier}.weight")
    first = tensors.get(f"{network.input_layer}.weight")
    shape = {} if file.in_chans is None else {"in_chans": file.in_chans}
    if head is not None and head.dim() == 2 and head.shape[1]:
        if not head.shape[0]:
            raise StateMismatchError(
                file.where, misshapen=[f"{network.classifier}.weight (no classes)"]
            )
        shape["num_classes"] = head.shape[0]
    if first is not None and first.dim() == 4 and first.numel():
        shape["in_chans"] = first.shape[1]
    return shape


def missing_counts(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """BatchNorm's counts for a file from before torch 0.4.1, which lacks them; torch does the same.

    Torchvision's weights of ResNets are such files.
    """
    counts = {key: value for key, value in expected.items() if key.endswith(".num_batches_tracked")}
    return {} if counts.keys() & tensors.keys() else counts


def _adapt_input(network: ImageNetwork, tensors: dict[str, Tensor], where: str) -> None:
    key = f"{network.input_layer}.weight"
    weight = tensors.get(key)
    # other shapes do not change: check_fit names them
    if weight is not None and weight.dim() == 4 and weight.shape[1] not in (0, network.in_chans):
        log.info(
            "%s is for images of %d channels: the first layer is adapted to %d",
            where,
            weight.shape[1],
            network.in_chans,
        )
        tensors[key] = adapt_channels(weight, network.in_chans)


def _adapt_positions(
    network: ImageNetwork, expected: Mapping[str, Tensor], tensors: dict[str, Tensor]
) -> None:
    key = network.positions
    if key is None or key not in expected or key not in tensors:
        return
    positions, (_, count, width) = tensors[key], expected[key].shape
    if positions.dim() != 3 or (positions.shape[0], positions.shape[2]) != (1, width):
        return
    old = positions.shape[1]
    if old not in (0, count) and math.isqrt(old) ** 2 == old:  # a square image of patches
        tensors[key] = adapt_positions(positions, count)


def _fresh_head(
    network: ImageNetwork, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The network's initial classifier, if the file's number of classes differs; else empty."""
    weight = tensors.get(f"{network.classifier}.weight")
    # a missing or misshapen classifier is an error of the file, which check_fit reports
    if weight is None or weight.dim() != 2 or weight.shape[0] == network.num_classes:
        return {}
    return {key: value for key, value in expected.items() if key.startswith(_prefixes(network))}


def _prefixes(network: ImageNetwork) -> tuple[str, ...]:
    """The prefixes of the names of the classifiers' tensors."""
    return tuple(f"{path}." for path in network.classifiers)
