"""A training step of 3-D U-Nets on one volume: ours, and MONAI's with and without checkpoints.

    python benchmarks/bench_volumes.py

Counts the peaks of all networks on tensors without values. Of some, it also measures one step, each
in its own process. Needs MONAI.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from measure import environment, growth, in_own_process
from monai.networks.nets import BasicUNet, DynUNet
from torch import nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.profiling.clock import now

OPTIONS = {"channels": (32, 64, 128, 256), "units": (6,) * 4, "groups": 4}


def ours(memory: str) -> nn.Module:
    """The reversible U-Net, with six blocks on each side of a level."""
    sizes = {"num_classes": 3, "in_chans": 1}
    return revzoo.create_model("revunet3d", **OPTIONS, **sizes, memory=memory)


def dynunet() -> nn.Module:
    """nnU-Net's network, in MONAI."""
    return DynUNet(
        3,
        1,
        3,
        kernel_size=[3] * 5,
        strides=[1, 2, 2, 2, 2],
        upsample_kernel_size=[2] * 4,
        filters=[32, 64, 128, 256, 320],
    )


def basic() -> nn.Module:
    """MONAI's BasicUNet, half as wide again as by default."""
    return BasicUNet(3, 1, 3, features=(48, 48, 96, 192, 384, 48))


def checkpointed(make: Callable[[], nn.Module]) -> nn.Module:
    """A network of MONAI whose blocks run through torch's checkpoint."""
    network = make()
    for module in network.modules():
        if type(module).__name__ in ("UnetBasicBlock", "TwoConv", "UpCat", "UnetUpBlock"):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    return network


CANDIDATES: dict[str, Callable[[], nn.Module]] = {
    "revunet3d, `store`": partial(ours, "store"),
    "revunet3d, `exact`": partial(ours, "exact"),
    "revunet3d, `invert`": partial(ours, "invert"),
    "DynUNet": dynunet,
    "DynUNet, checkpoints": partial(checkpointed, dynunet),
    "BasicUNet": basic,
    "BasicUNet, checkpoints": partial(checkpointed, basic),
}
MEASURED = ("revunet3d, `exact`", "DynUNet", "DynUNet, checkpoints")


def measured(name: str, side: int) -> str:
    """The growth of the resident peak in bytes, and the seconds, of a step after a small one."""
    torch.manual_seed(0)
    network, cpu = CANDIDATES[name](), torch.device("cpu")

    def step(side: int) -> None:
        network(torch.randn(1, 1, side, side, side)).square().mean().backward()

    step(32)  # gradients
    start = now(cpu)
    peak = growth(partial(step, side))
    return f"{peak} {now(cpu) - start}"


def main() -> None:
    """Print a table: parameters, the counted peak, the measured peak and time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--one", help="of the candidates: measure it in this process")
    args = parser.parse_args()
    if args.one:
        print(measured(args.one, args.side))
        return
    print(environment())
    print(
        "| network | parameters | counted, GiB | measured, GiB | seconds |\n|---|---|---|---|---|"
    )
    for name, make in CANDIDATES.items():
        with torch.device("meta"):
            network = make()
        counted = revzoo.audit(network, (1, 1, *[args.side] * 3), modes=[]).peak_bytes
        row = [name, f"{sum(p.numel() for p in network.parameters()):,}"]
        row += [f"{counted / 2**30:.2f}", "", ""]
        if name in MEASURED:
            output = in_own_process(__file__, ["--one", name, "--side", str(args.side)])
            peak, seconds = map(float, output.split()[-2:])
            row[-2:] = f"{peak / 2**30:.2f}", f"{seconds:.0f}"
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
