"""The answers of docs/questions.md: each test cites the questions that users asked elsewhere."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from compare import conv_net, error, images, twin
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.training.lightning_compat import quiet

PAGE = Path(__file__).parents[1] / "docs" / "questions.md"


def blocks(depth: int, make: Any = lambda: nn.Conv2d(4, 4, 3, padding=1)) -> list[nn.Module]:
    return [revzoo.ReversibleBlock(nn.Sequential(make(), nn.ReLU())) for _ in range(depth)]


def kept(net: nn.Module, *shape: int) -> int:
    return revzoo.audit(net, shape, modes=[]).kept_bytes


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(net(x).square().sum(), [*net.parameters()]))


def test_a_monitor_shows_more_than_activations() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/37 and
    https://github.com/lucidrains/reformer-pytorch/issues/142: nvidia-smi shows no saving."""
    model = revzoo.create_model("revnet38")
    audits = revzoo.audit(model, (4, 3, 32, 32), modes=["store", "exact"]).audits
    kept = {mode: audits[mode].kept_bytes for mode in audits}
    peak = {mode: audits[mode].peak_bytes for mode in audits}
    assert peak["exact"] > kept["exact"] + 2 * sum(4 * p.numel() for p in model.parameters())
    assert kept["store"] / kept["exact"] > 2 * peak["store"] / peak["exact"]


def test_memory_after_a_step_does_not_grow() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/37: it grew from batch to batch."""
    net, left = revzoo.ReversibleSequence(blocks(3)), []
    with LiveMemory() as memory:
        for _ in range(6):
            net(torch.randn(2, 8, 8, 8)).sum().backward()
            left.append(memory.now)
    assert left[3] == left[4] == left[5]  # from the third pass on, couplings share functions


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_memory_is_constant_in_depth_for_volumes_and_plain_containers(mode: str) -> None:
    """https://github.com/silvandeleemput/memcnn/issues/41 (a chain of 3D couplings) and
    https://github.com/silvandeleemput/memcnn/issues/6 (blocks in ``nn.Sequential``)."""
    found = {}
    for depth in (2, 6):
        chain = blocks(depth, lambda: nn.Conv3d(4, 4, 3, padding=1))
        nets = {"sequence": revzoo.ReversibleSequence(chain), "plain": nn.Sequential(*chain)}
        for name, net in nets.items():
            revzoo.set_memory(net, mode)
            found[name, depth] = kept(net, 2, 8, 6, 6, 6)
        revzoo.set_memory(net, "store")
        found["store", depth] = kept(net, 2, 8, 6, 6, 6)
    for name in ("sequence", "plain"):  # the guard's figures: less than 64 bytes a coupling
        assert found[name, 6] - found[name, 2] < 4 * 64
    assert found["store", 6] > 2.5 * found["store", 2]


def test_several_backward_passes_through_one_network() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/36."""
    found = []
    for mode in ("store", "invert"):
        net = twin(conv_net(), mode)
        x = images().requires_grad_()
        one, two = net(x), net(2 * x)  # two calls, three backward passes
        first = one.square().mean()
        first.backward(retain_graph=True)
        first.backward()
        two.sum().backward()
        found.append([x.grad, *(p.grad for p in net.parameters())])
    assert error(*found) < 1e-9


def test_the_input_is_still_there() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/29: NaN, as an input had been freed."""
    net = conv_net()
    x = images().requires_grad_()
    before = x.detach().clone()
    (x + net(x)).mean().backward()
    assert torch.equal(x, before)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("mode", ["store", "recompute", "exact"])
def test_branches_compute_in_the_type_of_autocast_in_both_passes(mode: str) -> None:
    """https://github.com/silvandeleemput/memcnn/issues/57 and
    https://github.com/karttikeya/minREV/issues/5: mixed precision."""
    model = revzoo.create_model("revvit_cifar", depth=2)
    types = []

    def note(module: nn.Module, given: Any, value: Tensor) -> None:
        types.append((value.dtype, revzoo.is_replaying()))

    linear = next(m for m in model.stages.modules() if isinstance(m, nn.Linear))
    linear.register_forward_hook(note)
    revzoo.set_memory(model, mode)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(2, 3, 32, 32))
    y.float().square().sum().backward()  # outside of autocast
    assert {kind for kind, _ in types} == {torch.bfloat16}
    assert [replaying for _, replaying in types] == [False] + [True] * (mode != "store")
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


