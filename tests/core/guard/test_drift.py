"""The drift guard fires where reconstructions are wrong, and only there."""

import contextlib
import copy
import itertools
import random

import numpy as np
import pytest
import torch
from compare import assert_same_training, conv_net, images, linear_net, twin
from torch import nn

import revzoo
from revzoo import (
    AdditiveCoupling,
    DriftError,
    Invertible,
    ReversibleBlock,
    ReversibleSequence,
    drift,
    set_drift_limit,
    set_memory,
)
from revzoo.core import offload
from revzoo.core.guard import drift as guard
from revzoo.profiling.live import LiveMemory


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
