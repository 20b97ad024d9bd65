"""Plans of earlier runs, in one file of the user's cache: a run like an earlier one takes its plan.

The key of a plan is a hash of the network, the conditions of the run and the code. The file keeps
the latest plans. If the file is missing or damaged, the run plans; if the folder cannot be written,
the next one plans again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from revzoo._files import json_bytes, write_atomically
from revzoo.profiling.count import signature
from revzoo.profiling.plan import PlannedMode
from revzoo.weights.files import cache_folder

MOST = 64
"""Plans in the file, about 1 KiB each; a new one replaces the oldest."""

NEAR = 0.9
"""A plan made for this share of the free bytes is used again: what is free varies."""


@dataclass(frozen=True)
class Planned:
    """A plan as plain data, with the figures of its line in the log."""

    modes: dict[str, str]
    """Path of a step to its mode."""
    limit: int  # bytes that it was made for; 0 for a mode without a limit
    need: int  # bytes of the smallest limit for it: its peak and a reserve
    peak: int  # bytes
    seconds: float
    extra: int  # bytes in the peak for the optimiser's state and copies of the weights
    inverting: str  # the mode of inverted steps
    pure: dict[str, list[float]]
    """Peak in bytes and seconds with every step in one mode: ``inverting`` and ``store``."""


def key_of(model: nn.Module, mode: PlannedMode, *conditions: Any) -> str:
    """A hash of what a plan depends on: the network, the mode, the ``conditions`` and the code."""
    network = [[name for name, _ in model.named_modules()], signature(model)]
    # functions of the network appear by name, not by address
    described = re.sub(r" at 0x[0-9a-f]+", "", repr(network))
    names = {type(each).__module__ for each in (mode, *model.modules())}
    files = {Path(path) for n in names if (path := getattr(sys.modules.get(n), "__file__", None))}
    files |= {*Path(__file__).parents[2].rglob("*.py")}  # of revzoo
    code = [(str(p), (s := p.stat()).st_mtime_ns, s.st_size) for p in sorted(files) if p.exists()]
    text = repr((torch.__version__, code, described, mode.name, conditions))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(key: str, limit: int) -> Planned | None:
    """The plan with this key, if it fits in ``limit`` bytes and was made for about as many.

    0 is no limit.
    """
    try:
        plan = Planned(**_read()[key])
    except (KeyError, TypeError):
        return None
    near = NEAR * limit <= plan.limit or {*plan.modes.values()} == {"store"}
    return plan if not limit or (near and plan.need <= limit) else None


def keep(key: str, plan: Planned) -> None:
    """Add a plan to the file."""
    plans = _read()
    plans.pop(key, None)
    latest = [*plans.items(), (key, asdict(plan))][-MOST:]
    with contextlib.suppress(OSError):
        write_atomically(_file(), json_bytes(dict(latest)))


def _file() -> Path:
    return cache_folder() / "plans.json"


def _read() -> dict[str, Any]:
    try:
        plans = json.loads(_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return plans if isinstance(plans, dict) else {}
