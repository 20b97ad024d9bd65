"""Norms of per-sample gradients, and clipping inside one backward pass, against a loop."""

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
from revzoo.core.guard import RangeError
from revzoo.core.live import LiveMemory
from revzoo.private.clipping import ClippedGradients, SampleNorms

CLIP = 0.5


def norms_of(loop):
    return sum(g.reshape(len(g), -1).square().sum(1) for g in loop.values()).sqrt()


def assert_clipped(net, loop, count):
    scale = (CLIP / (norms_of(loop) + 1e-6)).clamp(max=1)
    assert scale.min() < 1
    for name, p in net.named_parameters():
        if p.requires_grad:
            expected = torch.tensordot(scale, loop[name], 1) / count
            torch.testing.assert_close(p.grad, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_clipped_gradients_equal_a_loop_in_every_mode(name, mode):
    net = network(name, mode)
    images, labels = batch()
    loop = looped(net, images, labels)
    clipped = ClippedGradients(net, CLIP)
    functional.cross_entropy(net(images), labels).backward()
    assert_clipped(net, loop, 3)
    torch.testing.assert_close(clipped.norms, norms_of(loop), rtol=1e-10, atol=1e-10)
    clipped.remove()
    net.zero_grad()
    functional.cross_entropy(net(images), labels).backward()
    torch.testing.assert_close(net.fc.bias.grad, loop["fc.bias"].mean(0))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("mode", MODES)
def test_attention_equals_a_loop_in_every_mode(mode):
    net, (x, labels) = attention_network(mode), attention_batch()
    loop = looped(net, x, labels)
    clipped = ClippedGradients(net, CLIP)
    functional.cross_entropy(net(x), labels).backward()
    assert_clipped(net, loop, 3)
    torch.testing.assert_close(clipped.norms, norms_of(loop), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_layers_used_twice_tied_weights_and_frozen_ones(mode):
    net, (x, labels) = tied_network(mode), tied_batch()
    net[1].bias.requires_grad_(False)
    loop = looped(net, x, labels)
    ClippedGradients(net, CLIP)
    for _ in range(2):
        net.zero_grad()
        functional.cross_entropy(net(x), labels).backward()
        assert_clipped(net, loop, 3)


def test_several_losses_and_accumulation():
    """A sum of losses is clipped as one; two batches add up, each clipped by itself."""
    net = network("revnet38", "exact")
    images, labels = batch()
    loop = {
        name: g + h
        for (name, g), h in zip(
            looped(net, images, labels).items(),
            looped(net, images, labels.flip(0)).values(),
            strict=True,
        )
    }
    ClippedGradients(net, CLIP)
    logits = net(images)
    losses = [functional.cross_entropy(logits, y) for y in (labels, labels.flip(0))]
    sum(losses).backward()
    assert_clipped(net, loop, 3)
    first = {name: p.grad.clone() for name, p in net.named_parameters()}
    logits = net(images)
    sum(functional.cross_entropy(logits, y) for y in (labels, labels.flip(0))).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, 2 * first[name])


def test_a_loss_of_two_forward_passes_is_refused():
    """Each would be clipped separately: a sample in both would have twice the norm."""
    net, (x, labels) = tied_network("store"), tied_batch()
    ClippedGradients(net, CLIP)
    first, second = (functional.cross_entropy(net(t), labels) for t in (x, -x))
    with pytest.raises(RuntimeError, match="two forward passes"):
        (first + second).backward()


def test_norms_come_with_an_ordinary_backward_pass():
    net = network("revnet38", "exact")
    images, labels = batch()
    loop = looped(net, images, labels)
    norms = SampleNorms(net)
    functional.cross_entropy(net(images), labels, reduction="sum").backward()
    norms.collecting = True
    functional.cross_entropy(net(images), labels, reduction="sum").backward()
    torch.testing.assert_close(norms.take().sqrt(), norms_of(loop), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_norms_of_two_forward_passes_and_of_two_backward_passes(mode):
    """The norm of a sum is not the sum of the norms."""
    net, (x, labels) = tied_network(mode), tied_batch()
    loop, other = looped(net, x, labels), looped(net, -x, labels)
    norms = SampleNorms(net)
    norms.start()
    losses = [functional.cross_entropy(net(t), labels, reduction="sum") for t in (x, -x)]
    sum(losses).backward()
    expected = norms_of({name: g + other[name] for name, g in loop.items()})
    torch.testing.assert_close(norms.take().sqrt(), expected, rtol=1e-10, atol=1e-10)
    norms.start()
    loss = net(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass for all losses"):
        loss.backward()


@pytest.mark.parametrize("mode", ["store", "exact"])
def test_a_sample_that_is_not_finite_raises(mode):
    """Its clipped gradient would make all weights NaN."""
    net = network("revnet38", mode)
    images, labels = batch()
    images[1, 0, 0, 0] = torch.nan
    ClippedGradients(net, CLIP)
    with pytest.raises(FloatingPointError, match=r"samples \[1\] of the batch are not finite"):
        functional.cross_entropy(net(images), labels).backward()


def test_a_stream_beyond_its_range_raises_its_own_error():
    """Which training answers with a coarser grid."""
    branch = nn.Linear(4, 4)
    nn.init.constant_(branch.weight, 1e6)
    net = revzoo.ReversibleSequence([revzoo.ReversibleBlock(branch)], memory="exact")
    ClippedGradients(net, CLIP)
    with pytest.raises(RangeError):
        net(torch.ones(2, 8)).sum().backward()


def test_evaluation_is_left_alone():
    net = network("revnet38", "exact").eval()
    images, labels = batch()
    ClippedGradients(net, CLIP)
    loop = looped(net, images, labels)
    functional.cross_entropy(net(images), labels).backward()
    torch.testing.assert_close(net.fc.bias.grad, loop["fc.bias"].mean(0))


@pytest.mark.parametrize("training", [True, False])  # in evaluation, it was not clipped
def test_a_layer_that_is_not_reached_raises(training):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.skipped = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x) + functional.linear(x, self.skipped.weight)

    net = Skips()
    net.skipped.train(training)
    ClippedGradients(net, CLIP)
    with pytest.raises(RuntimeError, match="'skipped' got no gradient"):
        net(torch.ones(3, 2)).sum().backward()


def test_batch_normalisation_is_refused():
    net = revzoo.create_model("resnet32", units=(1, 1, 1))
    ClippedGradients(net, CLIP)
    with pytest.raises(ValueError, match='norm="group"'):
        net(torch.zeros(2, 3, 32, 32))


def test_nothing_is_left_of_a_graph():
    """No cycle holds activations until the garbage collector runs."""
    net = network("revnet38", "exact")
    images, labels = batch()
    ClippedGradients(net, CLIP)
    loss = functional.cross_entropy(net(images), labels)
    loss.backward()
    with LiveMemory() as memory:
        for _ in range(3):
            net(images)  # never differentiated
        left = memory.now
        loss = functional.cross_entropy(net(images), labels)
        loss.backward()
        del loss
    assert left < images.nbytes
    assert memory.now < images.nbytes


def test_an_interrupted_backward_pass_leaves_nothing_behind():
    """Its norms would be added to the next batch's."""
    net = network("revnet38", "exact")
    images, labels = batch()
    loop = looped(net, images, labels)
    clipped = ClippedGradients(net, CLIP)

    def interrupt(gradient):
        raise KeyboardInterrupt

    hook = net.stages[0].register_forward_hook(
        lambda m, args, out: out[0].register_hook(interrupt) and None
    )
    with pytest.raises(KeyboardInterrupt):
        functional.cross_entropy(net(images), labels).backward()
    hook.remove()
    net.zero_grad()
    functional.cross_entropy(net(images), labels).backward()
    torch.testing.assert_close(clipped.norms, norms_of(loop), rtol=1e-10, atol=1e-10)


def test_rows_that_are_not_samples_are_refused():
    """A sum over them would take one row as each sample's, or one sample's for another's."""

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.outer(x + self.inner(torch.ones(1, 2)))

    net = Constant()
    norms = SampleNorms(net)
    norms.start()
    with pytest.raises(ValueError, match="'inner' returned 1 rows for 3 samples"):
        net(torch.ones(3, 2)).sum().backward()


def test_tokens_along_dimension_0_are_refused():
    """The norms would belong to tokens."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x.flatten(0, 1)).view(len(x), -1)

    net = Tokens()
    ClippedGradients(net, CLIP)
    with pytest.raises(ValueError, match="'inner' returned 6 rows for 3 samples"):
        net(torch.ones(3, 2, 2)).sum().backward()


def test_second_derivatives_and_indices_are_refused():
    """The weights' own derivative would be missing; indices have no gradient."""
    net = nn.Linear(2, 2)
    ClippedGradients(net, CLIP)
    loss = net(torch.ones(3, 2)).square().mean()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*call remove\(\)"):
        torch.autograd.grad(loss, [net.weight], create_graph=True)
    with pytest.raises(TypeError, match=r"torch\.int64 as its first positional argument"):
        net(torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="NoneType as its first positional argument"):
        net(input=torch.ones(3, 2))


def test_wrong_options_and_outputs_are_refused():
    """A negative norm would climb the loss; a tuple hides its samples."""
    net = nn.Sequential(nn.Linear(2, 2))
    for norm in (0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="max_norm"):
            ClippedGradients(net, norm)
    clipped = ClippedGradients(net, CLIP)
    with pytest.raises(ValueError, match="already clipped"):
        ClippedGradients(net, CLIP)
    clipped.remove()
    net.append(nn.Identity())
    net[1].forward = lambda x: (x, x)
    ClippedGradients(net, CLIP)
    with pytest.raises(TypeError, match="returned tuple, expected one tensor"):
        net(torch.ones(3, 2))


def test_an_empty_batch_has_no_norms():
    net = nn.Linear(2, 2)
    clipped = ClippedGradients(net, CLIP)
    net(torch.ones(0, 2)).sum().backward()
    assert clipped.norms.shape == (0,)
    assert not net.weight.grad.any()


def test_a_copy_and_a_pickle_clip_by_themselves():
    net = network("revnet38", "exact")
    images, labels = batch()
    loop = looped(net, images, labels)
    ClippedGradients(net, CLIP)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net):
        functional.cross_entropy(other(images), labels).backward()
        assert_clipped(other, loop, 3)


def test_a_step_of_clipping_does_not_grow_with_depth():
    """The first pass keeps the graph, but no activations."""

    def peak(depth):
        options = {**ZOO["revnet38"], "units": (depth, 1)}
        net = revzoo.create_model("revnet38", **options, memory="exact").double()
        images, labels = batch(16, 16)
        ClippedGradients(net, CLIP)
        functional.cross_entropy(net(images), labels).backward()
        net.zero_grad()
        with LiveMemory() as memory:
            functional.cross_entropy(net(images), labels).backward()
        return memory.peak - sum(p.nbytes for p in net.parameters())

    assert peak(6) < 1.05 * peak(2)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_does_not_depend_on_the_images_is_refused(mode):
    """The pass that measures norms ends at the images, so it left out such calls."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.chain = nn.Linear(8, 8), tied_network(mode)

        def forward(self, x):
            return self.chain(self.inner(x) + self.inner(torch.ones_like(x)))

    net = Twice().double()
    ClippedGradients(net, CLIP)
    images, labels = tied_batch()
    with pytest.raises(RuntimeError, match=r"'inner' was called 2 times, but 1 of its outputs"):
        functional.cross_entropy(net(images), labels).backward()


def test_autocast():
    """The weights have 32 bits: autograd refused a gradient of another type."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    ClippedGradients(net, 1e-3)
    images, labels = tied_batch()
    with torch.autocast("cpu", torch.bfloat16):
        functional.cross_entropy(net(images.float()), labels).backward()
    norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    assert 0 < norm < 1.01e-3
