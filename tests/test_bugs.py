"""Each test describes one fault that was once there."""

import collections
import copy
import functools
import gc
import math
import threading
import types

import numpy as np
import pytest
import torch
from compare import error, linear_net, twin
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import profile

import revzoo
from revzoo import (
    AdditiveCoupling,
    DriftError,
    Invertible,
    Merge,
    NotInvertibleError,
    Reversed,
    ReversibleBlock,
    ReversibleSequence,
    Squeeze,
    check_inverse,
    checkpoint,
    create_model,
    drift,
    invertible_checkpoint,
    is_replaying,
    set_drift_limit,
    set_memory,
)
from revzoo.compat import memcnn
from revzoo.interop.foreign import read_tensors
from revzoo.models.components.lean import Lean
from revzoo.profiling.live import LiveMemory


def vectors(width=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, width, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(net, mode, x, *, grid=None):
    set_memory(net, mode, grid=grid)
    return torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])


@pytest.mark.parametrize("mode", ["offload", "invert"])
def test_a_branch_that_changes_what_it_has_saved(mode):
    """In ``recompute``, torch's checkpoint keeps aliases and does not look at their versions."""

    class Careless(nn.Module):
        def forward(self, x):
            h = x.tanh()
            saved = h.sin()
            h.add_(1)
            return saved + h

    net = ReversibleSequence([AdditiveCoupling(Careless()) for _ in range(2)], memory=mode)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(vectors()).sum().backward()


def test_random_numbers_of_a_step_without_a_replay_of_its_own():
    # Its inverse drew the forward pass's random numbers, its recorded forward pass the next ones.
    class Noisy(Invertible):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

        def forward(self, x1, x2):
            return x2, x1 + nn.functional.dropout(x2.exp() * self.weight)

        def inverse(self, y1, y2):
            return y2 - nn.functional.dropout(y1.exp() * self.weight), y1

    net, results = ReversibleSequence([Noisy() for _ in range(3)]), []
    for mode in ("invert", "store"):
        torch.manual_seed(3)
        results.append(gradients(net, mode, vectors()))
    assert error(*results) < 1e-12


def test_offload_sees_parameters_changed_on_the_cpu():
    # save_on_cpu keeps an alias of what is on the CPU already and checks no version.
    net = linear_net()
    set_memory(net, "offload")
    y = net(vectors())
    with torch.no_grad():
        net[0][0].branch[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_coupling_derived_from_the_additive_one(scale):
    # Its value was overwritten by the reconstructed stream before combine was recorded.
    class Scaled(AdditiveCoupling):
        def __init__(self, branch):
            super().__init__(branch)
            self.scale = nn.Parameter(torch.tensor(scale))

        def combine(self, x1, value):
            return x1 + self.scale * value

        def uncombine(self, y2, value):
            return y2 - self.scale * value

    torch.manual_seed(0)
    net = ReversibleSequence([Scaled(nn.Linear(4, 4)) for _ in range(3)]).double()
    x = vectors()
    assert error(gradients(net, "invert", x), gradients(net, "store", x)) < 1e-12


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_value_that_is_expanded(mode):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).mean(0, keepdim=True).expand_as(x)

    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(Mean()) for _ in range(3)]).double()
    x, grid = vectors(), 14 if mode == "exact" else None
    expected = gradients(net, "store", x, grid=grid)
    assert error(gradients(net, mode, x, grid=grid), expected) < 1e-12


def test_a_recomputed_step_that_does_not_repeat_itself():
    # Nothing was compared where a step is recomputed from its inputs.
    class Restless(nn.Module):
        def forward(self, x):
            return (x * (2 if is_replaying() else 1)).tanh()

    net = ReversibleSequence([AdditiveCoupling(Restless())], memory="recompute")
    with pytest.raises(DriftError, match="a recomputed stream is off by"):
        net(vectors()).sum().backward()


def test_drift_is_relative_to_what_is_added():
    # A stream of zeros has no size of its own: rounding in the other made it "off by 5e300".
    torch.manual_seed(0)
    blocks = [ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)]
    net = ReversibleSequence(blocks)
    net(torch.cat((torch.zeros(3, 4), torch.randn(3, 4)), 1).requires_grad_()).sum().backward()
    assert max(drift(net).values()) < 1e-5


def test_steps_that_run_steps_on_their_own_input():
    # The inner steps joined the chain that the outer one was about to continue.
    class Scaled(Invertible):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.tensor(1.5))

        def forward(self, *state):
            return tuple(t * self.scale for t in self.inner(*state))

        def inverse(self, *state):
            return self.inner.inverse(*(t / self.scale for t in state))

    net = ReversibleSequence([Scaled(linear_net(1, seed=i)) for i in range(3)]).double()
    x = vectors()
    assert error(gradients(net, "invert", x), gradients(net, "store", x)) < 1e-12


def test_a_chain_does_not_continue_across_detach():
    a, b = linear_net(seed=0), linear_net(seed=1)
    y = a(*vectors().chunk(2, dim=1))
    b(*(t.detach() for t in y))
    with torch.no_grad():
        b[0][0].branch[0].bias.add_(1)
    (y[0] + y[1]).sum().backward()  # b is none of its business


def test_the_mode_is_that_of_the_forward_pass():
    net = linear_net().float()
    x = vectors().detach().float().requires_grad_()
    expected = gradients(net, "exact", x)
    set_memory(net, "exact")
    loss = net(x).square().sum()
    set_memory(net, "store")  # the replay must still round
    actual = torch.autograd.grad(loss, [x, *net.parameters()])
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


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


@pytest.mark.parametrize("name", ["state", "step", "needs", "fn", "outputs", "record", "inputs"])
def test_keyword_arguments_of_any_name(name):
    class Takes(nn.Module):
        def forward(self, x, **context):
            return (x * context[name]).tanh()

    net = ReversibleSequence([AdditiveCoupling(Takes()) for _ in range(2)])
    net(vectors(), **{name: torch.tensor(2.0)}).sum().backward()


NORM = nn.BatchNorm1d(4).double()


@pytest.mark.parametrize("run", [lambda f, x: f(x), checkpoint])
def test_modules_that_a_function_names_as_globals(run):
    """As in a notebook. A replay counted the batch once more."""
    before = NORM.num_batches_tracked.item()
    run(lambda x: NORM(x).sin(), vectors(4)).sum().backward()
    assert NORM.num_batches_tracked == before + 1


def test_check_inverse_reports_nan():
    class Broken(Invertible):
        def forward(self, x1, x2):
            return x1, x2

        def inverse(self, y1, y2):
            return y1, y2 * float("nan")

    report = check_inverse(ReversibleSequence([Broken()]), torch.randn(2, 4))
    assert not report.worst(torch.float64) < 1


def test_check_inverse_on_a_grid():
    net = linear_net().float()
    set_memory(net, "exact")
    report = check_inverse(net, torch.randn(4, 8))
    assert {row.dtype for row in report} == {torch.float64, torch.float32, torch.bfloat16}
    assert all(report.worst(dtype) == 0 for dtype in (torch.float32, torch.bfloat16))


