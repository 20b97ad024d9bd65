"""Inputs and output gradients of layers, captured on the replay instead of the forward pass."""

import copy
import pickle

import pytest
import torch
from compare import conv_net, images, linear_net, twin
from torch import nn

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.private.capture import Captures, Hook
from revzoo.private.gradients import per_sample_gradients

MODES = ("store", "offload", "recompute", "invert", "exact")


class Watch(Captures):
    """Captures each layer with parameters, and passes its calls to a function."""

    def __init__(self, net, add, end=lambda: None):
        self.add, self.end = add, end
        super().__init__(net)

    def add(self, call, gradient):
        """Replaced by the function."""


def watch(net, keep):
    """``keep`` collects (name, inputs, gradient); the handles of the hooks."""
    names = {m: name for name, m in net.named_modules()}
    return Watch(net, lambda call, g: keep.append((names[call.module], call.inputs(), g))).handles


def plain_hooks(net, x):
    """The results of torch's own hooks in the stored network, in the order of the backward pass."""
    inputs, found = {}, []
    net = copy.deepcopy(net)
    revzoo.set_memory(net, "store")
    for name, m in net.named_modules():
        if m._parameters:
            m.register_forward_hook(lambda m, args, out, name=name: inputs.update({name: args[0]}))
            m.register_full_backward_hook(
                lambda m, gi, go, name=name: found.append((name, (inputs[name].detach(),), go[0]))
            )
    net(x.clone().requires_grad_()).square().sum().backward()
    return found


