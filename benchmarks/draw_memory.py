"""Draws the memory of a training step against the depth of the network.

    python benchmarks/draw_memory.py docs/pictures/memory_depth.png

Memory is the peak of all tensors alive during one training step in float32, per image of 3x32x32.
It is counted, as in ``bench_zoo.py``, so it is the same on every machine. The script also prints
the figures. It needs the ``plot`` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt

import revzoo

BATCH = 8
Model = tuple[int, str, dict[str, Any]]  # layers, name, options


def depths(name: str, *, layers_in_unit: int, units: tuple[int, ...]) -> list[Model]:
    """The network ``name`` with these numbers of units in each of its three stages."""
    return [(3 * layers_in_unit * n + 2, name, {"units": (n, n, n)}) for n in units]


# Depths between the zoo's networks: fewer units. revnet38 has a narrower last stage.
PANELS: dict[str, dict[str, list[Model]]] = {
    "basic blocks": {
        "ResNet": [
            (32, "resnet32", {}),
            *depths("resnet110", layers_in_unit=2, units=(12,)),
            (110, "resnet110", {}),
        ],
        "RevNet": [
            (38, "revnet38", {}),
            *depths("revnet110", layers_in_unit=4, units=(6,)),
            (110, "revnet110", {}),
        ],
    },
    "bottlenecks": {
        "ResNet": [
            *depths("resnet164", layers_in_unit=3, units=(6, 12)),
            (164, "resnet164", {}),
        ],
        "RevNet": [
            *depths("revnet164", layers_in_unit=6, units=(3, 6)),
            (164, "revnet164", {}),
        ],
    },
}
# family, memory mode -> colour and marker, readable on white and on GitHub's dark background
GREY = "#7d858d"
LINES = {
    ("ResNet", "store"): ("#b07a4a", "s--"),
    ("ResNet", "recompute"): ("#c9a227", "s--"),
    ("RevNet", "store"): ("#d9485f", "o-"),
    ("RevNet", "recompute"): ("#9273d6", "o-"),
    ("RevNet", "invert"): ("#2fa36b", "o-"),
    ("RevNet", "exact"): ("#4fb3ff", "x:"),  # on top of invert
}


def mebibytes(name: str, options: dict[str, Any], mode: str) -> float:
    """Peak of one training step, MiB per image."""
    torch.manual_seed(0)
    model = revzoo.create_model(name, num_classes=10, memory=mode, **options)
    report = revzoo.audit(model, (BATCH, 3, 32, 32), modes=[], real=True)
    return report.activation_bytes // BATCH / 2**20


def main() -> None:
    """Count, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    grey = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    plt.rcParams.update({**grey, "axes.edgecolor": GREY, "font.size": 12})
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axes, (title, families) in zip(panels, PANELS.items(), strict=True):
        for (family, mode), (colour, style) in LINES.items():
            layers = [depth for depth, _, _ in families[family]]
            peaks = [mebibytes(name, options, mode) for _, name, options in families[family]]
            found = ", ".join(f"{n}: {mib:.2f}" for n, mib in zip(layers, peaks, strict=True))
            print(f"{title}, {family}, {mode}, layers: MiB per image: {found}", flush=True)
            label = f"{family}, {mode}"
            size = {"lw": 4, "ms": 10} if mode == "invert" else {"lw": 2, "ms": 7, "mew": 2}
            axes.plot(layers, peaks, style, color=colour, label=label, **size)
            if (family, mode) in (("RevNet", "store"), ("RevNet", "invert")):
                place = {"xytext": (-8, 8), "textcoords": "offset points", "ha": "right"}
                axes.annotate(f"{peaks[-1]:.2f}", (layers[-1], peaks[-1]), color=colour, **place)
        axes.set(title=title, xlabel="layers", ylim=(0, None))
        axes.set_xticks(sorted({depth for models in families.values() for depth, _, _ in models}))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("peak memory, MiB per image")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(output, dpi=150, transparent=True)


if __name__ == "__main__":
    main()