class Counted(revzoo.Invertible):
    streams = 1

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("forward")
        return x.exp()

    def inverse(self, y: Tensor) -> Tensor:
        self.calls.append("inverse")
        return y.log()


def test_a_coupling_evaluates_its_branch_twice_in_a_step() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/77: twice as slow, for a trivial inverse."""
    branch, calls = nn.Conv2d(4, 4, 1), []
    branch.register_forward_hook(lambda *_: calls.append(1))
    net = revzoo.ReversibleSequence([revzoo.AdditiveCoupling(branch)], memory="invert")
    net(torch.randn(1, 8, 4, 4)).sum().backward()
    assert len(calls) == 2

    step = Counted()  # a step of your own: inverse, then forward again
    revzoo.set_memory(step, "invert")
    step(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert step.calls == ["forward", "inverse", "forward"]


def test_layers_that_change_the_number_of_features() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/63."""
    wider = revzoo.InjectiveLinear(8, 12, streams=1).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    assert revzoo.is_invertible(wider, x)
    with pytest.raises(ValueError, match="8"):
        revzoo.InjectiveLinear(12, 8)  # fewer outputs lose information

    class Narrow(revzoo.Step):  # no inverse: it is recomputed from its input
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x1), self.linear(x2)

    block = revzoo.ReversibleBlock
    net = revzoo.ReversibleSequence([block(nn.Linear(4, 4)), Narrow(), block(nn.Linear(2, 2))])
    net(torch.randn(3, 8)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert not revzoo.is_invertible(net)


def test_an_inverse_beside_the_saving() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/2."""
    net = revzoo.ReversibleSequence(blocks(3), memory="exact")
    x = torch.randn(2, 8, 6, 6)
    grid = (x * 2**23).round() / 2**23
    y = net(x)
    assert torch.equal(net.inverse(y), grid)
    y.sum().backward()


def test_an_output_that_no_loss_uses_is_freed() -> None:
    """https://github.com/RobinBruegger/RevTorch/issues/1: a leak."""
    net = revzoo.ReversibleSequence(blocks(3), memory="invert")
    left = []
    gc.disable()  # reference counts alone
    try:
        with LiveMemory() as memory:
            for _ in range(3):
                net(torch.randn(2, 8, 8, 8))  # and nothing more
                left.append(memory.now)
    finally:
        gc.enable()
    assert left[0] == left[1] == left[2] < 2048  # which values the guard samples: 128 integers


@pytest.fixture
def one_process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
def test_each_parameter_is_ready_once() -> None:
    """https://github.com/lucidrains/performer-pytorch/issues/14 (DDP under Lightning) and
    https://github.com/RobinBruegger/RevTorch/issues/10 (several GPUs)."""
    for unused in (False, True):
        net, ready = conv_net(), []
        names = {parameter: name for name, parameter in net.named_parameters()}
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(ready.append)
        revzoo.set_memory(net, "invert")
        parallel = DistributedDataParallel(net, find_unused_parameters=unused)
        parallel(images()).sum().backward()
        assert sorted(names[parameter] for parameter in ready) == sorted(names.values())


def test_a_reversible_network_trains_under_lightnings_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/lucidrains/performer-pytorch/issues/14."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net().float()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    for key in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    module = Module()
    before = [p.detach().clone() for p in module.parameters()]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="ddp", max_steps=2, default_root_dir=tmp_path,
        enable_model_summary=False, **options,
    )  # fmt: skip
    with quiet():
        trainer.fit(module, torch.utils.data.DataLoader(images(4).float(), batch_size=2))
    assert trainer.global_step == 2
    assert any(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_a_smaller_resolution_without_losing_a_value() -> None:
    """https://github.com/RobinBruegger/RevTorch/issues/12: downsampling in a reversible CNN."""
    wide = lambda: nn.Conv2d(16, 16, 3, padding=1)  # noqa: E731
    net = revzoo.ReversibleSequence([*blocks(2), revzoo.Squeeze(2), *blocks(2, wide)])
    x = torch.randn(2, 8, 6, 6)
    y = net(x)
    assert y.shape == (2, 32, 3, 3)
    assert revzoo.is_invertible(net, x)
    y.sum().backward()


def test_no_activation_of_a_layer_is_kept() -> None:
    """https://github.com/karttikeya/minREV/issues/7: is it truly reversible?"""
    small = {"width": 16, "heads": 2, "img_size": 8}
    found = {
        (mode, depth): kept(
            revzoo.create_model("revvit_cifar", depth=depth, memory=mode, **small), 4, 3, 8, 8
        )
        for mode in ("exact", "store")
        for depth in (2, 4)
    }
    assert found["exact", 4] - found["exact", 2] < 4 * 64  # numbers for the guard, no activation
    assert found["store", 4] > 1.8 * found["store", 2]


class Hashing(nn.Module):
    """A branch that draws: it mixes channels along a random direction."""

    def forward(self, x: Tensor) -> Tensor:
        direction = torch.randn(x.shape[1], dtype=x.dtype)
        return x * torch.einsum("bchw,c->bhw", x, direction).sign()[:, None] * 0.5


def test_branches_that_draw_random_numbers() -> None:
    """https://github.com/lucidrains/reformer-pytorch/pull/13: dropout, hashing."""
    branch = lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.5), Hashing())  # noqa: E731
    net = revzoo.ReversibleSequence(blocks(3, branch)).double()
    found = []
    for mode in ("store", "invert"):
        torch.manual_seed(3)
        found.append(gradients(twin(net, mode), images()))
        found[-1].append(torch.rand(1).double())  # the draws that follow are the same, too
    assert error(*found) < 1e-9


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0]