def assert_same(got, expected):
    assert sorted(name for name, *_ in got) == sorted(name for name, *_ in expected)
    expected = {name: rest for name, *rest in expected}
    for name, inputs, gradient in got:
        (x,), g = expected[name]
        torch.testing.assert_close(inputs[0], x, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradient, g, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_and_gradients_are_those_of_plain_hooks(mode):
    net = twin(conv_net(dropout=0.0, norm=lambda c: nn.GroupNorm(2, c)), mode)
    expected = plain_hooks(net, images())
    got = []
    watch(net, got)
    net(images()).square().sum().backward()
    assert_same(got, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_graph_gives_them_again(mode):
    net = twin(linear_net(), mode)
    x = images().flatten(1)[:, :8]
    expected = plain_hooks(net, x)
    got = []
    watch(net, got)
    loss = net(x).square().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert_same(got, expected)
        got.clear()


def test_a_sequence_in_a_branch():
    """The replay of the outer step runs the inner ones, whose own replays come later."""
    inner = twin(linear_net(2, 2), "invert")
    net = revzoo.ReversibleSequence(
        [revzoo.ReversibleBlock(nn.Sequential(inner, nn.Linear(4, 4).double()))], memory="invert"
    )
    revzoo.set_memory(net, "invert")
    x = images().flatten(1)[:, :8]
    expected = plain_hooks(net, x)
    got = []
    watch(net, got)
    net(x).square().sum().backward()
    assert_same(got, expected)


def test_a_backward_pass_spans_those_of_replays():
    """A replay differentiates in a pass of its own, so the end would come after each step."""
    inner = twin(linear_net(2, 2), "invert")
    branch = nn.Sequential(inner, nn.Linear(4, 4).double())
    net = revzoo.ReversibleSequence([revzoo.ReversibleBlock(branch)] * 2, memory="invert")
    events = []

    def note(call, gradient):
        events.append("layer")
        if events[0] == "fail":
            del events[0]
            raise KeyboardInterrupt

    Watch(net, note, lambda: events.append("end"))
    x = images().flatten(1)[:, :8]
    events.append("fail")
    failed = net(x).sum()
    with pytest.raises(KeyboardInterrupt):
        failed.backward()
    for _ in range(2):
        events.clear()
        net(x).sum().backward()
        assert events == ["layer"] * (len(events) - 1) + ["end"]


def test_a_step_with_a_captured_leaf_is_differentiated_once():
    outside = [nn.Parameter(torch.ones(4, dtype=torch.float64))]

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * outside[0]

    net = revzoo.ReversibleSequence(
        [revzoo.ReversibleBlock(Scaled(4, 4).double())], memory="invert"
    )
    got = []
    watch(net, got)
    net(images().flatten(1)[:, :8].requires_grad_()).sum().backward()
    assert sorted(name for name, *_ in got) == [f"steps.0.steps.{i}.branch" for i in (0, 1)]
    assert outside[0].grad is not None


def test_a_recomputed_function_and_an_inverse():
    linear = nn.Linear(4, 4).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    got = []
    watch(linear, got)
    revzoo.checkpoint(lambda x: linear(x).tanh(), x).sum().backward()
    assert len(got) == 1
    assert torch.equal(got[0][1][0], x)
    # an inverse is plain autograd under the conditions of a replay
    got.clear()
    net = twin(linear_net(2, 2), "invert")
    watch(net, got)
    net.inverse(x).sum().backward()
    assert sorted(name for name, *_ in got) == sorted(
        n for n, m in net.named_modules() if m._parameters
    )


def test_nothing_is_captured_without_gradient_or_after_removal():
    net = twin(linear_net(), "invert")
    x = images().flatten(1)[:, :8]
    got = []
    handles = watch(net, got)
    with torch.no_grad():
        net(x)
    torch.func.grad(lambda x: net(x).sum())(x)
    loss = net(x).sum()
    for handle in handles:
        handle.remove()
    loss.backward()  # its replays run the hooks of the forward pass, which saved the inputs
    net(x).sum().backward()
    assert got == []
    assert not any(m._forward_hooks for m in net.modules())


def test_each_call_of_a_layer_has_its_own_inputs():
    linear = nn.Linear(2, 2)
    got = []

    def note(call, gradient):
        got.append((call.inputs()[0], watched.several(linear)))

    watched = Watch(linear, note)
    x = torch.randn(3, 2)
    hidden = linear(x)
    linear(hidden).sum().backward()
    assert torch.equal(got[0][0], hidden)
    assert torch.equal(got[1][0], x)
    assert [several for _, several in got] == [True, True]
    linear(x).sum().backward()
    assert not got[2][1]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_counts_its_forward_pass_only(mode):
    """Also with hooks that come after its first call."""
    net = twin(linear_net(1), mode)
    x = images().flatten(1)[:, :8]
    net(x).sum().backward()
    layer, counted = net.steps[0].steps[0].branch[0], []

    watched = Watch(layer, lambda *_: counted.append(watched.several(layer)))
    for _ in range(2):
        net(x).sum().backward()
    (net(x) + net(x)).sum().backward()
    assert counted == [False, False, True, True]


def test_an_input_changed_in_place_raises():
    linear = nn.Linear(2, 2)
    Watch(linear, lambda call, g: call.inputs())
    x = torch.randn(3, 2)
    linear.weight.requires_grad_(False)  # so that autograd does not need x itself
    loss = linear(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_of_a_second_output_is_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.scale, x + self.scale

    module, got = Two(), []
    watch(module, got)
    first, second = module(torch.ones(2))
    first.sum().backward()
    assert len(got) == 1
    with pytest.raises(TypeError, match="not only the first tensor that Two returned"):
        second.sum().backward()


def test_attention_gives_all_arguments_and_refuses_a_gradient_of_its_weights():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    got = []
    watched = Watch(attention, lambda call, g: got.append(call.inputs()))
    x, mask = torch.randn(2, 3, 4), torch.zeros(3, 3)
    out, weights = attention(x, value=x, key=x, attn_mask=mask)
    out.sum().backward()
    ((q, k, v, padding, needed, given, averaged, causal),) = got
    assert all(torch.equal(t, x) for t in (q, k, v))
    assert torch.equal(given, mask)
    assert (padding, needed, averaged, causal) == (None, True, True, False)
    out, weights = attention(x, x, x)
    loss = out.sum() + weights.square().sum()
    with pytest.raises(TypeError, match=r"detach the others \(the weights of an attention\)"):
        loss.backward(retain_graph=True)
    watched.remove()
    loss.backward()


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_memory_is_that_of_the_network_alone(mode):
    """No more is alive at the peak than without the hooks, but for one input under way."""

    def peak(watched):
        net = twin(linear_net(8, 64), mode).float()
        revzoo.set_memory(net, mode)
        if watched:
            Watch(net, lambda call, g: call.inputs())
        x = torch.randn(512, 128)
        net(x).sum().backward()
        net.zero_grad(set_to_none=False)
        with LiveMemory() as memory:
            net(x).sum().backward()
        return memory.peak

    assert peak(True) - peak(False) <= 512 * 64 * 4


def test_hooks_of_the_user_that_change_inputs_and_output():
    linear = nn.Linear(2, 2)
    linear.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    linear.register_forward_hook(lambda m, args, out: out * 3)
    got = []
    watch(linear, got)
    linear(torch.ones(1, 2)).sum().backward()
    ((_, (x,), g),) = got
    assert torch.equal(x, torch.full((1, 2), 2.0))
    assert torch.equal(g, torch.full((1, 2), 3.0))


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m(input1=x, input2=x),
        lambda m, x: m(x, input2=x),
        lambda m, x: m(x, [x]),
    ],
)
def test_arguments_by_name_and_in_lists(call):
    bilinear, got, x = nn.Bilinear(2, 2, 2), [], torch.ones(1, 2)
    bilinear.forward = lambda input1, input2: input1 * bilinear.bias
    watch(bilinear, got)
    call(bilinear, x).sum().backward()
    ((_, (first, second), _),) = got
    assert torch.equal(first, x)
    assert torch.equal(second[0] if isinstance(second, list) else second, x)


def test_arguments_that_are_keyword_only_are_refused():
    """A rule would leave them out."""
    linear = nn.Linear(2, 2)
    linear.forward = lambda x, *, scale: x * linear.bias * scale
    watch(linear, [])
    with pytest.raises(TypeError, match="got scale as keyword-only arguments"):
        linear(torch.ones(1, 2), scale=2)
    linear.requires_grad_(False)
    linear(torch.ones(1, 2, requires_grad=True), scale=2)


class Nothing(Captures):
    def add(self, call, gradient):
        pass


def test_a_captured_module_is_copied_and_pickled():
    net = twin(linear_net(), "invert")
    captures = Nothing(net)
    net(images().flatten(1)[:, :8]).sum().backward()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        hooks = [h for m in other.modules() for h in m._forward_hooks.values()]
        assert len(hooks) == len(captures.handles)
        assert all(isinstance(h, Hook) and h.captures is hooks[0].captures for h in hooks)
        assert hooks[0].captures is not captures


@pytest.mark.parametrize("before", [lambda y: y.detach(), lambda y: None, lambda y: y.int()])
def test_a_layer_that_returns_something_before_its_output(before):
    """The gradient belonged to the first tensor that needs one, the evaluation to the first."""

    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return before(x * self.scale), x * self.scale

    module, got = Returns(), []
    Watch(module, lambda call, g: got.append(per_sample_gradients(module, call.inputs(), g)))
    x = torch.randn(3, 2)
    loss = module(x)[1].sum()
    if isinstance(before(x), torch.Tensor) and before(x).is_floating_point():
        with pytest.raises(TypeError, match="not only the first tensor that Returns returned"):
            loss.backward()
    else:
        loss.backward()
        torch.testing.assert_close(got[0]["scale"], x)
