"""The tape: gradients equal stored backprop in any order of use; nothing outlives its need."""

import copy
import gc
import math
import weakref

import pytest
import torch
from compare import (
    assert_same_training,
    conv_net,
    error,
    gradients_in,
    images,
    kept_bytes,
    leaf_rows,
    linear_net,
    train,
    twin,
)
from torch import nn

from revzoo import (
    AdditiveCoupling,
    DriftError,
    Invertible,
    ReversibleBlock,
    ReversibleSequence,
    is_replaying,
    set_drift_limit,
    set_memory,
)
from revzoo.core import tape
from revzoo.core.live import LiveMemory
from revzoo.core.modes import run_step

pytestmark = pytest.mark.usefixtures("couplings_alone_or_together")

MODES = ["recompute", "invert"]


class Counting(nn.Module):
    """Counts evaluations of a branch, without replays."""

    def __init__(self, branch):
        super().__init__()
        self.branch = branch
        self.calls = []

    def forward(self, x):
        self.calls.append(is_replaying())
        return self.branch(x)

    @property
    def forwards(self):
        return self.calls.count(False)

    @property
    def replays(self):
        return self.calls.count(True)


def counting_net(depth=3):
    torch.manual_seed(0)
    branches = [Counting(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2 * depth)]
    blocks = [ReversibleBlock(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    return ReversibleSequence(blocks).double(), branches


def vectors(batch=5, width=8, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, width, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_equals_store(mode, dropout):
    net = conv_net(dropout=dropout)
    assert_same_training(twin(net, mode), twin(net, "store"), images())


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_bit_equal_where_the_inputs_are(mode):
    # The first steps see bit-equal inputs, so each statistic counts each batch exactly once.
    net = conv_net(depth=1)
    buffers = [train(twin(net, m), images(), steps=1).buffers for m in (mode, "store")]
    for a, e in zip(*buffers, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("mode", MODES)
def test_each_branch_runs_once_forward_and_once_in_the_backward(mode):
    """Asked at https://github.com/silvandeleemput/memcnn/issues/77."""
    net, branches = counting_net()
    set_memory(net, mode)
    net(vectors()).sum().backward()
    assert [(b.forwards, b.replays) for b in branches] == [(1, 1)] * 6


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_second_gradient_of_the_last_step_alone_is_refused(mode):
    """The first one had moved the tape: the second took the step's input for its output."""
    steps = [AdditiveCoupling(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(3)]
    net = ReversibleSequence(steps, memory=mode)
    _, y = net(*torch.randn(2, 3, 4).requires_grad_())
    last = list(net[-1].parameters())
    torch.autograd.grad(y, last, torch.ones_like(y))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, last, torch.ones_like(y))


def test_nothing_is_replayed_in_store_nor_without_gradients():
    net, branches = counting_net()
    set_memory(net, "store")
    net(vectors()).sum().backward()
    set_memory(net, "invert")
    with torch.no_grad():
        net(vectors())
    with torch.inference_mode():
        net(vectors())
    assert [(b.forwards, b.replays) for b in branches] == [(3, 0)] * 6


def test_mode_of_a_single_step():
    net, branches = counting_net(depth=3)
    reference = twin(net, "store")
    set_memory(net[1], "store")
    x = vectors()
    expected = torch.autograd.grad(reference(x).square().sum(), list(reference.parameters()))
    actual = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    assert error(actual, expected) < 1e-12
    assert [b.replays for b in branches] == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice_through_a_retained_graph(mode):
    grads = []
    for m in (mode, "store"):
        net, x = twin(conv_net(dropout=0.2), m), images().requires_grad_()
        torch.manual_seed(3)
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([x.grad, *(p.grad for p in net.parameters())])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert error(*grads) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_several_losses_and_overlapping_graphs(mode):
    """Asked at https://github.com/silvandeleemput/memcnn/issues/36."""
    grads = []
    for m in (mode, "store"):
        net, x, z = twin(conv_net(), m), images(), images(seed=5)
        a, b = net(x), net(z)  # two forwards before one backward
        (a * b).sum().backward(retain_graph=True)
        a.square().sum().backward()
        b.sin().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert error(*grads) < 1e-12


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_gradient_penalty(mode):
    grads = []
    for m in (mode, "store"):
        net, x = twin(linear_net(), m), vectors()
        (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        (g.norm() ** 2).backward()
        grads.append([x.grad, *(p.grad for p in net.parameters() if p.grad is not None)])
    assert error(*grads) < 1e-12


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_gradcheck_and_gradgradcheck(mode):
    net = twin(linear_net(depth=2, width=2), mode)
    x = vectors(batch=2, width=4)
    assert torch.autograd.gradcheck(net, x)
    assert torch.autograd.gradgradcheck(net, x)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_a_subset_and_of_one_output(mode):
    """Asked at https://github.com/pytorch/pytorch/issues/51743."""
    net = linear_net()
    results = []
    for m in (mode, "store"):
        other, x = twin(net, m), vectors()
        y1, y2 = other(*x.chunk(2, dim=1))
        first = torch.autograd.grad(y1.sum(), [other[1][0].branch[0].weight], retain_graph=True)
        last = torch.autograd.grad(y2.square().sum(), [other[2][1].branch[2].weight, x])
        results.append([*first, *last])
    assert error(*results) < 1e-12


def test_partial_graphs_without_retaining():
    # Only the last branch is differentiated first; the rest of the graph is still whole.
    net = linear_net()
    results = []
    for m in ("invert", "store"):
        other, x = twin(net, m), vectors()
        y1, y2 = other(*x.chunk(2, dim=1))
        last = torch.autograd.grad(y2.sum(), [other[2][1].branch[2].weight])
        rest = torch.autograd.grad(y1.sum(), [other[0][0].branch[0].weight, x])
        results.append([*last, *rest])
    assert error(*results) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_inputs_without_gradient_and_frozen_parameters(mode):
    net = conv_net()
    for p in net[1].parameters():
        p.requires_grad_(False)
    results = []
    for m in (mode, "store"):
        other = twin(net, m)
        other(images()).square().sum().backward()
        assert all(p.grad is None for p in other[1].parameters())
        results.append([p.grad for p in other.parameters() if p.grad is not None])
    assert error(*results) < 1e-12


def test_a_frozen_beginning_is_not_replayed():
    net, branches = counting_net()
    net[0].requires_grad_(False)
    with torch.no_grad():
        x = vectors().detach()
    net(x).sum().backward()
    assert [b.replays for b in branches] == [0, 0, 1, 1, 1, 1]


def test_consecutive_containers_form_one_chain(monkeypatch):
    net, branches = counting_net()
    reference = twin(net, "store")
    made = []
    build = tape.Tape.__init__

    def spy(self, *args):
        build(self, *args)
        made.append(self)

    monkeypatch.setattr(tape.Tape, "__init__", spy)
    x = vectors()
    single = [ReversibleSequence([block]) for block in net]
    y = x
    for layer in single:
        y = layer(y)
    assert len(made) == 1
    y.square().sum().backward()
    expected = torch.autograd.grad(reference(x).square().sum(), list(reference.parameters()))
    assert error([p.grad for p in net.parameters()], expected) < 1e-12
    assert [b.replays for b in branches] == [1] * 6


def test_a_fork_of_two_chains():
    net = linear_net()
    results = []
    for m in ("invert", "store"):
        other, x = twin(net, m), vectors()
        h = ReversibleSequence([other[0]], memory=m)(x)
        a = ReversibleSequence([other[1]], memory=m)(h)
        b = ReversibleSequence([other[2]], memory=m)(h)
        ((a * b).sum() + h.sum() + (x + a).square().sum()).backward()
        results.append([x.grad, *(p.grad for p in other.parameters())])
    assert error(*results) < 1e-12


def test_the_output_changed_in_place_is_an_error():
    net = twin(linear_net(), "invert")
    y = net(vectors())
    y.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version"):
        y.sum().backward()


def test_the_input_changed_in_place_is_reconstructed():
    net = linear_net()
    x = vectors().detach()
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    y = net(x)
    x.zero_()
    actual = torch.autograd.grad(y.square().sum(), list(net.parameters()))
    assert error(actual, expected) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_changed_before_the_backward_is_an_error(mode):
    # Biases are not saved by autograd, so plain backprop would not notice; a replay must.
    net = twin(linear_net(), mode)
    y = net(vectors())
    with torch.no_grad():
        net[1][0].branch[2].bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: 'bias'"):
        y.sum().backward()


def test_a_branch_that_works_in_place_on_the_stream_is_refused():
    block = ReversibleBlock(nn.ReLU(inplace=True), nn.Identity())
    net = ReversibleSequence([AdditiveCoupling(nn.Identity()), block])
    x = torch.randn(2, 4, requires_grad=True)
    for mode in ("store", "offload", "recompute", "invert"):
        set_memory(net, mode)
        with pytest.raises(RuntimeError, match=r"Coupling changed its input stream"):
            net(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="changed its input stream 1"):
        net(x)


class FirstTimeDifferent(nn.Module):
    def __init__(self, first, later):
        super().__init__()
        self.first, self.later = first, later

    def forward(self, x):
        return self.later(x) if is_replaying() else self.first(x)


@pytest.mark.parametrize("mode", MODES)
def test_the_values_that_an_early_stop_recomputes_are_compared(mode):
    """In a chain of one step, nothing else shows that a branch does not repeat itself."""
    branch = FirstTimeDifferent(torch.tanh, lambda x: (x + 1).tanh())
    net = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)
    with pytest.raises(DriftError, match=r"steps\.0"):
        net(vectors()).sum().backward()


FAILING = weakref.WeakSet()  # unlike a list, none that a replay gives its old items


class Failing(nn.Module):
    """Fails in its replay a given number of times, in the middle of its work."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.linear = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x):
        x = self.drop(self.norm(x))
        if is_replaying() and self in FAILING:
            FAILING.remove(self)
            raise KeyError("from the branch")
        return self.linear(x).tanh()


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_a_replay_leaves_everything_as_it_was(mode):
    torch.manual_seed(0)
    blocks = [ReversibleBlock(Failing(), Failing()) for _ in range(2)]
    net = ReversibleSequence(blocks, memory=mode).double()
    reference = copy.deepcopy(net)
    loss = net(vectors()).square().sum()
    FAILING.add(net[0][1].branch)
    state, buffers = torch.get_rng_state(), [b.clone() for b in net.buffers()]
    net.eval()
    with pytest.raises(KeyError, match="from the branch"):
        loss.backward(retain_graph=True)
    assert not is_replaying()
    assert not any(m.training for m in net.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(buffers, net.buffers(), strict=True))
    # The same graph still works, and the next step is that of a net that never failed.
    net.train().zero_grad()
    loss.backward()
    for b, p in zip(reference.buffers(), net.buffers(), strict=True):
        b.copy_(p)
    net.zero_grad()
    a, e = train(net, vectors().detach(), steps=1), train(reference, vectors().detach(), steps=1)
    assert all(torch.equal(p, q) for p, q in zip(a.gradients, e.gradients, strict=True))


def test_activations_are_gone_between_forward_and_backward():
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            h = x.exp()
            if not is_replaying():
                seen.append(weakref.ref(h.untyped_storage()))
            return h.sin()

    net = ReversibleSequence([AdditiveCoupling(Watched()) for _ in range(4)])
    y = net(vectors())
    assert not [s for s in seen if s() is not None]
    set_memory(net, "store")
    z = net(vectors())
    assert len([s for s in seen if s() is not None]) == 4
    (y + z).sum().backward()


def test_slots_filled_are_released_as_the_walk_goes_on():
    """At most one step's recorded activations are alive at any time of the backward pass."""
    alive, peak = [], []

    class Watched(nn.Module):
        def forward(self, x):
            h = x.exp()
            if is_replaying():
                alive.append(weakref.ref(h.untyped_storage()))
                peak.append(sum(s() is not None for s in alive))
            return h.sin()

    net = ReversibleSequence([AdditiveCoupling(Watched()) for _ in range(6)])
    net(vectors()).sum().backward()
    assert len(peak) == 6
    assert max(peak) == 1


def test_backward_inside_forward_is_refused():
    class Inner(nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                h = x.detach().requires_grad_()
                (g,) = torch.autograd.grad(h.square().sum(), h)
            return g + x

    net = ReversibleSequence([AdditiveCoupling(Inner())])
    with pytest.raises(RuntimeError, match="use memory='store'"):
        net(vectors())
    set_memory(net, "store")
    net(vectors()).sum().backward()


def test_torch_func_runs_as_store():
    net = linear_net()
    params = dict(net.named_parameters())
    x = vectors().detach()

    def loss(params, x):
        return torch.func.functional_call(net, params, (x.unsqueeze(0),)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for i in range(len(x)):
        expected = torch.autograd.grad(net(x[i : i + 1]).square().sum(), list(net.parameters()))
        assert error([g[i] for g in per_sample.values()], expected) < 1e-12


def test_parameters_given_to_functional_call_are_those_of_the_replay():
    net = linear_net()
    other = {k: (2 * v.detach()).requires_grad_() for k, v in net.named_parameters()}
    results = []
    for m in ("invert", "store"):
        set_memory(net, m)
        y = torch.func.functional_call(net, other, (vectors(),))
        results.append(torch.autograd.grad(y.square().sum(), list(other.values())))
    assert error(*results) < 1e-12


@pytest.mark.parametrize("inner", ["store", "recompute", "invert"])
@pytest.mark.parametrize("outer", ["store", "recompute", "invert"])
def test_a_sequence_inside_a_branch(outer, inner):
    def build(outer, inner):
        torch.manual_seed(0)
        branches = [
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), linear_net(depth=2, width=2))
            for _ in range(2)
        ]
        net = ReversibleSequence([ReversibleBlock(*branches)], memory=outer).double()
        for b in branches:
            set_memory(b[2], inner)
        return net

    net, reference = build(outer, inner), build("store", "store")
    assert_same_training(net, reference, vectors().detach())


@pytest.mark.parametrize("mode", ["invert", "exact"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_kept_graph_keeps_no_states_of_sequences_in_branches(mode, frozen):
    """Each of them kept the input that its walk ended with."""

    def kept(depth):
        inner = [linear_net(depth=2, width=16) for _ in range(depth)]
        net = ReversibleSequence([AdditiveCoupling(s) for s in inner])
        set_memory(net, mode, grid=20 if mode == "exact" else None)
        set_drift_limit(net, math.inf)
        if frozen:  # then nothing of the first steps is replayed
            for sequence in inner:
                sequence[0].requires_grad_(False)
        x = torch.randn(1024, 64, dtype=torch.float64)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        loss = net(x).sum()
        with LiveMemory() as memory:
            loss.backward(retain_graph=True)
            return memory.now

    few, many = kept(2), kept(6)
    assert many - few < 1024 * 16 * 8  # one stream


def test_inside_torch_checkpoint_and_the_reverse():
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return torch_checkpoint(self.inner, x, use_reentrant=False)

    def build(mode, wrap):
        net = linear_net()
        if wrap == "around":
            net = Checkpointed(net)
        else:
            for step in net:
                for coupling in step:
                    coupling.branch = Checkpointed(coupling.branch)
        set_memory(net, mode)
        return net

    for wrap in ("around", "inside"):
        assert_same_training(build("invert", wrap), build("store", wrap), vectors().detach())


def test_inside_save_on_cpu():
    net = linear_net()
    results = []
    for m in ("invert", "store"):
        set_memory(net, m)
        with torch.autograd.graph.save_on_cpu():
            loss = net(vectors()).square().sum()
        results.append(torch.autograd.grad(loss, list(net.parameters())))
    assert error(*results) < 1e-12


def test_parameters_shared_between_steps():
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net = ReversibleSequence([ReversibleBlock(branch, branch) for _ in range(2)]).double()
    assert_same_training(net, twin(net, "store"), vectors().detach())


def test_a_chain_that_was_cut_is_joined_by_no_later_step():
    """Its known state moved in the backward pass; an input there starts a new chain."""
    first, second, third = (AdditiveCoupling(nn.Tanh()) for _ in range(3))
    x = vectors()
    state = tuple(t.detach().requires_grad_() for t in x.chunk(2, dim=1))
    middle = run_step(first, state)
    end = run_step(second, middle)
    torch.autograd.grad(end[1].sum(), middle[1])  # cut behind the first step
    later = run_step(third, end)
    gradient = torch.autograd.grad(middle[1].square().sum(), state)
    plain = tuple(t.detach().requires_grad_() for t in state)
    expected = torch.autograd.grad(first(*plain)[1].square().sum(), plain)
    assert error(gradient, expected) < 1e-12
    del later


def test_hooks_fire_once_with_equal_gradients():
    logs = []
    for m in ("invert", "store"):
        net, log = linear_net(depth=1), {}
        set_memory(net, m)
        linear = net[0][0].branch[0]
        note = lambda what, g, log=log: log.setdefault(what, []).append(g.clone())  # noqa: E731
        linear.register_full_backward_hook(lambda _m, _i, o, note=note: note("module", o[0]))
        linear.weight.register_hook(lambda g, note=note: note("weight", g))
        linear.weight.register_post_accumulate_grad_hook(
            lambda p, note=note: note("accumulated", p.grad)
        )
        net(vectors()).square().sum().backward()
        assert {what: len(found) for what, found in log.items()} == dict.fromkeys(log, 1)
        logs.append([log[what][0] for what in sorted(log)])
    assert len(logs[0]) == 3
    assert error(*logs) < 1e-12


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_graph_and_tape_die_without_the_garbage_collector(mode, passes):
    """With the graph kept, with a pass that used it up, and with none.

    Asked at https://github.com/RobinBruegger/RevTorch/issues/1.
    """
    net = linear_net()
    set_memory(net, mode, grid=20 if mode == "exact" else None)
    loss = net(vectors()).square().sum()  # gathers the members
    loss.backward()
    gc.collect()
    gc.disable()
    try:
        x = vectors().requires_grad_()
        y = net(x)
        loss = y.square().sum()
        y.grad_fn.metadata["token"] = token = nn.Identity()
        node = weakref.ref(token)
        for k in range(passes):
            loss.backward(retain_graph=k + 1 < passes)
        del y, loss, token
        assert node() is None
    finally:
        gc.enable()


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
    x = leaf_rows()
    assert error(gradients_in(net, "invert", x), gradients_in(net, "store", x)) < 1e-12


def test_a_chain_does_not_continue_across_detach():
    a, b = linear_net(seed=0), linear_net(seed=1)
    y = a(*leaf_rows().chunk(2, dim=1))
    b(*(t.detach() for t in y))
    with torch.no_grad():
        b[0][0].branch[0].bias.add_(1)
    (y[0] + y[1]).sum().backward()  # b is none of its business


def test_partial_graphs_in_the_order_that_cuts_the_tape_first():
    net, results = linear_net(), []
    for mode in ("invert", "store"):
        other, x = twin(net, mode), leaf_rows()
        y1, y2 = other(*x.chunk(2, dim=1))
        first = torch.autograd.grad(y1.sum(), [other[0][0].branch[0].weight, x])
        last = torch.autograd.grad(y2.square().sum(), [other[2][1].branch[2].weight])
        results.append([*first, *last])
    assert error(*results) < 1e-12


def test_a_frozen_weight_changed_before_the_backward():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))]).double().requires_grad_(False)
    y = net(leaf_rows())
    net[0].branch.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_retained_graph_costs_one_replay_a_step():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(is_replaying())
            return x.sin()

    net = ReversibleSequence([AdditiveCoupling(Counting()) for _ in range(5)])
    net(leaf_rows()).sum().backward(retain_graph=True)
    assert calls == [False] * 5 + [True] * 5


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
