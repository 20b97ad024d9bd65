"""Runs of blocks made reversible with side bits: right gradients, the same weights, few bytes."""

import contextlib
import copy
import functools
import inspect
import math
import pickle
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import revzoo
from revzoo import (
    AdditiveCoupling,
    RangeError,
    ReversibleSequence,
    Step,
    create_model,
    make_reversible,
    reversible_blocks,
    set_memory,
)
from revzoo.core.kernels import Growth, Scale
from revzoo.core.live import LiveMemory
from revzoo.core.words import Fixed
from revzoo.layers.side_bits import SideBits, pack_bits

BF16 = torch.autocast("cpu", dtype=torch.bfloat16)


class Block(nn.Module):
    """Post-activation, as torchvision's, with dropout and a change of channels where asked."""

    def __init__(self, channels=4, out=None, *, dropout=0.1):
        super().__init__()
        out = out or channels
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.bn = nn.BatchNorm2d(out)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if out != channels else nn.Identity()

    def forward(self, x, scale=1.0):
        return (self.skip(x) + scale * self.conv2(self.drop(self.bn(self.conv1(x)).relu()))).relu()


def network(depth=6, *, seed=0, **options):
    torch.manual_seed(seed)
    stages = [nn.Sequential(*(Block(**options) for _ in range(depth)))]
    stages.append(nn.Sequential(Block(4, 6), *(Block(6) for _ in range(2))))
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *stages, nn.Flatten(), nn.Linear(6 * 64, 5))