def test_partial_graphs_in_the_order_that_cuts_the_tape_first():
    net, results = linear_net(), []
    for mode in ("invert", "store"):
        other, x = twin(net, mode), vectors()
        y1, y2 = other(*x.chunk(2, dim=1))
        first = torch.autograd.grad(y1.sum(), [other[0][0].branch[0].weight, x])
        last = torch.autograd.grad(y2.square().sum(), [other[2][1].branch[2].weight])
        results.append([*first, *last])
    assert error(*results) < 1e-12


def test_a_frozen_weight_changed_before_the_backward():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))]).double().requires_grad_(False)
    y = net(vectors())
    net[0].branch.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_figures_of_a_backward_pass_that_failed_are_dropped():
    net = linear_net()
    loss, bias = net(vectors()).sum(), net[0][0].branch[0].bias

    def fail(_):
        raise KeyError("after the replay")

    bias.data.add_(1)
    handle = net[0][0].branch[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    handle.remove()
    bias.data.sub_(1)
    loss.backward()


def test_a_retained_graph_costs_one_replay_a_step():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(is_replaying())
            return x.sin()

    net = ReversibleSequence([AdditiveCoupling(Counting()) for _ in range(5)])
    net(vectors()).sum().backward(retain_graph=True)
    assert calls == [False] * 5 + [True] * 5


def test_spectral_norm_and_two_backward_passes():
    results = []
    for mode in ("invert", "store"):
        torch.manual_seed(0)
        spectral = nn.utils.parametrizations.spectral_norm
        steps = [AdditiveCoupling(spectral(nn.Linear(4, 4))) for _ in range(2)]
        net = ReversibleSequence(steps, memory=mode).double()
        loss = net(vectors()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([p.grad for p in net.parameters()])
    assert error(*results) < 1e-12


def test_streams_are_float32_under_autocast():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(torch.randn(2, 8).bfloat16()).dtype == torch.float32


def test_a_sequence_of_one_stream_takes_and_gives_a_bare_tensor():
    class Double(Invertible):
        streams = 1

        def forward(self, x):
            return 2 * x

        def inverse(self, y):
            return y / 2

    net, x = ReversibleSequence([Double(), Double()]), vectors()
    assert torch.equal(net(x), 4 * x)
    assert torch.equal(net.inverse(net(x)), x)


def test_tokens_are_split_along_another_dimension():
    torch.manual_seed(0)
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4))], dim=-1)
    x = torch.randn(2, 7, 8)
    y1, y2 = net(*x.chunk(2, dim=-1))
    assert torch.equal(net(x), torch.cat((y1, y2), dim=-1))
    assert torch.allclose(net.inverse(net(x)), x, atol=1e-6)


def test_zeros_appended_by_a_stage_of_one_block_are_guarded_in_the_next_stage_too():
    """The second coupling after a padding amplified rounding where it was in another stage."""
    model = create_model("irevnet13", units=(1, 2), memory="invert")
    modes = [m.memory for m in model.modules() if isinstance(m, AdditiveCoupling)]
    assert modes == ["recompute", "recompute", "invert"]


def test_stochastic_depth_in_training_has_no_inverse():
    """Only dropout was refused: the image came back wrong, without an error."""
    model = create_model("irevnet13", drop_path_rate=0.5, memory="exact")
    z = model.encode(torch.zeros(2, 3, 8, 8))
    with pytest.raises(NotInvertibleError, match=r"drop_path drops values with p=.*call eval\(\)"):
        model.inverse(z)
    x = torch.ones(1, 3, 8, 8)
    assert torch.equal(model.eval().inverse(model.encode(x)), x)


def test_reversing_leaves_the_module_its_modes_and_names():
    encoder = ReversibleSequence([AdditiveCoupling(nn.Tanh())], memory="exact")
    decoder = Reversed(encoder)
    assert (encoder[0].memory, encoder[0].grid, encoder[0].label) == ("exact", "auto", "steps.0")
    assert (decoder[0].memory, decoder[0].grid) == ("exact", "auto")
    x = torch.randint(-9, 9, (2, 4)) / 8
    assert torch.equal(decoder(encoder(x)), x)


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


def test_a_sequence_that_ends_in_one_stream_is_inverted():
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh()), Merge()])
    x = torch.randn(2, 3, 4)
    back = net.inverse(net(*x))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(back, x, strict=True))


def test_a_tensor_beside_the_weights_does_not_make_them_unreadable(tmp_path):
    state = {"weight": torch.ones(2)}
    path = tmp_path / "model_best.pth.tar"
    torch.save({"epoch": 3, "state_dict": state, "best_acc1": torch.tensor(1.0)}, path)
    assert read_tensors(path).keys() == state.keys()


class Attends(nn.Module):
    """Its kernels and saved tensors depend on the strides of its input."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Remembers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


class Permutes(nn.Module):
    """As in ConvNeXt: channels last for the linear layers, and back; a mask drawn in between."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x.mT), 0.3).mT


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


def gradients_of_streams(net, mode, state, *, grid=None, seed=3):
    set_memory(net, mode, grid=grid)
    torch.manual_seed(seed)
    loss = sum((y.square() * (i + 1)).sum() for i, y in enumerate(net(*state)))
    return torch.autograd.grad(loss, [*state, *net.parameters()])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("branch", [Attends, Remembers, Permutes])
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_streams_have_the_strides_of_the_forward_pass_again(branch, layout, mode):
    """Reconstructed streams had a different layout: replays saved other tensors or drew other
    masks."""
    torch.manual_seed(0)
    mixed = [branch(8), nn.Linear(8, 8), Permutes(8), branch(8)]
    net = ReversibleSequence([AdditiveCoupling(b) for b in mixed]).double()
    state, grid = streams(layout), 14 if mode == "exact" else None
    expected = gradients_of_streams(net, "store", state, grid=grid)
    actual = gradients_of_streams(net, mode, state, grid=grid)
    assert error(actual, expected) < 1e-11


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_any_kind_sees_the_strides_of_the_forward_pass(layout):
    """A step's own inverse returns any layout that its operators happen to give."""

    class Watched(Invertible):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x1, x2):
            self.seen.append((x1.stride(), x2.stride()))
            return x1.exp(), x2 * x1.sigmoid()

        def inverse(self, y1, y2):
            x1 = y1.log()
            return x1.mT.contiguous().mT, (y2 / x1.sigmoid()).flip(0).flip(0)

    steps = [Watched() for _ in range(2)]
    x = streams(layout)
    seq = ReversibleSequence(steps)
    sum(y.sum() for y in seq(*x)).backward()
    for step in steps:
        first, *rest = step.seen
        assert rest == [first]


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_value_that_overlaps_itself_in_a_storage_of_its_own_size(mode):
    """The replay subtracted in place from one row that stood for all."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)[:1].expand_as(x)

    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(First()) for _ in range(3)]).double()
    x, grid = vectors(), 14 if mode == "exact" else None
    expected = gradients(net, "store", x, grid=grid)
    assert error(gradients(net, mode, x, grid=grid), expected) < 1e-12


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_an_expanded_stream_of_a_compiled_branch(mode):
    """It was copied into memory with overlapping elements, which copy_() refuses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(8, 8)) for _ in range(3)]).double()
    state, grid = streams("expanded"), 14 if mode == "exact" else None
    expected = gradients_of_streams(net, "store", state, grid=grid)
    for step in net:
        step.branch.compile(backend="aot_eager")
    assert error(gradients_of_streams(net, mode, state, grid=grid), expected) < 1e-12
    torch._dynamo.reset()


