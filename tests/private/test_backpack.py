"""BackPACK's first-order extensions on reversible networks, against a loop over samples."""

import copy
import pickle

import pytest
import torch
from per_sample_nets import (
    MODES,
    ZOO,
    attention_batch,
    attention_network,
    batch,
    looped,
    network,
    tied_batch,
    tied_network,
)
from torch import nn
from torch.nn import functional

import revzoo
from revzoo.core.live import LiveMemory

pytest.importorskip("backpack")

from backpack import backpack
from backpack.context import CTX
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, SumGradSquared, Variance

from revzoo.integrations.backpack import BatchDotGrad, extend, remove

EXTENSIONS = (BatchGrad, BatchL2Grad, BatchDotGrad, SumGradSquared, Variance)


def assert_equals_loop(net, loop):
    """All five quantities of each parameter; BackPACK's are of the loss's terms, here a sum's."""
    for name, p in net.named_parameters():
        g = loop[name]
        rows = g.reshape(len(g), -1)
        expected = {
            "grad_batch": g,
            "batch_l2": rows.square().sum(1),
            "batch_dot": rows @ rows.T,
            "sum_grad_squared": g.square().sum(0),
            "variance": g.var(0, correction=0),
            "grad": g.sum(0),
        }
        for field, e in expected.items():
            got = getattr(p, field)
            torch.testing.assert_close(got, e, rtol=1e-10, atol=1e-10, msg=f"{name} {field}")


def summed_loss(net, images, labels):
    return functional.cross_entropy(net(images), labels, reduction="sum")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_every_network_equals_a_loop_in_every_mode(name, mode):
    net = network(name, mode)
    loop = looped(net, *batch())
    extend(net)
    with backpack(*(ext() for ext in EXTENSIONS)):
        summed_loss(net, *batch()).backward()
    assert_equals_loop(net, loop)


@pytest.mark.parametrize("mode", MODES)
def test_attention_equals_a_loop_in_every_mode(mode):
    net, (x, labels) = attention_network(mode), attention_batch()
    loop = looped(net, x, labels)
    extend(net)
    with backpack(*(ext() for ext in EXTENSIONS)):
        summed_loss(net, x, labels).backward()
    assert_equals_loop(net, loop)


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_a_layer_used_twice_and_tied_weights_add_up(mode):
    """In BackPACK the last use of a parameter overwrites those before it."""
    net, (x, labels) = tied_network(mode), tied_batch()
    loop = looped(net, x, labels)
    extend(net)
    for _ in range(2):  # nothing is left over from a step before
        net.zero_grad()
        with backpack(*(ext() for ext in EXTENSIONS)):
            summed_loss(net, x, labels).backward()
        assert_equals_loop(net, loop)


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_frozen_layers_get_nothing(mode):
    net = network("revnet38", mode)
    frozen = [*net.stem.parameters(), *net.stages[0].parameters(), net.fc.bias]
    for p in frozen:
        p.requires_grad_(False)
    loop = looped(net, *batch())
    extend(net)
    with backpack(BatchGrad()):
        summed_loss(net, *batch()).backward()
    assert not any(hasattr(p, "grad_batch") for p in frozen)
    for name, g in loop.items():
        torch.testing.assert_close(net.get_parameter(name).grad_batch, g, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["store", "invert", "exact"])
def test_several_losses_and_a_kept_graph(mode):
    """Each backward pass over the one graph leaves the quantities of its own loss."""
    net = extend(network("revnet38", mode))
    images, labels = batch()
    loop = looped(net, images, labels)
    others = looped(net, images, labels.flip(0))
    logits = net(images)
    first = functional.cross_entropy(logits, labels, reduction="sum")
    second = functional.cross_entropy(logits, labels.flip(0), reduction="sum")
    for loss, expected, kept in (
        (first, loop, True),
        (second, others, True),
        (first + second, None, False),
    ):
        with backpack(BatchGrad()):
            loss.backward(retain_graph=kept)
        for name, p in net.named_parameters():
            e = loop[name] + others[name] if expected is None else expected[name]
            torch.testing.assert_close(p.grad_batch, e, rtol=1e-10, atol=1e-10)