def test_the_inverse_of_a_transformer_from_its_hidden_states() -> None:
    """https://github.com/HomebrewML/revlib/issues/2."""
    mlp = lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))  # noqa: E731
    layers = [revzoo.ReversibleBlock(Attention(8), mlp()) for _ in range(4)]
    net = revzoo.ReversibleSequence(layers, dim=-1, memory="exact")
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        hidden = net(x)
        assert torch.equal(net.inverse(hidden), (x * 2**23).round() / 2**23)
        x1, x2 = net[:2](*x.chunk(2, -1))  # of a layer in the middle, too
        middle = [(part * 2**23).round() / 2**23 for part in net[:2].inverse(x1, x2)]
    assert torch.equal(torch.cat(middle, -1), (x * 2**23).round() / 2**23)


def test_where_an_irevnet_loses_information() -> None:
    """https://github.com/jhjacobsen/pytorch-i-revnet/issues/4 (does it save memory?),
    https://github.com/jhjacobsen/pytorch-i-revnet/issues/9 (pooling and the linear layer) and
    https://github.com/jhjacobsen/pytorch-i-revnet/issues/17 (injective or bijective)."""
    model = revzoo.create_model("irevnet13", in_chans=1, memory="exact").eval()
    x = torch.randint(256, (2, 1, 8, 8)) / 256
    z = model.encode(x)
    assert torch.equal(model.inverse(z), x)
    assert z.numel() > x.numel()  # zeros are appended: injective
    with pytest.raises(ValueError, match=r"shape \(2, 10\).*encode.*lost the rest"):
        model.inverse(model(x))
    model.train()
    memory = {mode: revzoo.audit(model, (8, 1, 8, 8), modes=[mode]) for mode in ("store", "exact")}
    assert memory["exact"].audits["exact"].kept_bytes < memory["store"].audits["store"].kept_bytes


