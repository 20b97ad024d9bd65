"""Mode exact: bit-identical reconstructions and gradients, within a range that the guard checks."""

import contextlib
import functools
import math
from collections import OrderedDict

import pytest
import torch
from compare import conv_branch, conv_net, error, images, leaf_rows, linear_net, train, twin
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook

from revzoo import (
    AdditiveCoupling,
    AffineCoupling,
    ChannelPermutation,
    DriftError,
    Invertible,
    RangeError,
    Residual,
    ReversibleBlock,
    ReversibleSequence,
    SpatialPadding,
    Squeeze,
    drift,
    make_reversible,
    set_drift_limit,
    set_memory,
)
from revzoo.core import kernels, sums
from revzoo.core.kernels import round_to_grid
from revzoo.core.modes import assign_memory
from revzoo.core.sums import put_on_grid
from revzoo.core.words import Fixed, fixed_of
from revzoo.models.components import Branch

BF16 = torch.autocast("cpu", dtype=torch.bfloat16)


def deep_net(half_steps=200, width=8):
    torch.manual_seed(0)

    def branch():
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    return ReversibleSequence([AdditiveCoupling(branch()) for _ in range(half_steps)])


def test_a_replay_reads_narrow_where_the_branch_casts(monkeypatch):
    """Gradients stay those of a float32 reading, bit for bit."""

    def gradients(narrows):
        monkeypatch.setattr(Branch, "narrows", narrows)
        read = []
        monkeypatch.setattr(Fixed, "read", lambda *a: read.append(real(*a)) or read[-1])
        torch.manual_seed(0)
        steps = [AdditiveCoupling(Branch(4, out_channels=4)) for _ in range(6)]
        x = images().float().requires_grad_()
        with BF16:
            y = ReversibleSequence(steps, memory="exact")(x)
        assert y.dtype == torch.float32
        y.square().sum().backward()
        found = [x.grad, *(p.grad for step in steps for p in step.parameters())]
        return found, {t.dtype for t in read[2:]}  # the first two enter the chain

    real = Fixed.read
    (narrow, narrow_kinds), (wide, wide_kinds) = gradients(True), gradients(False)
    assert (narrow_kinds, wide_kinds) == ({torch.bfloat16}, {torch.float32})
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b)


def hooked(branch):
    branch.register_full_backward_hook(lambda m, given, _: (given[0] * 1.1,))
    return branch


def in_place(branch):
    branch.norm1, branch.relu1 = nn.Identity(), nn.ReLU(inplace=True)
    return branch


def with_a_layer_of_that_name(branch):
    return nn.Sequential(OrderedDict(narrows=nn.GroupNorm(1, 4), branch=branch))


@pytest.mark.parametrize("change", [hooked, in_place, with_a_layer_of_that_name])
def test_a_replay_reads_wide_where_the_cast_could_show(change):
    def gradients(mode):
        torch.manual_seed(0)
        branches = [change(Branch(4, out_channels=4)) for _ in range(3)]
        net = ReversibleSequence(map(AdditiveCoupling, branches))
        set_memory(net, mode, grid="auto")
        x = images().float().requires_grad_()
        with BF16:
            y = net(x)
        y.square().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    for a, b in zip(gradients("exact"), gradients("store"), strict=True):
        assert torch.equal(a, b)


