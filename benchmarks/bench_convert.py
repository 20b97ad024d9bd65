"""Networks made reversible: what a step keeps and costs, accuracy by bits, a memory limit.

    python benchmarks/bench_convert.py counted [--networks "ViT-B/16, 224" ...]
    python benchmarks/bench_convert.py timed [--networks "ViT-B/16, 224" ... --rounds 5]
    python benchmarks/bench_convert.py accuracy --root DIR [--model resnet32 --images 10000]
    python benchmarks/bench_convert.py finetune --root DIR [--model resnet32 --train 2560]
    python benchmarks/bench_convert.py limit --root DIR [--gib 4]

``counted`` and ``timed`` compare, with random weights: ``plain`` training; ``checkpoint``, torch's
around each block; ``paying``, :func:`revzoo.make_reversible` with ``input_shape``; ``converted``,
also with ``checkpoint=True``. Bytes are counted on fake tensors, times are interleaved CPU times of
one thread. Set ``MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_MMAP_MAX_=0 MALLOC_TOP_PAD_=500000000``
for ``timed``: page faults cost more than the operators on some machines. They need timm,
transformers, peft and monai for the networks of these.

DIR holds ``train/CLASS/*`` and ``test/CLASS/*`` with CIFAR-10's images of 3x32x32 pixels.
``accuracy`` evaluates the shipped weights. ``finetune`` trains the plain and the converted networks
with the same images, order and rate, and tests their last weights; it runs in mode ``store`` on the
grid, which gives bit-equal gradients in less time. ``limit`` trains in processes whose data segment
is limited (``RLIMIT_DATA``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import MIB, environment, in_own_process, interleaved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.io import ImageReadMode, decode_image

import revzoo
from revzoo.models.revunet import RevUNet


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


# ------------------------------------------------------------------------------------- costs


class Decoder(nn.Module):
    """A Llama of 24 layers and width 256, without its head, on embedded tokens ``(B, T, 256)``."""

    def __init__(self, *, lora: bool = False) -> None:
        super().__init__()
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # without a mask, as in a real step: on fake tensors transformers makes one for "sdpa"
        transformers.AttentionInterface.register("causal", sdpa_attention_forward)
        options = {"attn_implementation": "causal", "use_cache": False, "vocab_size": 8}
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
        config = transformers.LlamaConfig(num_hidden_layers=24, **sizes, **options)
        self.net: nn.Module = transformers.LlamaModel(config)
        if lora:
            import peft

            adapters = peft.LoraConfig(r=8, target_modules="all-linear")
            self.net = peft.get_peft_model(self.net, adapters)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(inputs_embeds=x).last_hidden_state


def monai_net(name: str, **options: Any) -> nn.Module:
    """A network of MONAI for volumes of one channel, with two classes."""
    import monai

    return getattr(monai.networks.nets, name)(
        spatial_dims=3, in_channels=1, out_channels=2, **options
    )


class Network(NamedTuple):
    """How to build it, the shape of one sample, and the class of its blocks if it has no runs."""

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    block: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS[:2] if self.block else KINDS


ANY_SIZE = {
    "ResNet-18": "torchvision:resnet18",
    "ResNet-50": "torchvision:resnet50",
    "ResNet-152": "torchvision:resnet152",
    "MobileNetV3-L": "torchvision:mobilenet_v3_large",
    "EfficientNet-B0": "torchvision:efficientnet_b0",
    "ConvNeXt-T": "torchvision:convnext_tiny",
    "Swin-T": "torchvision:swin_t",
}
ONE_SIZE = {
    "Hiera-S": "timm:hiera_small_224",
    "ViT-B/16": "torchvision:vit_b_16",
    "ViT-L/16": "torchvision:vit_l_16",
    "DeiT-S": "timm:deit_small_patch16_224",
    "DeiT-B": "timm:deit_base_patch16_224",
    "EVA-02-S": "timm:eva02_small_patch14_336",
}
NETWORKS = {
    f"{label}, {side}": Network(
        partial(
            revzoo.create_model,
            name,
            memory="store",
            **({"img_size": side} if label in ONE_SIZE else {}),
        ),
        (3, side, side),
    )
    for label, name in (ANY_SIZE | ONE_SIZE).items()
    for side in (224, 384)
}
for tokens in (512, 4096):
    NETWORKS[f"decoder, {tokens} tokens"] = Network(Decoder, (tokens, 256))
    with_lora = partial(Decoder, lora=True)
    NETWORKS[f"decoder with LoRA, {tokens} tokens"] = Network(with_lora, (tokens, 256))
UNET = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2), "num_res_units": 2}
REVUNET = partial(revzoo.create_model, "revunet3d", memory="store", num_classes=2, in_chans=1)
VOLUME = (1, 64, 64, 64)
NETWORKS |= {
    "MONAI UNet, 64": Network(partial(monai_net, "UNet", **UNET), VOLUME, "ResidualUnit"),
    "MONAI BasicUNet, 64": Network(partial(monai_net, "BasicUNet"), VOLUME, "TwoConv"),
    "MONAI SegResNet, 64": Network(partial(monai_net, "SegResNet"), VOLUME),
    "revunet3d, 64": Network(REVUNET, VOLUME),
}
BATCH = 8  # that is counted
KINDS = ("plain", "checkpoint", "paying", "converted")
NO_RUN = ("no run", "no run")  # in place of the last two
MODES = dict(zip(KINDS, ("store", "recompute", "exact", "exact"), strict=True))  # of revunet3d


def prepared(name: str, kind: str) -> nn.Module:
    """The network for plain, checkpointed or reversible training."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    net = network.build()
    if isinstance(net, RevUNet):  # reversible by design
        revzoo.set_memory(net, MODES[kind])
    elif kind == "checkpoint":
        for block in blocks_of(net, network.block):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[assignment]
    elif kind != "plain":
        shape = (BATCH, *network.sample)
        revzoo.make_reversible(net, input_shape=shape, checkpoint=kind == "converted")
    return net


