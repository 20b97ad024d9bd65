"""Activations that training keeps for an image, against accuracy: reversible backbones and others.

    python benchmarks/draw_backbones.py docs/pictures/backbones.png

Bytes are those that the graph holds between forward and backward pass, for one image at the
network's size, in float32. They are counted on fake tensors, so they are the same on every machine.
Accuracy on ImageNet is what publishers state: of our entries, and of the papers named in ``PLAIN``.
It needs timm. The script prints the table, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from measure import MIB, environment

import revzoo
from revzoo.weights.entry import WeightsEntry
from revzoo.weights.table import SHIPPED

# family: timm's name, side in pixels, published top-1 in percent
PLAIN: dict[str, list[tuple[str, int, float]]] = {
    # Tan and Le 2019, arXiv 1905.11946, table 2
    "EfficientNet": [
        ("efficientnet_b0", 224, 77.1),
        ("efficientnet_b1", 240, 79.1),
        ("efficientnet_b2", 260, 80.1),
        ("efficientnet_b3", 300, 81.6),
        ("efficientnet_b4", 380, 82.9),
        ("efficientnet_b5", 456, 83.6),
        ("efficientnet_b6", 528, 84.0),
        ("efficientnet_b7", 600, 84.3),
    ],
    # Liu et al. 2022, arXiv 2201.03545, table 1
    "ConvNeXt": [
        ("convnext_tiny", 224, 82.1),
        ("convnext_small", 224, 83.1),
        ("convnext_base", 224, 83.8),
        ("convnext_large", 224, 84.3),
    ],
    # Touvron et al. 2021, arXiv 2012.12877, table 5
    "DeiT": [("deit_small_patch16_224", 224, 79.8), ("deit_base_patch16_224", 224, 81.8)],
}
# family -> beginning of its names, colour
OURS = {
    "RevBiFPN": ("revbifpn", "#2fa36b"),
    "RevCol": ("revcol", "#4fb3ff"),
    "Rev-ViT": ("revvit", "#9273d6"),
    "Rev-MViT": ("revmvit", "#d66bb0"),
}
GREY, COLOURS = "#7d858d", {"EfficientNet": "#b07a4a", "ConvNeXt": "#c9a227", "DeiT": "#d9485f"}


def kept(name: str, side: int, mode: str) -> tuple[float, float]:
    """Millions of parameters, and MiB kept for one image."""
    with torch.device("meta"):
        model = revzoo.create_model(name, num_classes=1000)
    revzoo.set_memory(model, mode)
    report = revzoo.audit(model, (1, 3, side, side), modes=())
    return sum(p.numel() for p in model.parameters()) / 1e6, report.kept_bytes / MIB


def entries(start: str) -> list[WeightsEntry]:
    """The published weights of a family, those trained on ImageNet-1k alone."""
    named = [SHIPPED.entries[name] for name in SHIPPED.names(f"{start}*.in1k")]
    return sorted(named, key=lambda entry: entry.parameters or 0)


def main() -> None:
    """Print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    print(environment())
    print("| network | million parameters | side | top-1, % | MiB, `store` | MiB, `exact` |")
    print("|---|---|---|---|---|---|")
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    style = {"linewidth": 1, "markersize": 5}
    for family, rows in PLAIN.items():
        points = []
        for name, side, accuracy in rows:
            parameters, size = kept(f"timm:{name}", side, "store")
            print(f"| timm:{name} | {parameters:.1f} | {side} | {accuracy} | {size:.1f} | |")
            points.append((size, accuracy))
        axes.plot(*zip(*points, strict=True), "s--", color=COLOURS[family], label=family, **style)
    for family, (start, colour) in OURS.items():
        points = {"store": [], "exact": []}
        for entry in entries(start):
            accuracy = 100 * entry.metrics["test/acc"]
            for mode, of_mode in points.items():
                of_mode.append((entry.mib[mode], accuracy))
            start_of_row = f"| {entry.name} | {entry.parameters} | {entry.input_size[1]} "
            print(f"{start_of_row}| {accuracy:.1f} | {entry.mib['store']} | {entry.mib['exact']} |")
        axes.plot(*zip(*points["store"], strict=True), "o:", color=colour, alpha=0.5, **style)
        axes.plot(*zip(*points["exact"], strict=True), "o-", color=colour, label=family, **style)
    axes.set(xscale="log", xlabel="MiB that training keeps for an image", ylabel="top-1, %")
    axes.tick_params(colors=GREY, which="both")
    for side in axes.spines.values():
        side.set_color(GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, title="dotted: mode store", title_fontsize=8)
    axes.get_legend().get_title().set_color(GREY)
    figure.savefig(args.picture, dpi=160, transparent=True)


if __name__ == "__main__":
    main()
