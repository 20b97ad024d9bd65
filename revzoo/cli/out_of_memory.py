"""What to say when memory runs out: how much was used, and which memory mode would need less.

What each mode needs is counted, not looked up: one training step of the same model on few images,
on the CPU, counting the tensors alive at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from revzoo.profiling.live import LiveMemory
from revzoo.training.classifier import model_from
from revzoo.training.footprint import peak_bytes

MODES = ("store", "recompute", "exact", "invert")
MEMINFO = Path("/proc/meminfo")
FEW = (2, 3)  # images of the counted steps: normalisation over one value is refused
GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory has run out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch has no type of its own for the host
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def memory_advice(
    spec: Mapping[str, Any], *, batch_size: int, image_size: int, device: torch.device
) -> str:
    """The peak of memory, what each memory mode needs for the activations, and what to change.

    Args:
        spec: the model's, with the memory mode of the run.
        batch_size: training images per step.
        image_size: their side in pixels.
        device: what the model is on.
    """
    peak, limit = peak_bytes(device), available_bytes(device)
    used = f"at a peak of {peak / GIB:.2f} GiB" if peak is not None else "at an unknown peak"
    of = f" of {limit / GIB:.2f} GiB" if limit is not None else ""
    said = f"out of memory {used}{of}, with memory={spec.get('memory') or 'auto'}"
    try:
        needs = {
            mode: per_image * batch_size
            for mode in MODES
            if (per_image := bytes_per_image({**spec, "memory": mode}, image_size)) is not None
        }
    except Exception:  # the model itself is at fault: nothing can be counted
        needs = {}
    if not needs:
        return f"{said}; lower data.batch_size ({batch_size}), or use memory=invert"
    counted = ", ".join(f"{mode} {need / GIB:.3f} GiB" for mode, need in needs.items())
    return (
        f"{said}. Counted for {batch_size} images in float32, activations take: {counted}. "
        + _choice(needs, limit, spec.get("memory"), batch_size)
    )


def _choice(
    needs: Mapping[str, float], limit: int | None, present: str | None, batch_size: int
) -> str:
    least = min(needs, key=lambda mode: needs[mode])
    if least == present:
        return f"That is the least of all modes: lower data.batch_size ({batch_size})"
    if limit is None or needs[least] < 0.9 * limit:
        return f"memory={least} would fit" if limit is not None else f"Use memory={least}"
    return f"memory={least} needs least; lower data.batch_size ({batch_size}) as well"


def available_bytes(device: torch.device, meminfo: Path = MEMINFO) -> int | None:
    """All memory of a CUDA device, or of the host; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    totals = [line for line in lines if line.startswith("MemTotal:")]
    return int(totals[0].split()[1]) * 1024 if totals else None  # the kernel prints KiB


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