class Careless(Invertible):
    def forward(self, x1, x2):
        return x2, x1 + x2.sin()

    def inverse(self, y1, y2):
        return y2.sub_(y1.sin()), y1


class CarelessCoupling(AdditiveCoupling):
    def uncombine(self, y2, value):
        return y2.sub_(value)


class Pass(Invertible):
    """Costs nothing and saves nothing: inverted, but never replayed."""

    def forward(self, x1, x2):
        return x2, x1

    inverse = forward


@pytest.mark.parametrize("last", [[], [Pass()]], ids=["replayed", "inverted"])
@pytest.mark.parametrize("step", [Careless, lambda: CarelessCoupling(nn.Tanh())])
def test_an_inverse_that_works_in_place_is_refused(step, last):
    """It changed the output that the caller still held."""
    net = ReversibleSequence(
        [AdditiveCoupling(nn.Tanh()), step(), AdditiveCoupling(nn.Tanh()), *last]
    )
    y = net(*streams("dense"))
    before = [t.detach().clone() for t in y]
    with pytest.raises(RuntimeError, match=r"inverse of steps\.1 .*in place.*out of place"):
        sum(t.sum() for t in y).backward()
    with pytest.raises(RuntimeError, match=r"inverse of steps\.1 .*in place.*out of place"):
        net.inverse(*(t.clone() for t in before))
    with pytest.raises(RuntimeError, match=r"inverse.*in place.*out of place"):
        check_inverse(net, *(t.detach().float() for t in before))