def test_rounding():
    x = torch.tensor([0.0, 0.5, 1.5, 0.74, -0.26, 3.0])
    x.requires_grad_()
    y = round_to_grid(x, 0)
    assert y.tolist() == [0, 0, 2, 1, 0, 3]  # half to even
    assert round_to_grid(x, 1).tolist() == [0, 0.5, 1.5, 0.5, -0.5, 3]
    y.sum().backward()
    assert x.grad.tolist() == [1] * 6


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_reconstruction_is_bit_identical_at_200_half_steps(autocast):
    context = BF16 if autocast else contextlib.nullcontext()
    net, x = deep_net(), torch.randn(16, 16)
    errors = {}
    for mode in ("invert", "exact"):
        set_memory(net, mode)
        with torch.no_grad(), context:
            on_grid = round_to_grid(x, 14)
            errors[mode] = (net.inverse(net(on_grid)) - on_grid).abs().max().item()
    assert errors["exact"] == 0
    assert errors["invert"] > 0


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_gradients_are_bit_equal_to_store_with_the_same_rounding(autocast):
    context = BF16 if autocast else contextlib.nullcontext()
    net = conv_net(depth=4, dropout=0.2).float()
    results = {}
    for mode in ("exact", "store", "recompute", "invert"):
        other = twin(net, mode)
        set_memory(other, mode, grid=14)
        results[mode] = train(other, images().float(), context=context)
    for mode in ("exact", "recompute", "invert"):
        pairs = zip(results[mode].gradients, results["store"].gradients, strict=True)
        assert all(torch.equal(a, e) for a, e in pairs), mode
        pairs = zip(results[mode].buffers, results["store"].buffers, strict=True)
        assert all(torch.equal(a, e) for a, e in pairs), mode


def test_drift_is_zero():
    net = deep_net(20)
    set_memory(net, "exact")
    net(torch.randn(4, 16)).sum().backward()
    assert set(drift(net).values()) == {0.0}


