"""Memory, accuracy and time of reversible backbones, beside others of equal accuracy.

    python benchmarks/bench_backbones.py --picture docs/pictures/backbones.png
    python benchmarks/bench_backbones.py --time revcol_tiny revvit_small

Bytes are those that the graph holds between forward and backward pass, for one image, in float32.
They are counted on fake tensors, so they are the same on every machine. Accuracy on ImageNet is
what publishers state: of our entries, and of the papers named in ``PLAIN``. ``--time`` runs a
training step of a backbone and of its peer in turn. It needs timm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from measure import MIB, environment, interleaved
from torch import nn

import revzoo
from revzoo.weights.entry import WeightsEntry
from revzoo.weights.table import SHIPPED

# family: name, side in pixels, published top-1 in percent
PLAIN: dict[str, list[tuple[str, int, float]]] = {
    # renmengye/revnet-public: the baseline of RevNet-104
    "ResNet": [("resnet101", 224, 77.0)],
    # Tan and Le 2019, arXiv 1905.11946, table 2
    "EfficientNet": [
        ("timm:efficientnet_b0", 224, 77.1),
        ("timm:efficientnet_b1", 240, 79.1),
        ("timm:efficientnet_b2", 260, 80.1),
        ("timm:efficientnet_b3", 300, 81.6),
        ("timm:efficientnet_b4", 380, 82.9),
        ("timm:efficientnet_b5", 456, 83.6),
        ("timm:efficientnet_b6", 528, 84.0),
        ("timm:efficientnet_b7", 600, 84.3),
    ],
    # Liu et al. 2022, arXiv 2201.03545, table 1
    "ConvNeXt": [
        ("timm:convnext_tiny", 224, 82.1),
        ("timm:convnext_small", 224, 83.1),
        ("timm:convnext_base", 224, 83.8),
        ("timm:convnext_large", 224, 84.3),
    ],
    # Touvron et al. 2021, arXiv 2012.12877, table 5
    "DeiT": [("timm:deit_small_patch16_224", 224, 79.8), ("timm:deit_base_patch16_224", 224, 81.8)],
}
# family -> beginning of its names, colour
OURS = {
    "RevBiFPN": ("revbifpn", "#2fa36b"),
    "RevCol": ("revcol", "#4fb3ff"),
    "Rev-ViT": ("revvit", "#9273d6"),
    "Rev-MViT": ("revmvit", "#d66bb0"),
    "RevNet": ("revnet", "#3f6fd6"),
}
# a backbone -> the other one of about its accuracy
PEERS = {
    "revnet104": "resnet101",
    "revbifpn_s2": "timm:efficientnet_b1",
    "revbifpn_s3": "timm:efficientnet_b3",
    "revbifpn_s4": "timm:efficientnet_b4",
    "revbifpn_s5": "timm:efficientnet_b5",
    "revbifpn_s6": "timm:efficientnet_b7",
    "revcol_tiny": "timm:convnext_tiny",
    "revcol_small": "timm:convnext_small",
    "revcol_base": "timm:convnext_base",
    "revcol_large": "timm:convnext_large",  # both 86.6 after ImageNet-22k
    "revvit_small": "timm:deit_small_patch16_224",
    "revvit_base": "timm:deit_base_patch16_224",
    "revmvit_base": "timm:convnext_small",
}
GREY = "#7d858d"
COLOURS = {"ResNet": "#5a6068", "EfficientNet": "#b07a4a", "ConvNeXt": "#c9a227", "DeiT": "#d9485f"}
SIDES = {name: side for rows in PLAIN.values() for name, side, _ in rows}


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


def tables() -> tuple[dict[str, list[tuple[float, float]]], list[WeightsEntry]]:
    """Print the tables; MiB and top-1 of the families in ``PLAIN``, and the entries of ours."""
    print(
        "| network | million parameters | side | top-1, % | MiB, `store` | MiB, `exact` | at 224 |"
    )
    print("|---|---|---|---|---|---|---|")
    points: dict[str, list[tuple[float, float]]] = {}
    found: dict[str, tuple[float, float]] = {}
    for family, rows in PLAIN.items():
        for name, side, accuracy in rows:
            parameters, size = kept(name, side, "store")
            found[name] = (accuracy, size)
            points.setdefault(family, []).append((size, accuracy))
            cells = f"{parameters:.1f} | {side} | {accuracy} | {size:.1f} | |"
            print(f"| {name} | {cells} {kept(name, 224, 'store')[1]:.1f} |", flush=True)
    ours = [entry for start, _ in OURS.values() for entry in entries(start)]
    for entry in ours:
        accuracy, side = 100 * entry.metrics["test/acc"], entry.input_size[1]
        sizes = entry.mib
        small = kept(entry.architecture, 224, "exact")[1] if side != 224 else sizes["exact"]
        cells = f"{entry.parameters} | {side} | {accuracy:.1f} | {sizes['store']} | "
        print(f"| {entry.name} | {cells}{sizes['exact']} | {small:.2f} |", flush=True)
    print("\n| backbone | top-1, % | MiB, `exact` | peer | top-1, % | MiB | times less |")
    print("|---|---|---|---|---|---|---|")
    for entry in ours:
        if peer := PEERS.get(entry.architecture):
            accuracy, size = found[peer]
            own = f"{100 * entry.metrics['test/acc']:.1f} | {entry.mib['exact']}"
            ratio = f"{size / entry.mib['exact']:.0f}"
            print(f"| {entry.architecture} | {own} | {peer} | {accuracy} | {size:.1f} | {ratio} |")
    return points, ours


def times(names: Iterable[str], batch: int, rounds: int) -> None:
    """Print the time of a step over that of the peer."""
    print("| backbone | peer | seconds a step of the peer | `store` | `exact` |")
    print("|---|---|---|---|---|")
    for name in names:
        trained = SHIPPED.names(f"{name}.*in1k")  # also after ImageNet-22k
        side = min(SHIPPED.entries[entry].input_size[1] for entry in trained)
        peer = PEERS[name]
        steps = {"peer": step(peer, SIDES[peer], "store", batch)}
        steps |= {mode: step(name, side, mode, batch) for mode in ("store", "exact")}
        found = interleaved(steps, rounds)
        ratios = [
            f"{t.ratio:.2f} ({t.low:.2f} to {t.high:.2f})" for t in (found["store"], found["exact"])
        ]
        cells = (name, peer, f"{found['peer'].seconds:.3g}", *ratios)
        print(f"| {' | '.join(cells)} |", flush=True)


def step(name: str, side: int, mode: str, batch: int) -> Callable[[], None]:
    """A forward and a backward pass in training."""
    torch.manual_seed(0)
    model = revzoo.create_model(name, num_classes=1000)
    revzoo.set_memory(model, mode)
    images, labels = torch.randn(batch, 3, side, side), torch.arange(batch)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()

    return run


def draw(
    picture: Path, points: dict[str, list[tuple[float, float]]], ours: list[WeightsEntry]
) -> None:
    """Top-1 against MiB, a line for each family."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    style = {"linewidth": 1, "markersize": 5}
    for family, found in points.items():
        axes.plot(*zip(*found, strict=True), "s--", color=COLOURS[family], label=family, **style)
    for family, (start, colour) in OURS.items():
        rows = [entry for entry in ours if entry.architecture.startswith(start)]
        top = [100 * entry.metrics["test/acc"] for entry in rows]
        for mode, line, look in (
            ("store", "o:", {"alpha": 0.5}),
            ("exact", "o-", {"label": family}),
        ):
            sizes = [entry.mib[mode] for entry in rows]
            axes.plot(sizes, top, line, color=colour, **look, **style)
    axes.set(xscale="log", xlabel="MiB that training keeps for an image", ylabel="top-1, %")
    axes.tick_params(colors=GREY, which="both")
    for side in axes.spines.values():
        side.set_color(GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, title="dotted: mode store", title_fontsize=8)
    axes.get_legend().get_title().set_color(GREY)
    figure.savefig(picture, dpi=160, transparent=True)


def main() -> None:
    """Print the tables, and draw the picture; or print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--time", nargs="+", metavar="NAME", choices=PEERS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(environment())
    if args.time:
        times(args.time, args.batch, args.rounds)
        return
    points, ours = tables()
    if args.picture:
        draw(args.picture, points, ours)


if __name__ == "__main__":
    main()