def pictures(batch=3):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def effects(net, x, *, seed=2, context=contextlib.nullcontext):
    torch.manual_seed(seed)
    net.zero_grad(set_to_none=True)
    with context():
        y = net(x)
    y.float().square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    return [y.detach(), *gradients, *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("context", [contextlib.nullcontext, lambda: BF16], ids=["fp32", "bf16"])
def test_gradients_are_bit_equal_to_store(bits, context):
    found = []
    for mode in ("exact", "store", "recompute"):
        net = make_reversible(network(), bits)
        set_memory(net, mode, grid="auto")
        found.append(effects(net, pictures(), context=context))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_the_formula():
    net = make_reversible(network(dropout=0.0).double().eval(), 3)
    blocks, b = net[1], 1 / 8
    before = x = net[0](pictures().double())
    for k, block in enumerate(blocks):
        value = Block.forward(block, x)
        following = value if k == 0 else (1 + b) * value - 2 * b * x + b * before
        before, x = x, following
    assert (blocks(net[0](pictures().double())) - x).abs().max() < 1e-12


def test_the_plain_network_comes_back():
    net = network()
    plain, keys = effects(copy.deepcopy(net), pictures()), list(net.state_dict())
    weights = copy.deepcopy(net.state_dict())
    make_reversible(net)
    assert list(net.state_dict()) == keys
    net.load_state_dict(weights)
    assert not torch.equal(effects(net, pictures())[0], plain[0])
    net.load_state_dict(weights)
    make_reversible(net, None)
    assert not any(isinstance(m, SideBits) for m in net.modules())
    assert all(map(torch.equal, effects(net, pictures()), plain))


def test_more_bits_change_the_outputs_less():
    net = network(dropout=0.0).eval()
    with torch.no_grad():
        for block in net[1]:
            block.conv2.weight.mul_(0.1)
        plain = net(pictures())
        errors = [
            ((make_reversible(net, bits)(pictures()) - plain).norm() / plain.norm()).item()
            for bits in (2, 4, 8)
        ]
    assert errors[0] > 2 * errors[1] > 8 * errors[2]
    assert errors[2] < 0.01


def test_a_block_keeps_its_bits_alone():
    x = torch.randn(16, 4, 16, 16)

    def kept(depth, bits):
        net = nn.Sequential(*(Block(dropout=0.0) for _ in range(depth)))
        net = make_reversible(net, bits)
        with LiveMemory() as memory:
            y = net(x)
        return memory.now, y

    for bits, size in ((4, x.numel() // 2), (8, x.numel())):
        growth = (kept(12, bits)[0] - kept(4, bits)[0]) / 8
        assert size <= growth < 1.1 * size + 2000  # BatchNorm's own statistics of the batch


def test_a_block_that_ends_a_run_keeps_its_input_alone():
    """It kept its output, too, which its replay does not read: a fifth of a ResNet-50's bytes."""
    x = torch.randn(16, 4, 16, 16)
    net = make_reversible(nn.Sequential(Block(dropout=0.0), Block(4, 64, dropout=0.0)))
    with LiveMemory() as memory:
        mean = net(x).mean((2, 3))  # keeps the shape alone
    assert memory.now < 16 * x.nbytes  # the size of the output
    mean.sum().backward()


class Decoder(nn.Module):
    """As Hugging Face's: keyword arguments, and a tuple back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, mask=None, *, positions):
        value = self.linear(hidden * mask).tanh() + positions
        return hidden + value, value.mean(-1), None


class Decoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Decoder() for _ in range(4))

    def forward(self, x, mask, positions):
        total = 0.0
        for layer in self.layers:
            x, attention, nothing = layer(x, mask, positions=positions)
            assert nothing is None
            total = total + attention.sum()
        return x.square().sum() + total


def test_tuples_masks_and_positions():
    found = []
    for mode in ("exact", "store"):
        torch.manual_seed(0)
        net = make_reversible(Decoders(), blocks=["layers"])
        set_memory(net, mode, grid="auto")
        x, positions = torch.randn(2, 3, 8), torch.randn(3, 8, requires_grad=True)
        loss = net(x, torch.ones(2, 3, 1), positions)
        found.append([loss, *torch.autograd.grad(loss, [positions, *net.parameters()])])
    assert all(map(torch.equal, *found))


class Tagged(nn.Module):
    """Returns an object of the caller, and one that holds a graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden, tag):
        value = self.linear(hidden).tanh()
        return hidden + value, tag, {value: "no tensor, but a key"}


def test_what_a_block_returns_is_not_kept():
    """The step held it: copies raised, and the graph stayed in memory."""
    net = make_reversible(nn.Sequential(Tagged(), Tagged()))
    y, _, held = net[0](torch.randn(2, 8), None)
    graph = weakref.ref(next(iter(held)))
    del held
    assert graph() is None
    twin = copy.deepcopy(net)
    y.sum().backward()
    assert twin[0].linear.weight.grad is None


def test_threads_get_their_own_objects_back():
    net = make_reversible(nn.Sequential(Tagged(), Tagged()))
    entered, returned = threading.Barrier(2), []

    def wait(*_):
        entered.wait(10)

    net[0].linear.register_forward_hook(wait)

    def call(tag):
        with torch.no_grad():
            for _ in range(100):
                returned.append((tag, net[0](torch.randn(2, 8), tag)[1]))

    threads = [threading.Thread(target=call, args=(tag,)) for tag in "ab"]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(returned) == 200
    assert all(tag == other for tag, other in returned)


def test_mixed_modes_compute_the_same_function():
    """A block after one in another mode started a new run: it got a rounded copy of its input."""
    torch.manual_seed(0)
    net = revzoo.create_model("resnet32", units=(4, 1, 1))
    net = revzoo.make_reversible(net, bits=4).eval()
    x = torch.randn(2, 3, 32, 32)
    outputs = {}
    for modes in ("store", "exact"), ("store", "store"), ("exact", "store"), ("recompute", "exact"):
        blocks = [f"stages.0.steps.{i}" for i in range(4)]
        revzoo.set_memory(net, dict(zip(blocks, 2 * modes, strict=True)))
        outputs[modes] = net(x)
        joined = [net.get_submodule(f"{path}.reversible").last_call.joined for path in blocks]
        assert joined == [False, True, True, True]
    for y in outputs.values():
        assert torch.allclose(y, outputs["store", "store"], atol=1e-5)


def test_a_stream_passed_by_keyword():
    net = make_reversible(Decoders(), blocks=["layers"])
    x, keywords = torch.randn(2, 3, 8), {"mask": torch.ones(2, 3, 1), "positions": torch.zeros(8)}
    expected = net(x, *keywords.values())
    total = 0.0
    for layer in net.layers:
        x, attention, _ = layer(**keywords, hidden=x)
        total = total + attention.sum()
    assert torch.equal(x.square().sum() + total, expected)
    assert [row.role for row in reversible_blocks(net)] == ["starts", *3 * ["joins"]]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'hidden'"):
        net.layers[0](**keywords)


class Twice(nn.Module):
    """Two lists hold the same blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout=0.0) for _ in range(4))
        self.all = nn.Sequential(*self.layers)
        self.first = nn.Sequential(*self.layers[:2])

    def forward(self, x):
        return self.all(x)


def test_blocks_in_several_lists_are_converted_once():
    """A step ran inside another one, and ``bits=None`` removed only one of them."""
    torch.manual_seed(0)
    net = Twice()
    alone = make_reversible(copy.deepcopy(net.all))
    x = torch.randn(2, 4, 8, 8)
    plain = effects(net, x)
    assert torch.equal(effects(make_reversible(copy.deepcopy(net)), x)[0], effects(alone, x)[0])
    make_reversible(net, blocks=["all", "layers", "first", "first"])
    net(x)
    assert [row.role for row in reversible_blocks(net)] == ["starts", *3 * ["joins"]]
    make_reversible(net, None)
    assert torch.equal(effects(net, x)[0], plain[0])


def test_graphs_used_twice_and_parts_of_them():
    net = make_reversible(network(dropout=0.0))
    loss = net(pictures()).square().sum()
    weights = [net[1][0].conv1.weight, net[1][4].conv2.weight]
    parts = [torch.autograd.grad(loss, w, retain_graph=True)[0] for w in weights]
    both = torch.autograd.grad(loss, weights)
    assert all(map(torch.equal, parts, both))


def test_frozen_blocks_and_inputs_with_gradient():
    results = []
    for mode in ("exact", "store"):
        net = make_reversible(network(dropout=0.0))
        net[1][2].requires_grad_(False)
        net[2].requires_grad_(False)
        set_memory(net, mode, grid="auto")
        x = pictures().requires_grad_()
        trained = [p for p in net.parameters() if p.requires_grad]
        results.append(torch.autograd.grad(net(x).square().sum(), [x, *trained]))
    assert all(map(torch.equal, *results))


def test_copies_work_alone():
    net = make_reversible(network(dropout=0.0))
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        expected = effects(copy.deepcopy(net), pictures())
        assert all(map(torch.equal, effects(twin, pictures()), expected))
        with torch.no_grad():
            next(twin.parameters()).zero_()
        assert next(net.parameters()).abs().sum() > 0
        steps = [m for m in twin.modules() if isinstance(m, SideBits)]
        assert {id(step.subject) for step in steps} <= {id(m) for m in twin.modules()}


def test_an_input_that_was_changed_starts_a_run():
    net = make_reversible(nn.Sequential(*(Block(dropout=0.0) for _ in range(2)))).eval()
    x = torch.randn(1, 4, 8, 8)
    middle = net[0](x)
    joined, apart = net[1](middle), net[1](net[0](x) * 1)
    assert not torch.equal(joined, apart)
    assert (apart - Block.forward(net[1], middle)).abs().max() < 1e-6


@pytest.mark.parametrize("changed", ["state", "input"])
@pytest.mark.parametrize("mode", ["exact", "store"])
def test_an_in_place_change_starts_a_run(changed, mode):
    """The next block read the changed tensor as its predecessor's: off by b times the change."""
    net = make_reversible(nn.Sequential(*(Block(dropout=0.0) for _ in range(3)))).eval()
    set_memory(net, mode)
    with torch.no_grad():
        x = net[0](torch.randn(1, 4, 8, 8))
        y = net[1](x)
        (y if changed == "state" else x).fill_(0.5)
        expected = Block.forward(net[2], y)
        assert (net[2](y) - expected).abs().max() < 1e-6


class Arguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, args=0.0):
        return x + self.linear(x) * args


def test_a_keyword_named_args():
    net = make_reversible(nn.Sequential(Arguments(), Arguments()))
    x = torch.randn(2, 8)
    found = [net[1](net[0](x, args=0.5), args=0.5), net[1](net[0](x, 0.5), 0.5)]
    assert torch.equal(*found)
    found[0].sum().backward()


class Grows(nn.Module):
    """A block of a language model, whose values grow to thousands."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(8.0))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(("value", "grid"), [(math.inf, None), (math.nan, None), (1e30, -74)])
def test_values_that_are_not_finite_have_no_grid(value, grid):
    """An infinite image showed grid=-91."""
    net = make_reversible(nn.Sequential(Grows(), Grows()))
    net(torch.tensor([[1.0, value]]))
    assert [row.grid for row in reversible_blocks(net)] == [grid, grid]


def test_values_beyond_the_range_get_a_coarser_grid():
    found = []
    for mode in ("exact", "store", "recompute"):
        net = make_reversible(nn.Sequential(*(Grows() for _ in range(7))))
        set_memory(net, mode, grid="auto")
        y = net(torch.ones(2, 3))
        found.append([y, *torch.autograd.grad(y.sum(), net.parameters())])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    rows = reversible_blocks(net)
    assert [row.role for row in rows[:3]] == ["starts", "joins", "ends"]
    assert [row.grid for row in rows] == sorted((row.grid for row in rows), reverse=True)
    assert rows[0].grid == 23
    assert rows[-1].grid <= 30 - 18 - 2  # 8**6 goes into the last block
    net(torch.ones(2, 3))
    rows = reversible_blocks(net)  # the grids have adapted
    assert [row.role for row in rows][:3] == ["starts", "joins", "joins"]


def test_values_beyond_a_chosen_range():
    net = make_reversible(nn.Sequential(*(Grows() for _ in range(6))))
    set_memory(net, "exact", grid=20)
    y = net(torch.ones(2, 3))
    assert y.isnan().all()
    with pytest.raises(RangeError, match="grid="):
        y.sum().backward()
    set_memory(net, "exact", grid=8)
    net(torch.ones(2, 3)).sum().backward()


def test_modes_in_floating_point_are_refused():
    net = make_reversible(network())
    for mode in ("invert", {"1.3": "invert"}):
        with pytest.raises(ValueError, match=r"SideBits has no inverse in .*: use 'exact'"):
            set_memory(net, mode)
    assert {m.memory for m in net.modules() if isinstance(m, SideBits)} == {"exact"}
    set_memory(net, "invert", grid="auto")
    net(pictures()).sum().backward()
    for step in (m for m in net.modules() if isinstance(m, SideBits)):
        step.grid = None
    with pytest.raises(ValueError, match=r"1\.0\.reversible SideBits has no inverse in float"):
        net(pictures())


@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}, None])
@pytest.mark.parametrize("length", [1, 2])
def test_runs_do_not_leave_a_checkpoint(options, length):
    from torch.utils import checkpoint as torchs

    def gradients(call):
        net = make_reversible(network(dropout=0.0), 2)
        x = pictures().requires_grad_()
        parts = [net[1][i : i + length] for i in range(0, 6, length)]
        y = net[0](x)
        for part in parts:
            y = call(part, y)
        y.square().sum().backward()
        return [y, *(t.grad for t in (x, *net[1].parameters()))]

    def checkpointed(part, y):
        if options is None:
            return revzoo.checkpoint(part, y)
        return torchs.checkpoint(part, y, **options)

    found = gradients(checkpointed)
    expected = gradients(lambda part, y: part(y.clone()))
    # of the largest gradient: those of biases before BatchNorm are rounding errors
    limit = 1e-5 * max(float(b.detach().abs().max()) for b in expected)
    assert all((a - b).abs().max() <= limit for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["second", "frozen"])
def test_a_reentrant_checkpoint_reads_a_block_outside(how):
    """Its forward pass joined the run of the block before, but not its replay: wrong gradients."""
    from torch.utils.checkpoint import checkpoint

    net = make_reversible(network(dropout=0.0), 2).double()
    x, blocks = pictures().double(), net[1]
    net[0].requires_grad_(how == "second")
    blocks[0].requires_grad_(how == "second")
    dummy = torch.zeros((), dtype=torch.float64, requires_grad=True)
    weight = blocks[1].conv2.weight

    def loss():
        y = blocks[0](net[0](x))
        y = checkpoint(lambda y, _: blocks[1](y), y, dummy, use_reentrant=True)
        return blocks[2](y).square().sum()

    loss().backward()
    direction, values = torch.randn_like(weight), []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            weight += step * direction
        values.append(loss().detach())
    slope = (values[0] - values[1]) / 2e-6
    assert torch.allclose((weight.grad * direction).sum(), slope, rtol=1e-5)


def test_graphs_of_torch_compute_the_same():
    net = make_reversible(network(dropout=0.0).eval(), 2)
    x = pictures()
    expected = net(x)
    assert not torch.allclose(make_reversible(copy.deepcopy(net), None)(x), expected, atol=1e-3)
    found = [
        torch.export.export(net, (x,)).module()(x),
        torch.compile(net, backend="eager")(x),
        torch.func.vmap(lambda image: net(image[None])[0])(x),
    ]
    for each in found:
        assert torch.allclose(each, expected, atol=1e-4)


def test_an_outer_step_drops_the_bits_of_inner_ones():
    def kept(depth):
        torch.manual_seed(0)
        branches = (nn.Sequential(*(Block(dropout=0.0) for _ in range(4))) for _ in range(depth))
        net = ReversibleSequence([AdditiveCoupling(make_reversible(b, 8)) for b in branches])
        x = torch.randn(16, 8, 16, 16)
        with LiveMemory() as memory:
            y = net(x)
        return memory.now, y

    one = 16 * 4 * 16 * 16  # values of a stream, bytes of its bits
    assert (kept(6)[0] - kept(2)[0]) / 4 < one / 2


class Stage(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.next = nn.Conv2d(width, 2 * width, 2, 2)

    def forward(self, x):
        return self.next(self.blocks(x))


class Numbered(nn.Module):
    """As timm's RegNet: a stage whose blocks are not a list."""

    def __init__(self):
        super().__init__()
        self.b1, self.b2, self.b3 = Block(4, 6), Block(6), Block(6)
        self.conv1, self.conv2 = Stage(6, 1), Stage(12, 1)

    def forward(self, x):
        return self.b3(self.b2(self.b1(x)))


def paths(net, **options):
    return [row.path for row in reversible_blocks(make_reversible(net, **options))]


def test_runs_are_found_once():
    stages = nn.Sequential(Stage(4, 2), Stage(8, 3))
    inner = ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1", "1.blocks.2"]
    assert paths(stages) == inner
    assert paths(stages, blocks=["1.blocks"]) == inner  # the others stay as they are
    assert paths(nn.Sequential(*(Stage(4, 2) for _ in range(2)))) == ["0", "1"]
    assert paths(nn.ModuleList([Numbered()])) == ["0.b1", "0.b2", "0.b3"]
    make_reversible(stages, None, blocks=["1.blocks"])
    assert [row.path for row in reversible_blocks(stages)] == inner[:2]
    assert sorted(paths(stages, blocks=[""])) == ["0", *inner[:2], "1"]
    make_reversible(stages, None)
    assert not reversible_blocks(stages)
    make_reversible(stages, blocks=[""])
    assert paths(stages) == inner


def test_steps_as_blocks():
    net = create_model("resnet32", units=(3, 3, 3))
    make_reversible(net)
    assert len(reversible_blocks(net)) == 9
    found = []
    for mode in ("exact", "store"):
        set_memory(net, mode, grid="auto")
        with LiveMemory() as memory:
            y = net(torch.ones(8, 3, 32, 32))
        found.append([memory.now, torch.autograd.grad(y.square().sum(), net.stages.parameters())])
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert found[0][0] < 0.7 * found[1][0]
    make_reversible(net, None)
    set_memory(net, "recompute")
    assert not any(m.delegates for m in net.modules() if isinstance(m, Step))


def test_blocks_whose_forward_was_replaced():
    """As by tools that move weights between devices, or by ``torch.compile``."""

    def build(*, patched):
        net = nn.Sequential(*(Block(dropout=0.0) for _ in range(3)))
        net.load_state_dict(network(3, dropout=0.0)[1].state_dict())
        for block in net if patched else ():
            forward = functools.partial(type(block).forward, block, scale=0.5)
            block.forward = lambda x, forward=forward: forward(x)
        return net

    x = torch.randn(2, 4, 8, 8)
    net = build(patched=True)
    plain, patch = net(x), net[0].forward
    assert not torch.equal(plain, build(patched=False)(x))
    found = []
    for mode in ("exact", "store"):
        net = make_reversible(build(patched=True), 8)
        set_memory(net, mode, grid="auto")
        y = net(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))])
    assert all(map(torch.equal, *found))
    assert (y - plain).norm() < 0.02 * plain.norm()
    net[0].forward = patch
    with pytest.raises(ValueError, match=r"0\.reversible .* Block.forward was replaced after"):
        make_reversible(net, None)
    net = make_reversible(make_reversible(build(patched=True)), None)
    assert torch.equal(net(x), plain)
    compiled = nn.Sequential(*(torch.compile(b, backend="eager") for b in build(patched=False)))
    with torch.no_grad():
        expected = make_reversible(build(patched=False))(x)
        assert torch.equal(make_reversible(compiled)(x), expected)


