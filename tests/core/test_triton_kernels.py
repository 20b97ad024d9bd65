"""Triton's kernels against torch's, bit for bit: under Triton's interpreter on a CPU."""

import math
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import revzoo.core
from revzoo import AdditiveCoupling, ReversibleBlock, ReversibleSequence, make_reversible
from revzoo.core import kernels as torchs
from revzoo.core.kernels import magnitudes, sum_of, with_sum
from revzoo.layers.side_bits import pack_bits, unpack_bits
from revzoo.models.components import Branch

pytest.importorskip("triton")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_under_the_interpreter():
    """The other tests, in a process of their own: Triton must be imported with this variable."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    if INTERPRETED:
        pytest.skip("is running")
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stdout
    assert "103 passed" in run.stdout, run.stdout


@pytest.fixture
def kernels():
    """The module: interpreted, or compiled on a GPU."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU or Triton's interpreter")
    from revzoo.core import triton_kernels

    return triton_kernels


@pytest.fixture
def in_place_of_torchs(kernels, monkeypatch):
    """CPU tensors are computed as on a GPU."""
    monkeypatch.setattr(torchs, "_FREE_TO_READ", set())
    monkeypatch.setattr(torchs, "_with_triton", {"cpu", "cuda"})
    torchs._triton_kernels.cache_clear()
    yield
    torchs._triton_kernels.cache_clear()


def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows(count, n, dtype=torch.float32, size=10.0):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(count, n, generator=generator) * size
    # ties, to round half to even, also where adding 2**23 would lose them
    x[:, ::3] = (x[:, ::3] * 2**22).round() / 2**22 + 2.0**-24
    return x.to(device(), dtype)


def figures(count, scales):
    down = torch.tensor([2.0**-23, 2.0**-20, 2.0**-21, 2.0**-14])[:count].to(device())
    down = down if scales == "each" else down[:1]
    return down.reciprocal(), down


def same_floats(a, b, dtype):
    # the interpreter cuts off a bfloat16 where a GPU rounds it
    rounds = dtype != torch.bfloat16 or not INTERPRETED
    torch.testing.assert_close(a, b, rtol=0 if rounds else 2**-7, atol=0)


def shaped(t):
    return t.view(-1, 1) if len(t) > 1 else t.view(())


