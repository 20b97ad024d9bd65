"""An out-of-memory error lists the memory used, and what each memory mode would need.

We count the needs by :func:`revzoo.audit`, in a training step of the same model with few images. An
evaluation keeps no activations in any mode, so only a smaller batch helps there.
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

from revzoo._checks import UserError
from revzoo.core.invertible import steps_in
from revzoo.core.modes import MODES
from revzoo.core.set_memory import set_memory
from revzoo.data import ImageData
from revzoo.profiling.audit import audit
from revzoo.profiling.units import in_units
from revzoo.training.classifier import Classifier, model_from
from revzoo.training.lightning_compat import all_callbacks
from revzoo.training.process_memory import free_bytes, give_back, peak_bytes

FEW = (2, 3)  # images of the counted steps: batch normalisation needs two values
LESS = 0.95  # a mode needs less than another if it needs at most this share
PLAN = "the plan"  # the memory modes of a planned run, as one row besides the pure modes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` reports that a device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch has no error type for the host
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class NoMemoryError(UserError):
    """Memory ran out; the message says what to change."""


@contextmanager
def memory_errors(
    trainer: pl.Trainer,
    module: Classifier,
    data: ImageData,
    *,
    eval_option: str = "data.eval_batch_size",
) -> Iterator[None]:
    """Turn an out-of-memory error into :class:`NoMemoryError` with advice for the trainer's stage.

    With ``HYDRA_FULL_ERROR=1`` in the environment the error passes unchanged.

    Args:
        trainer: runs inside the context.
        module: the module that it trains or evaluates.
        data: the data module.
        eval_option: the option that sets ``data.eval_batch_size``, for the message.
    """
    stages: list[RunningStage | None] = []  # the trainer resets it before the error arrives
    note = LambdaCallback(on_exception=lambda *_: stages.append(trainer.state.stage))
    all_callbacks(trainer).append(note)
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        # before any advice: counting needs memory, too
        _drop_frames(error)
    finally:
        all_callbacks(trainer).remove(note)
    device = trainer.strategy.root_device
    # validations during a fit are evaluations
    if stages == [RunningStage.TRAINING]:
        advice = memory_advice(module, data, device=device)
        raise NoMemoryError(f"step {trainer.global_step}: {advice}")
    size = data.eval_batch_size
    raise NoMemoryError(f"{_used(device)}, evaluating {size} images at once: lower {eval_option}")


def _drop_frames(error: BaseException) -> None:
    """Free the failed step: the error refers to its frames, and the frames to its activations."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        # Lightning wraps errors, and each keeps its own frames
        link.__traceback__, link = None, link.__context__
    give_back()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_advice(module: Classifier, data: ImageData, *, device: torch.device) -> str:
    """A message: the peak memory, the activations in each memory mode, and a remedy.

    Args:
        module: the trained module, after its failed step was freed.
        data: its data module.
        device: the device of the training.
    """
    batch_size, spec = data.batch_size, dict(module.hparams["model"])
    plan = {path: step.memory for path, step in steps_in(module.model).items()}
    kinds = sorted(set(plan.values()))
    configured = spec.get("memory") or module.memory_mode
    if mixed := len(kinds) > 1:
        mode, name = PLAN, f"a plan of {' and '.join(kinds)}"
    else:
        # on the CPU, offload keeps its tensors in the memory that ran out, as store does
        mode = module.memory_mode if device.type == "cpu" else configured
        name = f"memory={configured}"
    used = f"{_used(device)}, with {name}"
    needs: dict[str, float] = {}
    # counting fails if the model is broken or too little memory is left
    with suppress(Exception):
        counts = bytes_per_image(spec, data.image_size, plan if mixed else None)
        needs = {m: count * batch_size for m, count in counts.items()}
    if mode not in needs:
        return f"{used}; lower data.batch_size ({batch_size})"
    counted = ", ".join(f"{name} {in_units(need)}" for name, need in needs.items())
    return (
        f"{used}. Counted for {batch_size} images in float32, activations take: {counted}. "
        + _remedy(needs, free_bytes(device), mode, batch_size)
    )


def _used(device: torch.device) -> str:
    peak = peak_bytes(device)
    return f"out of memory at a peak of {in_units(peak)}" if peak else "out of memory"


def _remedy(needs: dict[str, float], free: int | None, current: str, batch_size: int) -> str:
    # from the end of the table: of modes that need about as much, exact comes first
    modes = {mode: need for mode, need in reversed(needs.items()) if mode != PLAN}
    best = next(mode for mode, need in modes.items() if LESS * need <= min(modes.values()))
    if needs[best] >= LESS * needs[current]:
        return f"No mode takes less than {current}: lower data.batch_size ({batch_size})"
    if free is None:
        return f"Use memory={best}"
    # leave a tenth for everything that the count leaves out
    if needs[best] < 0.9 * free:
        return f"memory={best} would fit: {in_units(free)} are free without the step"
    return (
        f"memory={best} needs least, but only {in_units(free)} are free without the step: "
        f"lower data.batch_size ({batch_size}) as well"
    )


def bytes_per_image(
    spec: Mapping[str, Any], image_size: int, plan: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Bytes that each image adds to a training step's peak in float32, by memory mode.

    Args:
        spec: arguments of ``create_model``.
        image_size: side of the images in pixels.
        plan: memory modes by path, see :func:`revzoo.set_memory`, counted as :data:`PLAN`.
    """
    model = model_from({**spec, "memory": "store"}).train()
    if plan is not None:
        set_memory(model, plan)
    # the difference of two counts leaves out whatever does not grow with the batch
    few, more = (
        audit(model, (count, spec["in_chans"], image_size, image_size)).audits for count in FEW
    )
    return {
        PLAN if mode not in MODES else mode: (more[mode].peak_bytes - few[mode].peak_bytes)
        / (FEW[1] - FEW[0])
        for mode in few
    }