def test_without_rounding_gradients_are_not_bit_equal():
    # What the rounding is for: the comparison above can fail.
    net = deep_net(20)
    x = torch.randn(4, 16)
    grads = []
    for mode in ("invert", "store"):
        set_memory(net, mode)
        grads.append(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
    assert not all(torch.equal(a, e) for a, e in zip(*grads, strict=True))


def test_squeezes_and_single_tensors_are_exact():
    """Asked at https://github.com/silvandeleemput/memcnn/issues/2."""
    torch.manual_seed(0)
    blocks = [ReversibleBlock(conv_branch(c), conv_branch(c)) for c in (2, 8)]
    net = ReversibleSequence([blocks[0], Squeeze(2), blocks[1]], memory="exact").eval()
    x = round_to_grid(images(channels=4, size=8).float(), 14)
    with torch.no_grad():
        assert torch.equal(net.inverse(net(x)), x)


@pytest.mark.filterwarnings("ignore:.*less than 1024 units")
def test_the_grid_is_a_parameter():
    net, x = linear_net().float(), torch.randn(3, 8)
    outputs = []
    for bits in (4, 10):
        set_memory(net, "exact", grid=bits)
        y = net(x)
        assert torch.equal(y, round_to_grid(y, bits))
        outputs.append(y)
    set_memory(net, "store")
    coarse, fine = ((y - net(x)).abs().max() for y in outputs)
    assert 0 < fine < coarse / 16
    assert {m.grid for m in net.modules() if hasattr(m, "grid")} == {None}


def test_leaving_the_range_is_an_error_with_a_grid_that_fits():
    """Asked at https://github.com/tbung/pytorch-revnet/issues/11."""
    net = ReversibleSequence([AdditiveCoupling(nn.Softplus()) for _ in range(6)])
    x = torch.full((2, 4), 100.0, requires_grad=True)
    set_memory(net, "exact", grid=22)  # exact below 256
    y = net(x)
    with pytest.raises(RangeError, match=r"reached 300"):
        net.inverse(y)
    assert net.inverse(torch.tensor([[math.nan, 1.0]])).isnan().all()  # as in a plain network
    with pytest.raises(RangeError, match=r"steps\.1 Add\w+: .* reached 300, .*or grid=\d\d;"):
        y.sum().backward()
    set_memory(net, "exact", grid=15)
    net(x).sum().backward()


def test_a_step_without_a_guard_that_leaves_the_range_is_named():
    """The step after it is guarded, and reads it."""
    net = ReversibleSequence([AdditiveCoupling(nn.Softplus()) for _ in range(3)])
    set_memory(net, "exact", grid=22)  # exact below 256
    x = torch.full((2, 4), 100.0, requires_grad=True)
    set_drift_limit(net[1], None)
    y = net(x)
    with pytest.raises(RangeError, match=r"steps\.1 Add\w+: .* reached 300"):
        y.sum().backward()
    set_drift_limit(net, None)
    net(x).sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_leaving_the_range_raises_without_a_backward_pass(mode):
    inner = ReversibleSequence([AdditiveCoupling(nn.Softplus()) for _ in range(3)])
    net = ReversibleSequence([inner, *[AdditiveCoupling(nn.Softplus()) for _ in range(3)]])
    x = torch.full((2, 4), 100.0)
    set_memory(net, "exact", grid=22)  # exact below 256
    with mode():
        with pytest.raises(RangeError, match=r"steps\.0\.steps\.1 Add\w+: .* reached 300"):
            net(x)
        # a stream that is not finite passes, as in a plain network
        assert not net(torch.full((2, 4), float("inf"))).isfinite().any()
        set_drift_limit(net, None)
        assert net(x).isnan().any()


def leaves_its_range(mode):
    """Six steps with parameters on a grid that is exact below 256, and an input."""
    steps = [AdditiveCoupling(nn.Linear(4, 4)) for _ in range(6)]
    for step in steps:
        nn.init.eye_(step.branch.weight)
        nn.init.zeros_(step.branch.bias)
    net = ReversibleSequence(steps)
    set_memory(net, mode, grid=22)
    return net, torch.full((2, 8), 100.0)


LEFT = r"steps\.1 Add\w+: .* reached 300"


def test_a_frozen_network_that_leaves_its_range_raises_in_the_forward_pass():
    net, x = leaves_its_range("exact")
    with pytest.raises(RangeError, match=LEFT):
        net.requires_grad_(False)(x)


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
@pytest.mark.parametrize("alone", [False, True])
def test_the_first_stream_beyond_its_range_is_reported_after_a_detour(mode, alone):
    """Later streams are NaN, and a step without parameters is not replayed."""
    net, x = leaves_its_range(mode)
    net.requires_grad_(False)
    x1, x2 = x.chunk(2, 1)
    if alone:  # one by one, without gradients
        with pytest.raises(RangeError, match=LEFT):
            functools.reduce(lambda state, step: step(*state), net, (x1, x2))
    else:  # the gradient of the input
        y = net(x1.requires_grad_(), x2)
        with pytest.raises(RangeError, match=LEFT):
            y[0].sum().backward()


class WithExtra(nn.Module):
    """Its value is beyond the range; its extra output is not."""

    def forward(self, x):
        return x + 1000, x.square().mean()


class Choice(nn.Module):
    """Saves only a mask, which the guard does not compare."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return torch.where(x > 0, self.a, self.b)


def test_a_sum_beyond_its_range_that_no_gradient_reaches_raises():
    """The stream recovered from it was NaN: other parameters got the gradient."""
    last = AdditiveCoupling(WithExtra())
    last.extras = 1
    net = ReversibleSequence([AdditiveCoupling(Choice()), last])
    set_memory(net, "exact", grid=22)
    y1, _, extra = net(torch.randn(2, 4, requires_grad=True), torch.randn(2, 4))
    with pytest.raises(RangeError, match=r"steps.1 Add\w+: .* reached 1e\+03"):
        (y1.sum() + extra).backward()


@pytest.mark.parametrize("mode", ["store", "exact"])
def test_a_converted_network_on_a_grid_raises_beyond_its_range(mode):
    blocks = [Residual(nn.Linear(4, 4)) for _ in range(3)]
    net = make_reversible(nn.Sequential(*blocks), bits=2)
    for p in net.parameters():
        nn.init.constant_(p, 1)
    set_memory(net, mode, grid=22)
    x = torch.full((2, 4), 30.0)
    with torch.no_grad(), pytest.raises(RangeError, match="reached"):
        net(x)
    with pytest.raises(RangeError, match="reached"):
        net(x).sum().backward()


@pytest.mark.parametrize(("mode", "frozen"), [("exact", 5), ("store", 0)])
def test_steps_without_replays_that_leave_their_range_raise_in_the_backward_pass(mode, frozen):
    net, x = leaves_its_range(mode)
    for step in list(net)[:frozen]:
        step.requires_grad_(False)
    loss = net(x).sum()
    for _ in range(2):  # a kept graph
        with pytest.raises(RangeError, match=LEFT):
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("mode", ["store", "offload", "recompute", "exact"])
def test_parts_of_a_graph_behind_a_stream_beyond_its_range_raise(mode):
    """Gradients of the later steps were NaN: such a pass reached only sums that added NaN."""
    net, x = leaves_its_range(mode)
    nn.init.constant_(net[0].branch.bias, 1000)
    for step in net:
        loss = net(x).square().sum()
        with pytest.raises(RangeError, match=r"reached 1.*e\+03"):
            torch.autograd.grad(loss, list(step.parameters()))


def test_a_network_behind_one_that_left_its_range_names_a_step_of_it():
    """It was "Merge", which is not in the user's network."""
    net, x = leaves_its_range("exact")
    behind = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))], memory="exact")
    set_memory(behind, "exact", grid=22)
    y = net(x).detach()
    with pytest.raises(RangeError, match=r"steps\.[1-5] Add\w+: .* reached"):
        behind(y).sum().backward()


