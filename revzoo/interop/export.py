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

Known limits: the image size is fixed; the batch size may stay open.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from revzoo._checks import Size, is_count, package_needed
from revzoo._files import replacing
from revzoo.core.modes import set_memory
from revzoo.layers.orthogonal import OrthogonalMix
from revzoo.models.network import ImageNetwork
from revzoo.models.registry import from_pretrained
from revzoo.models.save import pack

EXTRA = "revzoo.json"
INPUT, OUTPUT = "images", "logits"
TOLERANCE = 1e-4  # of the largest logit; another order of float32 sums costs 1e-7 to 1e-5
# fields of an entry that describe the safetensors file, not the network
_FILE_FIELDS = ("sha256", "file")

Predictor = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to logits (B, num_classes)."""


class ExportError(ValueError):
    """The export failed, or its output differs from the network's; no file is left."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """The options of one export.

    Attributes:
        network: made by ``create_model``.
        image_size: side of the images in pixels, or (height, width); None for the architecture's.
        batch: images per call; None for any number.
        opset: ONNX operator set; None for the exporter's default.
        facts: fields of :class:`~revzoo.weights.entry.WeightsEntry`, such as ``classes``.
    """

    network: ImageNetwork
    image_size: Size | None = None
    batch: int | None = None
    opset: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def images(self, batch: int) -> Tensor:
        """Random images ``(batch, C, H, W)``; a batch size always gives the same images."""
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(self.network.batch_shape(batch, self.image_size), generator=generator)

    def packed(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """A safetensors file, and the description of the network for other formats."""
        facts = {"input_size": tuple(self.images(1).shape[1:]), **self.facts}
        data, entry = pack(self.network, file=f"{name}.safetensors", facts=facts)
        return data, {k: v for k, v in entry.plain().items() if k not in _FILE_FIELDS}


def export(job: Export, path: Path, *, kind: str, tolerance: float = TOLERANCE) -> float:
    """Write ``path`` atomically. Does not change the network.

    Args:
        job: the options.
        path: the file; its suffix must be the format's.
        kind: one of :data:`FORMATS`.
        tolerance: largest allowed difference, relative to the largest logit.

    Returns:
        The largest difference between the file's logits and the network's, relative to the largest
        logit. Measured on random images at two batch sizes, or at the fixed one.

    Raises:
        ExportError: the difference is above ``tolerance``, a package is missing, or the file's name
            or an option does not fit the format; ``path`` is unchanged.
        ValueError: the network does not accept images of this size.
    """
    file_format = _checked(job, path, kind)
    # a copy: evaluation mode and mode "store" would otherwise stay on the caller's network
    plain = copy.deepcopy(job.network).cpu().eval()
    set_memory(plain, "store")
    job = replace(job, network=plain)
    plain.check_size(*job.images(1).shape[2:])
    with replacing(path) as temporary, torch.no_grad():
        try:
            file_format.write(job, temporary)
        except RuntimeError as error:  # torch's exporters name no remedy
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise ExportError(
                f"torch cannot write this network as {kind} ({reason}): try a fixed batch, "
                "batch=1 (--batch-size 1), or the format safetensors"
            ) from error
        # read back inside `replacing`: a wrong file never appears under its final name
        predict = file_format.load(temporary)
        # sizes other than the traced one show a batch size that became a constant of the graph
        sizes = (1, 3) if job.batch is None else (job.batch,)
        largest = max(_difference(predict, plain, job.images(size)) for size in sizes)
        if not largest <= tolerance:  # `largest > tolerance` would let NaN pass
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
    if job.batch is not None and not is_count(job.batch):
        raise ExportError(f"batch={job.batch}: expected a whole number >= 1, or None for any")
    if (dtype := next(job.network.parameters()).dtype) != torch.float32:
        raise ExportError(f"the network has {dtype} weights: expected float32, network.float()")
    if not all(map(find_spec, FORMATS[kind].packages)):
        raise ExportError(package_needed("this format needs", *FORMATS[kind].packages))
    return FORMATS[kind]


def _difference(predict: Predictor, network: ImageNetwork, images: Tensor) -> float:
    expected, actual = network(images), predict(images)
    # unequal shapes would broadcast in the difference
    if actual.shape != expected.shape:
        raise ExportError(
            f"the file returns logits of shape {tuple(actual.shape)}, expected "
            f"{tuple(expected.shape)}: nothing was written"
        )
    largest = float(expected.abs().max())
    return float((actual - expected).abs().max()) / (largest or 1.0)  # all logits may be zero


def _program(job: Export) -> tuple[torch.export.ExportedProgram, Any]:
    """The graph, and the open batch axis of its images, or None."""
    axis = None if job.batch is not None else ({0: torch.export.Dim("batch")},)
    for step in job.network.modules():
        if isinstance(step, OrthogonalMix):  # the matrix is constant now, and ONNX has no solver
            matrix = step.matrix().contiguous()
            step.matrix = partial(torch.Tensor.detach, matrix)  # type: ignore[method-assign]
    # two images stand for any number: torch.export treats a size of one as a constant
    images = job.images(job.batch or 2)
    return torch.export.export(job.network, (images,), dynamic_shapes=axis), axis


def _write_pt2(job: Export, path: Path) -> None:
    extra = {EXTRA: json.dumps(job.packed(path.stem)[1])}
    torch.export.save(_program(job)[0], path, extra_files=extra)


def _write_onnx(job: Export, path: Path) -> None:
    graph, axis = _program(job)
    options: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT], "verbose": False}
    # without the axis it has an internal name, such as s77
    options |= {"opset_version": job.opset, "dynamic_shapes": axis}
    with warnings.catch_warnings():
        # torch 2.15's exporter warns of deprecated calls in its own code
        warnings.simplefilter("ignore")
        program = torch.onnx.export(graph, (), **options)
    assert program is not None, "the dynamo exporter returns a program"
    for key, value in job.packed(path.stem)[1].items():
        # ONNX metadata maps strings to strings
        text = value if isinstance(value, str) else json.dumps(value)
        program.model.metadata_props[key] = text
    # weights in a second file would not survive the atomic move of `path`
    program.save(path, external_data=False)


def _load_onnx(path: Path) -> Predictor:
    import onnxruntime

    # on the CPU: another device rounds differently
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


class Format(NamedTuple):
    """Writes a file, and loads it without the network that wrote it."""

    write: Callable[[Export, Path], object]
    load: Callable[[Path], Predictor]
    packages: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {
    "pt2": Format(_write_pt2, lambda path: torch.export.load(path).module()),
    "onnx": Format(_write_onnx, _load_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "safetensors": Format(
        lambda job, path: path.write_bytes(job.packed(path.stem)[0]),
        lambda path: from_pretrained(path, memory="store").eval(),
    ),
}
