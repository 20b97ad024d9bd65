"""The drift guard fires where reconstructions are wrong, and only there."""

import contextlib
import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
from compare import (
    assert_same_training,
    conv_net,
    error,
    images,
    leaf_rows,
    linear_net,
    relu_block,
    twin,
)
from torch import nn

import revzoo
from revzoo import (
    AdditiveCoupling,
    DriftError,
    Invertible,
    ReversibleBlock,
    ReversibleSequence,
    drift,
    is_replaying,
    set_drift_limit,
    set_memory,
)
from revzoo.core import guard
from revzoo.core import saved as offload
from revzoo.core.kernels import sum_of
from revzoo.core.live import LiveMemory


def run(net, x):
    net(x.requires_grad_()).square().mean().backward()


def test_drift_is_available_per_step():
    net = twin(conv_net(depth=2).float(), "invert")
    assert drift(net) == {}
    run(net, images().float())
    figures = drift(net)
    assert list(figures) == [
        "steps.0.steps.0",
        "steps.0.steps.1",
        "steps.1.steps.0",
        "steps.1.steps.1",
    ]
    assert all(0 <= value < 1e-5 for value in figures.values())
    assert any(value > 0 for value in figures.values())


def exploding_net():
    """Each block multiplies by a hundred: small values are lost in large ones."""
    torch.manual_seed(0)

    def branch():
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            layer.weight.mul_(100)
        return layer

    return ReversibleSequence(
        [ReversibleBlock(branch(), branch()) for _ in range(6)], memory="invert"
    )


def test_fires_on_an_exploding_net():
    net, x = exploding_net(), torch.randn(4, 16)
    with pytest.raises(
        DriftError, match=r"steps\.\d AdditiveCoupling.*off by .* so the gradients are wrong"
    ) as raised:
        run(net, x)
    reason = raised.value.reason
    assert str(raised.value).startswith(f"{reason}, so the gradients")
    set_memory(net, "recompute")
    run(net, x)  # keeps its inputs, so there is nothing to drift


def test_fires_on_narrow_streams():
    net = twin(conv_net(), "invert").bfloat16()
    remedies = r"limit 0\.001.* torch\.autocast\(.* revzoo\.set_memory\(model, 'exact'\)"
    with pytest.raises(DriftError, match=remedies):
        run(net, images().bfloat16())


def test_the_limit_is_a_setting():
    net = twin(conv_net(), "invert").bfloat16()
    set_drift_limit(net, float("inf"))
    run(net, images().bfloat16())
    assert max(drift(net).values()) > 1e-3  # measured all the same
    set_drift_limit(net, 0.5)
    run(net, images().bfloat16())
    assert max(drift(net).values()) > 1e-3
    set_drift_limit(net, 0)
    with pytest.raises(DriftError, match="limit 0;"):
        run(net, images().bfloat16())
    set_drift_limit(net, None)
    assert drift(net) == {}
    for limit in (-1, "none", True, float("nan")):
        with pytest.raises(ValueError, match=f"limit={limit!r}: expected a relative error"):
            set_drift_limit(net, limit)


