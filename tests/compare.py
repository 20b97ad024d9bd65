"""Shared by the tests: small reversible nets, and training runs whose effects can be compared."""

import contextlib
import copy
import gc
from typing import NamedTuple

import torch
from torch import Tensor, nn

from revzoo import ReversibleBlock, ReversibleSequence, set_memory
from revzoo.core.live import LiveMemory


def conv_branch(channels=4, *, dropout=0.0, norm=nn.BatchNorm2d):
    return nn.Sequential(
        norm(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        norm(channels),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(channels, channels, 3, padding=1),
    )


def conv_net(depth=3, channels=4, *, seed=0, **branch):
    """``depth`` blocks in float64 on ``(B, 2 * channels, H, W)``."""
    torch.manual_seed(seed)
    blocks = [
        ReversibleBlock(conv_branch(channels, **branch), conv_branch(channels, **branch))
        for _ in range(depth)
    ]
    return ReversibleSequence(blocks).double()


def linear_net(depth=3, width=4, *, seed=0):
    """``depth`` blocks in float64 on ``(B, 2 * width)``, without statistics."""
    torch.manual_seed(seed)

    def branch():
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    return ReversibleSequence([ReversibleBlock(branch(), branch()) for _ in range(depth)]).double()


def twin(net, mode):
    """A copy of ``net`` in another memory mode."""
    other = copy.deepcopy(net)
    set_memory(other, mode)
    return other


def images(batch=3, channels=8, size=6, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, size, size, dtype=torch.float64, generator=generator)


class Effects(NamedTuple):
    """All effects of a few training steps."""

    losses: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]
    random_state: Tensor


def train(net, x, *, steps=3, seed=2, context=contextlib.nullcontext()):  # noqa: B008
    """Plain SGD on the squared output; every step's loss, input and parameter gradients."""
    torch.manual_seed(seed)
    losses, gradients = [], []
    for _ in range(steps):
        x = x.detach().clone().requires_grad_()
        net.zero_grad(set_to_none=True)
        with context:
            loss = net(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients += [x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    buffers = [b.clone() for b in net.buffers()]
    return Effects(losses, gradients, buffers, torch.get_rng_state())


def error(actual, expected):
    """Largest difference relative to the largest expected value, over lists of tensors."""
    assert len(actual) == len(expected) > 0
    assert all(e.isfinite().all() for e in expected)
    scale = max(e.abs().max().item() for e in expected)
    return max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True)) / scale


def assert_same_training(net, reference, x, *, tolerance=1e-12, **options):
    """Gradients agree to ``tolerance``; buffers and random state bit for bit."""
    actual, expected = train(net, x, **options), train(reference, x, **options)
    assert error(actual.losses, expected.losses) <= tolerance
    assert error(actual.gradients, expected.gradients) <= tolerance
    for a, e in zip(actual.buffers, expected.buffers, strict=True):
        if a.is_floating_point():
            assert (a - e).abs().max() <= tolerance * e.abs().max()
        else:
            assert torch.equal(a, e)
    assert torch.equal(actual.random_state, expected.random_state)


def leaf_rows(width=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, width, dtype=torch.float64, generator=generator).requires_grad_()


def gradients_in(net, mode, x, *, grid=None):
    set_memory(net, mode, grid=grid)
    return torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])


LAYOUTS = {
    "dense": lambda x: x.clone(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "batch last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "sliced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[:1].expand_as(x),
}


def streams(layout, *, rows=8, width=8):
    generator = torch.Generator().manual_seed(1)
    x1, x2 = torch.randn(2, 5, rows, width, dtype=torch.float64, generator=generator)
    return [LAYOUTS[layout](x).detach().requires_grad_() for x in (x1, x2)]


def relu_block(norm, width=8):
    def branch():
        return nn.Sequential(
            *(norm(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
            *(norm(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
        )

    return ReversibleBlock(branch(), branch())


def kept_bytes(run):
    """Bytes alive between forward and backward, besides the result of ``run``."""
    with LiveMemory() as memory:
        outputs = run()
        own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
        kept = memory.now - sum(own.values())
        sum(t.sum() for t in outputs).backward()
    return kept


def grows(run):
    """Whether each call of ``run`` leaves tensors behind."""
    gc.collect()
    gc.freeze()  # so that only what is made from here on is counted
    try:
        alive = []
        for _ in range(6):
            run()
            gc.collect()
            alive.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))
    finally:
        gc.unfreeze()
    return alive[-1] > alive[2]
