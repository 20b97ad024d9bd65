"""An out-of-memory error lists the memory used and what each memory mode would need.

The needs are counted: one training step of the same model on few images, on the CPU, adding up the
tensors that are alive at the same time. An evaluation keeps no activations in any mode, so only the
number of images helps there.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.trainer.states import RunningStage
from torch.nn import functional

from revzoo.core.modes import COUNTED
from revzoo.data import ImageData
from revzoo.profiling.live import LiveMemory
from revzoo.training.callbacks.footprint import peak_bytes
from revzoo.training.classifier import Classifier, model_from
from revzoo.training.tuning.memory_limit import free_bytes, give_back

FEW = (2, 3)  # images of the counted steps: normalisation over one value is refused
LESS = 0.95  # of what another mode needs: a smaller difference is none
GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory has run out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch has no such type for the host
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class NoMemoryError(Exception):
    """Memory ran out; the message says which change needs less."""


@contextmanager
def memory_errors(
    trainer: pl.Trainer,
    module: Classifier,
    data: ImageData,
    *,
    eval_option: str = "data.eval_batch_size",
) -> Iterator[None]:
    """Turn an error for lack of memory into :class:`NoMemoryError`, by what the trainer was doing.

    With ``HYDRA_FULL_ERROR=1`` in the environment the error passes.

    Args:
        trainer: what is run inside.
        module: what it trains or evaluates.
        data: what on.
        eval_option: the option that sets ``data.eval_batch_size``.
    """
    stages: list[RunningStage | None] = []  # the trainer forgets it before the error gets here
    note = LambdaCallback(on_exception=lambda *_: stages.append(trainer.state.stage))
    trainer.callbacks.append(note)  # type: ignore[attr-defined]
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        _drop_frames(error)
    finally:
        trainer.callbacks.remove(note)  # type: ignore[attr-defined]
    device = trainer.strategy.root_device
    if stages == [RunningStage.TRAINING]:
        advice = memory_advice(module, data, device=device)
        raise NoMemoryError(f"step {trainer.global_step}: {advice}")
    size = data.eval_batch_size
    raise NoMemoryError(f"{_used(device)}, evaluating {size} images at once: lower {eval_option}")


def _drop_frames(error: BaseException) -> None:
    """Free what failed: the error holds its frames, and they the activations of the step."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__, link = None, link.__context__
    give_back()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_of(module: Classifier) -> str:
    """The memory mode that a module is trained in; on the CPU, ``offload`` takes as ``store``."""
    mode = dict(module.hparams["model"]).get("memory") or module.model.default_memory or "store"
    return "store" if mode == "offload" else str(mode)


def memory_advice(module: Classifier, data: ImageData, *, device: torch.device) -> str:
    """The peak of memory, what each memory mode needs for the activations, and what to change.

    Args:
        module: that has been trained; its failed step is gone.
        data: what on.
        device: where.
    """
    batch_size, spec = data.batch_size, dict(module.hparams["model"])
    mode = spec.get("memory") or memory_of(module)
    said = f"{_used(device)}, with memory={mode}"
    if device.type == "cpu":
        mode = memory_of(module)
    needs: dict[str, float] = {}
    # the model itself may be at fault, or there is too little left to count in
    with suppress(Exception):
        counts = {m: bytes_per_image({**spec, "memory": m}, data.image_size) for m in COUNTED}
        needs = {m: count * batch_size for m, count in counts.items() if count is not None}
    if mode not in needs:
        return f"{said}; lower data.batch_size ({batch_size})"
    counted = ", ".join(f"{name} {need / GIB:.3f} GiB" for name, need in needs.items())
    return (
        f"{said}. Counted for {batch_size} images in float32, activations take: {counted}. "
        + _choice(needs, free_bytes(device), mode, batch_size)
    )


def _used(device: torch.device) -> str:
    peak = peak_bytes(device)
    return f"out of memory at a peak of {peak / GIB:.2f} GiB" if peak else "out of memory"


def _choice(needs: dict[str, float], free: int | None, present: str, batch_size: int) -> str:
    least = next(mode for mode in reversed(needs) if LESS * needs[mode] <= min(needs.values()))
    if needs[least] >= LESS * needs[present]:
        return f"No mode takes less than {present}: lower data.batch_size ({batch_size})"
    if free is None:
        return f"Use memory={least}"
    if needs[least] < 0.9 * free:
        return f"memory={least} would fit: {free / GIB:.3f} GiB are free without the step"
    return (
        f"memory={least} needs least, but {free / GIB:.3f} GiB are free without the step: lower "
        f"data.batch_size ({batch_size}) as well"
    )


def bytes_per_image(spec: Mapping[str, Any], image_size: int) -> float | None:
    """Bytes of activations that each image adds to a training step's peak, in float32.

    None where the model does not know the memory mode of ``spec``.
    """
    try:
        model = model_from(spec).train()
    except ValueError:
        return None
    peaks = []
    for count in FEW:
        images = torch.randn(count, spec["in_chans"], image_size, image_size)
        labels = torch.zeros(count, dtype=torch.int64)
        model.zero_grad()
        with LiveMemory() as memory:
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        peaks.append(memory.peak)
    return (peaks[1] - peaks[0]) / (FEW[1] - FEW[0])