def test_scripted_blocks_are_refused():
    with pytest.warns(FutureWarning, match="deprecated"):
        scripted = torch.jit.script(nn.Sequential(*(Grows() for _ in range(2))))
    with pytest.raises(ValueError, match=r"Grows is compiled by torch.jit.script: expected"):
        make_reversible(scripted)


@pytest.mark.parametrize("bits", [0, 9, 2.0, True])
def test_impossible_bits(bits):
    with pytest.raises(ValueError, match='expected 1 to 8, "auto", or None'):
        make_reversible(network(), bits)


def test_what_has_no_run():
    with pytest.raises(ValueError, match=r"no run of blocks: expected revzoo.Residual modules"):
        make_reversible(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(ValueError, match=r"has no module 'layer9': expected the path"):
        make_reversible(network(), blocks=["layer9"])


@pytest.mark.parametrize("bits", [1, 3, 4, 5, 8])
def test_bits_are_packed_and_come_back(bits):
    words = torch.randint(-(2**30), 2**30, (3, 5, 7), dtype=torch.int32)
    x, value = torch.randn(2, 3, 5, 7)
    packed, shifted = pack_bits(words, bits)
    assert torch.equal(shifted, words >> bits)
    assert len(packed) == -(-words.numel() // {1: 8, 3: 2, 4: 2, 5: 1, 8: 1}[bits])
    q = (((1 + 2.0**-bits) * value - 2 * 2.0**-bits * x) * 2**23).round().to(torch.int32)
    scale = Scale(torch.tensor([2.0**-23]), torch.ones(1), Growth(), torch.int32, 23)
    total = Fixed(q + (words >> bits), scale, torch.float32)
    back = SideBits(nn.Identity(), bits, last=False)._undone(total, x, value, packed)
    assert (back.words - words).abs().max() <= 2**bits * 64  # by the rounding of q as written here
    assert torch.equal(back.words & (2**bits - 1), words & (2**bits - 1))


def test_inside_a_reversible_sequence_of_a_users_own():
    """Steps of one network may be of both kinds."""

    def build():
        torch.manual_seed(0)
        inner = make_reversible(nn.Sequential(*(Block(dropout=0.0) for _ in range(3))))
        return ReversibleSequence([AdditiveCoupling(inner) for _ in range(2)])

    found = []
    for mode in ("exact", "store"):
        net = build()
        set_memory(net, mode, grid="auto")
        x = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(3))
        found.append(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
    # the stream has several uses, whose gradients are summed in another order
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


class Mixing(nn.Module):
    """A block without rounding at a kink; ``change`` acts on what it returns."""

    def __init__(self, change=None):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.change = change

    def forward(self, x, scale: float = 0.5):
        y = x + scale * self.linear(x).tanh()
        return y if self.change is None else self.change(y)


def mixing(*changes):
    torch.manual_seed(0)
    return nn.Sequential(*map(Mixing, changes))


def vectors():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "plan",
    [
        ["exact", "exact", "store", "store", "exact"],
        ["store", "exact", "store", "recompute", "exact"],
        ["exact", "recompute", "recompute", "store", "store"],
    ],
)
def test_modes_that_change_inside_a_run_compute_the_same_function(plan):
    net = make_reversible(mixing(*[None] * 5), 2)
    set_memory(net, "store")
    expected = effects(net, vectors())
    set_memory(net, {str(i): mode for i, mode in enumerate(plan)})
    found = effects(net, vectors())
    assert [row.role for row in reversible_blocks(net)] == ["starts"] + ["joins"] * 4
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(found, expected, strict=True))