@pytest.mark.parametrize("n", [1, 1000, 1024, 3001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kernel_equals_torchs(kernels, dtype, n):
    count = 4
    up, down = figures(count, "each")
    value, x = rows(count, n, dtype), (rows(count, n) * 2**22).int()
    found, expected = torch.empty_like(x), torch.empty_like(x)
    reached, ended = kernels.quantise(value, found, up)
    torchs.quantise(value, expected, shaped(up))
    assert torch.equal(found, expected)
    assert torch.equal(reached, magnitudes(value.float(), count))
    assert torch.equal(ended, down)

    kernels.subtract(x, value, found, up)
    torchs.subtract(x, value, expected, shaped(up))
    assert torch.equal(found, expected)

    floats, known = (torch.empty_like(x, dtype=dtype) for _ in range(2))
    kernels.read(x, floats, down)
    torchs.read(x, known, shaped(down))
    same_floats(floats, known, dtype)

    reached, ended = kernels.add_and_read(x, value, found, floats, up, down)
    torchs.add_and_read(x, value, expected, known, shaped(up), shaped(down))
    assert torch.equal(found, expected)
    same_floats(floats, known, dtype)
    assert torch.equal(reached, magnitudes(torch.stack([value, floats], 1).float(), count))
    assert torch.equal(ended, down)


def test_one_scale_for_all(kernels):
    up, down = figures(1, "all")
    value, x = rows(1, 2500), (rows(1, 2500) * 2**20).int()
    words, total = torch.empty_like(x), torch.empty_like(value)
    kernels.add_and_read(x, value, words, total, up, down)
    expected, known = torch.empty_like(x), torch.empty_like(value)
    torchs.add_and_read(x, value, expected, known, up.view(()), down.view(()))
    assert torch.equal(words, expected)
    assert torch.equal(total, known)


def test_the_result_may_take_the_memory_of_the_summand(kernels):
    up, _ = figures(4, "each")
    value, x = rows(4, 1500), (rows(4, 1500) * 2**20).int()
    expected = torch.empty_like(x)
    torchs.subtract(x, value, expected, shaped(up))
    kernels.subtract(x, value, value.view(torch.int32), up)
    assert torch.equal(value.view(torch.int32), expected)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # of NumPy
@pytest.mark.parametrize("n", [1500, 1])
def test_samples_that_leave_their_range(kernels, n):
    """By the sum, the summand, before this sum, or not at all; others keep their unit."""
    unit = torch.full((7,), 2.0**-20, device=device())  # the range ends at 1024
    down = unit.clone()
    down[6] = math.nan
    words, value = torch.full((7, n), 2**20 * 600, dtype=torch.int32), torch.zeros(7, n)
    value[:, -1] = torch.tensor([400, 500, -1100, math.nan, math.inf, -1e30, 0])
    words, value = words.to(device()), value.to(device())
    total = torch.empty_like(value)
    reached, ended = kernels.add_and_read(words, value, words.clone(), total, 1 / unit, down)
    nan, inf = math.nan, math.inf
    for found, known in (
        (reached, [1000, 1100, 1100, nan, inf, 1e30, nan]),
        (ended, [2.0**-20, *[nan] * 6]),
        # in this sum, of a summand beyond the range only the value itself
        (total.isnan().sum(1).float(), [0, 0, 1, 1, 1, 1, n]),
    ):
        torch.testing.assert_close(
            found.cpu(), torch.tensor(known).float(), equal_nan=True, rtol=0, atol=0
        )
    quantised = kernels.quantise(value, words, 1 / unit)
    known = [[400, 500, 1100, nan, inf, 1e30, 0], [*unit[:2].tolist(), *[nan] * 4, 2.0**-20]]
    torch.testing.assert_close(quantised.cpu(), torch.tensor(known), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("grid", ["auto", 20])
def test_a_network_computes_the_same(in_place_of_torchs, monkeypatch, grid, layout):
    """Outputs and gradients are equal bit for bit to those of torch's kernels."""

    def train(with_triton):
        monkeypatch.setattr(torchs, "_with_triton", {"cpu", "cuda"} if with_triton else set())
        torch.manual_seed(0)
        steps = [
            AdditiveCoupling(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3)))
            for _ in range(4)
        ]
        net = ReversibleSequence(steps, memory="exact").to(device())
        for step in net:
            step.grid = grid
        x = torch.randn(3, 6, 5, 5).to(device(), memory_format=layout).requires_grad_()
        y = net(x)
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in net.parameters())]

    calls = []
    for name in ("quantise", "read", "subtract", "add_and_read"):
        kernel = getattr(torchs._triton_kernels(device()), name)
        launch = lambda *a, name=name, kernel=kernel: (calls.append(name), kernel(*a))[1]  # noqa: E731
        monkeypatch.setattr(torchs._triton_kernels(device()), name, launch)
    found = train(True)
    # two streams enter; each of four couplings adds in forward, reads and subtracts in its replay
    expected = {"quantise": 2, "read": 2 + 4, "add_and_read": 4, "subtract": 4}
    assert Counter(calls) == expected
    for a, b in zip(found, train(False), strict=True):
        assert torch.equal(a, b)