def relu_block(norm, width=8):
    def branch():
        return nn.Sequential(
            *(norm(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
            *(norm(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
        )

    return ReversibleBlock(branch(), branch())


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


@pytest.mark.parametrize("mode", ["store", "offload", "recompute", "invert", "exact"])
@pytest.mark.parametrize(
    "where",
    ["meta", "fake"],
)
def test_training_steps_without_values(mode, where):
    """The guard read figures that have no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    context = FakeTensorMode() if where == "fake" else torch.device("meta")
    with context:
        blocks = [relu_block(nn.BatchNorm2d) for _ in range(2)]
        net = ReversibleSequence(blocks, memory=mode)
        x = torch.randn(2, 16, 8, 8, requires_grad=True)
        net(x).square().mean().backward()
        net.inverse(net(x))
        net.eval()
        net.inverse(net(x))
    assert x.grad.shape == x.shape
    run = ReversibleSequence([relu_block(nn.BatchNorm2d)], memory=mode)
    run(torch.randn(2, 16, 8, 8, requires_grad=True)).mean().backward()  # nothing fake was cached


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


def test_check_inverse_where_an_inverse_lacks_a_dtype():
    """It crashed on torch.linalg, which knows no bfloat16."""

    class Mixes(Invertible):
        streams = 1

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

        def forward(self, x):
            return x @ self.weight

        def inverse(self, y):
            return torch.linalg.solve(self.weight, y, left=False)

    report = check_inverse(ReversibleSequence([Mixes()]), torch.randn(3, 4))
    assert {row.dtype for row in report} == {torch.float64, torch.float32}
    assert report.worst(torch.float32) < 1e-5
    assert "bfloat16" in str(report)
    assert "not implemented" in report.skipped[torch.bfloat16]
    with pytest.raises(ValueError, match=r"bfloat16 was not checked: .*not implemented"):
        report.worst(torch.bfloat16)

    class Broken(Mixes):
        def inverse(self, y):
            raise RuntimeError("broken in every type")

    with pytest.raises(RuntimeError, match="broken in every type"):
        check_inverse(ReversibleSequence([Broken()]), torch.randn(3, 4))


@pytest.mark.parametrize("mode", ["offload", "recompute", "invert", "exact"])
@pytest.mark.parametrize("kind", ["step", "pre", "global", "in place"])
def test_a_forward_hook_on_a_step_that_changes_its_streams(mode, kind):
    """The replay ignored it: gradients of a different loss. Such a step is recomputed."""
    net, x = linear_net().float(), vectors().detach().float().requires_grad_()
    step = net[1][0]

    def double(module, args, outputs=None):
        state = args if outputs is None else outputs
        if module is not step:
            return None
        if kind == "in place":
            state[1].mul_(2)
            return None
        return tuple(2 * t for t in state)

    handle = {
        "step": step.register_forward_hook,
        "in place": step.register_forward_hook,
        "pre": step.register_forward_pre_hook,
        "global": nn.modules.module.register_module_forward_hook,
    }[kind](double)
    grid = 14 if mode == "exact" else None
    try:
        expected = gradients(net, "store", x, grid=grid)
        if kind == "global" and mode in ("invert", "exact"):
            with pytest.raises(DriftError):
                gradients(net, mode, x, grid=grid)
        else:
            assert error(gradients(net, mode, x, grid=grid), expected) < 1e-5
    finally:
        handle.remove()


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_hooks_on_a_step_that_only_look_are_welcome(mode):
    net, x, seen = linear_net(), vectors(), []
    net[1][0].register_forward_pre_hook(lambda m, args: seen.append(args))
    net[1][0].register_forward_hook(lambda m, args, outputs: seen.append(outputs))
    net[1][0].register_full_backward_hook(lambda m, gin, gout: seen.append(gout))
    assert error(gradients(net, mode, x), gradients(net, "store", x)) < 1e-12
    assert len(seen) >= 6


def test_a_hook_on_a_step_with_its_log_determinant():
    """There the step is called inside another one."""
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))])
    net[0].register_forward_hook(lambda m, args, outputs: tuple(2 * t for t in outputs))
    x, found = torch.randn(2, 8, requires_grad=True), []
    for mode in ("invert", "store"):
        set_memory(net, mode)
        y, _ = net.forward_with_log_det(x)
        found.append(torch.autograd.grad(y.square().sum(), [x, *net.parameters()]))
    assert error(*found) < 1e-5


def kept_bytes(run):
    """Bytes alive between forward and backward, besides the result of ``run``."""
    with LiveMemory() as memory:
        outputs = run()
        own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
        kept = memory.now - sum(own.values())
        sum(t.sum() for t in outputs).backward()
    return kept


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_step_called_by_itself_keeps_what_its_mode_says(mode):
    """It silently kept as much as ``store``."""
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(8, 8), *[nn.Tanh() for _ in range(9)])
    coupling = AdditiveCoupling(branch)
    x1, x2 = torch.randn(2, 4000, 8).requires_grad_()
    x = x1.detach().requires_grad_(), x2.detach().requires_grad_()
    results, kept = [], []
    for m in ("store", mode):
        set_memory(coupling, m, grid="auto" if mode == "exact" else None)
        kept.append(kept_bytes(lambda: coupling(*x)))
        results.append([t.grad for t in x])
        for t in x:
            t.grad = None
    assert error(*results) < 1e-6
    assert kept[1] < kept[0] / 3


def test_steps_called_one_after_the_other_form_a_chain():
    torch.manual_seed(0)
    steps = [AdditiveCoupling(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(12)]
    x = torch.randn(4000, 8, requires_grad=True)

    def run(depth):
        state = x, x
        for step in steps[:depth]:
            state = step(*state)
        return state

    few, many = kept_bytes(lambda: run(3)), kept_bytes(lambda: run(12))
    assert many - few < 4000 * 8 * 4


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_layer_given_another_number_of_streams(streams):
    """It ran on all of them."""
    layer = Squeeze(2, streams=3)
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(ValueError, match=rf"Squeeze got {streams} streams, expected 3"):
        layer(*[x] * streams)
    with pytest.raises(ValueError, match=rf"got {streams} streams, .* 3"):
        ReversibleSequence([layer])(*[x] * streams)


@pytest.mark.parametrize("mode", ["recompute", "invert", "offload"])
def test_a_functional_transform_inside_a_branch(mode):
    """torch's own error asked to open an issue."""

    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.func.grad(lambda x: self.linear(x).tanh().sum())(x)

    net = ReversibleSequence([AdditiveCoupling(Slope())], memory=mode).double()
    with pytest.raises(RuntimeError, match=r"steps\.0 .*torch\.func.*use memory='store'"):
        net(vectors())
    set_memory(net, "store")
    net(vectors()).sum().backward()


def nested_net(outer, mode, *, inner=2, width=8):
    torch.manual_seed(0)

    def branch():
        steps = [
            AdditiveCoupling(nn.Sequential(nn.Linear(width, width), nn.Tanh()))
            for _ in range(inner)
        ]
        return nn.Sequential(ReversibleSequence(steps), nn.LayerNorm(2 * width))

    return ReversibleSequence([AdditiveCoupling(branch()) for _ in range(outer)], memory=mode)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_sequence_inside_a_branch_takes_no_more_memory_with_depth(mode, which):
    """The inner sequence's last state was kept for every step of the outer one."""
    peaks = {}
    for depth in (4, 32):
        options = {"outer": depth} if which == "outer" else {"outer": 4, "inner": depth}
        net = nested_net(mode=mode, **options)
        net(*torch.randn(2, 3, 16))[0].sum().backward()  # the first pass measures each sum
        x1, x2 = torch.randn(2, 2000, 16)
        state = x1.requires_grad_(), x2.requires_grad_()
        with LiveMemory() as memory:
            sum(t.square().sum() for t in net(*state)).backward()
            own = sum(p.nbytes for p in net.parameters()) + 2 * x1.nbytes
            peaks[depth] = memory.peak - own
    stream = 2000 * 16 * 4
    grows = 28 * stream if mode == "recompute" else 0  # inputs of each step are what it keeps
    assert peaks[32] - peaks[4] < grows + 2 * stream


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_gradients_of_a_sequence_inside_a_branch(mode):
    """Also a second time, for some of the parameters, and for gradients in ``recompute``."""
    net, results = nested_net(3, mode).double(), []
    grid = 14 if mode == "exact" else None
    for m in ("store", mode):
        set_memory(net, m, grid=grid)
        x = torch.cat((vectors(), vectors()), 1).repeat(1, 2).detach().requires_grad_()
        loss = net(x).square().sum()
        first = torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True)
        last = torch.autograd.grad(loss, list(net[2].parameters()), retain_graph=True)
        results.append([*first, *last])
        if mode == "recompute":
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            results[-1] += torch.autograd.grad(slope.square().sum(), [x, *net.parameters()])
    assert error(*results) < 1e-10


def test_the_mode_of_a_sequence_inside_a_branch_is_that_of_the_forward_pass():
    """In another mode, its replay saves other tensors."""
    net = nested_net(3, "invert").double()
    x = torch.cat((vectors(), vectors()), 1).repeat(1, 2).detach().requires_grad_()
    expected = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    loss = net(x).square().sum()
    set_memory(net, "store")
    assert error(torch.autograd.grad(loss, [x, *net.parameters()]), expected) < 1e-12


REPLAYED = ["recompute", "invert"]


def compared(build, mode, *, steps=3, between=None, size=4):
    """Train a net in a mode and in store; ``between`` acts between forward and backward."""
    results = []
    for m in (mode, "store"):
        torch.manual_seed(0)
        net = ReversibleSequence(build(), memory=m).double()
        found = []
        for seed in range(steps):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(5, 2 * size, dtype=torch.float64, generator=generator)
            loss = net(x.requires_grad_()).square().sum()
            if between is not None:
                between(net)
            loss.backward()
            found.append(x.grad)
        found += [p.grad for p in net.parameters() if p.grad is not None]
        results.append([*found, *(b.double() for b in net.buffers())])
    return error(*results)


@pytest.mark.parametrize("mode", REPLAYED)
@pytest.mark.parametrize("how", ["derived", "hook", "reader", "function"])
def test_running_statistics_that_influence_the_output_in_training(mode, how):
    """Only torch's own layers ignore them in training. What else reads theirs is reported."""

    class Renorm(nn.modules.batchnorm._NormBase):
        def forward(self, x):
            mean, var = x.mean(0), x.var(0)
            with torch.no_grad():
                r = (var / self.running_var).sqrt()
                d = (mean - self.running_mean) / self.running_var.sqrt()
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(var, 0.1)
            return (x - mean) / var.sqrt() * r + d

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x) * self.norm.running_var.clone()

    class Functional(nn.Module):  # F.batch_norm changes its arguments without a new version
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x):
            y = nn.functional.batch_norm(x, self.mean, self.var, training=True)
            return y + self.mean.clone()

    def branch():
        if how == "derived":
            return Renorm(4)
        if how == "reader":
            return Reader()
        norm = nn.BatchNorm1d(4)
        norm.register_forward_hook(lambda m, _, y: y * m.running_var.clone())
        return norm

    if how == "function":
        branch = Functional
    if how in ("hook", "reader"):
        with pytest.raises(DriftError):
            compared(lambda: [AdditiveCoupling(branch()) for _ in range(3)], mode)
    else:
        assert compared(lambda: [AdditiveCoupling(branch()) for _ in range(3)], mode) < 1e-12


@pytest.mark.parametrize("mode", REPLAYED)
def test_buffers_that_a_kernel_changes_without_a_new_version(mode):
    """A replay started from the changed ones."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x):
            y = nn.functional.batch_norm(x, self.mean, self.var, training=True)
            return (y + self.mean.clone()).tanh()

    assert compared(lambda: [AdditiveCoupling(Scaled())], mode) < 1e-12


@pytest.mark.parametrize("mode", REPLAYED)
@pytest.mark.parametrize("how", ["alias", "partial", "import", "update"])
def test_statistics_that_functions_of_torch_update(mode, how):
    """A replay updated them again."""
    alias = nn.functional.batch_norm

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))
            self.normalize = functools.partial(nn.functional.batch_norm, training=True)

        def forward(self, x):
            from torch import batch_norm_update_stats as update
            from torch.nn.functional import batch_norm as imported

            y = self.linear(x)
            if how == "alias":
                return alias(y, self.mean, self.var, training=True)
            if how == "partial":
                return self.normalize(y, self.mean, self.var)
            if how == "import":
                return imported(y, self.mean, self.var, training=True)
            mean, _ = update(y.detach(), self.mean, self.var, 0.1)
            return y - mean

    assert compared(lambda: [AdditiveCoupling(Own()) for _ in range(3)], mode) < 1e-12


CREATES = pytest.mark.filterwarnings("ignore:lazy layers have no weights yet:UserWarning")


@CREATES
@pytest.mark.parametrize("mode", REPLAYED)
@pytest.mark.parametrize("kind", [nn.LazyBatchNorm1d, nn.LazyInstanceNorm1d])
def test_statistics_that_the_first_pass_creates(mode, kind):
    """The replay updated them again, and InstanceNorm read its size before it was set."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = kind(affine=True, track_running_stats=True).double()

        def forward(self, x):
            return self.norm(x[..., None].expand(*x.shape, 2).cos()).mean(-1)

    assert compared(lambda: [AdditiveCoupling(Normed()) for _ in range(3)], mode) < 1e-12


@pytest.mark.parametrize("mode", ["offload", *REPLAYED])
@pytest.mark.parametrize("kind", ["buffer", "made"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_in_a_branch(mode, kind, layout):
    """They have no storage to identify them: "Cannot access storage of SparseTensorImpl"."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("adjacency", torch.eye(5).to_sparse(layout=layout))

        def forward(self, x):
            a = self.adjacency.to(x.dtype)
            if kind == "made":
                a = (torch.eye(5, dtype=x.dtype) * 2).to_sparse(layout=layout)
            return (torch.sparse.mm(a, x) @ self.weight).tanh()

    results = []
    for m in (mode, "store"):
        torch.manual_seed(0)
        net = ReversibleSequence([AdditiveCoupling(Graph()) for _ in range(3)], memory=m)
        results.append(gradients(net.double(), m, vectors()))
    assert error(*results) < 1e-12


@pytest.mark.parametrize("mode", REPLAYED)
@pytest.mark.parametrize("around", ["forward", "backward"])
def test_the_default_device_is_that_of_the_forward_pass(mode, around):
    """A replay put a branch's tensors in place of those that the caller of backward() expected."""

    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x):
            self.seen.append(torch.arange(4).device.type)
            return x.sin()

    net = ReversibleSequence([AdditiveCoupling(Where())], memory=mode)
    set_drift_limit(net, math.inf)
    x = vectors()
    forward, backward = ("meta", "cpu") if around == "forward" else ("cpu", "meta")
    with torch.device(forward):
        loss = net(x).sum()
    with torch.device(backward):
        loss.backward()
        assert torch.empty(0).device.type == backward
    assert net[0].branch.seen == [forward, forward]


@pytest.mark.parametrize("mode", REPLAYED)
def test_the_default_device_set_for_good_is_that_of_the_forward_pass(mode):
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh())], memory=mode)
    set_drift_limit(net, math.inf)
    seen = []
    net[0].branch.register_forward_pre_hook(lambda *_: seen.append(torch.empty(0).device.type))
    loss = net(vectors()).sum()
    torch.set_default_device("meta")
    try:
        loss.backward()
    finally:
        torch.set_default_device(None)
    assert seen == ["cpu", "cpu"]


