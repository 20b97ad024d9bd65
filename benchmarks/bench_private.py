"""Per-sample gradients and private training: memory and time of a step, by engine and memory mode.

    python benchmarks/bench_private.py

Networks with group normalisation on images of 3x32x32, float32. The script counts the bytes of all
tensors alive, so the figures are the same on every machine; it subtracts the bytes of the gradients
(one tensor for each parameter), since they grow with depth in any method. Times are ratios within
one run, all candidates of a round in turn. Needs the extras ``opacus`` and ``backpack``.

"plain" candidates are the libraries' own classes on a network that stores its activations.
BackPACK's own has no rule for GroupNorm, so it computes less than the others.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import opacus
import torch
from backpack import backpack
from backpack import extend as plain_extend
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.extensions import BatchGrad, BatchL2Grad
from measure import MIB, environment, interleaved
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.integrations.backpack import extend
from revzoo.integrations.opacus import PrivacyEngine
from revzoo.private.clipping import ClippedGradients

Step = Callable[[], None]


def network(name: str, memory: str) -> nn.Module:
    """The same network in each call."""
    torch.manual_seed(0)
    return revzoo.create_model(name, norm="group", memory=memory)


def with_opacus(engine: type[opacus.PrivacyEngine], mode: str) -> Callable[..., Step]:
    """A step of DP-SGD with an engine of Opacus or ours."""

    def make(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
        made = engine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=1e-3),
            data_loader=DataLoader(TensorDataset(images, labels), batch_size=len(images)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        model, optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

        def step() -> None:
            criterion(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def with_clipping(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """The work of callbacks.private in a step."""
    clipped = ClippedGradients(net, 1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        functional.cross_entropy(net(images), labels).backward()
        for p in net.parameters():
            p.grad.add_(torch.randn_like(p), alpha=1.0 / len(images))
        optimizer.step()
        optimizer.zero_grad()

    step.kept = clipped  # type: ignore[attr-defined]
    return step


def with_backpack(
    prepare: Callable[[nn.Module], nn.Module], extension: type, lean: bool
) -> Callable[..., Step]:
    """A step with an extension of BackPACK; its results are dropped at the end."""

    def make(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
        prepare(net)

        def step() -> None:
            with backpack(extension()), weight_jac_t_save_memory(lean):
                functional.cross_entropy(net(images), labels).backward()
            for p in net.parameters():
                p.grad = None
                for field in ("grad_batch", "batch_l2"):
                    if hasattr(p, field):
                        delattr(p, field)

        return step

    return make


def ordinary(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """A forward and a backward pass."""

    def step() -> None:
        functional.cross_entropy(net(images), labels).backward()
        net.zero_grad()

    return step


CANDIDATES: dict[str, tuple[str, Callable[..., Step]]] = {
    "ordinary step": ("store", ordinary),
    "ordinary step, exact": ("exact", ordinary),
    "plain Opacus, gradients of samples": ("store", with_opacus(opacus.PrivacyEngine, "hooks")),
    "plain Opacus, ghost": ("store", with_opacus(opacus.PrivacyEngine, "ghost")),
    "revzoo Opacus, gradients of samples, exact": ("exact", with_opacus(PrivacyEngine, "hooks")),
    "revzoo Opacus, ghost, store": ("store", with_opacus(PrivacyEngine, "ghost")),
    "revzoo Opacus, ghost, exact": ("exact", with_opacus(PrivacyEngine, "ghost")),
    "callbacks.private, store": ("store", with_clipping),
    "callbacks.private, exact": ("exact", with_clipping),
    "plain BackPACK, BatchGrad": ("store", with_backpack(plain_extend, BatchGrad, False)),
    "plain BackPACK, BatchGrad, lean": ("store", with_backpack(plain_extend, BatchGrad, True)),
    "revzoo BackPACK, BatchGrad, exact": ("exact", with_backpack(extend, BatchGrad, False)),
    "revzoo BackPACK, BatchGrad, lean, exact": ("exact", with_backpack(extend, BatchGrad, True)),
    "revzoo BackPACK, BatchL2Grad, exact": ("exact", with_backpack(extend, BatchL2Grad, False)),
}


def make(candidate: str, name: str, batch: int) -> tuple[Step, int]:
    """The step, and the bytes of the network's parameters."""
    memory, build = CANDIDATES[candidate]
    net = network(name, memory)
    torch.manual_seed(1)
    images, labels = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    return build(net, images, labels), sum(p.nbytes for p in net.parameters())


def peak(candidate: str, name: str, batch: int) -> tuple[float, float]:
    """MiB at the peak of a step, and of the gradients."""
    step, gradients = make(candidate, name, batch)
    step()
    with LiveMemory() as memory:
        step()
    return memory.peak / MIB, gradients / MIB


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--networks", nargs=2, default=["revnet38", "revnet110"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # advice of the libraries
    small, large = args.networks
    print("# Per-sample gradients and private training: memory and time\n")
    print(environment() + f"- Batch {args.batch}, n = {args.rounds} rounds of {small} for the time")
    print(f"- opacus {opacus.__version__}, norm=group\n")
    print("MiB at the peak less the gradients' own; time over an ordinary step, with quartiles.\n")
    print(f"| candidate | {small} | {large} | {large} over {small} | time of {small} |")
    print("|---|---|---|---|---|")
    timings = {}
    if args.rounds:
        timings = interleaved(
            {c: make(c, small, args.batch)[0] for c in CANDIDATES}, rounds=args.rounds
        )
    own = []
    for candidate in CANDIDATES:
        peaks = [peak(candidate, name, args.batch) for name in (small, large)]
        own = [gradients for _, gradients in peaks]
        first, second = (whole - gradients for whole, gradients in peaks)
        t = timings.get(candidate)
        time = f"{t.ratio:.2f} ({t.low:.2f} to {t.high:.2f})" if t else "-"
        ratio = second / first
        print(f"| {candidate} | {first:.1f} | {second:.1f} | {ratio:.2f} | {time} |", flush=True)
    print(f"\nGradients: {own[0]:.1f} MiB of {small}, {own[1]:.1f} of {large}.")


if __name__ == "__main__":
    main()
