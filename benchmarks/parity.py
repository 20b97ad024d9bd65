"""Networks of the zoo against their publishers' code: parameters, logits, gradients.

    python benchmarks/parity.py --original DIR NAME      DIR: a checkout of the publisher's code
    python benchmarks/parity.py --modes NAME             memory modes against each other

The release of RevNet needs TensorFlow: see ``parity_tensorflow.py``.

Both networks get the same random weights, by our translation of the publisher's names, and the
same images. Logits are compared by their largest difference, gradients by the largest difference
relative to the largest value of the same tensor; the largest of all tensors counts. Gradients that
are zero but for rounding, as of a shift before a batch normalisation, are left out. In train mode
both draw the same random numbers for stochastic depth.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from measure import environment, interleaved
from torch import Tensor, nn

import revzoo
from revzoo.models import IUNETS, ImageNetwork
from revzoo.models.dense import CONVOLUTIONS
from revzoo.models.iresnet import IRESNETS
from revzoo.models.registry import MODELS

BATCH = 2
DROP_PATH = 0.1  # of RevCol
ZERO = 1e-7  # a tensor's largest gradient over the largest of all


class Original(NamedTuple):
    """The publisher's network, and its logits for images."""

    network: nn.Module
    logits: Callable[[Tensor], Tensor]


def revbifpn(original: Path, name: str, size: int) -> Original:
    """RevBiFPN of CerebrasResearch/RevBiFPN, without its random drops, whose order differs."""
    sys.path.insert(0, str(original))
    import revbifpn as code  # type: ignore[import-not-found]

    with contextlib.redirect_stdout(None):  # it names the size of its images
        theirs = code.model_fns[name](head_dropout=0.0, stochastic_depth=0.0)
    return Original(theirs, theirs)


def revcol(original: Path, name: str, size: int) -> Original:
    """RevCol of megvii-research/RevCol, with its random drops; it needs timm."""
    sys.path.insert(0, str(original))
    import models.revcol  # type: ignore[import-not-found]
    import models.revcol_huge  # type: ignore[import-not-found]

    code = models.revcol_huge if name == "revcol_huge" else models.revcol
    # it reads rates from a tensor, also where the weights are on the meta device
    with mock.patch("torch.linspace", partial(torch.linspace, device="cpu")):
        theirs = getattr(code, name)(save_memory=False, drop_path=DROP_PATH)
    return Original(theirs, lambda x: theirs(x)[0][-1])


def momentumnet(original: Path, name: str, size: int) -> Original:
    """Momentum ResNet of michaelsdr/momentumnet with the stem for ImageNet, plain autograd."""
    sys.path.insert(0, str(original))
    from momentumnet import models as code  # type: ignore[import-not-found]

    theirs = getattr(code, f"mResNet{name.removeprefix('momentumnet')}")(use_backprop=True)
    return Original(theirs, theirs)


CONFIGS = {
    "revvit_small": "REV_VIT_S",
    "revvit_base": "REV_VIT_B",
    "revmvit_base": "REV_MVIT_B_16_CONV",
}
VIDEO = ("av", "cv2", "detectron2", "psutil", "pytorchvideo", "sklearn", "slowfast.datasets")


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of packages for videos, which the networks do not use."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        used = not name.startswith(VIDEO)
        return None if used else ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def slowfast(original: Path, name: str, size: int) -> Original:
    """Rev-ViT and Rev-MViT of facebookresearch/SlowFast, without its random drops.

    Its configurations need fvcore, iopath and simplejson on PYTHONPATH.
    """
    sys.path.insert(0, str(original))
    sys.meta_path.insert(0, Stubs())
    from slowfast.config.defaults import get_cfg  # type: ignore[import-not-found]
    from slowfast.models.video_model_builder import MViT  # type: ignore[import-not-found]

    config = get_cfg()
    config.merge_from_file(str(original / f"configs/ImageNet/{CONFIGS[name]}.yaml"))
    config.DATA.TRAIN_CROP_SIZE = config.DATA.TEST_CROP_SIZE = size
    config.MODEL.HEAD_ACT = "none"  # logits, also in evaluation mode
    config.MVIT.DROPPATH_RATE = 0.0
    with torch.device("cpu"):  # it reads values of tensors
        theirs = MViT(config)
    return Original(theirs, lambda x: theirs([x]))


def iunet(original: Path, name: str, size: int) -> Original:
    """The iUNet of cetmann/iunets between two convolutions, as in its examples; it needs memcnn.

    Its gradient of the Cayley transform is wrong, so autograd differentiates it here.
    """
    sys.path.insert(0, str(original))
    from iunets import cayley, iUNet, layers  # type: ignore[import-not-found]

    layers.cayley = SimpleNamespace(apply=cayley._cayley)
    row = IUNETS[name]
    conv, width = CONVOLUTIONS[row.dims], row.channels[0]
    with contextlib.redirect_stdout(None):
        inner = iUNet(row.channels, row.units, row.dims, disable_custom_gradient=True)
    first, last = conv(3, width, 3, padding=1), conv(width, CLASSES[name], 3, padding=1)
    theirs = nn.Sequential(first, inner, last)
    return Original(theirs, theirs)