def test_deep_chains_of_affine_couplings_stay_finite() -> None:
    """https://github.com/vislearn/FrEIA/issues/38, https://github.com/vislearn/FrEIA/issues/76 and
    https://github.com/tbung/pytorch-revnet/issues/11: NaN, exploding values."""

    def chain(make: Any) -> revzoo.ReversibleSequence:
        torch.manual_seed(0)
        return revzoo.ReversibleSequence([make() for _ in range(60)], memory="invert")

    class Loud(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 12 * super().forward(x)

    def loud(outputs: int) -> nn.Module:
        return Loud(nn.Linear(4, outputs), nn.Tanh())

    x = torch.randn(3, 8)
    naive = chain(lambda: revzoo.ScaledCoupling(revzoo.AffineAdapterNaive(loud(4))))
    assert not naive(x).isfinite().all()
    bounded = chain(lambda: revzoo.AffineCoupling(loud(8), clamp=0.1))
    y = bounded(x)
    assert y.isfinite().all()
    assert revzoo.is_invertible(bounded, x)


def test_a_value_out_of_range_is_reported_not_used() -> None:
    """https://github.com/tbung/pytorch-revnet/issues/11: gradients that explode."""
    huge = nn.Linear(4, 4)
    nn.init.constant_(huge.weight, 1e6)
    net = revzoo.ReversibleSequence([revzoo.ReversibleBlock(huge)], memory="exact")
    y = net(torch.ones(2, 8))
    with pytest.raises(revzoo.RangeError, match="grid"):
        y.sum().backward()


def test_a_batch_counts_once_in_batch_norm() -> None:
    """https://github.com/pytorch/pytorch/issues/96136: a checkpoint counted it twice."""
    block = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Tanh())
    once, again = copy.deepcopy(block), copy.deepcopy(block)
    x = torch.randn(8, 4, requires_grad=True)
    once(x).sum().backward()
    revzoo.checkpoint(again, x).sum().backward()
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert torch.equal(again[0].running_mean, once[0].running_mean)
    assert (int(once[0].num_batches_tracked), int(again[0].num_batches_tracked)) == (1, 1)
    assert int(block[0].num_batches_tracked) == 2


def test_a_checkpoint_whose_inputs_need_no_gradient() -> None:
    """https://github.com/pytorch/pytorch/issues/7617."""
    layer = nn.Linear(4, 4)
    y = revzoo.checkpoint(layer, torch.randn(2, 4))
    assert y.requires_grad
    y.sum().backward()
    assert layer.weight.grad is not None


def test_gradients_of_chosen_tensors() -> None:
    """https://github.com/pytorch/pytorch/issues/51743: ``autograd.grad``, ``backward(inputs=)``."""
    net, x = conv_net(), images().requires_grad_()
    wanted = torch.autograd.grad(twin(net, "store")(x).sum(), x)[0]
    revzoo.set_memory(net, "invert")
    (found,) = torch.autograd.grad(net(x).sum(), x)
    assert error([found], [wanted]) < 1e-9
    net(x).sum().backward(inputs=[x])
    assert error([x.grad], [wanted]) < 1e-9
    assert all(p.grad is None for p in net.parameters())


class Momentum(revzoo.Invertible):
    """``v' = decay * v + (1 - decay) * f(x)``, ``x' = x + v'`` (Sander et al. 2021)."""

    def __init__(self, f: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.f, self.decay = f, decay

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = self.decay * v + (1 - self.decay) * self.f(x)
        return x + v, v

    def inverse(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        x = x - v
        return x, (v - (1 - self.decay) * self.f(x)) / self.decay


def test_the_inverse_of_a_momentum_network_takes_both_states() -> None:
    """https://github.com/michaelsdr/momentumnet/issues/19."""
    net = revzoo.ReversibleSequence([Momentum(nn.Linear(4, 4)) for _ in range(5)]).double()
    x, v = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    out = net(x, v)
    back = net.inverse(*out)
    assert error(back, (x, v)) < 1e-9
    other = net.inverse(out[0], torch.zeros_like(v))  # without the velocity: another point
    assert error(other, (x, v)) > 1e-3


def test_a_zoo_with_reversible_resnets_and_transformers() -> None:
    """https://github.com/open-mmlab/mmpretrain/issues/1073."""
    names = revzoo.list_models(["revnet*", "revvit*", "irevnet*"])
    assert {"revnet104", "revvit_small", "irevnet301"} <= {*names}
    with torch.device("meta"):
        model = revzoo.create_model("revvit_small", num_classes=5)
    assert model(torch.zeros(1, 3, 224, 224, device="meta")).shape == (1, 5)


def test_the_page_and_the_tests_cite_the_same_questions() -> None:
    url = r"https://github\.com/[\w/.-]+/(?:issues|pull)/\d+"
    here = set(re.findall(url, Path(__file__).read_text()))
    assert here == set(re.findall(url, PAGE.read_text()))
    assert len(here) >= 25