class _Kernels(TorchDispatchMode):
    """Collects the operators that launch a kernel on a GPU: not views, and not empty memory."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        moves_nothing = func.is_view or name.startswith(("empty", "new_empty", "promote_types"))
        self.names[name] += not moves_nothing
        return func(*args, **(kwargs or {}))


class _Launches:
    """A Triton kernel that is counted as one operator."""

    def __init__(self, kernel, name, mode):
        self.kernel, self.name, self.mode = kernel, name, mode

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.mode.names[self.name] += 1
            with _disable_current_modes():  # the interpreter's own operators
                self.kernel[grid](*args, **options)

        return launch


def operators_of_couplings(monkeypatch, ours, mode, build, *, guard, autocast=False, steps=3):
    """Operators of a coupling in the last of the training steps, from networks of two depths."""
    found = []
    depths = 2, 4  # the interpreter is slow
    for depth in depths:
        torch.manual_seed(0)
        net = ReversibleSequence([build() for _ in range(depth)], memory=mode).to(device())
        if not guard:
            revzoo.set_drift_limit(net, None)
        for _ in range(steps):  # the third step's couplings share functions
            counted = _Kernels()
            with monkeypatch.context() as patch, counted:
                for name in ("_quantise", "_subtract", "_read", "_add_and_read"):
                    patch.setattr(ours, name, _Launches(getattr(ours, name), name, counted))
                x = torch.randn(3, 6, 5, 5).to(device()).requires_grad_()
                with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
                    y = net(x)
                y.float().square().sum().backward()
        found.append(counted.names)
    short, deep = found
    couplings = (depths[1] - depths[0]) * sum(
        isinstance(m, AdditiveCoupling) for m in build().modules()
    )
    return {name: n / couplings for name in deep if (n := deep[name] - short[name])}


def branch():
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3))


@pytest.mark.parametrize(
    ("build", "guard", "autocast", "more"),
    [
        (lambda: AdditiveCoupling(branch()), False, False, 2),
        (lambda: AdditiveCoupling(branch()), True, False, 3),
        (lambda: AdditiveCoupling(branch()), True, True, 3),
        (lambda: ReversibleBlock(branch(), branch()), True, False, 3),
        # its replay reads in bfloat16, without a cast; unguarded, since the interpreter cuts off
        (lambda: AdditiveCoupling(Branch(3, out_channels=3)), False, True, 1),
    ],
    ids=["coupling", "guarded", "guarded-bfloat16", "block-guarded", "of the zoo"],
)
def test_a_coupling_runs_few_kernels_more_than_in_invert(
    in_place_of_torchs, kernels, monkeypatch, build, guard, autocast, more
):
    """At most three, forward and replay together."""
    exact, invert = (
        operators_of_couplings(monkeypatch, kernels, mode, build, guard=guard, autocast=autocast)
        for mode in ("exact", "invert")
    )
    assert {name: n for name, n in exact.items() if name[0] == "_" and name in vars(kernels)} == {
        "_add_and_read": 1,
        "_read": 1,
        "_subtract": 1,
    }
    assert 0 < sum(exact.values()) - sum(invert.values()) <= more, (exact, invert)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_guard_of_exact_reads_no_stream(in_place_of_torchs, kernels, monkeypatch, steps):
    """Its checksums cost a coupling two numbers that are set to 0, and no kernel on streams."""
    guarded, alone = (
        operators_of_couplings(
            monkeypatch, kernels, "exact", lambda: AdditiveCoupling(branch()), guard=g, steps=steps
        )
        for g in (True, False)
    )
    more = {name: count - alone.get(name, 0) for name, count in guarded.items()}
    assert {name: count for name, count in more.items() if count > 0} == {"new_zeros": 2}


def words_of(shape, dtype, layout):
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(0)
    words = torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)
    return {
        "contiguous": lambda: words,
        "channels last": lambda: words.movedim(1, -1).contiguous().movedim(-1, 1),
        "transposed": lambda: words.transpose(0, -1),
        "with gaps": lambda: words.repeat_interleave(2, 1)[:, ::2],
    }[layout]().to(device())


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "with gaps"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (3, 7, 11, 23), (2, 2, 33, 41)])
def test_checksums_equal_torchs(in_place_of_torchs, monkeypatch, shape, layout):
    """Of words of both signs, whose sums and differences wrap around."""
    words, up = words_of(shape, torch.int32, layout), torch.tensor(2.0**20).to(device())
    for dtype in DTYPES:
        value = torch.randn_like(words, dtype=dtype) * 4
        out, total = torch.empty_like(words), torch.empty_like(words, dtype=dtype)
        minus = torchs.subtract, (words, value, out), out, up
        plus = torchs.add_and_read, (words, value, out, total), words, up, 1 / up
        for fn, tensors, summed, *figures in (minus, plus):
            taken = torchs._by_triton(fn, tensors, tuple(figures), sums=True)
            assert taken is not None or layout in ("transposed", "with gaps")
            _, checksum = with_sum(fn, tensors, summed, *figures)
            assert torch.equal(checksum, sum_of(summed)), (fn, dtype)
            with monkeypatch.context() as patch:
                patch.setattr(torchs, "_with_triton", set())
                _, expected = with_sum(fn, tensors, summed, *figures)
            assert torch.equal(checksum, expected), (fn, dtype)
            assert checksum.dtype == torch.int64


class _Drifts(nn.Module):
    """Returns something else in each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 0.5 + self.calls * 1e-3


