"""Layers in a row against the same layers one by one."""

import copy

import pytest
import torch
from compare import error
from torch import nn

import revzoo
from revzoo.models.components import ACTIVATIONS
from revzoo.models.lean import Lean, run


def layers(activation="relu", *, dropout=0.0):
    torch.manual_seed(0)
    return [
        nn.BatchNorm2d(4),
        ACTIVATIONS[activation](),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        ACTIVATIONS[activation](),
        nn.Dropout(dropout),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
    ]


def effects(net, x):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = net(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y))
    return [y, x.grad, *(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()]


def frozen(net, what):
    for m in net:
        is_norm = isinstance(m, nn.BatchNorm2d)
        if what == "all" or (is_norm and what == "norms"):
            m.requires_grad_(False).eval()
        if what in ("weights", "affine"):
            m.requires_grad_(is_norm == (what == "weights"))
    return net


def assert_same(a, b):
    for s, t in zip(a, b, strict=True):
        assert s is t or torch.equal(s, t)


LAYOUTS = (torch.contiguous_format, torch.channels_last)
FROZEN = ("nothing", "norms", "weights", "affine", "all")


@pytest.mark.parametrize(
    ("activation", "what", "layout"),
    [
        *(("relu", what, layout) for what in FROZEN[:-1] for layout in LAYOUTS),
        *((name, "all", LAYOUTS[0]) for name in ACTIVATIONS),
        *((name, "nothing", LAYOUTS[0]) for name in ACTIVATIONS if name != "relu"),
    ],
)
def test_results_are_bit_equal_to_the_plain_layers(activation, what, layout):
    """But for an ELU, whose gradient torch computes from the output if it worked in place."""
    x = torch.randn(3, 4, 6, 6).to(memory_format=layout)
    found = []
    for kind in (Lean, nn.Sequential):
        net = frozen(kind(*layers(activation, dropout=0.3)), what).to(memory_format=layout)
        found.append(effects(net, x))
    if activation == "elu":
        given = [[t for t in effect if t is not None] for effect in found]
        assert error(*given) < 1e-6
    else:
        assert_same(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["nothing", "all"])
def test_under_autocast(what, dtype):
    x = torch.randn(3, 4, 6, 6).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = [effects(frozen(kind(*layers()), what), x) for kind in (Lean, nn.Sequential)]
    assert_same(*found)


@pytest.mark.parametrize("what", FROZEN)
def test_derivatives_never_read_what_was_not_kept(what):
    """torch fills new memory with NaN while it is deterministic."""
    torch.use_deterministic_algorithms(True)  # undone after each test
    net = frozen(Lean(*layers("tanh")), what).double()
    x = torch.randn(2, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, x)
    assert torch.autograd.gradgradcheck(net, x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pooling(layout):
    torch.use_deterministic_algorithms(True)
    x = torch.randn(2, 4, 6, 6).to(memory_format=layout)
    found = []
    lean = Lean(nn.AvgPool2d(2))
    for pool in (lean, nn.AvgPool2d(2)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        found.append((y, leaf.grad))
    assert_same(*found)
    leaf = x.double().requires_grad_()
    assert torch.autograd.gradgradcheck(lean, leaf)


def test_a_hooked_layer_and_the_one_behind_it_run_as_they_are():
    """A hook may keep a layer's output, or compute with its input."""
    net = frozen(Lean(*layers()), "all")
    seen = []
    net[0].register_forward_hook(lambda m, inputs, output: seen.append(output))
    net[2].register_forward_hook(lambda m, inputs, output: seen.append(inputs[0].square()))
    x = torch.randn(3, 4, 6, 6, requires_grad=True)
    net(x)
    assert (seen[0] < 0).any()  # a ReLU in place would have changed it
    assert torch.autograd.grad(seen[1].sum(), x)[0].isfinite().all()


def test_full_backward_hooks():
    """torch refuses to change the result of such a hook in place."""
    net, seen = Lean(*layers()), []
    for m in net:
        m.register_full_backward_hook(lambda m, *_: seen.append(m))
    net(torch.randn(3, 4, 6, 6, requires_grad=True)).sum().backward()
    assert set(seen) == set(net)


def test_a_stream_is_never_changed_in_place():
    x = torch.randn(3, 4)
    before = x.clone()
    run([nn.Identity(), nn.ReLU()], x)
    run([nn.Dropout(0.5), nn.ReLU()], x)
    assert torch.equal(x, before)


def test_frozen_weights_changed_before_the_backward_pass_are_refused():
    net = frozen(Lean(*layers()), "all")
    y = net(torch.randn(3, 4, 6, 6, requires_grad=True))
    with torch.no_grad():
        net[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_weight_that_another_layer_computes():
    """Its gradient was read from memory that was never written."""
    gradients = []
    for kind in (nn.Sequential, Lean):
        conv, weight = nn.Conv2d(4, 4, 3, bias=False), torch.ones(4, 4, 3, 3, requires_grad=True)
        del conv.weight
        conv.weight = weight * 2
        torch.manual_seed(0)
        x = torch.randn(3, 4, 6, 6, requires_grad=True)
        kind(nn.Identity(), conv)(x).square().sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def test_transforms_and_captured_graphs():
    net = frozen(Lean(*layers()), "all")
    x = torch.randn(3, 4, 6, 6)
    plain = nn.Sequential(*copy.deepcopy(list(net)))
    gradient = torch.func.grad(lambda t: net(t).sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda t: plain(t).sum())(x))
    exported = torch.export.export(net, (x,)).module()
    torch.testing.assert_close(exported(x), plain(x))


def chain(branch, mode, **options):
    torch.manual_seed(0)
    blocks = [revzoo.ReversibleBlock(branch(), branch()) for _ in range(2)]
    return revzoo.ReversibleSequence(blocks, memory=mode, **options)


def gradients(net, dtype=torch.float32, layout=torch.contiguous_format):
    torch.manual_seed(1)
    x = torch.randn(16, 8, 8, 8).to(dtype, memory_format=layout).requires_grad_()
    y = net(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y))
    return [y, x.grad, *(p.grad for p in net.parameters()), *net.buffers()]


@pytest.mark.parametrize(
    ("mode", "layout"), [("recompute", LAYOUTS[0]), ("invert", LAYOUTS[1]), ("exact", LAYOUTS[1])]
)
def test_a_replay_computes_the_same_values(mode, layout):
    """``exact`` compares every bit of the reconstruction."""
    net = chain(lambda: Lean(*layers()), mode)
    found = gradients(net, layout=layout)
    plain = chain(lambda: Lean(*layers()), "store")
    if mode == "exact":
        revzoo.set_memory(plain, "store", grid="auto")
    for s, t in zip(found, gradients(plain, layout=layout), strict=True):
        assert torch.equal(s, t) or (mode == "invert" and torch.allclose(s, t, 1e-4, 1e-4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_repeat_exactly(dtype):
    def branch():
        return Lean(*layers()).to(dtype)

    found = [gradients(chain(branch, mode), dtype) for mode in ("recompute", "store")]
    assert all(map(torch.equal, *found))


class Shared(nn.Module):
    """Runs a normalisation twice, on different values."""

    def __init__(self):
        super().__init__()
        self.layers = Lean(nn.BatchNorm2d(4), nn.Tanh())

    def forward(self, x):
        return self.layers(2 * self.layers(x).exp())


@pytest.mark.parametrize(
    "branch", [Shared, lambda: Lean(nn.BatchNorm2d(4, affine=False), nn.Tanh())]
)
def test_normalisations_that_run_twice_or_have_no_weights(branch):
    found = [gradients(chain(branch, mode)) for mode in ("recompute", "store")]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "activations",
    [
        [nn.LeakyReLU(-0.2)],
        [nn.LeakyReLU(0.2), nn.ReLU(inplace=True)],
        [nn.ELU(), nn.ReLU(inplace=True)],
    ],
    ids=["negative slope", "leaky, then in place", "elu, then in place"],
)
def test_activations_whose_gradient_needs_the_input_keep_it(activations):
    """The backward pass raised; with the plain layers it does not."""
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    found = [
        effects(kind(copy.deepcopy(linear), *activations), x) for kind in (Lean, nn.Sequential)
    ]
    assert_same(*found)


@pytest.mark.parametrize("place", [1, 2])
def test_a_backward_hook_on_an_activation_alone_runs(place):
    layers = Lean(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4))
    called = []
    layers[place].register_full_backward_hook(lambda *_: called.append(place))
    layers(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert called == [place]