class Restless(nn.Module):
    """Never the same twice, but always of the same shape."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, x):
        return (x * next(self.calls)).tanh()


def test_fires_on_a_branch_that_does_not_repeat_itself():
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh()), AdditiveCoupling(Restless())])
    with pytest.raises(DriftError, match=r"steps\.1 AdditiveCoupling"):
        run(net, torch.randn(4, 16))


class MaskOfOneImage(nn.Module):
    """Sets half of the values of one image to zero, others in each pass."""

    def __init__(self, seed):
        super().__init__()
        self.seed = np.array([seed])  # a replay does not restore entries of arrays

    def forward(self, x):
        self.seed[0] += 1
        draw = random.Random(int(self.seed[0]))
        image = draw.randrange(len(x))
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        mask = torch.ones_like(x)
        mask[image] = (torch.rand(x.shape[1:], generator=generator) > 0.5).to(x.dtype)
        return x * mask


@pytest.mark.parametrize("memory", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_fires_on_a_mask_that_touches_one_image_of_many(memory, place):
    found = 0
    for seed in range(10):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
        layers.insert(place, MaskOfOneImage(100 * seed))
        branches = [nn.Sequential(*layers), nn.Conv2d(8, 8, 1)]
        net = ReversibleSequence([ReversibleBlock(*branches)], memory=memory)
        try:
            run(net, torch.randn(128, 16, 8, 8))
        except DriftError:
            found += 1
    assert found >= 9


@pytest.mark.parametrize("dropout", [0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory", ["recompute", "exact"])
def test_fires_though_a_mask_and_a_copy_of_a_weight_are_saved_last(memory, autocast, dropout):
    last = [nn.Linear(8, 8), nn.Dropout(dropout)] if dropout else [nn.Linear(8, 8)]
    branch = nn.Sequential(nn.Linear(8, 8), Restless(), *last)
    net = ReversibleSequence([AdditiveCoupling(branch)], memory=memory)
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net(x)
    with pytest.raises(DriftError, match="not deterministic"):
        y.sum().backward()


class DrawnAnew(nn.Module):
    """Applies a function with other random numbers in each pass."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.seeds = itertools.count()

    def forward(self, x):
        return self.change(x, torch.Generator().manual_seed(next(self.seeds)))


def shuffle_rows(x, generator):
    return x[..., torch.randperm(x.shape[-1], generator=generator)]


def drop_a_column(x, generator):
    mask = torch.ones_like(x)
    mask[..., torch.randint(x.shape[-1], (), generator=generator)] = 0
    return x * mask


def add_noise(x, generator):
    return x + 3e-3 * torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize(
    ("change", "place"), [(shuffle_rows, 1), (drop_a_column, 2), (add_noise, 1)]
)
def test_fires_on_changes_that_cancel_in_sums(change, place):
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]
    layers.insert(place, DrawnAnew(change))
    net = ReversibleSequence([AdditiveCoupling(nn.Sequential(*layers))], memory="recompute")
    # 2,048 values in a stream: without weights, each sum is the sum of half an image's channel
    with pytest.raises(DriftError):
        run(net, torch.randn(4, 16, 8, 8))


def test_sums_are_the_same_wherever_words_begin_in_memory():
    """A slice at an odd place was summed in another way than its copy."""
    words = torch.randint(-(2**31), 2**31, (1 + 2**13,), dtype=torch.int32)[1:]
    assert torch.equal(sum_of(words), sum_of(words.clone()))


def test_sums_of_large_words_do_not_wrap_around():
    net = linear_net()
    for block, mode, grid in zip(net, ("exact", "invert", "exact"), (23, None, 23), strict=True):
        set_memory(block, mode, **({} if grid is None else {"grid": grid}))
    # words of 2**59; the inverted block gets them and recomputes floats
    run(net, torch.full((1024, 8), 120.0, dtype=torch.float64))
    assert max(drift(net).values()) < 1e-14


@pytest.mark.parametrize(
    ("size", "dtype", "warns"),
    [
        (1, "float32", False),
        (3e-5, "float32", True),
        (0, "float32", False),
        (3e-5, "float64", False),
    ],
)
def test_warns_of_values_that_a_grid_rounds(size, dtype, warns):
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh())], memory="exact")
    x = size * torch.linspace(-1, 1, 16, dtype=getattr(torch, dtype)).view(2, 8)
    run(net, x)  # the grid adapts
    revzoo.set_memory(net, "exact", grid=23)
    expected = r"all values .* less than 1024 units .*grid=23.* choose more bits"
    with pytest.warns(RuntimeWarning, match=expected) if warns else contextlib.nullcontext():
        run(net, x)


def test_fires_on_a_parameter_changed_behind_autograds_back():
    net = linear_net()
    y = net(torch.randn(4, 8, dtype=torch.float64, requires_grad=True))
    net[1][0].branch[2].bias.data.add_(1)  # .data leaves the version as it is
    with pytest.raises(DriftError, match=r"steps\.1\.steps\.0 AdditiveCoupling"):
        y.sum().backward()


