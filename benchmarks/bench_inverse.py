"""Errors of ``inverse(forward(x))``, relative to the largest value of x.

    python benchmarks/bench_inverse.py

The networks are untrained; their running statistics are measured on the images. For i-RevNets the
script goes from the image to the representation and back, for other networks through the
invertible steps of the stage with the most units. Images are random bytes divided by 256. The
columns are: float32; float32 streams with branches under bfloat16 autocast; memory mode ``exact``
without and with that autocast. There, 0 means equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import environment
from torch import Tensor, nn

import revzoo
from revzoo import ReversibleSequence
from revzoo.core.modes import on_grid_of
from revzoo.models import ImageNetwork, IRevNet

MODELS = (
    ("irevnet13", {"in_chans": 1}),
    ("irevnet163", {}),
    ("irevnet301", {"num_classes": 1000}),
    ("revnet38", {}),
    ("revnet110", {}),
    ("revnet164", {}),
    ("revnet104", {"num_classes": 1000}),
    ("revvit_cifar", {}),
    ("revvit_small", {"num_classes": 1000}),
)
BATCH = 4


def settle(model: nn.Module, images: Tensor) -> None:
    """Measure the running statistics on ``images`` and switch to evaluation mode."""
    momenta = {}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            momenta[module] = module.momentum
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    for module, momentum in momenta.items():
        module.momentum = momentum
    model.eval()


def round_trip(model: ImageNetwork, images: Tensor, mode: str) -> tuple[Callable[[], float], int]:
    """A function that measures the error, and its number of couplings."""
    if isinstance(model, IRevNet):
        steps = list(model.stages.modules())

        def measure() -> float:
            return error(model.inverse(model.encode(images)), images)
    else:
        stage = max(model.stages, key=len)
        chain = ReversibleSequence([step for step in stage if step.invertible], memory=mode)
        steps = list(chain.modules())
        seen: list[tuple[Tensor, ...]] = []
        first = next(step for step in stage if step.invertible)
        handle = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
        model(images)
        handle.remove()
        state = tuple(t.detach().float() for t in seen[0])

        def measure() -> float:
            # copies have no words, so the chain rounds them again: to the same values
            given = tuple(t.clone() for t in on_grid_of(next(iter(chain)), state))
            back = chain.inverse(*chain(*given))
            return max(error(a, b) for a, b in zip(back, given, strict=True))

    return measure, sum(isinstance(step, revzoo.AdditiveCoupling) for step in steps)


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    """Print the table."""
    print("# Errors of inversion\n")
    print(environment())
    print("| model | couplings | float32 | bf16 autocast | `exact` | `exact`, bf16 autocast |")
    print("|---|---|---|---|---|---|")
    for name, keywords in MODELS:
        torch.manual_seed(0)
        model = revzoo.create_model(name, **keywords)
        side = model.image_size
        images = torch.randint(256, (BATCH, model.in_chans, side, side)) / 256
        settle(model, images)
        cells = []
        for mode in ("invert", "exact"):
            revzoo.set_memory(model, mode)
            measure, couplings = round_trip(model, images, mode)
            for narrow in (False, True):
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                    cells.append(f"{measure():.1g}")
        print(f"| {name} | {couplings} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
