"""Pretrained networks made reversible: accuracy by bits, memory and time of a step, a memory limit.

    python benchmarks/bench_convert.py accuracy --root DIR [--model resnet32 --images 10000]
    python benchmarks/bench_convert.py finetune --root DIR [--model resnet32 --train 2560]
    python benchmarks/bench_convert.py steps [--network resnet50]
    python benchmarks/bench_convert.py limit --root DIR [--gib 4]

DIR holds ``train/CLASS/*`` and ``test/CLASS/*`` with CIFAR-10's images of 3x32x32 pixels.

``accuracy`` evaluates the shipped weights. ``finetune`` trains the plain and the
converted networks with the same images, order and rate, and tests their last weights; it runs in
mode ``store`` on the grid, which gives bit-equal gradients in less time. ``steps`` compares plain
training, torch's checkpoint around each block, and the converted network: kept bytes are counted
on tensors. A run without two of its blocks gives the bytes of a block. The peak is measured in a
fresh process; times are interleaved. ``limit`` trains in processes whose data segment is limited
(``RLIMIT_DATA``). ``llama`` needs transformers, a decoder of 24 layers of width 256 built from a
configuration.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import MIB, environment, growth, in_own_process, interleaved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.io import ImageReadMode, decode_image

import revzoo
from revzoo.profiling.live import LiveMemory

# For timing: malloc keeps freed memory, as page faults cost more than the operators on some
# machines. Peaks are measured without these settings, in processes that return freed memory.
FAST_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": "500000000",
}
KINDS = ("plain", "checkpoint", "converted")


def read_images(root: Path, split: str, count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """``count`` random images ``(N, 3, 32, 32)``, bytes, and their labels."""
    names = sorted(path.name for path in (root / split).iterdir())
    files = [
        (f, i) for i, name in enumerate(names) for f in sorted((root / split / name).iterdir())
    ]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))[:count]
    chosen = [files[int(i)] for i in order]
    pixels = torch.stack([decode_image(str(f), ImageReadMode.RGB) for f, _ in chosen])
    return pixels, torch.tensor([label for _, label in chosen])


@torch.no_grad()
def logits_of(net: nn.Module, images: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits of all images, in evaluation mode."""
    net.eval()
    batches = images.split(200)
    return torch.cat([net(transform(b).to(memory_format=torch.channels_last)) for b in batches])


def pretrained(name: str) -> Any:
    """The shipped network, channels last."""
    net = revzoo.create_model(name, pretrained=True)
    return net.to(memory_format=torch.channels_last)


