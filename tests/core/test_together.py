"""Couplings that share a function: as if each had its own."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from revzoo import AdditiveCoupling, DriftError, ReversibleBlock, ReversibleSequence, set_memory
from revzoo.core import replay, tape
from revzoo.core.invertible import Step

MODES = ["invert", "exact"]


def branch(channels, *, bias=False):
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv)


def net_of(mode, depth=6, dtype=torch.float32):
    torch.manual_seed(0)
    blocks = [ReversibleBlock(branch(4), branch(4)) for _ in range(depth)]
    net = ReversibleSequence(blocks).to(dtype)
    set_memory(net, mode, grid=23 if mode == "store" else None)
    return net


def images(dtype=torch.float32, batch=3):
    return torch.randn(batch, 8, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def functions_of(y):
    """How many functions of couplings the graph of ``y`` holds."""
    waiting, seen = [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [n for n, _ in node.next_functions]
    return sum(type(node).__name__ == "StepFunctionBackward" for node in seen)


@pytest.fixture(autouse=True)
def from_the_first_pass_on(monkeypatch):
    monkeypatch.setattr(Step, "close_checks", 0)


def plain(net, x):
    return torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])


def one_output(net, x):
    y1, _ = net(*x.chunk(2, 1))
    return torch.autograd.grad(y1.square().sum(), [x, net[2][0].branch[2].weight])


def kept_graph(net, x):
    y = net(x)
    first = torch.autograd.grad(y.sum(), [x, *net[3].parameters()], retain_graph=True)
    again = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    return [*first, *again, *torch.autograd.grad(y.square().sum(), list(net.parameters()))]


def frozen_middle(net, x):
    net[1].requires_grad_(False)
    found = torch.autograd.grad(net(x).square().sum(), [x, *net[0].parameters()])
    net[1].requires_grad_(True)
    return found


def frozen_norms(net, x):
    net.eval()
    return plain(net, x)


def autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).float().square().sum()
    return torch.autograd.grad(loss, [x, *net.parameters()])


def accumulated(net, x):
    for _ in range(2):
        net(x).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def channels_last(net, x):
    net.to(memory_format=torch.channels_last)
    return plain(net, x.detach().to(memory_format=torch.channels_last).requires_grad_())


def two_calls(net, x):
    return torch.autograd.grad((net(net(x)) * net(x)).sum(), [x, *net.parameters()])


USES = [plain, one_output, kept_graph, frozen_middle, frozen_norms, autocast, accumulated]
USES += [channels_last, two_calls]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_gradients_and_statistics_equal_stores(use, mode):
    results = []
    for m in (mode, "store"):
        net = net_of(m)
        net(images())  # not at first: a first pass looks for tensors that a branch captures
        gradients = use(net, images().requires_grad_())
        results.append([*gradients, *net.buffers()])
    for found, expected in zip(*results, strict=True):
        if mode == "exact" and use is not two_calls:  # store on the same grid
            assert torch.equal(found, expected)
        error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
        assert error < (5e-2 if use is autocast else 1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_up_to_eight_couplings_share_a_function(mode):
    net = net_of(mode)
    y = net(images().requires_grad_())
    # 12 couplings: 8 together, 2 together, 2 alone
    assert functions_of(y) == 4


def test_only_plain_couplings_with_equal_settings_share():
    x = images().requires_grad_()
    net = net_of("exact", depth=4)
    assert functions_of(net(x)) == 3  # 6 together, 2 alone
    set_memory(net[2][0], "recompute")
    assert functions_of(net(x)) == 3 + 3  # 2 together and 2 alone; 3 alone
    net = net_of("exact", depth=4)
    net[1][1].branch.append(nn.Dropout(0.1))
    assert functions_of(net(x)) == 3 + 1 + 3
    assert functions_of(net.eval()(x)) == 3
    net = net_of("exact", depth=4)
    net[1] = net[0]  # in one function its gradients would be those of two couplings
    assert functions_of(net(x)) == 1 + 1 + 1 + 2


def test_couplings_without_gradient_do_not_share():
    net = net_of("exact", depth=4)
    assert functions_of(net(images())) == 2 + 1 + 2  # the first two make the state require gradient


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_both_outputs_see_whole_gradients(mode):
    """That of the first output lacked what the last branch adds."""
    found = []
    for m in (mode, "store"):
        net, x, seen = net_of(m), images().requires_grad_(), []
        y = net(*x.chunk(2, 1))
        for t in y:
            t.register_hook(lambda g: g * 0.5)
        y[1].grad_fn.register_prehook(seen.extend)
        loss = sum(t.square().sum() for t in y)
        found.append(torch.autograd.grad(loss, [*y, x, *net.parameters()]))
        assert torch.equal(seen[-1], found[-1][1] * 0.5)  # after the hook of the tensor
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_repeats_the_same_functions(mode, monkeypatch):
    """After the first backward pass couplings shared functions, so the second did not fit."""
    monkeypatch.setattr(Step, "close_checks", 1)
    found = []
    for m in (mode, "store"):
        net, x = net_of(m), images().requires_grad_()
        losses = [checkpoint(net, x, use_reentrant=False).square().sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        found.append([x.grad, *(p.grad for p in net.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_a_mode_keeps_stay_whole(mode):
    """Reading one that a function had freed crashed the process."""
    kept = []

    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kept.append(func(*args, **(kwargs or {})))
            return kept[-1]

    net, x = net_of(mode), images().requires_grad_()
    with Keeps():
        net(x)
    tensors = [t for t in kept if isinstance(t, torch.Tensor)]
    assert all(t.untyped_storage().nbytes() >= t.nbytes for t in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_a_changed_weight_is_named(mode):
    net = net_of(mode)
    y = net(images().requires_grad_())
    with torch.no_grad():
        net[1][1].branch[2].weight += 1
    with pytest.raises(RuntimeError, match=r"'weight' of steps\.1\.steps\.1 .*changed between"):
        y.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_change_behind_autograds_back_names_the_function_then_the_step(mode, monkeypatch):
    monkeypatch.undo()
    net = net_of(mode)
    for step in net.modules():
        if isinstance(step, AdditiveCoupling):
            step.close_checks = 0

    def run():
        y = net(images().requires_grad_())
        net[1][1].branch[2].weight.data += 1
        y.sum().backward()

    with pytest.raises(DriftError, match=r"steps\.0\.steps\.0 \w+ to steps\.3\.steps\.1 "):
        run()
    with pytest.raises(DriftError, match=r"^steps\.1\.steps\.1 \w+: "):
        run()


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_that_changes_its_input_is_refused(mode):
    net = net_of(mode, depth=2)
    net[0][1].branch[0] = nn.ReLU(inplace=True)
    with pytest.raises(RuntimeError, match=r"steps\.0\.steps\.1 .* changed its input stream"):
        net(images().requires_grad_())


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_a_branch_names_its_step(mode):
    net = net_of(mode, depth=2)
    net[1][0].branch[2] = nn.Conv2d(5, 4, 3, padding=1)
    with pytest.raises(RuntimeError) as error:
        net(images().requires_grad_())
    assert "steps.1.steps.0" in error.value.__notes__[0]


def test_a_hook_of_a_parameter_runs_once():
    net = net_of("exact", depth=2)
    calls = []
    for p in net.parameters():
        p.register_hook(lambda g: calls.append(1))
    net(images().requires_grad_()).sum().backward()
    assert len(calls) == len(list(net.parameters()))


def test_a_deep_copy_has_functions_of_its_own():
    net = net_of("exact", depth=2)
    net(images().requires_grad_()).sum().backward()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0][0].branch[2].weight.zero_()
    x = images().requires_grad_()
    y = [m(x) for m in (net, other)]
    assert not torch.equal(*y)
    for out, m in zip(y, (net, other), strict=True):
        assert all(g is not None for g in torch.autograd.grad(out.sum(), list(m.parameters())))


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_hooks_keep_stay_whole(mode):
    """A function freed its input, which hooks of saved tensors had got as the state of the tape."""
    net, kept = net_of(mode), []
    x = images().requires_grad_()

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x).square().sum().backward()
    assert all(t.untyped_storage().nbytes() >= t.nbytes for t in kept)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_freed_while_a_function_replays(mode, monkeypatch):
    """The frames that called it held them: one more stream at the peak than for couplings alone."""
    net = net_of(mode, depth=4)
    received, alive = [], []
    stash, leaf = replay.stash_gradients, replay.AdditiveCall._leaf

    def stashes(call, grads):
        received.extend(map(weakref.ref, grads))
        return stash(call, grads)

    def reads(self, t, step):
        if len(self.steps) > 1:
            alive.append(sum(r() is not None for r in received))
        return leaf(self, t, step)

    monkeypatch.setattr(tape, "stash_gradients", stashes)
    monkeypatch.setattr(replay.AdditiveCall, "_leaf", reads)
    net(images()).square().sum().backward()
    # the first replay needs both, the second one of them
    assert alive == [2, 1, 0, 0]