@pytest.mark.parametrize("mode", ["store", "offload", *REPLAYED])
def test_training_on_the_meta_device(mode):
    net = ReversibleSequence(
        [AdditiveCoupling(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))) for _ in range(2)],
        memory=mode,
    ).to("meta")
    set_drift_limit(net, math.inf)
    with torch.device("meta"):
        net(torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert all(p.grad.is_meta for p in net.parameters())


@pytest.mark.parametrize("mode", ["store", *REPLAYED])
@pytest.mark.parametrize("inside", [True, False])
def test_training_with_fake_tensors(mode, inside):
    """Their random states were compared, which a fake tensor refuses."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        branches = [nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)]
        net = ReversibleSequence([AdditiveCoupling(b) for b in branches], memory=mode)
        set_drift_limit(net, math.inf)
        x = torch.randn(5, 8, requires_grad=True)
    if not inside:
        net(x).sum().backward()
        return
    with fake:
        net(x).sum().backward()
    assert all(isinstance(p.grad, FakeTensor) for p in net.parameters())


@pytest.mark.parametrize("mode", REPLAYED)
def test_a_model_converted_before_the_backward_is_an_error(mode):
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))], memory=mode)
    loss = net(torch.randn(5, 8, requires_grad=True)).sum()
    net.double()
    with pytest.raises(RuntimeError, match="dtype"):
        loss.backward()


@CREATES
@pytest.mark.parametrize("mode", ["store", "offload", *REPLAYED])
def test_a_lazy_layer_in_a_branch(mode):
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(nn.LazyLinear(4)) for _ in range(2)], memory=mode)
    net(torch.ones(3, 8))
    reference = copy.deepcopy(net)
    torch.manual_seed(1)
    lazy = ReversibleSequence([AdditiveCoupling(nn.LazyLinear(4)) for _ in range(2)], memory=mode)
    x = torch.randn(5, 8, requires_grad=True)
    loss = lazy(x).square().sum()
    reference.load_state_dict(lazy.state_dict())
    set_memory(reference, "store")
    actual = torch.autograd.grad(loss, [x, *lazy.parameters()])
    expected = torch.autograd.grad(reference(x).square().sum(), [x, *reference.parameters()])
    assert error(actual, expected) < 1e-5
    assert error(gradients(lazy, mode, x), expected) < 1e-5


@pytest.mark.parametrize("mode", REPLAYED)
def test_a_lazy_layer_beside_dropout(mode):
    """Its initialisation draws random numbers, but a replay would not."""

    def branch():
        return nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5))

    with pytest.warns(UserWarning, match=r"keep their activations.* torch\.no_grad\(\) first"):
        found = compared(lambda: [AdditiveCoupling(branch()) for _ in range(3)], mode)
    assert found < 1e-12


@CREATES
@pytest.mark.parametrize("mode", REPLAYED)
def test_only_steps_with_lazy_layers_keep_their_activations(mode):
    def kept(*kinds):
        branches = [nn.Sequential(kind(64), nn.Tanh(), nn.Linear(64, 64)) for kind in kinds]
        net = ReversibleSequence(map(AdditiveCoupling, branches), memory=mode)
        set_drift_limit(net, None)
        x = torch.randn(256, 128, requires_grad=True)
        found = []
        for _ in range(2):
            with LiveMemory() as memory:
                y = net(x)
            found.append(memory.now)
            y.sum().backward()
        return found

    plain, lazy = functools.partial(nn.Linear, 64), nn.LazyLinear
    first, later = kept(plain, lazy, plain, plain)
    assert first > later  # the second branch's activations
    assert later == pytest.approx(kept(plain, plain, plain, plain)[1], rel=0.01)


@CREATES
@pytest.mark.parametrize("mode", REPLAYED)
def test_a_lazy_layer_changed_before_its_first_backward_is_an_error(mode):
    net = ReversibleSequence([AdditiveCoupling(nn.LazyLinear(4))], memory=mode)
    loss = net(torch.randn(5, 8, requires_grad=True)).sum()
    with torch.no_grad():
        net[0].branch.weight.mul_(1 + 1e-5)
    with pytest.raises(RuntimeError, match=r"inplace|expected version"):
        loss.backward()


class Masked(nn.Module):
    """A large buffer that changes in place on demand."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(2**15))
        self.changes = False

    def forward(self, x):
        if self.changes:
            self.mask.mul_(0.5)
        return (x * self.mask[:4]).tanh()


@pytest.mark.parametrize("mode", REPLAYED)
def test_large_buffers_that_stay_as_they_are_are_not_copied(mode):
    """Each forward pass copied every buffer: four masks of 16 MB took 38 ms instead of 1.3."""
    net = ReversibleSequence([AdditiveCoupling(Masked()) for _ in range(2)], memory=mode)
    net(vectors().float()).sum().backward()
    with profile(record_shapes=True) as profiler:
        net(vectors().float()).sum().backward()
        torch.zeros(2**15).clone()
    copies = [e for e in profiler.events() if e.name == "aten::clone"]
    assert sum(e.input_shapes[0] == [2**15] for e in copies) == 1  # the test's own


@pytest.mark.parametrize("mode", REPLAYED)
def test_a_large_buffer_that_forward_changes_in_place_is_an_error(mode):
    net = ReversibleSequence([AdditiveCoupling(Masked())], memory=mode)
    net[0].branch.changes = True
    loss = net(vectors().float()).sum()
    with pytest.raises(RuntimeError, match=r"'mask' of steps\.0 .*memory='store'"):
        loss.backward()
    assert net[0].branch.mask[0] == 0.5


@pytest.mark.parametrize("way", ["children", "get_submodule", "_modules"])
def test_statistics_of_submodules_that_a_function_walks_over(way):
    """As above, if the model that calls invertible_checkpoint finds them by walking."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8).double()

        def find(self):
            if way == "children":
                return next(iter(self.children()))
            return self.get_submodule("norm") if way == "get_submodule" else self._modules["norm"]

        def forward(self, *state):
            return invertible_checkpoint(
                lambda a, b: (b, a + self.find()(b).tanh()),
                lambda a, b: (b - self.find()(a).tanh(), a),
                *state,
            )

    net, x = Model(), vectors()
    net(x, x.sin())[1].square().sum().backward()
    assert net.norm.num_batches_tracked == 1


@pytest.mark.parametrize("way", ["data", "numpy"])
@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_a_buffer_updated_around_autograd(mode, way):
    """Moving averages that code updates by ``.data``, without a new version, moved twice."""

    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(8, dtype=torch.float64))

        def forward(self, x):
            if way == "data":
                self.mean.data.mul_(0.9)
            else:
                self.mean.numpy()[...] *= 0.9
            return x.tanh() * self.mean

    results = []
    for m in (mode, "store"):
        net = ReversibleSequence([AdditiveCoupling(Average()) for _ in range(2)], memory=m)
        x = vectors()
        y = net(x, x.sin())
        grads = torch.autograd.grad(y[1].square().sum(), x)
        results.append([*grads, *net.buffers()])
    assert error(*results) < 1e-12


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_statistics_of_an_exported_branch(mode):
    """Its graph updates them without a new version, in code that is not searched."""
    norm = nn.Sequential(nn.BatchNorm1d(8).double(), nn.Tanh())
    branches = [torch.export.export(norm, (vectors(),)).module() for _ in range(2)]
    for branch, m in zip(branches, (mode, "store"), strict=True):
        net, x = ReversibleSequence([AdditiveCoupling(branch)], memory=m), vectors()
        net(x, x.sin())[1].square().sum().backward()
    for actual, expected in zip(branches[0].buffers(), branches[1].buffers(), strict=True):
        assert torch.equal(actual, expected)


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
    x = torch.complex(vectors(), vectors().sin()).detach().requires_grad_()
    (actual,) = torch.autograd.grad(net(x).sin().abs().sum(), x)
    (expected,) = torch.autograd.grad((8 * x.conj()).sin().abs().sum(), x)
    assert error([actual], [expected]) < 1e-12


class FirstBatch(nn.Module):
    """A scale taken from the first batch; a flag says that it was."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        with torch.no_grad():
            if not self.ready:
                self.scale.copy_(1 / x.std(0))
                self.ready.fill_(True)
        return self.scale * x.tanh()


class Clamped(nn.Module):
    def __init__(self, change=lambda weight: weight.clamp_(-0.1, 0.1)):
        super().__init__()
        weight = torch.linspace(-1, 1, 8, dtype=torch.float64)
        self.weight, self.change = nn.Parameter(weight), change

    def forward(self, x):
        with torch.no_grad():
            self.change(self.weight)
        return self.weight * x.tanh()


@pytest.mark.parametrize("branch", [FirstBatch, Clamped])
@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_a_parameter_that_the_forward_pass_changes(mode, branch):
    """The replay changed it again, in place: the graph that had saved it refused it."""
    results = []
    for m in (mode, "store"):
        net = ReversibleSequence([AdditiveCoupling(branch()) for _ in range(3)], memory=m)
        for _ in range(2):
            x = vectors()
            y = net(x, x.sin())
            results.append(torch.autograd.grad(y[1].square().sum(), [x, *net.parameters()]))
        results.append([p.detach() for p in net.parameters()])
    for actual, expected in zip(results[:3], results[3:], strict=True):
        assert error(actual, expected) < 1e-12


def traced(module):
    return torch.jit.trace(module, torch.ones(2, 4))


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("compiled", [torch.jit.script, traced])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_branch_of_torchscript(mode, compiled):
    """Its tables of parameters have no ``get``."""
    torch.manual_seed(0)
    steps = [AdditiveCoupling(compiled(nn.Linear(4, 4))) for _ in range(2)]
    net, x = ReversibleSequence(steps), vectors().detach().float().requires_grad_()
    grid = "auto" if mode == "exact" else None
    expected = gradients(net, "store", x, grid=grid)
    torch.testing.assert_close(gradients(net, mode, x, grid=grid), expected, rtol=1e-4, atol=1e-5)


def test_hooks_on_a_step_that_several_threads_call():
    """The threads swapped the step's forward at the same time: an error, or a leftover wrapper."""
    step = AdditiveCoupling(nn.Tanh())
    step.register_forward_hook(lambda *_: None)
    step(vectors(), vectors())  # seen to draw nothing, so that threads do not wait for each other
    both = threading.Event()

    def overlap(*_):  # the first thread enters first and leaves first
        if threading.current_thread() is first:
            second.start()
            both.wait(5)
        else:
            both.set()
            first.join(5)

    step.branch.register_forward_hook(overlap)
    failures = []

    def call():
        try:
            step(vectors(), vectors())
        except (RuntimeError, AttributeError) as failure:
            failures.append(failure)

    first, second = threading.Thread(target=call), threading.Thread(target=call)
    first.start()
    first.join()
    second.join()
    assert not failures
    assert "forward" not in vars(step)


class Stashes(nn.Module):
    """Keeps its own loss: in an attribute, or in a list."""

    def __init__(self):
        super().__init__()
        self.linear, self.losses = nn.Linear(4, 4), []

    def forward(self, x):
        value = self.linear(x).tanh()
        self.aux = value.square().mean()
        self.losses.append(value.square().mean())
        return value


@pytest.mark.parametrize("read", [lambda b: b.aux, lambda b: b.losses[0]])
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_loss_that_forward_keeps(mode, read):
    """``autograd.grad()`` left its part of the gradient out, without an error."""
    results = []
    for m in (mode, "store"):
        torch.manual_seed(0)
        net = ReversibleSequence([AdditiveCoupling(Stashes()) for _ in range(2)], memory=m)
        loss = net(vectors().detach().float()).sum() + sum(read(step.branch) for step in net)
        if m in ("invert", "exact"):
            with pytest.raises(RuntimeError, match=r"a gradient reached .*extras"):
                torch.autograd.grad(loss, list(net.parameters()))
            return
        results.append(torch.autograd.grad(loss, list(net.parameters())))
    assert error(*results) < 1e-6


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_gradients_of_an_activation_that_a_hook_keeps(mode):
    """As for Grad-CAM: the replay's activation, which has the gradient."""
    found, kept = [], {}
    for m in (mode, "store"):
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        net = ReversibleSequence(map(AdditiveCoupling, branches), memory=m).double()
        branches[1][0].register_forward_hook(lambda _, args, y: kept.update(y=y) or y.retain_grad())
        net(vectors()).square().sum().backward()
        found.append([kept["y"].grad])
    assert error(*found) < 1e-5


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


@pytest.mark.parametrize("way", ["list", "tuple", "dict", "object"])
@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_graphs_in_containers_that_each_forward_pass_replaces_are_freed(mode, way):
    """Each graph that was dropped without a backward pass kept the one before it."""

    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), None

        def forward(self, x):
            value = self.linear(x).tanh() * (1 if self.kept is None else 2)
            aux = value.square().mean()
            self.kept = {
                "list": [aux],
                "tuple": ((aux,),),
                "dict": {"aux": [aux]},
                "object": types.SimpleNamespace(aux=aux),
            }[way]
            return value

    net = ReversibleSequence([AdditiveCoupling(Replaces())], memory=mode)
    assert not grows(lambda: net(torch.ones(2, 8, requires_grad=True)))


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_a_weight_that_forward_clamps_around_autograd(mode):
    """A change that gives the same value when done twice may run in a replay, on a copy."""
    results = []
    for m in (mode, "store"):
        branches = [Clamped(lambda weight: weight.data.clamp_(-0.1, 0.1)) for _ in range(2)]
        net = ReversibleSequence([AdditiveCoupling(b) for b in branches], memory=m)
        x = vectors()
        loss = net(x, x.sin())[1].square().sum()
        results.append(torch.autograd.grad(loss, [x, *net.parameters()]))
        results[-1] += tuple(p.detach() for p in net.parameters())
    assert error(*results) < 1e-12