def test_after_it_fired_the_next_step_is_judged_afresh():
    net = linear_net()
    restless = copy.deepcopy(net)
    restless[2][1].branch = Restless()
    for _ in range(2):
        with pytest.raises(DriftError):
            run(restless, torch.randn(4, 8, dtype=torch.float64))
    restless[2][1].branch = copy.deepcopy(net[2][1].branch)
    run(restless, torch.randn(4, 8, dtype=torch.float64))


def test_an_exception_in_the_backward_pass_leaves_no_figures_behind():
    net = linear_net()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    y = net(x)
    net[0][0].branch[0].bias.data.add_(1)  # drifts at the very first step

    def fail(_):
        raise KeyError("after the replay")

    handle = net[0][0].branch[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        y.sum().backward()
    handle.remove()
    run(net, x)


def test_a_diverged_forward_pass_is_not_called_drift():
    run(twin(linear_net(), "invert"), torch.full((4, 8), float("inf"), dtype=torch.float64))


class Halves(Invertible):
    """Its inverse is wrong, unless ``right``."""

    def __init__(self, *, right):
        super().__init__()
        self.right = right

    def forward(self, x1, x2):
        return x1 / 2, x2 / 2

    def inverse(self, y1, y2):
        return y1 * (2 if self.right else 30), y2 * 2


@pytest.mark.parametrize("right", [True, False])
def test_an_inverted_step_after_an_exact_one(right):
    """Its input has words and its replay has none: the guard summed no words, which raised."""
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4)), Halves(right=right)])
    for step, mode in zip(net, ("exact", "invert"), strict=True):
        set_memory(step, mode)
    with contextlib.nullcontext() if right else pytest.raises(DriftError, match=r"steps\.1 Halves"):
        run(net, torch.randn(4, 8))


def test_channels_are_compared_in_the_first_passes_only(monkeypatch):
    """To find their spread took longer than all other figures."""
    spreads = []
    plain = guard.spread_of_channels
    monkeypatch.setattr(guard, "spread_of_channels", lambda t: spreads.append(t) or plain(t))
    net = twin(conv_net(depth=2).float(), "invert")
    for expected in (4, 4, 0, 0):
        spreads.clear()
        run(net, images().float())
        assert len(spreads) == expected
    set_memory(net, "invert")
    run(net, images().float())
    assert len(spreads) == 4


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_wrong_inverse_is_named_though_the_graph_needs_nothing_of_its_step(mode):
    """The step before it was: its replay was the first to be compared."""

    class Flip(Invertible):
        exact = True

        def forward(self, x1, x2):
            return x1.flip(1), x2.flip(1)

        def inverse(self, y1, y2):
            return y1, y2

    couplings = [AdditiveCoupling(nn.Linear(4, 4)) for _ in range(4)]
    net = ReversibleSequence([*couplings[:2], Flip(), *couplings[2:]], memory=mode)
    # a flip keeps the sum of the words, so the step before it is the first that differs
    named = r"^steps\.1 Add" if mode == "exact" else r"^steps\.2 Flip: "
    with pytest.raises(DriftError, match=named):
        run(net, torch.randn(2, 8))


@pytest.mark.parametrize("name", ["revnet38", "revnet110"])
def test_never_fires_on_the_zoo_in_float32(name):
    torch.manual_seed(0)
    net = revzoo.create_model(name, memory="invert")
    run(net, torch.randn(8, 3, 32, 32))
    assert 0 < max(drift(net).values()) < 1e-4


def test_what_is_kept_of_a_long_chain_does_not_grow():
    """Samples of each step were kept: 384 bytes a coupling of 16 channels, at any depth.

    Its sum keeps one number, the largest value.
    """
    coupling = AdditiveCoupling(nn.Tanh())

    def kept(depth):
        net = ReversibleSequence([coupling] * depth)
        x = torch.randn(2, 32, 4, 4, requires_grad=True)
        with LiveMemory() as memory:
            y = net(x)
            kept = memory.now
        del y
        return kept

    _, few, many, more = map(kept, (8, 64, 512, 1024))  # the first makes the tables of places
    # a sum of 8 bytes, an amax of 4, and what torch rounds them up to
    assert few < many
    assert more - many <= 512 * 32