def test_a_branch_that_hides_the_nan_that_it_reads_raises():
    """Only the sum after it is in the graph, and that sum is finite."""
    net = ReversibleSequence([AdditiveCoupling(nn.Softplus()), AdditiveCoupling(Choice())])
    set_memory(net, "store", grid=22)
    _, y2 = net(torch.full((2, 4), 200.0, requires_grad=True), torch.full((2, 4), 100.0))
    with pytest.raises(RangeError, match=r"steps\.0 Add\w+: .* reached 300"):
        y2.sum().backward()


class Own(Invertible):
    """Adds by hand."""

    exact = sums = True

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x1, x2):
        return x2, sums.add(x1, x2 * self.factor, fixed_of(x1), self)

    def inverse(self, y1, y2):
        return sums.add(y2, -y1 * self.factor, fixed_of(y2), self), y1


@pytest.mark.parametrize("mode", ["store", "offload", "recompute", "exact"])
def test_a_step_of_the_users_own_is_named(mode):
    """It was "a step"."""
    net = ReversibleSequence([Own(1.0), Own(1e4), Own(1.0)])
    set_memory(net, mode, grid=22)
    x = torch.ones(2, 4)
    left = pytest.raises(RangeError, match=r"steps\.1 Own: .* reached 2e\+04")
    with left:
        net(x).sum().backward()
    with left, torch.no_grad():
        net(x)
    with pytest.raises(RangeError, match=r"steps\.1 Own: .* reached"):
        net.inverse(torch.arange(8.0).view(2, 4))


class Overflow(nn.Module):
    """Its values are infinite in float16."""

    def forward(self, x):
        return nn.functional.linear(x, 1e5 * torch.eye(4).to(x.dtype))