@pytest.mark.parametrize("inner", ["recompute", "invert"])
def test_dropout_in_steps_inside_a_checkpoint(inner):
    """A replay that ends early was said to draw other random numbers."""
    results = []
    for mode in (inner, "store"):
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(2)]
        net = ReversibleSequence([AdditiveCoupling(b) for b in branches], memory=mode).double()
        x = vectors()
        y = net(x) if mode == "store" else checkpoint(net, x)
        results.append(torch.autograd.grad(y.square().sum(), [x, *net.parameters()]))
    assert error(*results) < 1e-12


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_a_graph_that_a_replay_leaves_in_a_list_is_freed(mode):
    """It held the tape through the hook that packed its saved tensors."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.losses = nn.Linear(4, 4), []

        def forward(self, x):
            value = self.linear(x).tanh()
            self.losses.clear()
            self.losses.append(value.square().mean())
            return value

    net = ReversibleSequence([AdditiveCoupling(Keeps())], memory=mode)
    assert not grows(lambda: net(torch.ones(2, 8, requires_grad=True)).sum().backward())


def test_nothing_is_left_of_a_checkpoint_that_fails():
    """Its last activation held its own graph, for good."""
    linear = nn.Linear(4, 4)

    def fails(x):
        linear(x).exp()
        raise KeyError

    def step():
        with pytest.raises(KeyError):
            checkpoint(fails, torch.ones(2, 4))

    assert not grows(step)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("around", [lambda y: y.data, torch.from_dlpack])
def test_an_output_changed_around_autograd_has_another_inverse(dtype, around):
    """The inverse used the old words, without an error."""
    torch.manual_seed(0)
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4)) for _ in range(2)], memory="exact")
    with torch.no_grad():
        y = net.to(dtype)(vectors().to(dtype))
        unchanged = net.inverse(y)
        around(y)[1, 2] += 1
        found, expected = net.inverse(y), net.inverse(y.clone())
    # values that did not change keep all bits of their words
    torch.testing.assert_close(
        found, expected, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )
    assert not torch.equal(found, unchanged)


@pytest.mark.parametrize("part", [0, 1, "both"])
@pytest.mark.parametrize("around", [lambda y: y.data, lambda y: torch.from_dlpack(y.detach())])
def test_an_output_changed_around_autograd_enters_a_sequence_as_it_is(part, around):
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
                around(t).mul_(2)
            found, expected = alone(*y), alone(*(t.clone() for t in y))
        assert all(map(torch.equal, found, expected))
    y = first(*x.requires_grad_().chunk(2, dim=1))
    for t in y if part == "both" else (y[part],):
        around(t).mul_(2)
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


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_a_normalisation_whose_channels_are_pruned_between_steps(mode, norm):
    """The replay updated scratch statistics of the old number of channels, which raised."""
    torch.manual_seed(0)
    branch = nn.Sequential(
        nn.Conv1d(2, 4, 1), norm(4, track_running_stats=True), nn.Conv1d(4, 2, 1)
    )
    net = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)
    x = torch.randn(3, 4, 5)
    for _ in range(2):  # the first pass adds an attribute to the step
        net(x).sum().backward()
    for layer in branch[:2]:
        for name, t in (*layer.named_parameters(), *layer.named_buffers()):
            if t.dim():
                kept = t.detach()[:3].clone()
                setattr(layer, name, nn.Parameter(kept) if isinstance(t, nn.Parameter) else kept)
    branch[1].num_features = 3
    branch[2].weight = nn.Parameter(branch[2].weight.detach()[:, :3].clone())
    expected = copy.deepcopy(net)
    set_memory(expected, "store", grid="auto" if mode == "exact" else None)
    for each in (net, expected):
        each.zero_grad()
        each(x).square().sum().backward()
    grads = ([p.grad for p in each.parameters()] for each in (net, expected))
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(list(net.buffers()), list(expected.buffers()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: revzoo.SpatialPadding(1.5), r"padding=1\.5: expected two numbers"),
        (lambda: revzoo.SpatialPadding(True), "padding=True: expected two numbers"),
        (lambda: revzoo.Squeeze(2.0), r"factor=2\.0: expected a whole number"),
        (lambda: revzoo.InvertibleFlatten((2.5,)), r"shape=\(2\.5,\): expected the sizes"),
        (lambda: revzoo.InvertibleFlatten((2, 3), start_dim=1.0), r"start_dim=1\.0.*expected"),
        (lambda: revzoo.ReversibleSequence([], split=2), r"split=2: expected .* two whole numbers"),
        (
            lambda: revzoo.ReversibleSequence(collections.OrderedDict(append=nn.Identity())),
            "name 'append'",
        ),
    ],
)
def test_arguments_of_the_wrong_type_are_named(make, message):
    """They raised a TypeError or KeyError of Python, or were accepted."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("place", [1, 2])