def accuracy(args: argparse.Namespace) -> Iterator[str]:
    """Rows: network, bits, accuracy with its standard error, relative change of the logits."""
    images, labels = read_images(args.root, "test", args.images, seed=0)
    net = pretrained(args.model)
    plain = logits_of(net, images, net.transforms())
    for bits in (None, 8, 6, 4, 3, 2, 1):
        logits = plain
        if bits is not None:
            revzoo.make_reversible(net, bits)
            logits = logits_of(net, images, net.transforms())
        right = (logits.argmax(1) == labels).double().mean().item()
        error = math.sqrt(right * (1 - right) / len(labels))
        change = (logits - plain).norm() / plain.norm()
        agree = (logits.argmax(1) == plain.argmax(1)).double().mean().item()
        yield (
            f"| {args.model} | {len(labels)} | {bits or 'plain'} | {100 * right:.2f} "
            f"({100 * error:.2f}) | {100 * agree:.2f} | {change:.4f} |"
        )


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored or not, shifted by up to 4 pixels."""
    padded = nn.functional.pad(images.float(), (4, 4, 4, 4)).to(torch.uint8)
    rows = []
    for image in padded:
        dy, dx, flip = torch.randint(0, 9, (3,), generator=generator).tolist()
        part = image[:, dy : dy + 32, dx : dx + 32]
        rows.append(part.flip(2) if flip % 2 else part)
    return torch.stack(rows)


def train(
    net: Any, images: Tensor, labels: Tensor, *, batch: int, lr: float, seed: int
) -> list[float]:
    """One pass over the images; returns the losses."""
    net.train()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 0.1  # so few steps would hardly move the statistics at the zoo's 0.01
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    steps = len(images) // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for chosen in torch.randperm(len(images), generator=generator)[: steps * batch].split(batch):
        x = net.transforms()(augmented(images[chosen], generator))
        loss = nn.functional.cross_entropy(
            net(x.to(memory_format=torch.channels_last)), labels[chosen]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def finetune(args: argparse.Namespace) -> Iterator[str]:
    """Rows: network, bits, and for each seed the accuracy before and after."""
    images, labels = read_images(args.root, "test", args.images, seed=0)
    for bits in args.bits:
        for seed in range(args.seeds):
            net = pretrained(args.model)
            if bits:
                revzoo.make_reversible(net, bits)
                revzoo.set_memory(net, "store", grid="auto")
            data = read_images(args.root, "train", args.train, seed=seed + 1)
            train(net, *data, batch=args.batch, lr=args.lr, seed=seed)
            logits = logits_of(net, images, net.transforms())
            right = (logits.argmax(1) == labels).double().mean().item()
            yield (
                f"| {args.model} | {bits or 'plain'} | {seed} | {args.train} | {len(labels)} | "
                f"{100 * right:.2f} |"
            )


# ------------------------------------------------------------------------------------- steps


def checkpointed(blocks: Sequence[nn.Module]) -> None:
    """Run each block in torch's checkpoint."""
    for block in blocks:
        forward = block.forward

        def run(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        block.forward = run  # type: ignore[method-assign]


def network(name: str, size: int) -> tuple[nn.Module, Tensor, str]:
    """The network, its input, and the path of its longest run; ``size`` of a ResNet's images."""
    import torchvision

    torch.manual_seed(0)
    if name == "llama":
        import transformers

        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
        config = transformers.LlamaConfig(
            vocab_size=1000, num_hidden_layers=24, use_cache=False, **sizes
        )
        return transformers.LlamaModel(config), torch.randint(0, 1000, (2, 256)), "layers"
    if name == "vit_b_16":
        return torchvision.models.vit_b_16(), torch.randn(2, 3, 224, 224), "encoder.layers"
    model = getattr(torchvision.models, name)()
    return model, torch.randn(4, 3, size, size), "layer3"


def prepared(name: str, kind: str, *, size: int, left_out: int = 0) -> tuple[nn.Module, Tensor]:
    """The network for plain, checkpointed or reversible training."""
    net, x, path = network(name, size)
    container = net.get_submodule(path)
    for key in list(container._modules)[len(container._modules) - left_out :]:
        del container._modules[key]
    if name == "llama":
        net.config.num_hidden_layers -= left_out
    revzoo.make_reversible(net, 4)
    rows = revzoo.reversible_blocks(net)
    if kind != "converted":
        revzoo.make_reversible(net, None)
    if kind == "checkpoint":
        checkpointed([net.get_submodule(row.path) for row in rows])
    return net, x


def output_of(net: nn.Module, x: Tensor) -> Tensor:
    """A loss: the mean square of the network's output."""
    y = net(x)
    return (y if isinstance(y, Tensor) else y.last_hidden_state).square().mean()


def kept(name: str, kind: str, *, size: int, left_out: int = 0) -> int:
    """Bytes alive between forward and backward pass."""
    net, x = prepared(name, kind, size=size, left_out=left_out)
    output_of(net, x).backward()  # a first pass makes things that stay, such as caches
    net.zero_grad()
    with LiveMemory() as memory:
        loss = output_of(net, x)
    assert loss.requires_grad
    return memory.now


def training_step(net: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward pass."""

    def step() -> None:
        output_of(net, x).backward()
        net.zero_grad(set_to_none=True)

    return step


def measured(args: argparse.Namespace) -> Iterator[str]:
    """One figure in this process, for :func:`steps`."""
    if args.figure == "time":
        candidates = {
            kind: training_step(*prepared(args.network, kind, size=args.size))
            for kind in KINDS[::-1]
        }
        order = {kind: candidates[kind] for kind in ("checkpoint", "plain", "converted")}
        timings = interleaved(order, args.rounds)
        yield json.dumps({kind: tuple(timing) for kind, timing in timings.items()})
        return
    step = training_step(*prepared(args.network, args.figure, size=args.size))
    if args.peak:
        step()  # the first step allocates gradients and workspaces
        yield json.dumps(growth(step))
    else:
        # the difference of the two is the bytes of two blocks
        yield json.dumps(
            [kept(args.network, args.figure, size=args.size, left_out=n) for n in (0, 2)]
        )


def steps(args: argparse.Namespace) -> Iterator[str]:
    """Rows: network, how it trains, kept bytes, a block's, peak, time against the checkpoint."""
    common = ["measured", "--network", args.network, "--rounds", str(args.rounds)]
    common += ["--size", str(args.size)]

    def child(*more: str, environment: dict[str, str] | None = None) -> Any:
        command = [*common, *more]
        if environment is None:
            return json.loads(in_own_process(__file__, command))
        found = subprocess.run(
            [sys.executable, __file__, *command],
            env=os.environ | environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return json.loads(found.stdout)

    times = child("--figure", "time", environment=FAST_MALLOC)
    for kind in KINDS:
        whole, shorter = child("--figure", kind)
        peak = child("--figure", kind, "--peak")
        seconds, ratio, low, high = times[kind]
        yield (
            f"| {args.network} | {kind} | {whole / MIB:.2f} | {(whole - shorter) / 2 / MIB:.3f} | "
            f"{peak / MIB:.0f} | {seconds:.2f} | {ratio:.2f} ({low:.2f} to {high:.2f}) |"
        )


# ------------------------------------------------------------------------------------- limit


def limited(args: argparse.Namespace) -> Iterator[str]:
    """Fine-tune with a fresh classifier in this process, its memory limited."""
    limit = int(args.gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    net = pretrained(args.model)
    net.reset_classifier(10)
    if args.figure == "converted":
        revzoo.make_reversible(net, 4)
    images, labels = read_images(args.root, "train", args.train, seed=1)
    try:
        losses = train(net, images, labels, batch=args.batch, lr=args.lr, seed=0)
    except (RuntimeError, MemoryError) as error:
        yield json.dumps(f"{type(error).__name__}: {str(error)[:160]}")
        return
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    yield json.dumps({"losses": [round(loss, 3) for loss in losses], "peak_mib": round(peak)})


def limit(args: argparse.Namespace) -> Iterator[str]:
    """Rows: how it trains, and its losses or its error."""
    common = ["--root", str(args.root), "--model", args.model, "--gib", str(args.gib)]
    common += ["--train", str(args.train), "--batch", str(args.batch), "--lr", str(args.lr)]
    for kind in ("plain", "converted"):
        found = json.loads(in_own_process(__file__, ["limited", "--figure", kind, *common]))
        yield f"| {args.model} | {args.batch} | {kind} | {found} |"


CONVERTED = (
    *("torchvision:resnet18", "torchvision:resnet50", "torchvision:resnet152"),
    *("torchvision:regnet_y_1_6gf", "torchvision:mobilenet_v3_large"),
    *("torchvision:efficientnet_b0", "torchvision:convnext_tiny", "torchvision:swin_t"),
    *("torchvision:vit_b_16", "timm:resnet50", "timm:convnext_tiny"),
    *("timm:swin_tiny_patch4_window7_224", "timm:vit_tiny_patch16_224"),
    *("timm:vit_small_patch16_224", "timm:vit_base_patch16_224", "timm:deit_small_patch16_224"),
    *("timm:deit3_base_patch16_224", "timm:eva02_tiny_patch14_336"),
    *("timm:eva02_small_patch14_336", "timm:hiera_tiny_224"),
)


def conversions(args: argparse.Namespace) -> Iterator[str]:
    """What training keeps for an image of 224x224, by kind of conversion; how outputs change."""
    yield "| network | blocks, inverted | plain | torch | `input_shape` | `checkpoint` | changed |"
    yield "|---|---|---|---|---|---|---|"
    shape = (1, 3, 224, 224)
    for name in CONVERTED:
        torch.manual_seed(0)
        size = {"img_size": 224} if name.endswith("336") else {}
        net = revzoo.create_model(name, memory="store", **size).eval()
        paths = [row.path for row in revzoo.reversible_blocks(revzoo.make_reversible(net, 4))]
        revzoo.make_reversible(net, None)
        x = torch.randn(shape)
        sizes, changed = [], 0.0
        with torch.no_grad():
            plain = net(x)
            for recomputed in (False, True):
                revzoo.make_reversible(net, input_shape=shape, checkpoint=recomputed)
                found = revzoo.conversion(net, shape)
                sizes.append(found.now)
                changed = max(changed, float((net(x) - plain).norm() / plain.norm()))
        revzoo.make_reversible(net, None)
        for block in map(net.get_submodule, paths):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[assignment]
        torchs = revzoo.audit(net, shape, modes=[]).kept_bytes
        inverted = sum(row.inverted for row in found.rows)
        mib = [f"{size / MIB:.3g}" for size in (found.before, torchs, *sizes)]
        yield f"| {name} | {len(paths)}, {inverted} | {' | '.join(mib)} | {changed:.2%} |"


PARTS = {f.__name__: f for f in (accuracy, finetune, steps, measured, limit, limited, conversions)}


def main() -> None:
    """Print the head of a report, then the rows as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--size", type=int, default=128, help="pixels, of a ResNet's images")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--train", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--bits", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", help=argparse.SUPPRESS)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if args.part not in ("measured", "limited"):
        print(environment(root=args.root), flush=True)
    for row in PARTS[args.part](args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