@pytest.mark.parametrize("mode", ["recompute", "exact"])
@pytest.mark.parametrize("last", [nn.MaxPool2d(3, 1, 1), nn.Tanh()], ids=["indices", "values"])
def test_a_step_that_saves_indices_last_is_compared(mode, last):
    """Masks and indices say nothing of the values before them."""
    factors = itertools.count(1)  # a replay cannot restore it

    class Varies(nn.Module):
        def forward(self, x):
            return last(x * next(factors) * 0.1)

    net = ReversibleSequence([AdditiveCoupling(Varies())], memory=mode)
    y = net(torch.randn(2, 4, 6, 6, requires_grad=True))
    with pytest.raises(DriftError, match="not deterministic"):
        y.square().sum().backward()


def test_a_long_chain_is_still_compared():
    class Wrong(Invertible):
        """Its inverse is off."""

        def forward(self, x1, x2):
            return x2, x1

        def inverse(self, y1, y2):
            return y2 + 1, y1

    steps = [AdditiveCoupling(nn.Tanh()) for _ in range(600)]
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    ReversibleSequence(steps)(x).sum().backward()
    with pytest.raises(DriftError):
        ReversibleSequence([*steps[:301], Wrong(), *steps[301:]])(x).sum().backward()


def test_a_drift_names_what_the_caller_has():
    """Callers of ``checkpoint`` were advised to use another mode or to check an inverse."""
    calls = itertools.count(1)

    def different(x):
        return (x * next(calls)).sin()

    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(DriftError, match=r"not determinist.*without checkpoint\(\)") as found:
        revzoo.checkpoint(different, x).sum().backward()
    assert "inverse" not in str(found.value)
    y = revzoo.invertible_checkpoint(torch.exp, lambda y: y, x)
    with pytest.raises(DriftError, match=r"a wrong inverse.*by checkpoint\(\)") as found:
        y.sum().backward()
    assert "memory=" not in str(found.value)


@pytest.mark.parametrize("outer", ["invert", "exact", "recompute"])
def test_an_exact_sequence_in_a_branch_is_as_exact_as_the_step_around_it(outer):
    """Its limit was zero even if a floating-point replay rounds its input."""

    def net(memory):
        torch.manual_seed(0)
        inner = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4)) for _ in range(2)])
        blocks = [ReversibleBlock(nn.Sequential(nn.Linear(8, 8), inner), nn.Linear(8, 8))]
        net = ReversibleSequence([*blocks, ReversibleBlock(nn.Linear(8, 8))])
        set_memory(net, memory)
        set_memory(inner, "exact" if memory != "store" else "store")
        return net

    x = torch.randn(4, 16)
    assert_same_training(net(outer), net("store"), x, tolerance=1e-5)


def test_an_exact_sequence_in_a_branch_on_complex_streams():
    """Complex streams have no words, so a step on them is inverted in floating point."""

    class AsReal(nn.Module):
        def forward(self, x):
            return torch.view_as_real(x)

    class OnParts(nn.Module):
        def __init__(self, memory):
            super().__init__()
            bounded = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
            self.inner = ReversibleSequence([ReversibleBlock(*bounded)], memory=memory)

        def forward(self, x):
            parts = self.inner(torch.view_as_real(x).flatten(-2))
            return torch.view_as_complex(parts.unflatten(-1, (-1, 2)).contiguous())

    def net(memory):
        torch.manual_seed(0)
        blocks = [ReversibleBlock(OnParts(memory), OnParts(memory)) for _ in range(2)]
        return ReversibleSequence(blocks, memory=memory)

    x = torch.randn(4, 8, dtype=torch.complex64)
    exact, store = (nn.Sequential(net(memory), AsReal()) for memory in ("exact", "store"))
    assert_same_training(exact, store, x, tolerance=1e-5)