def test_a_backward_hook_on_an_activation_alone_runs(place):
    layers = Lean(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4))
    called = []
    layers[place].register_full_backward_hook(lambda *_: called.append(place))
    layers(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert called == [place]


class Counts(revzoo.Step):
    """Replaces a large buffer in each pass, from the second on."""

    streams = 1

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2**14 + 1))
        self.counts = False

    def forward(self, x):
        if self.counts:
            self.count = self.count + 1
        return (x * (1 + self.count[0])).sin()


def test_a_large_buffer_may_be_replaced_for_the_first_time_in_a_later_pass():
    """The replay said that it was changed in place."""
    found = []
    for mode in ("store", "recompute"):
        step, x = Counts(), vectors()
        step.memory = mode
        for step.counts in (False, True):
            found.append(torch.autograd.grad(step(x).sum(), x)[0])
        assert step.count[0] == 1
    assert torch.equal(found[1], found[3])


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


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inverses_of_values_that_are_not_finite(value):
    """It could not convert NaN to an integer. The other row is right."""
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4))])
    y = torch.randn(2, 8)
    expected = net.inverse(y)
    y[0, 0] = value
    x = net.inverse(y)
    assert x[0].isnan().all()
    assert torch.equal(x[1:], expected[1:])


def test_a_branch_without_its_extra_output():
    coupling = AdditiveCoupling(nn.Identity())
    coupling.extras = 1
    with pytest.raises(TypeError, match="returned Tensor, expected a tuple of 2 tensors"):
        coupling(torch.ones(1, 2), torch.ones(1, 2))


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