def test_accumulated_gradients():
    """Two batches: ``grad`` adds up, ``grad_batch`` belongs to the last batch, as in BackPACK."""
    net = extend(network("revnet38", "invert"))
    loops = [looped(net, *batch(seed=seed)) for seed in (1, 2)]
    losses = [summed_loss(net, *batch(seed=seed)) for seed in (1, 2)]  # two graphs at a time
    for loss, loop in zip(losses, loops, strict=True):
        with backpack(BatchGrad()):
            loss.backward()
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.grad_batch, loop[name], rtol=1e-10, atol=1e-10)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, loops[0][name].sum(0) + loops[1][name].sum(0))


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_a_graph_from_before_another_backward_pass_raises(mode):
    """Squares of both uses would have to be added up before."""
    net, (x, labels) = extend(tied_network(mode)), tied_batch()
    with backpack(BatchL2Grad()):
        first = summed_loss(net, x, labels)
        summed_loss(net, x, labels).backward()
        third = summed_loss(net, x, labels)
        with pytest.raises(RuntimeError, match="one backward pass for all losses"):
            (first + third).backward()
        summed_loss(net, x, labels).backward()


@pytest.mark.parametrize("mode", ["store", "exact"])
def test_remove_leaves_no_hook(mode):
    """Neither in the modules nor in an existing graph."""
    net = network("revnet38", mode)
    before = {name: dict(m._forward_hooks) for name, m in net.named_modules()}
    extend(extend(net))
    copied = extend(copy.deepcopy(net))
    graph = summed_loss(net, *batch()) if mode == "store" else None
    remove(net)
    assert before == {name: dict(m._forward_hooks) for name, m in net.named_modules()}
    assert not any(m._backward_hooks for m in net.modules())
    with backpack(BatchGrad()):
        if graph is not None:  # a recomputation without the hooks saves other tensors, and raises
            graph.backward()
        summed_loss(net, *batch()).backward()
    assert not any(hasattr(p, "grad_batch") for p in net.parameters())
    with backpack(BatchGrad()):
        summed_loss(copied, *batch()).backward()
    assert all(hasattr(p, "grad_batch") for p in copied.parameters())
    assert all(len(m._forward_hooks) <= 1 for m in copied.modules())
    CTX.remove_hooks()  # BackPACK's way


def test_context_options_are_backpacks():
    """Subsampling, the hook after the extensions, and the lean algorithm of convolutions."""
    net = network("revnet38", "invert")
    loop = looped(net, *batch())
    extend(net)
    called = []
    with (
        backpack(BatchGrad(subsampling=[2, 0]), extension_hook=called.append),
        weight_jac_t_save_memory(),
    ):
        summed_loss(net, *batch()).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad_batch, loop[name][[2, 0]], rtol=1e-10, atol=1e-10)
    assert len(called) == sum(bool(m._parameters) for m in net.modules())
    assert not any(hasattr(m, "input0") or hasattr(m, "output") for m in net.modules())


def test_extensions_of_second_order_are_refused():
    net = extend(network("revnet38"))
    with pytest.raises(NotImplementedError, match="DiagGGNExact"), backpack(DiagGGNExact()):
        summed_loss(net, *batch()).backward()


def test_batch_normalisation_is_refused_in_training():
    net = extend(revzoo.create_model("resnet32", units=(1, 1, 1), memory="recompute"))
    images = torch.zeros(2, 3, 32, 32)
    with backpack(BatchGrad()):
        with pytest.raises(ValueError, match='norm="group"'):
            net(images).sum().backward()
        net.eval()(images).sum().backward()
    assert net.fc.weight.grad_batch.shape == (2, 10, 64)


def test_inputs_of_one_branch_at_most_are_alive():
    """Memory does not grow with depth, as it does with BackPACK's own hooks."""

    def peak(depth, mode):
        torch.manual_seed(0)
        branches = [
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2 * depth)
        ]
        blocks = [
            revzoo.ReversibleBlock(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)
        ]
        net = extend(revzoo.ReversibleSequence(blocks, memory=mode))
        x = torch.randn(512, 128)

        def forget(module):  # the results are the user's: only what the hooks keep is counted
            for p in module.parameters():
                del p.batch_l2

        with backpack(BatchL2Grad(), extension_hook=forget):
            net(x).sum().backward()
            net.zero_grad(set_to_none=False)
            with LiveMemory() as memory:
                net(x).sum().backward()
        return memory.peak

    stream = 512 * 64 * 4
    assert peak(8, "invert") - peak(4, "invert") < stream
    assert peak(8, "store") - peak(4, "store") >= 4 * 2 * 2 * stream


