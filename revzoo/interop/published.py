"""Published weights of other programs, as models of the zoo.

=============  ===================================================================================
``irevnet``    the PyTorch release of i-RevNet (arXiv 1802.07088): ``stack.i.bottleneck_block.j``
``memcnn``     MemCNN (JOSS 2019): ``layerN.i.revblock._fn.Fm``, once ``revblock.rev_block``
=============  ===================================================================================

The architecture follows from the shapes of the tensors (:mod:`revzoo.interop.irevnet`,
:mod:`revzoo.interop.memcnn`). Shapes do not show the strides of MemCNN's stages, an i-RevNet's
squeeze before zero padding, or dropout; the defaults are the published networks', and keywords
change them. :mod:`revzoo.interop.foreign` reads the files and runs no code in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from revzoo._checks import check_choice, shortened
from revzoo.interop import irevnet, memcnn
from revzoo.interop.foreign import ConversionError, Weights, read_tensors
from revzoo.models.network import ImageNetwork
from revzoo.models.pretrained import missing_counts
from revzoo.models.registry import create_model
from revzoo.models.weights_file import check_finite, check_fit
from revzoo.weights.errors import StateMismatchError

# the errors that unexpected names or shapes raise
_OTHER_PROGRAM = (KeyError, IndexError, ValueError, ZeroDivisionError)


class Program(NamedTuple):
    """How to read the checkpoints of one program."""

    spec: Callable[[Weights], dict[str, Any]]
    """The arguments of :func:`revzoo.create_model` for a state dict."""

    keys: Callable[[ImageNetwork], Iterator[tuple[str, str]]]
    """Pairs (their name, our name) of the modules that hold tensors."""


SOURCES: Mapping[str, Program] = {
    "irevnet": Program(irevnet.spec, irevnet.keys),
    "memcnn": Program(memcnn.spec, memcnn.keys),
}


def load_published(
    path: str | Path, source: str, *, name: str | None = None, **overrides: Any
) -> ImageNetwork:
    """The model in a checkpoint of another program, in evaluation mode, on the CPU.

    Args:
        path: the checkpoint.
        source: ``"irevnet"`` or ``"memcnn"``.
        name: the network (see :func:`revzoo.list_models`); None to derive it from the tensors.
        overrides: arguments of :func:`revzoo.create_model` that replace derived ones, such as
            ``memory="exact"``, ``strides=(1, 1, 2)`` or ``convention="memcnn_fix"``.

    Raises:
        OSError: the file cannot be read.
        ConversionError: it is not a checkpoint of ``source``, or holds a network other than
            ``name``.
        NotFiniteError: it has NaN or Inf.
        ValueError: unknown ``source``, ``name`` or override.

    Example:
        ``docs/guide/weights.md`` loads a file of MemCNN. A file of another program raises:

        >>> torch.save({"weight": torch.zeros(3)}, "other.pt")
        >>> revzoo.load_published("other.pt", "memcnn")
        Traceback (most recent call last):
        ...
        revzoo.interop.foreign.ConversionError: other.pt is not a checkpoint of 'memcnn': ...
    """
    check_choice("source", source, SOURCES)
    weights = read_tensors(path)
    try:
        spec = SOURCES[source].spec(weights)
    except _OTHER_PROGRAM as error:
        raise ConversionError(
            f"{path} is not a checkpoint of {source!r}: its tensors are {_listed(weights)}"
        ) from error
    if name is not None:
        spec = {"name": name, **{key: spec[key] for key in ("num_classes", "in_chans")}}
    # last, so that the caller decides where shapes do not
    model = create_model(**(spec | overrides)).eval()
    _fill(model, weights, dict(SOURCES[source].keys(model)), path)
    return model


def _fill(model: ImageNetwork, weights: Weights, keys: Mapping[str, str], path: str | Path) -> None:
    """Load the weights under revzoo's names; ``keys`` maps names of modules."""
    renamed = {_rename(key, keys): value for key, value in weights.items()}
    expected = model.state_dict()
    renamed |= missing_counts(expected, renamed)
    try:
        check_fit(expected, renamed, str(path))
    except StateMismatchError as error:
        raise ConversionError(
            f"{error}\nName its network (name=...), or pass the differing options as keywords"
        ) from None
    check_finite(renamed, str(path))
    model.load_state_dict(renamed)


def _rename(key: str, keys: Mapping[str, str]) -> str:
    module, _, leaf = key.rpartition(".")
    # the suffix keeps an unknown key from passing as one of revzoo's names
    return f"{keys[module]}.{leaf}" if module in keys else f"{key} (as in the file)"


def _listed(names: Iterable[str]) -> str:
    return shortened(sorted(names), 3)