@pytest.mark.parametrize("limit", [1e-3, None])
@pytest.mark.parametrize("mode", ["offload", "recompute", "invert", "exact"])
@pytest.mark.parametrize("training", [True, False])
def test_a_tensor_that_is_filled_after_it_was_saved(mode, training, limit, monkeypatch):
    """RReLU fills its noise late, and in evaluation never: a replay stopped before."""
    monkeypatch.setattr(offload, "_STAYS", ("meta",))  # as on a GPU: activations move

    def net(memory):
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.RReLU()) for _ in range(2)]
        net = ReversibleSequence(list(map(AdditiveCoupling, branches))).train(training)
        set_memory(net, memory)
        set_drift_limit(net, limit)
        return net

    # torch hands out freed memory again, so an unfilled tensor holds these
    x, junk = torch.rand(4, 8), [torch.full((4, 4), 7.0) for _ in range(20)]
    reference = net("store")
    del junk
    assert_same_training(net(mode), reference, x, tolerance=1e-5)


def test_an_inverted_function_is_replayed_to_its_end_where_it_must():
    """The last part of a replay stopped at the last tensor in every step."""

    def gradient(call):
        torch.manual_seed(0)
        x = torch.randn(64, requires_grad=True)
        y = call(x)
        junk = [torch.full((64,), 7.0) for _ in range(20)]
        del junk
        return torch.autograd.grad(y.sum(), x)[0]

    def fn(t):
        return nn.functional.rrelu(t.exp(), training=True)

    inverted = gradient(lambda x: revzoo.invertible_checkpoint(fn, torch.log, x))
    torch.testing.assert_close(inverted, gradient(fn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda size: nn.GroupNorm(1, size)])
def test_a_recomputed_step_in_an_inverted_one(norm, dtype):
    """The mean that a second norm saves is pure rounding error."""

    def net(memory):
        torch.manual_seed(0)
        inner = AdditiveCoupling(nn.Sequential(norm(4), norm(4), nn.Linear(4, 4)))
        inner.memory = memory if memory == "store" else "recompute"
        sequence = ReversibleSequence([inner], memory=None)
        outer = [AdditiveCoupling(nn.Sequential(nn.Linear(8, 8), sequence))]
        outer.append(AdditiveCoupling(nn.Linear(8, 8)))
        for step in outer:
            step.memory = memory
        return ReversibleSequence(outer, memory=None).to(dtype)

    x = torch.randn(4, 16, dtype=dtype)
    assert_same_training(net("invert"), net("store"), x, tolerance=1e-5)


def test_an_overflow_in_float16_is_not_drift_of_a_step_inside():
    """``GradScaler`` skips such a step; the recomputed one in a branch raised."""
    torch.manual_seed(0)
    inner = AdditiveCoupling(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    inner.memory = "recompute"
    sequence = ReversibleSequence([inner], memory=None)
    branches = [nn.Sequential(nn.Linear(8, 8), sequence), nn.Linear(8, 8), nn.Linear(8, 8)]
    nn.init.constant_(branches[-1].weight, 1e6)
    net = ReversibleSequence(list(map(AdditiveCoupling, branches)), memory=None)
    for step in net:
        step.memory = "invert"
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        y = net(x)
    assert not y.isfinite().all()
    y.float().square().sum().backward()


def test_integers_do_not_set_the_size_of_the_drift():
    """A stream of integers with the shape of the other one was taken for the summand."""

    class Scales(Invertible):
        def forward(self, x, m):
            return x * 3 + 1e5, m + 1

        def inverse(self, y, n):
            return (y - 1e5) / 3, n - 1

    net = ReversibleSequence([Scales(), Scales()], memory="invert")
    x = torch.randn(4, 16, requires_grad=True)
    y, _ = net(x, torch.zeros(4, 16, dtype=torch.int64))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 9))


def test_a_recomputed_step_that_does_not_repeat_itself():
    # Nothing was compared where a step is recomputed from its inputs.
    class Restless(nn.Module):
        def forward(self, x):
            return (x * (2 if is_replaying() else 1)).tanh()

    net = ReversibleSequence([AdditiveCoupling(Restless())], memory="recompute")
    with pytest.raises(DriftError, match="a recomputed stream is off by"):
        net(leaf_rows()).sum().backward()


