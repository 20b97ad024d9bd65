"""Exports networks for other programs; each file is read back and compared before it is kept.

=============  ===================================================================================
``pt2``        ``torch.export``: a graph and its weights; ``torch.export.load(path).module()``
``onnx``       ONNX, from the same graph; input ``images``, output ``logits``
``safetensors``  weights and description of the network; ``revzoo.from_pretrained(path)``
=============  ===================================================================================

The network is exported in evaluation mode and plain arithmetic (memory mode ``store``, no
rounding to a grid). Every file carries a description of the network (the fields of
:class:`~revzoo.weights.entry.WeightsEntry`): in ``revzoo.json`` among the archive's extra files, in
ONNX's metadata by field, in the safetensors header.

Known limits: the image size is fixed; the batch size may be left open.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from revzoo._files import replacing
from revzoo.core.invertible import Step
from revzoo.core.modes import set_memory
from revzoo.models.network import ImageNetwork
from revzoo.models.registry import from_pretrained
from revzoo.models.save import pack

EXTRA = "revzoo.json"
INPUT, OUTPUT = "images", "logits"
TOLERANCE = 1e-4  # of the largest logit; another order of float32 sums costs 1e-7 to 1e-5
_OF_THE_FILE = ("sha256", "file")

Predictor = Callable[[Tensor], Tensor]
"""Images (B, C, S, S) to logits (B, num_classes)."""


class ExportError(ValueError):
    """The export failed, or its output differs from the network's; no file is left."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """The options of one export.

    Attributes:
        network: made by ``create_model``.
        image_size: side of the images in pixels; None for the architecture's.
        batch: images per call; None for any number.
        opset: of ONNX; None for the exporter's default.
        facts: fields of :class:`~revzoo.weights.entry.WeightsEntry`, such as ``classes``.
    """

    network: ImageNetwork
    image_size: int | None = None
    batch: int | None = None
    opset: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def images(self, batch: int) -> Tensor:
        """Random images ``(batch, C, S, S)``, the same ones each time."""
        size = self.image_size or self.network.image_size
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, self.network.in_chans, size, size, generator=generator)

    def packed(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """A safetensors file, and the entry's fields that do not depend on the file."""
        size = self.images(1).shape[1:]
        facts = {"input_size": tuple(size), **self.facts}
        data, entry = pack(self.network, file=f"{name}.safetensors", facts=facts)
        return data, {k: v for k, v in entry.plain().items() if k not in _OF_THE_FILE}


def export(job: Export, path: Path, *, kind: str, tolerance: float = TOLERANCE) -> float:
    """Write ``path`` atomically. Does not change the network.

    Args:
        job: the options.
        path: the file; its suffix must be the format's.
        kind: one of :data:`FORMATS`.
        tolerance: largest allowed difference, relative to the largest logit.

    Returns:
        The largest difference between logits of the file and of the network, relative to the
        largest logit, on random images at two batch sizes (or two batches of the fixed size).

    Raises:
        ExportError: the difference is above ``tolerance``, a package is missing, or the file's name
            or an option does not fit the format; ``path`` is unchanged.
        ValueError: the network does not accept images of this size.
    """
    form = _checked(job, path, kind)
    plain = copy.deepcopy(job.network).eval()
    if any(isinstance(m, Step) for m in plain.modules()):
        set_memory(plain, "store")
    job = replace(job, network=plain)
    plain.check_size(*job.images(1).shape[2:])
    with replacing(path) as temporary, torch.no_grad():
        form.write(job, temporary)
        predict = form.load(temporary)
        # two sizes: a batch size that became a constant of the graph shows
        sizes = (1, 3) if job.batch is None else (job.batch, job.batch)
        largest = max(_difference(predict, plain, job.images(size)) for size in sizes)
        if not largest <= tolerance:  # NaN as well
            raise ExportError(
                f"{kind} differs from the network by {largest:.2g} of the largest logit, more than "
                f"{tolerance:g}: nothing was written"
            )
    return largest


def _checked(job: Export, path: Path, kind: str) -> Format:
    if kind not in FORMATS:
        raise ExportError(f"unknown format {kind!r}: expected {', '.join(FORMATS)}")
    if path.suffix != f".{kind}":
        raise ExportError(f"{path}: expected a name that ends in .{kind}")
    if not path.parent.is_dir():
        raise ExportError(f"there is no folder {path.parent}: make it, or give another file")
    if job.opset is not None and kind != "onnx":
        raise ExportError(f"opset={job.opset} applies to ONNX only: leave it out for {kind}")
    if job.batch is not None and job.batch < 1:
        raise ExportError(f"batch={job.batch}: expected a whole number >= 1, or None for any")
    return FORMATS[kind]


def _difference(predict: Predictor, network: ImageNetwork, images: Tensor) -> float:
    expected = network(images)
    found = predict(images)
    if found.shape != expected.shape:
        raise ExportError(f"the file gives {tuple(found.shape)} for {tuple(expected.shape)} logits")
    largest = float(expected.abs().max())
    return float((found - expected).abs().max()) / (largest or 1.0)  # all logits may be zero


def _program(job: Export) -> torch.export.ExportedProgram:
    shapes = None if job.batch is not None else ({0: torch.export.Dim("batch")},)
    # two images stand for any number: torch.export treats a size of one as a constant
    return torch.export.export(job.network, (job.images(job.batch or 2),), dynamic_shapes=shapes)


def _write_pt2(job: Export, path: Path) -> None:
    extra = {EXTRA: json.dumps(job.packed(path.stem)[1])}
    torch.export.save(_program(job), path, extra_files=extra)


def _load_pt2(path: Path) -> Predictor:
    return torch.export.load(path).module()


def _write_onnx(job: Export, path: Path) -> None:
    with _onnx_needed():
        import onnxscript  # noqa: F401  # torch's exporter imports it
    options: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT], "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        program = torch.onnx.export(_program(job), (), opset_version=job.opset, **options)
    assert program is not None, "the dynamo exporter returns a program"
    for key, value in job.packed(path.stem)[1].items():
        text = value if isinstance(value, str) else json.dumps(value)
        program.model.metadata_props[key] = text
    program.save(path, external_data=False)


def _load_onnx(path: Path) -> Predictor:
    with _onnx_needed():
        import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


@contextmanager
def _onnx_needed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ExportError(
            f"onnx needs more packages ({error}): pip install onnx onnxscript onnxruntime"
        ) from error


def _write_safetensors(job: Export, path: Path) -> None:
    path.write_bytes(job.packed(path.stem)[0])


def _load_safetensors(path: Path) -> Predictor:
    return from_pretrained(path, memory="store").eval()


class Format(NamedTuple):
    """Functions that write a file, and load it without the network."""

    write: Callable[[Export, Path], None]
    load: Callable[[Path], Predictor]


FORMATS: dict[str, Format] = {
    "pt2": Format(_write_pt2, _load_pt2),
    "onnx": Format(_write_onnx, _load_onnx),
    "safetensors": Format(_write_safetensors, _load_safetensors),
}