def test_an_order_drawn_outside_of_torch_is_noticed():
    """It permuted the gradient."""
    x = torch.randn(3, 64, requires_grad=True)
    y = revzoo.checkpoint(
        lambda x: x[:, torch.from_numpy(np.random.default_rng().permutation(64))], x
    )
    with pytest.raises(DriftError):
        y.sum().backward()


def test_an_inverse_that_draws_inside_a_forward_pass():
    """The inverse put the random state back, so its step seemed to draw nothing."""
    results = []
    for disable in (True, False):
        torch.manual_seed(0)
        branch = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
        coupling = memcnn.AdditiveCoupling(branch, nn.Linear(4, 4))
        y = torch.randn(4, 8, requires_grad=True)
        x = memcnn.InvertibleModuleWrapper(coupling, disable=disable).inverse(y)
        state = torch.get_rng_state()
        x.square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        results.append([y.grad, *(p.grad for p in coupling.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


class Forks(nn.Linear):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            noise = torch.rand(x.shape)
        return super().forward(x) * noise


class Seeds(nn.Linear):
    def forward(self, x):
        torch.manual_seed(7)
        return super().forward(x) * torch.rand(x.shape)


@pytest.mark.parametrize("kind", [Forks, Seeds])
@pytest.mark.parametrize("memory", ["recompute", "invert", "exact"])
def test_branches_that_set_the_random_state(kind, memory):
    """A state that was the same afterwards counted as one that nothing was drawn from."""
    torch.manual_seed(0)
    seq = ReversibleSequence([AdditiveCoupling(kind(8, 8)) for _ in range(2)], memory=memory)
    for _ in range(2):  # from the second pass on, the seed leaves the state as it was
        x1, x2 = torch.ones(2, 3, 8, requires_grad=True)
        found, expected = [], []
        for mode, results in ((memory, found), ("store", expected)):
            set_memory(seq, mode, grid=seq.steps[0].grid)
            torch.manual_seed(7)
            torch.rand(3, 8)
            y1, y2 = seq(x1, x2)
            torch.rand(3)
            state = torch.get_rng_state()
            results += torch.autograd.grad((y1 * y2).sum(), [x1, x2, *seq.parameters()])
            assert torch.equal(torch.get_rng_state(), state)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("train", [True, False])
def test_layers_with_other_kernels_without_gradients(train):
    """``exact`` inverted them without gradients: other last bits, and so a DriftError."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    torch.manual_seed(0)
    branch = Recurrent() if train else nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    steps = [AdditiveCoupling(nn.Linear(8, 8)), AdditiveCoupling(branch)]
    seq = ReversibleSequence(steps, memory="exact", dim=-1).train(train)
    # the first output does not depend on the last step, which is only inverted
    y1, _ = seq(*torch.randn(2, 3, 5, 8, requires_grad=True))
    y1.sum().backward()
    assert drift(seq) == {"steps.0": 0, "steps.1": 0}


def test_a_ctc_loss_of_sequences_of_several_lengths():
    """Its kernel leaves a part of its table unfilled, which the guard compared."""
    lengths, targets = torch.tensor([20, 12, 9]), torch.tensor([[1, 2, 3], [2, 1, 4], [3, 3, 5]])

    def loss(x):
        targets_length = torch.tensor([3, 2, 3])
        return nn.functional.ctc_loss(x.log_softmax(-1), targets, lengths, targets_length)

    for _ in range(20):
        x = torch.randn(20, 3, 6, requires_grad=True)
        y = checkpoint(loss, x)
        # other tensors take the place of the freed table
        del [torch.full((420,), 1e3) for _ in range(20)][:]
        (gradient,) = torch.autograd.grad(y, x)
        (expected,) = torch.autograd.grad(loss(x), x)
        assert torch.equal(gradient, expected)