class Product(nn.Module):
    """A layer of two inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x, other):
        return x * self.weight * other


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(2, 3, (1, 3), padding="same"), (3, 2, 4, 4)),
        (lambda: nn.Conv1d(2, 4, 3, padding="same", dilation=3, groups=2), (3, 2, 9)),
        (Product, (3, 4)),
    ],
)
def test_layers_whose_rules_in_backpack_are_wrong_or_fail(layer, shape):
    torch.manual_seed(0)
    layer, x = layer().double(), torch.randn(shape, dtype=torch.float64)
    inputs = (x, x.sin()) if isinstance(layer, Product) else (x,)
    rows = []
    for i in range(3):
        loss = layer(*(t[i : i + 1] for t in inputs)).square().sum()
        rows.append(torch.autograd.grad(loss, layer.parameters()))
    extend(layer)
    with backpack(*(ext() for ext in EXTENSIONS)):
        layer(*inputs).square().sum().backward()
    names = [n for n, _ in layer.named_parameters()]
    assert_equals_loop(
        layer, {n: torch.stack(g) for n, g in zip(names, zip(*rows, strict=True), strict=True)}
    )


def test_a_pickled_model_stays_extended_once():
    net, (x, labels) = extend(tied_network("invert")), tied_batch()
    loop = looped(net, x, labels)
    other = extend(pickle.loads(pickle.dumps(net)))
    with backpack(*(ext() for ext in EXTENSIONS)):
        summed_loss(other, x, labels).backward()
    assert_equals_loop(other, loop)
    remove(other)
    assert not any(m._forward_hooks or m._forward_hooks_with_kwargs for m in other.modules())


class _Affine(nn.Module):
    """``weight * x``, and plus ``shift`` in some instances."""

    def __init__(self, *, shifts: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.randn(3)) if shifts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return y if self.shift is None else y + self.shift


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_instances_of_a_class_may_have_other_parameters(order: tuple[bool, bool]) -> None:
    """The first instance's names served all, so per-sample gradients were missing."""
    torch.manual_seed(0)
    net = extend(nn.Sequential(*(_Affine(shifts=shifts) for shifts in order)))
    with backpack(BatchGrad()):
        net(torch.randn(4, 3)).square().sum().backward()
    for p in net.parameters():
        assert torch.allclose(p.grad_batch.sum(0), p.grad, atol=1e-5)
    remove(net)


def test_a_model_extended_in_parts():
    """Layers of the second call did not know those of the first, so a shared weight had one use."""
    images, labels = tied_batch()
    first, second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    second.weight = first.weight
    net = nn.Sequential(first, second)
    loop = looped(net, images, labels)
    extend(first)
    extend(net)
    with backpack(*(kind() for kind in EXTENSIONS)):
        summed_loss(net, images, labels).backward()
    assert_equals_loop(net, loop)


def test_batch_normalisation_that_train_switched_on():
    """Without parameters it had no hook, if it was in evaluation mode before."""
    norm = nn.BatchNorm2d(3, affine=False).eval()
    net = extend(nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Flatten()).double())
    net.train()
    with backpack(BatchGrad()), pytest.raises(ValueError, match="batch normalisation in training"):
        net(batch()[0]).sum().backward()


def test_rows_that_are_not_samples_are_refused():
    """``batch_l2`` of this layer belonged to tokens."""
    tokens = nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 4), nn.Unflatten(0, (3, -1)))
    net = extend(nn.Sequential(tokens, nn.Flatten(), nn.Linear(96, 2)))
    with backpack(BatchL2Grad()), pytest.raises(ValueError, match=r"'0\.1' returned 72 rows for"):
        net(torch.randn(3, 24, 8)).sum().backward()
