"""Weights of a network small enough for many tests, as a folder of entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from revzoo._files import json_bytes
from revzoo.models import ImageNetwork, create_model
from revzoo.models.save import pack
from revzoo.weights.entry import WeightsEntry

OPTIONS = {"units": (1, 2, 1), "stem_width": 4, "widths": (4, 4, 8)}
FACTS = {
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.2, 0.1),
    "license": "MIT",
    "recipe": "python train.py model=revnet38",
    "metrics": {"test/acc": 0.5},
    "measured_on": "noise, 1 image",
    "input_size": (3, 8, 8),
}


def undescribed(entry: WeightsEntry) -> list[str]:
    """The missing fields that a published entry must have."""
    names = ("mean", "std", "license", "recipe", "metrics", "measured_on")
    return [name for name in names if not getattr(entry, name)]


def small(architecture: str = "revnet38", *, seed: int = 0, **keywords: Any) -> ImageNetwork:
    """A small network whose buffers are not defaults either."""
    torch.manual_seed(seed)
    model = create_model(architecture, **{**OPTIONS, "num_classes": 5, **keywords})
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model


def write_entry(folder: Path, name: str = "revnet38.small", **facts: Any) -> WeightsEntry:
    """``NAME.safetensors`` and ``NAME.json`` of :func:`small`."""
    model = small(name.partition(".")[0])
    data, entry = pack(model, file=f"{name}.safetensors", facts={"name": name, **FACTS, **facts})
    (folder / f"{name}.safetensors").write_bytes(data)
    (folder / f"{name}.json").write_bytes(json_bytes(entry.plain()))
    return entry


def change(folder: Path, name: str, **fields: Any) -> None:
    """Overwrite fields of an entry's JSON; None removes one."""
    path = folder / f"{name}.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