def test_drift_is_relative_to_what_is_added():
    # A stream of zeros has no size of its own: rounding in the other made it "off by 5e300".
    torch.manual_seed(0)
    blocks = [ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)]
    net = ReversibleSequence(blocks)
    net(torch.cat((torch.zeros(3, 4), torch.randn(3, 4)), 1).requires_grad_()).sum().backward()
    assert max(drift(net).values()) < 1e-5


def test_figures_of_a_backward_pass_that_failed_are_dropped():
    net = linear_net()
    loss, bias = net(leaf_rows()).sum(), net[0][0].branch[0].bias

    def fail(_):
        raise KeyError("after the replay")

    bias.data.add_(1)
    handle = net[0][0].branch[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    handle.remove()
    bias.data.sub_(1)
    loss.backward()


class Zero(nn.Module):
    """A branch that saves its input."""

    def forward(self, x):
        return 0 * x.exp()


def test_the_drift_of_a_step_is_that_of_its_worst_stream():
    class Wrong(Invertible):
        def forward(self, x1, x2):
            return x1.exp(), x2.exp()

        def inverse(self, y1, y2):
            return y1.log() + 1e-4, y2.log()

    net = ReversibleSequence([AdditiveCoupling(Zero()), Wrong()])
    sum(t.sum() for t in net(*torch.ones(2, 3, 4, requires_grad=True))).backward()
    assert drift(net)["steps.1"] == pytest.approx(1e-4 / math.e, rel=0.1)


def pruned(norm, filters, *, seed, width=8):
    """A stem with filters of zeros, then three blocks."""
    torch.manual_seed(seed)
    stem = nn.Conv2d(3, 2 * width, 3, padding=1, bias=False)
    with torch.no_grad():
        stem.weight[filters] = 0
    chain = ReversibleSequence([relu_block(norm, width) for _ in range(3)])
    return nn.Sequential(stem, chain), torch.randn(8, 3, 12, 12)


@pytest.mark.parametrize("seed", range(3))
def test_pruned_filters_before_batch_norm(seed):
    """Rounding on constant channels, amplified by BatchNorm: the stem's gradient was 13 to 37 times
    off at a drift of 2e-5 of the stream."""
    net, x = pruned(nn.BatchNorm2d, [9, 12], seed=seed)
    assert_right_by_default(net, x)
    set_memory(net, "invert")
    for _ in range(4):  # a step stops looking only after passes without such a channel
        with pytest.raises(DriftError, match=r"a channel .* is off by .* of its spread"):
            net(x).square().mean().backward()


def assert_right_by_default(net, *x):
    """On the same words, ``store`` computes the same gradients, summed in another order."""
    found = []
    for mode in (None, "store"):
        if mode is not None:
            set_memory(net, mode, grid="auto")
        outputs = net(*x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(y.square().mean() for y in outputs)
        found.append(torch.autograd.grad(loss, list(net.parameters())))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_stream_of_zeros_before_group_norm(seed, groups):
    """As pruned filters before BatchNorm."""
    net, x = pruned(lambda c: nn.GroupNorm(groups, c), slice(8, None), seed=seed)
    assert_right_by_default(net, x)
    set_memory(net, "invert")
    with pytest.raises(DriftError):
        net(x).square().mean().backward()


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_zeros_before_rms_norm(seed):
    """As pruned filters before BatchNorm; the channels are in the last dimension."""
    torch.manual_seed(seed)

    def branch():
        layers = nn.RMSNorm(8), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False)
        return nn.Sequential(*layers)

    net = ReversibleSequence([ReversibleBlock(branch(), branch()) for _ in range(3)])
    x = torch.randn(4, 16, 8, requires_grad=True)
    assert_right_by_default(net, x, torch.zeros_like(x))
    set_memory(net, "invert")
    with pytest.raises(DriftError, match=r"a channel .* is off by .* of its spread"):
        sum(y.square().mean() for y in net(x, torch.zeros_like(x))).backward()


@pytest.mark.parametrize("last", [False, True], ids=["images", "tokens"])
def test_channels_that_are_small_or_mostly_zero_are_not_drift(last):
    """They count as much as the others, as long as they exceed rounding."""
    torch.manual_seed(0)
    scale = torch.logspace(-4, 0, 8)
    if last:
        net = ReversibleSequence([AdditiveCoupling(nn.Linear(8, 8)) for _ in range(8)])
        x = torch.randn(4, 64, 16) * scale.repeat(2)
    else:
        net = nn.Sequential(*[relu_block(nn.BatchNorm2d) for _ in range(4)])
        x = torch.randn(8, 16, 12, 12) * scale.repeat(2)[:, None, None]
        x = torch.where(torch.rand_like(x) > 0.01, 0, x)
    for layer in net.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            with torch.no_grad():  # values as small as the channel that they are added to
                layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.dim() - 1)))
    state = x.chunk(2, dim=-1 if last else 1) if last else (x,)
    out = net(*(t.requires_grad_() for t in state))
    (out[0] if last else out).square().mean().backward()


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_float16_that_overflows_is_a_skipped_step(mode):
    """The reconstruction from infinity was called drift, and the run ended."""

    class Overflows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale = 1.0

        def forward(self, x):
            return nn.functional.layer_norm(self.linear(x) * self.scale, (8,))

    class Spot(Overflows):
        def forward(self, x):  # at a single place, which no sample need hit
            value = self.linear(x)
            spot = torch.zeros_like(value)
            spot[3, 5] = 1
            return value + spot * (self.scale - 1) * 10

    for kind in (Overflows, Spot):
        torch.manual_seed(0)
        net = ReversibleSequence([ReversibleBlock(kind(), kind()) for _ in range(3)], memory=mode)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for scale in (1.0, 1e6, 1.0):
            net[1][0].branch.scale = scale
            before = [p.detach().clone() for p in net.parameters()]
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(16, 16)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            pairs = zip(before, net.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs) == (scale > 1)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("shape", [(6, 8), (4, 7, 8), (2, 8, 5, 5), (2, 8, 3, 3, 3)])
def test_the_guard_looks_at_values_whatever_the_default_device_is(mode, shape):
    """Its indices were made on the default device, and kept."""
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh()) for _ in range(2)], memory=mode)
    x = torch.randn(shape, requires_grad=True)
    with torch.device("meta"):
        sum(y.sum() for y in net(x, x)).backward()
    sum(y.sum() for y in net(x, x)).backward()


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_a_drift_without_limit_is_measured(mode):
    """An infinite limit also stopped the measuring."""

    class Restless(nn.Module):
        def forward(self, x):
            return (x * (2 if is_replaying() else 1)).sin()

    net = ReversibleSequence([AdditiveCoupling(Restless())], memory=mode)
    set_drift_limit(net, math.inf)
    net(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert drift(net)["steps.0"] > 0.1


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_a_stream_that_is_conjugated_lazily(mode):
    """The guard looked at its parts, which torch refuses."""

    class Conjugate(Invertible):
        streams = 1

        def forward(self, x):
            return (2 * x).conj()

        def inverse(self, y):
            return y.conj() / 2

    net = ReversibleSequence([Conjugate(), Conjugate(), Conjugate()], memory=mode)
    x = torch.complex(leaf_rows(), leaf_rows().sin()).detach().requires_grad_()
    (actual,) = torch.autograd.grad(net(x).sin().abs().sum(), x)
    (expected,) = torch.autograd.grad((8 * x.conj()).sin().abs().sum(), x)
    assert error([actual], [expected]) < 1e-12


@pytest.mark.parametrize("memory", ["recompute", "exact"])
def test_a_mask_drawn_outside_of_torch_is_noticed(memory):
    """Early stops compared values only: a mask that only the last operator read went unnoticed."""

    class Drops(nn.Module):
        def forward(self, x):
            keep = torch.from_numpy(np.random.default_rng().random(x.shape) < 0.5)
            return torch.where(keep, x.tanh(), 0.0)

    seq = ReversibleSequence([AdditiveCoupling(Drops())], memory=memory)
    _, y2 = seq(*torch.randn(2, 8, 64, requires_grad=True))
    with pytest.raises(DriftError):
        y2.sum().backward()