def test_checksums_find_a_replay_that_differs(in_place_of_torchs):
    net = ReversibleSequence([AdditiveCoupling(_Drifts()) for _ in range(3)], memory="exact")
    y = net(torch.randn(3, 6, 5, 5).to(device()).requires_grad_())
    with pytest.raises(revzoo.DriftError, match="did not repeat the forward pass"):
        y.sum().backward()


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "with gaps"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5, 7), (3, 7, 11, 13), (2, 3, 4, 4, 5)])
def test_side_bits_equal_torchs(in_place_of_torchs, monkeypatch, shape, dtype, layout):
    words = words_of(shape, dtype, layout)
    for bits in range(1, 9):
        packed, shifted = pack_bits(words, bits)
        restored = unpack_bits(packed, shifted, bits)
        with monkeypatch.context() as patch:
            patch.setattr(torchs, "_with_triton", set())
            expected = pack_bits(words, bits)
            assert torch.equal(unpack_bits(packed, shifted, bits), words)
        assert torch.equal(packed, expected[0])
        assert torch.equal(shifted, expected[1])
        assert torch.equal(restored, words)
        assert restored.dtype == words.dtype
        assert restored.is_contiguous() == expected[1].is_contiguous()


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_run_with_side_bits_computes_the_same(in_place_of_torchs, monkeypatch, layout, bits):
    calls = []

    def train(with_triton):
        monkeypatch.setattr(torchs, "_with_triton", {"cpu", "cuda"} if with_triton else set())
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)]
        net = make_reversible(nn.Sequential(*map(revzoo.Residual, layers)), bits).to(device())
        x = torch.randn(3, 3, 5, 5).to(device(), memory_format=layout).requires_grad_()
        y = net(x)
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in net.parameters())]

    for name in ("pack_bits", "unpack_bits"):
        kernel = getattr(torchs._triton_kernels(device()), name)
        launch = lambda *a, name=name, kernel=kernel: (calls.append(name), kernel(*a))[1]  # noqa: E731
        monkeypatch.setattr(torchs._triton_kernels(device()), name, launch)
    found = train(True)
    # the first block begins the run and drops nothing
    assert Counter(calls) == {"pack_bits": 3, "unpack_bits": 3}
    for a, b in zip(found, train(False), strict=True):
        assert torch.equal(a, b)


def test_without_triton_torchs_kernels_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "revzoo.core.triton_kernels", None)
    monkeypatch.delattr(revzoo.core, "triton_kernels", raising=False)
    torchs._triton_kernels.cache_clear()
    with pytest.warns(RuntimeWarning, match="Triton does not work here"):
        assert torchs._triton_kernels(device()) is None
    torchs._triton_kernels.cache_clear()


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from revzoo.core import triton_kernels as ours

kinds = {"x": "*i32", "words": "*i32", "out": "*i32", "up": "*fp32", "down": "*fp32"}
kinds |= {"figures": "*i32", "n": "i32", "count": "i32", "BLOCK": "constexpr"}
kinds |= {"checksum": "*i64", "PAIRS": "constexpr"}
guarded = {"BLOCK": 1024, "PAIRS": True}
for fn in (ours._quantise, ours._subtract, ours._read, ours._add_and_read):
    plain = {**guarded, "checksum": None, "PAIRS": False}
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        signature = {name: kinds.get(name, "*" + dtype) for name in fn.arg_names}
        for options in (guarded, plain) if dtype == "fp32" else (guarded,):
            options = {name: value for name, value in options.items() if name in signature}
            signature |= dict.fromkeys(options, "constexpr")
            source = ASTSource(fn, signature=signature, constexprs=options)
            assert triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
for fn in (ours._pack_bits, ours._unpack_bits):
    for dtype, bits, slot in (("i16", 1, 1), ("i32", 3, 4), ("i32", 4, 4), ("i64", 8, 8)):
        signature = dict.fromkeys(fn.arg_names, "constexpr")
        signature |= {"words": "*" + dtype, "shifted": "*" + dtype, "packed": "*u8"}
        signature |= dict.fromkeys(("n", "count", "channels", "size"), "i32")
        options = {"BITS": bits, "SLOT": slot, "MIXED": bits == 3, "BLOCK": 1024}
        source = ASTSource(fn, signature=signature, constexprs=options)
        assert triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
print("compiled")
"""


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
def test_they_compile_for_a_gpu_that_is_not_here():
    """The interpreter accepts more than the compiler."""
    run = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True)
    assert run.stdout == "compiled\n", run.stderr