def revunet(original: Path, name: str, size: int) -> Original:
    """The U-Net of RobinBruegger/PartiallyReversibleUnet, without sigmoid; it needs revtorch."""
    sys.path.insert(0, str(original))
    # loggers and losses
    sys.modules.update({key: mock.MagicMock() for key in ("comet_ml", "bratsUtils")})
    from experiments import noNewReversible as code  # type: ignore[import-not-found]

    theirs = code.NoNewReversible()
    theirs.firstConv = nn.Conv3d(3, 60, 3, padding=1, bias=False)
    theirs.lastConv = nn.Conv3d(60, CLASSES[name], 1)

    def logits(x: Tensor) -> Tensor:
        with mock.patch("torch.sigmoid", lambda y: y):
            return theirs(x)  # type: ignore[no-any-return]

    return Original(theirs, logits)


def iresnet(original: Path, name: str, size: int) -> Original:
    """The i-ResNet of jhjacobsen/invertible-resnet, after a first batch."""
    sys.path.insert(0, str(original))
    sys.modules["matrix_utils"] = mock.MagicMock()  # traces for densities, by an old torch
    from models.conv_iResNet import conv_iResNet  # type: ignore[import-not-found]

    row = IRESNETS[name]
    with contextlib.redirect_stdout(None), torch.device("cpu"):  # it copies to parameters
        theirs = conv_iResNet(  # as scripts/classify_cifar.sh
            *((3, size, size), row.units, row.strides, row.inner),
            **{"init_ds": 1, "inj_pad": row.padding, "nClasses": CLASSES[name], "n_power_iter": 1},
            **{"coeff": row.coefficient, "nonlin": "elu"},
        )
        for p in theirs.parameters():
            if p.dim() == 4:
                p.data.mul_(3)  # so that each bound acts
        # it sets the ActNorms, and begins the power iterations
        theirs(torch.randn(BATCH, 3, size, size))
    return Original(theirs, lambda x: theirs(x)[0])


ORIGINALS: dict[str, Callable[[Path, str, int], Original]] = {
    "revbifpn": revbifpn,
    "revcol": revcol,
    "revvit": slowfast,
    "revmvit": slowfast,
    "momentumnet": momentumnet,
    **dict.fromkeys(("iunet1d", "iunet2d", "iunet3d"), iunet),
    "revunet3d": revunet,
    "iresnet": iresnet,
}
CLASSES = dict.fromkeys(("iunet1d", "iunet2d", "iunet3d", "revunet3d", "iresnet64"), 10)
OPTIONS: dict[str, dict[str, Any]] = {
    "momentumnet": {"downsampling_stem": True},
    "revbifpn": {"drop_rate": 0.0, "drop_path_rate": 0.0},
    "revcol": {"drop_path_rate": DROP_PATH},
}


def family(name: str) -> str:
    """The architecture of a network."""
    return name.partition("_")[0].rstrip("0123456789")


def ours_of(name: str, size: int) -> ImageNetwork:
    """Our network for images of a size, and ImageNet-1k or 10 classes."""
    options = dict(OPTIONS.get(family(name), {}))
    if "img_size" in MODELS[name].keywords:
        options["img_size"] = size
    if name in IRESNETS:
        options["image_size"] = size  # of the power iterations
    return revzoo.create_model(name, num_classes=CLASSES.get(name, 1000), **options)


def randomise(model: nn.Module) -> None:
    """Random scales and shifts, which begin at 0, 1 or 1e-6, so that every layer matters."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if name.endswith(("_log_scale", "_shift", "prior_mu", "prior_logstd")):
            continue  # of an i-ResNet: a batch has set them, or nothing reads them
        if p.squeeze().dim() == 1:
            low, high = (-0.2, 0.2) if name.endswith("bias") else (0.3, 1.0)
            nn.init.uniform_(p, low, high)
        elif not p.any():  # the rotations of an iUNet
            nn.init.normal_(p, std=0.1)


def counts(theirs: nn.Module, ours: ImageNetwork) -> str:
    """The numbers of parameters; all of ours are translated from theirs."""
    translated = ours.adapt_state_dict(dict(theirs.named_parameters()))
    own = dict(ours.named_parameters())
    assert {key: t.shape for key, t in translated.items()} == {k: p.shape for k, p in own.items()}
    numbers = (theirs.parameters(), translated.values(), own.values())
    return " | ".join(f"{sum(t.numel() for t in tensors):,}" for tensors in numbers)


def run(
    model: nn.Module, logits: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the cross entropy by name."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    found = logits(x)
    classes = torch.arange(len(x), device=x.device)
    shape = (-1, *[1] * (found.dim() - 2))  # of a map: the same class everywhere
    target = classes.view(shape).expand(len(x), *found.shape[2:])
    nn.functional.cross_entropy(found, target).backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return found.detach(), grads


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest value."""
    assert found.keys() == expected.keys()
    least = ZERO * max(t.abs().max() for t in expected.values())
    pairs = ((found[key], t) for key, t in expected.items() if t.abs().max() > least)
    return max(float((f - t).abs().max() / t.abs().max()) for f, t in pairs)