@pytest.mark.parametrize("autocast", [True, False])
def test_an_overflow_in_float16_beside_an_exact_network_is_not_a_cause_for_a_warning(autocast):
    """Loss scaling causes it in every training."""
    half = ReversibleSequence([AdditiveCoupling(nn.Sequential(Overflow(), nn.LayerNorm(4)))])
    set_memory(half, "store", grid=10)
    x = torch.ones(2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        y = half(x) if autocast else half.half()(x.half())
    net = linear_net().float()
    (y.float().sum() + net(x).sum()).backward()
    assert y.isnan().any()


@pytest.mark.parametrize("start", [1.0, 100.0])
@pytest.mark.parametrize("value", [2.0, 1000.0, math.nan, math.inf])
def test_a_stream_that_was_changed_around_autograd(start, value):
    """One that was repaired stayed beyond its range."""
    net, x = leaves_its_range("exact")
    y = net(x.fill_(start)).detach()
    y.data.fill_(value)
    if start == 100:  # an earlier sum left the range
        outcome = pytest.raises(RangeError, match="reached 300")
    elif value == 1000:
        outcome = pytest.raises(RangeError, match=r"reached 1e\+03")
    else:  # values that are not finite: as in a plain network
        outcome = contextlib.nullcontext()
    with outcome:
        net(y).sum().backward()
    if value == 2 and start == 1:
        assert all(p.grad.isfinite().all() for p in net.parameters())


def test_an_inverse_that_leaves_its_range_in_the_last_step_raises():
    net = ReversibleSequence([AdditiveCoupling(nn.Identity())])
    set_memory(net, "exact", grid=22)
    with pytest.raises(RangeError, match=r"steps\.0 Add\w+: .* reached"):
        net.inverse(torch.tensor([[250.0, -250.0]]))


def test_refused_where_arithmetic_is_not_exact():
    net = ReversibleSequence([AffineCoupling(nn.Linear(2, 4))])
    with pytest.raises(ValueError, match=r"steps\.0 AffineCoupling is not exact.*use 'invert'"):
        set_memory(net, "exact")
    with pytest.raises(ValueError, match="products with its scales leave the grid"):
        ReversibleSequence([AffineCoupling(nn.Linear(2, 4))], memory="exact")

    class Swap(Invertible):
        def forward(self, x1, x2):
            return x2, x1

        inverse = forward

    with pytest.raises(ValueError, match=r"its class does not set exact = True"):
        set_memory(ReversibleSequence([Swap()]), "exact")


@pytest.mark.parametrize("bits", [-1, 30, 3.0, True, "fine"])
def test_impossible_grids(bits):
    with pytest.raises(ValueError, match="expected the number of fractional bits"):
        set_memory(linear_net(), "exact", grid=bits)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("mode", ["exact", "recompute"])
def test_ten_steps_are_bit_equal_to_store(mode, accumulate):
    nets = {}
    for m in (mode, "store"):
        net = conv_net(depth=2, dropout=0.2).float()
        set_memory(net, m, grid=14)
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(10):
            optimizer.zero_grad()
            for part in range(accumulate):
                x = images(seed=10 * step + part).float()
                (net(x).square().mean() / accumulate).backward()
            optimizer.step()
        nets[m] = net.state_dict()
    for key, expected in nets["store"].items():
        assert torch.equal(nets[mode][key], expected), key


def tanh_branch(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("mode", ["exact", "recompute"])
def test_an_input_beyond_a_chosen_range(mode, bad):
    """The other samples are as without it."""
    net = ReversibleSequence([AdditiveCoupling(tanh_branch())])
    set_memory(net, mode, grid=20)
    x1, x2 = torch.randn(3, 4), torch.randn(3, 4).index_put_((torch.tensor(0),), torch.tensor(bad))
    y1, y2 = net(x1, x2)
    assert y1[0].isnan().all()
    assert y2[0].isnan().all()
    assert torch.equal(torch.cat(net(x1[1:], x2[1:])), torch.cat((y1[1:], y2[1:])))
    if bad == 1e6:
        with pytest.raises(RangeError, match="reached 1e\\+06"):
            y2.sum().backward()
    else:
        y2.sum().backward()
        assert not any(p.grad.isfinite().all() for p in net.parameters())


class Values(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.full_like(x, 5, dtype=torch.uint8),
        lambda x: torch.full_like(x, -3, dtype=torch.int8),
        lambda x: x > 0,
    ],
    ids=["uint8", "int8", "bool"],
)
def test_values_that_are_whole_numbers(fn):
    net = ReversibleSequence([AdditiveCoupling(Values(fn)) for _ in range(3)])
    x = round_to_grid(torch.randn(3, 8), 20).requires_grad_()
    y = net(x)
    set_memory(net, "store")
    assert torch.equal(y, net(x))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


class Swap(Invertible):
    exact = True

    def forward(self, x1, x2):
        return x2, x1

    inverse = forward


class InFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = tanh_branch()

    def forward(self, x):
        return self.layers(x.float()).to(x.dtype)


@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("second", [torch.bfloat16, torch.float64])
def test_streams_of_two_types(first, second):
    net = ReversibleSequence([AdditiveCoupling(InFloat32()), Swap(), AdditiveCoupling(InFloat32())])
    x = torch.randn(3, 4).to(first).requires_grad_(), torch.randn(3, 4).to(second).requires_grad_()
    results = []
    for mode in ("exact", "store"):
        set_memory(net, mode, grid="auto")
        y = net(*x)
        assert [t.dtype for t in y] == [second, first]
        loss = sum(t.double().square().sum() for t in y)
        results.append(torch.autograd.grad(loss, [*x, *net.parameters()]))
        back = net.inverse(*(t.detach() for t in y))
        assert [t.dtype for t in back] == [first, second]
    assert all(torch.equal(a, e) for a, e in zip(*results, strict=True))


@pytest.mark.parametrize("last", [None, "permutation"])
@pytest.mark.parametrize("log_det", [False, True])
def test_changes_in_place_count_in_inference_mode(last, log_det):
    def net():
        torch.manual_seed(0)
        steps = [ReversibleBlock(tanh_branch(), tanh_branch())]
        return ReversibleSequence(steps + ([ChannelPermutation(8)] if last else []))

    first, second, x = net(), net(), (torch.randn(3, 4), torch.randn(3, 4))
    results = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            state = first.forward_with_log_det(*x)[0] if log_det else first(*x)
            state = first.inverse(*(t.relu_() for t in state))
            results += [*second(*(t.mul_(2) for t in state))]
            results.append(second(first(torch.cat(x, 1)).relu_()))
    half = len(results) // 2
    assert all(torch.equal(a, e) for a, e in zip(results[:half], results[half:], strict=True))


@pytest.mark.parametrize("mode", ["store", "recompute"])
@pytest.mark.parametrize("where", ["step", "log-determinant", "every module"])
def test_a_hook_that_changes_streams_on_a_grid(mode, where):
    moves = ChannelPermutation(8)
    blocks = [ReversibleBlock(tanh_branch(), tanh_branch()) for _ in range(2)]
    net = ReversibleSequence([blocks[0], moves, blocks[1]])

    def doubled(module, inputs, outputs):
        return tuple(2 * t for t in outputs) if module is moves else None

    register = register_module_forward_hook if where == "every module" else None
    handle = (register or moves.register_forward_hook)(doubled)
    try:
        x, results = torch.randn(3, 8, requires_grad=True), []
        for name, grid in ((mode, "auto"), ("store", None)):
            set_memory(net, name, grid=grid)
            y = net.forward_with_log_det(x)[0] if where == "log-determinant" else net(x)
            results.append(torch.autograd.grad(y.square().sum(), x)[0])
    finally:
        handle.remove()
    assert torch.allclose(*results, atol=1e-5)


def test_a_hook_on_a_block_may_work_in_place_in_exact_alone():
    """docs/guide/memory.md says so: autograd keeps other tensors there."""
    net = ReversibleSequence([ReversibleBlock(tanh_branch(), tanh_branch()) for _ in range(2)])

    def gradient(mode, hook):
        set_memory(net, mode)
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        handle = net[0].register_forward_hook(hook)
        try:
            return torch.autograd.grad(net(x).square().sum(), x)[0]
        finally:
            handle.remove()

    def doubles(module, inputs, outputs):
        return (2 * outputs[0], outputs[1])

    def doubles_in_place(module, inputs, outputs):
        outputs[0].mul_(2)

    expected = gradient("store", doubles)
    assert torch.allclose(gradient("exact", doubles_in_place), expected, atol=1e-5)
    for mode in ("store", "invert"):
        assert torch.allclose(gradient(mode, doubles), expected, atol=1e-5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(mode, doubles_in_place)


def test_a_padding_that_is_not_zero_is_not_exact():
    assert SpatialPadding(1).exact
    net = ReversibleSequence([SpatialPadding(1, value=1.0)])
    assert net[0].memory == "invert"
    with pytest.raises(ValueError, match="not a multiple of their unit"):
        set_memory(net, "exact")


@pytest.mark.parametrize("seed", range(4))
def test_streams_that_are_views_with_gaps_are_read_with_their_gaps(seed):
    # torch sums over them in another order than over dense tensors
    torch.manual_seed(seed)
    blocks = [ReversibleBlock(conv_branch(2), conv_branch(2)) for _ in range(2)]
    net = ReversibleSequence([ChannelPermutation(4), blocks[0], ChannelPermutation(4), blocks[1]])
    x, results = torch.randn(4, 4, 6, 6, requires_grad=True), []
    for mode in ("exact", "store"):
        other = twin(net, mode)
        set_memory(other, mode, grid="auto")
        loss = other(x).square().sum()
        results.append(torch.autograd.grad(loss, [x, *other.parameters()]))
    assert all(torch.equal(a, e) for a, e in zip(*results, strict=True))


def test_inverses_are_exact_behind_a_permutation_with_channels_last():
    for seed in range(10):
        torch.manual_seed(seed)

        def branch(c):
            layers = nn.GroupNorm(1, c), nn.SiLU(), nn.Conv2d(c, c, 1), nn.GroupNorm(1, c)
            return nn.Sequential(*layers)

        blocks = [ReversibleBlock(branch(c), branch(c)) for c in (6, 6)]
        net = ReversibleSequence([blocks[0], ChannelPermutation(12), blocks[1]])
        x = round_to_grid(torch.randn(2, 12, 6, 6), 20).to(memory_format=torch.channels_last)
        with torch.no_grad():
            y = net(x)
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(net.inverse(y), x)


def test_a_plan_with_exact_steps_before_inverted_ones():
    net = linear_net().float()
    results = []
    for modes in (("exact", "invert", "exact"), ("store", "store", "store")):
        for block, mode, grid in zip(net, modes, ("auto", None, "auto"), strict=True):
            assign_memory([block, *block], mode, grid=grid)
        x = torch.ones(3, 8, requires_grad=True)
        loss = net(x).square().sum()
        results.append(torch.autograd.grad(loss, [x, *net.parameters()]))
    assert all(torch.allclose(a, e, atol=1e-5) for a, e in zip(*results, strict=True))
    assert drift(net)["steps.0.steps.1"] == 0


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        ("auto", torch.float64),
        (20, torch.float32),
    ],
)
def test_compiled_sums_are_bit_equal(grid, dtype, monkeypatch):
    """Sums of streams and their inverses, of pictures in both layouts, beyond the range, too."""

    def results_of(backend):
        monkeypatch.setattr(kernels, "backend", backend)
        torch.manual_seed(0)
        found = []
        for layout in (torch.contiguous_format, torch.channels_last):
            x, y, z = torch.randn(3, 2, 4, 5, 5).to(dtype)
            z[0, 0, 0, 0] = 3e9  # beyond the range
            step = AdditiveCoupling(nn.Identity())
            step.grid = grid
            (x,) = put_on_grid((x.contiguous(memory_format=layout),), step)
            for value in (y.contiguous(memory_format=layout), y.transpose(2, 3), z):
                total = sums.add(x, value if value is y else -value, fixed_of(x))
                back = fixed_of(total).minus(value.clone(), None, overwrite=True)
                rows = slice(1 if value is z else 0, None)  # integers beyond their range
                found += [total, back.read(), fixed_of(total).words[rows], back.words[rows]]
        return found

    torch._dynamo.reset()
    kernels._compiled.cache_clear()
    eager = results_of(None)
    compiled = results_of("inductor" if dtype == torch.float32 else "aot_eager")
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    for a, b in zip(eager, compiled, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
    assert any(t.is_floating_point() and t.isnan().any() for t in eager)


def test_a_fake_pass_does_not_change_later_ones():
    net = linear_net()
    set_memory(net, "exact", grid=18)
    x = torch.randn(3, 8, dtype=torch.float64)
    before = net(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        net(x)
    assert torch.equal(net(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_the_default_dtype_does_not_matter(dtype, kind):
    net = linear_net().to(dtype)
    set_memory(net, "exact", grid=26)
    x = kind(torch.randn(3, 8, dtype=dtype).clamp(-2, 2))
    expected = net(x)
    try:
        torch.set_default_dtype(torch.float16)
        found = net(x)
        found.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("value", "dtype"), [(3e38, torch.float32), (1e39, torch.float64)])
def test_values_near_the_end_of_float32_are_out_of_range(value, dtype):
    net = linear_net().to(dtype)
    set_memory(net, "exact")
    with pytest.raises(RangeError, match=r"reached (1e\+39|3e\+38)"):
        net(torch.full((2, 8), value, dtype=dtype)).sum().backward()


def test_nan_in_one_stream():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4)) for _ in range(3)], memory="exact")
    y1, y2 = net(torch.full((2, 4), torch.nan), torch.randn(2, 4))
    (y1 + y2).sum().backward()
    assert net[0].branch.weight.grad.isnan().all()