CHANGES = {
    "complex": lambda y: torch.complex(y, 2 * y),
    "int": lambda y: (100 * y).long(),
    "bool": lambda y: y > 0,
    "float64": lambda y: y.double() * math.pi,
}


@pytest.mark.parametrize("mode", ["exact", "store", "recompute"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_output_of_a_type_that_the_stream_cannot_hold_ends_the_run(change, mode):
    net = make_reversible(mixing(None, change))
    first, last = net
    set_memory(net, mode)
    x = vectors()
    y = first(x)
    value = last(y)
    expected = Mixing.forward(last, y)
    assert torch.equal(value, expected)
    assert value.dtype == expected.dtype
    assert reversible_blocks(net)[1].role == "ends"


class Passing(nn.Linear):
    def forward(self, x):
        return x


def test_a_block_that_returns_its_input_stays_in_the_run():
    found = []
    for mode in ("exact", "store", "recompute"):
        net = make_reversible(nn.Sequential(Passing(6, 6), Passing(6, 6), *mixing(None, None)), 2)
        set_memory(net, mode, grid="auto")
        x = vectors().requires_grad_()
        y = net(x)
        y.square().sum().backward()
        found.append([y, x.grad, net[3].linear.weight.grad])
        assert [row.role for row in reversible_blocks(net)] == ["starts", "joins"] * 2
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    set_memory(net, "store")
    x = vectors()
    alive = weakref.ref(x)
    net[0](x)
    del x
    assert alive() is None


def test_forward_keeps_its_signature():
    net = mixing(None, None)
    plain = inspect.signature(net[0].forward)
    assert "scale: float" in str(plain)
    make_reversible(net)
    for copied in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert inspect.signature(copied[0].forward) == plain
        assert make_reversible(copied, None) is copied
        assert "forward" not in vars(copied[0])


class Taken(Mixing):
    def __init__(self):
        super().__init__()
        self.reversible = nn.Identity()


def test_blocks_that_cannot_be_converted_change_nothing():
    message = "Taken has an attribute 'reversible'.* rename it"
    net = nn.Sequential(mixing(None, None), nn.Sequential(Taken(), Taken()))
    before = list(net.modules())
    with pytest.raises(ValueError, match=message):
        make_reversible(net)
    assert list(net.modules()) == before
    assert not any("forward" in vars(m) for m in net.modules())
    # and where the network is reversible already
    make_reversible(net[0], 2)
    with pytest.raises(ValueError, match=message):
        make_reversible(net)
    assert [row.bits for row in reversible_blocks(net)] == [2, 2]


def test_a_forward_that_was_replaced_changes_nothing():
    net = make_reversible(mixing(None, None, None), 2)
    net[1].forward = lambda x: x
    for bits in (4, None):
        with pytest.raises(
            ValueError, match=r"1\.reversible SideBits: Mixing\.forward was replaced"
        ):
            make_reversible(net, bits)
    assert [row.bits for row in reversible_blocks(net)] == [2, 2, 2]


def test_a_block_that_calls_all_its_children_is_named():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            for layer in self.children():
                x = layer(x)
            return x

    net = make_reversible(nn.Sequential(Chain(), Chain()))
    with pytest.raises(RuntimeError, match=r"Chain calls all its children.* by name; choose"):
        net(vectors())


def test_results_without_tensors_first_are_named_by_their_types():
    for change, types in ((lambda y: {"a": 1, "y": y}, "int, Tensor"), (lambda y: [], "nothing")):
        net = make_reversible(mixing(None, change))
        with pytest.raises(TypeError, match=rf"1\.reversible SideBits got {types} from Mixing"):
            net(vectors())


def test_without_runs_there_is_nothing_to_undo():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert make_reversible(net, None) is net
    message = r"blocks=\['0'\] has no run of blocks"
    with pytest.raises(ValueError, match=message):
        make_reversible(
            nn.Sequential(nn.Sequential(nn.Linear(4, 4)), *mixing(None, None)), blocks=["0"]
        )


def test_blocks_is_a_list():
    with pytest.raises(TypeError, match=r"blocks='1': expected a list of paths, blocks=\['1'\]"):
        make_reversible(network(), blocks="1")


@pytest.mark.filterwarnings("ignore:lazy layers have no weights yet:UserWarning")
@pytest.mark.parametrize("numbered", [False, True])
def test_lazy_layers_in_stages_and_numbered_blocks(numbered):
    """Their shapes were compared before they had one."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.LazyLinear(8)

        def forward(self, x):
            return x + self.linear(x).tanh()

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.b1, self.b2 = Lazy(), Lazy()

        def forward(self, x):
            return self.b2(self.b1(x))

    net = Stage() if numbered else nn.Sequential(Stage(), Stage())
    make_reversible(net, 4)
    net(torch.randn(2, 8)).sum().backward()
    assert {row.role for row in reversible_blocks(net)} == {"starts", "joins"}


@pytest.mark.parametrize("part", [True, False])
@pytest.mark.parametrize("outer", ["exact", "invert"])
def test_a_stored_run_of_side_bits_in_a_branch(outer, part):
    """Its bits reached the outer step, which has none."""
    torch.manual_seed(0)
    blocks = [revzoo.Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(3)]
    branch = revzoo.make_reversible(nn.Sequential(*blocks), bits=4)
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh()), AdditiveCoupling(branch)], memory=None)
    for step in net:
        step.memory, step.grid = outer, "auto" if outer == "exact" else None
    set_memory(branch, "store", grid=20)
    state = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]

    def effects():
        y1, y2 = net(*state)
        loss = y1.square().sum() if part else (y1 * y2).sum()
        return torch.autograd.grad(loss, [*state, *branch.parameters()], materialize_grads=True)

    found = effects()
    for step in net:
        step.memory = "store"
    for a, b in zip(found, effects(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