def compare(
    name: str, original: Path, sizes: Iterable[int], device: str, dtype: torch.dtype
) -> None:
    """Print the tables of one network."""
    build = ORIGINALS[family(name)]
    print("| model | parameters of the original | of those, translated | ours |")
    sizes = list(sizes)
    side = sizes[0] if sizes else 224
    with torch.device("meta"):
        cells = counts(build(original, name, side).network, ours_of(name, side))
    print(f"|---|---|---|---|\n| {name} | {cells} |\n")
    if not sizes:
        return
    print("| model | images | pass | `memory` | logits | gradients |\n|---|---|---|---|---|---|")
    for size in sizes:
        torch.manual_seed(0)
        theirs, logits_of = build(original, name, size)
        randomise(theirs)
        ours = ours_of(name, size)
        theirs.to(device, dtype), ours.to(device, dtype)
        tensors = copy.deepcopy(theirs.state_dict())  # with its metadata
        x = torch.randn(ours.batch_shape(BATCH, size), generator=torch.Generator().manual_seed(2))
        x = x.to(device, dtype)
        for training in (False, True):
            theirs.train(training), ours.train(training)
            theirs.load_state_dict(tensors)
            logits, found = run(theirs, logits_of, x)
            expected = ours.adapt_state_dict(found)
            for memory in ("store", ours.default_memory):
                ours.load_state_dict(ours.adapt_state_dict(tensors))  # the same buffers in each row
                revzoo.set_memory(ours, memory)
                own, grads = run(ours, ours, x)
                row = (
                    *(
                        name,
                        "x".join(map(str, x.shape[2:])),
                        "train" if training else "eval",
                        f"`{memory}`",
                    ),
                    *(f"{float((own - logits).abs().max()):.0e}", f"{apart(grads, expected):.0e}"),
                )
                print("| " + " | ".join(row) + " |", flush=True)


def modes(name: str, batch: int, rounds: int, device: str) -> None:
    """Print memory, time, drift and gradients of the memory modes, in training."""
    torch.manual_seed(0)
    model = revzoo.create_model(name, num_classes=CLASSES.get(name, 1000)).to(device)
    x = torch.randn(model.batch_shape(batch), device=device)
    print(
        "| model | `memory` | kept, MiB an image | peak, MiB an image | time | drift | gradients |"
    )
    print("|---" * 7 + "|")
    names = ("store", "recompute", "invert", "exact")

    def step(memory: str) -> Callable[[], object]:
        def one() -> object:
            revzoo.set_memory(model, memory)
            # any drift: it is measured, and does not end the run
            revzoo.set_drift_limit(model, torch.inf)
            return run(model, model, x)

        return one

    steps = {memory: step(memory) for memory in names}
    plain: Any = steps["store"]()
    timed = interleaved(steps, rounds)
    for memory in names:
        _, grads = plain if memory == "store" else steps[memory]()  # type: ignore[misc]
        drift = revzoo.drift(model) if memory in ("invert", "exact") else {}
        worst = max(drift.values(), default=0.0)
        revzoo.set_memory(model, memory)
        revzoo.set_drift_limit(model, torch.inf)
        report = revzoo.audit(model, x.shape, modes=[], real=True)
        kept, peak = (b / batch / 2**20 for b in (report.kept_bytes, report.activation_bytes))
        row = (name, f"`{memory}`", f"{kept:,.2f}", f"{peak:,.2f}", f"{timed[memory].ratio:.2f}")
        print("| " + " | ".join((*row, f"{worst:.0e}", f"{apart(grads, plain[1]):.0e}")) + " |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--original", type=Path, metavar="DIR")
    parser.add_argument("--modes", action="store_true")
    parser.add_argument("--sizes", nargs="*", type=int, default=[224, 288], help="none: counts")
    parser.add_argument("--double", action="store_true", help="in float64")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(environment(root=args.original))
    for name in args.names:
        if args.modes:
            modes(name, args.batch, args.rounds, args.device)
        else:
            dtype = torch.float64 if args.double else torch.float32
            compare(name, args.original, args.sizes, args.device, dtype)


if __name__ == "__main__":
    main()