@pytest.mark.filterwarnings("ignore:.*less than 1024 units")
def test_a_stream_changed_in_place_is_no_longer_on_the_grid():
    net = linear_net().float()
    set_memory(net, "exact", grid=8)
    with torch.no_grad():
        state = net(*torch.randn(2, 5, 4))
        for t in state:
            t.mul_(1 / 3)
        y = torch.cat(net(*state))
        assert torch.equal(y * 2**8, (y * 2**8).round())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_output_changed_around_autograd_has_another_inverse(dtype):
    """The inverse used the old words, without an error."""
    torch.manual_seed(0)
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4)) for _ in range(2)], memory="exact")
    with torch.no_grad():
        y = net.to(dtype)(leaf_rows().to(dtype))
        unchanged = net.inverse(y)
        y.data[1, 2] += 1
        found, expected = net.inverse(y), net.inverse(y.clone())
    # values that did not change keep all bits of their words
    torch.testing.assert_close(
        found, expected, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )
    assert not torch.equal(found, unchanged)


@pytest.mark.parametrize("part", [0, 1, "both"])
def test_an_output_changed_around_autograd_enters_a_sequence_as_it_is(part):
    """The next sequence computed with the old words, without an error."""
    torch.manual_seed(0)
    first, second = (
        ReversibleSequence([ReversibleBlock(nn.Linear(4, 4))], memory="exact") for _ in range(2)
    )
    x = torch.randn(4, 8)
    for alone in (second, second[0], second[0][0]):  # a sequence, a block, a step
        with torch.no_grad():
            y = first(*x.chunk(2, dim=1))
            for t in y if part == "both" else (y[part],):
                t.data.mul_(2)
            found, expected = alone(*y), alone(*(t.clone() for t in y))
        assert all(map(torch.equal, found, expected))
    y = first(*x.requires_grad_().chunk(2, dim=1))
    for t in y if part == "both" else (y[part],):
        t.data.mul_(2)
    found = second(*y)
    with pytest.raises(DriftError, match="did not repeat the forward pass"):
        torch.cat(found).square().sum().backward()


class EditsBetween(nn.Module):
    """Two exact sequences, and an output of the first that is changed around autograd."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            ReversibleSequence([AdditiveCoupling(nn.Linear(2, 2))], memory="exact")
            for _ in range(2)
        )

    def forward(self, x):
        y = self.first(x)
        y.data.mul_(2)
        return self.second(y)


def test_an_output_changed_around_autograd_inside_a_branch():
    """Inside another sequence, the next sequence computed with the old words."""
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(EditsBetween())], memory="exact")
    x = torch.randn(4, 8)
    with torch.no_grad():
        found = net(x)
        set_memory(net, "store")
        assert error([found], [net(x)]) < 1e-6


def test_an_output_changed_around_autograd_with_log_determinants():
    """``forward_with_log_det`` computed with the old words."""
    torch.manual_seed(0)
    net = EditsBetween()
    with torch.no_grad():
        y = net.first(torch.randn(4, 4))
        y.data.mul_(2)
        found, expected = (net.second.forward_with_log_det(t)[0] for t in (y, y.clone()))
    assert torch.equal(found, expected)
