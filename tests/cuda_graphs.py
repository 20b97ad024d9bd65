"""Stands in for the capture of a CUDA graph, which needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from revzoo.training import graphed_step as graphs
from revzoo.training.callbacks import cuda_graph

CAPTURES: list[Any] = []  # the objects whose steps were captured
RESULTS = ("_value", "_logits")


def stand_in(run: Any) -> Callable[[], None]:
    """Repeats ``run`` and writes into the memory of its first results, as a CUDA graph does."""
    step = run.__self__
    CAPTURES.append(step)
    run()
    first = {name: getattr(step, name) for name in RESULTS if hasattr(step, name)}
    gradients = [p.grad for p in step._parameters]

    def replay() -> None:
        held = [p.grad for p in step._parameters]
        for name in first:
            delattr(step, name)
        with graphs._unguarded(step._module):
            run()
        with torch.no_grad():
            for name, value in first.items():
                value.copy_(getattr(step, name))
            for g, p in zip(gradients, step._parameters, strict=True):
                if g is not None:
                    g.copy_(p.grad)
        for name, value in first.items():
            setattr(step, name, value)
        for p, g in zip(step._parameters, held, strict=True):
            p.grad = g

    return replay


def use(patch: pytest.MonkeyPatch, captured: Callable[..., Any] = stand_in) -> None:
    """Capture on any device, by ``captured``."""
    CAPTURES.clear()
    for module in (graphs, cuda_graph):
        patch.setattr(module, "why_not", lambda device: "")
    patch.setattr(graphs, "captured", captured)