def blocks_of(net: nn.Module, kind: str) -> list[nn.Module]:
    """The modules of this class; without one, the blocks of all runs."""
    if kind:
        return [m for m in net.modules() if type(m).__name__ == kind]
    revzoo.make_reversible(net, 4)
    paths = [row.path for row in revzoo.reversible_blocks(net)]
    revzoo.make_reversible(net, None)
    return [net.get_submodule(path) for path in paths]


def counted(args: argparse.Namespace) -> Iterator[str]:
    """Rows: network, blocks, inverted, and by kind MiB a sample kept, and at the peak."""
    yield f"| network | blocks, inverted | {' | '.join(KINDS)} |"
    yield "|---" * (len(KINDS) + 2) + "|"
    for name in args.networks:
        cells, blocks = [], {}
        for kind in NETWORKS[name].kinds:
            net = prepared(name, kind)
            report = revzoo.audit(net, (BATCH, *NETWORKS[name].sample), modes=[])
            sizes = (report.kept_bytes / BATCH / MIB, report.activation_bytes / BATCH / MIB)
            cells.append(
                ", ".join(f"{size:.3g}" if size < 1000 else f"{size:.0f}" for size in sizes)
            )
            blocks[kind] = len(revzoo.reversible_blocks(net))
        counts = f"{blocks['converted']}, {blocks['paying']}" if blocks.get("converted") else "-"
        yield f"| {name} | {counts} | {' | '.join([*cells, *NO_RUN][:4])} |"


def timed(args: argparse.Namespace) -> Iterator[str]:
    """Rows: network, seconds of a plain step, and by kind the ratio to it (quartiles).

    One sample; without the large sizes.
    """
    yield "| network | plain, s | checkpoint | converted |"
    yield "|---|---|---|---|"
    for name in (n for n in args.networks if not n.endswith((", 384", ", 4096 tokens"))):
        x = torch.randn(1, *NETWORKS[name].sample)
        candidates: dict[str, Callable[[], object]] = {
            kind: partial(step, prepared(name, kind), x)
            for kind in NETWORKS[name].kinds
            if kind != "paying"
        }
        found = interleaved(candidates, args.rounds)
        ratios = [f"{t.ratio:.2f} ({t.low:.2f} to {t.high:.2f})" for t in [*found.values()][1:]]
        cells = " | ".join([*ratios, *NO_RUN][:2])
        yield f"| {name} | {found['plain'].seconds:.2f} | {cells} |"


def step(net: nn.Module, x: Tensor) -> None:
    """Forward and backward pass; the loss is the mean square of the output."""
    net(x).square().mean().backward()
    net.zero_grad(set_to_none=True)


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


PARTS = {f.__name__: f for f in (counted, timed, accuracy, finetune, limit, limited)}


def main() -> None:
    """Print the head of a report, then the rows as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--train", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--bits", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if args.part != "limited":
        print(environment(root=args.root), flush=True)
    for row in PARTS[args.part](args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
