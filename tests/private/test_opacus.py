"""Opacus on reversible networks: its gradients and steps against a loop over samples."""

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
from torch.utils.data import DataLoader, TensorDataset

import revzoo
from revzoo.core.live import LiveMemory

pytest.importorskip("opacus")

from revzoo.integrations.opacus import PrivacyEngine
from revzoo.private import gradients as rules

pytestmark = pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Expected size .* batch size"
)
CLIP = 0.5  # below the norm of some samples' gradients, above others'


def private(net, mode="hooks", *, noise=0.0, size=3, **options):
    """Model, optimiser, loss of Opacus, for batches of ``size`` images."""
    images, labels = batch(size)
    loader = DataLoader(TensorDataset(images, labels), batch_size=size)
    made = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
        noise_generator=torch.Generator().manual_seed(3),
        **options,
    )
    criterion = made[2] if mode == "ghost" else functional.cross_entropy
    return made[0], made[1], criterion


def clipped_mean(loop):
    """The gradient of a private step without noise, by parameter."""
    norms = sum(g.reshape(len(g), -1).square().sum(1) for g in loop.values()).sqrt()
    scale = (CLIP / (norms + 1e-6)).clamp(max=1)
    assert scale.min() < 1
    return {n: torch.tensordot(scale, g, 1) / len(scale) for n, g in loop.items()}


def assert_close(actual, expected, name):
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name} {m}"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_gradients_of_samples_equal_a_loop_in_every_mode(name, mode):
    net = network(name, mode)
    loop = looped(net, *batch())
    model, _, criterion = private(net)
    images, labels = batch()
    criterion(model(images), labels).backward()
    for n, p in net.named_parameters():
        assert_close(p.grad_sample, loop[n], n)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_a_step_of_ghost_clipping_equals_a_loop_in_every_mode(name, mode):
    net = network(name, mode)
    expected = clipped_mean(looped(net, *batch()))
    model, optimizer, criterion = private(net, "ghost")
    images, labels = batch()
    criterion(model(images), labels).backward()
    optimizer.pre_step()
    for n, p in net.named_parameters():
        assert_close(p.grad, expected[n], n)
        assert p.grad_sample is None


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
@pytest.mark.parametrize("mode", MODES)
def test_steps_with_noise_equal_those_of_store(mode, sampling):
    def weights(mode):
        net = network("revnet38", mode)
        model, optimizer, criterion = private(net, sampling, noise=1.0)
        for seed in range(3):
            images, labels = batch(seed=seed)
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        return dict(net.named_parameters())

    expected = weights("store")
    for n, p in weights(mode).items():
        assert_close(p, expected[n], n)


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
@pytest.mark.parametrize("mode", MODES)
def test_attention_equals_a_loop_in_every_mode(mode, sampling):
    net, (x, labels) = attention_network(mode), attention_batch()
    expected = clipped_mean(looped(net, x, labels))
    model, optimizer, criterion = private(net, sampling)
    criterion(model(x), labels).backward()
    optimizer.pre_step()
    for n, p in net.named_parameters():
        assert_close(p.grad, expected[n], n)


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
@pytest.mark.parametrize("mode", ["store", "invert"])
def test_a_backward_pass_that_failed_leaves_nothing_behind(mode, sampling):
    """Between two uses of a layer; its graph stays alive, as in a notebook."""
    net, (x, labels) = tied_network(mode), tied_batch()
    loop = looped(net, x, labels)
    model, optimizer, criterion = private(net, sampling)

    def interrupt(module, args, out):
        out.register_hook(lambda gradient: (_ for _ in ()).throw(KeyboardInterrupt))

    for count in (3, 1):
        handle = net[0][0].steps[1].branch.register_forward_hook(interrupt)
        failed = criterion(model(x[:count]), labels[:count])
        with pytest.raises(KeyboardInterrupt):
            failed.backward()
        handle.remove()
        optimizer.zero_grad()
        criterion(model(x), labels).backward()
        optimizer.pre_step()
        for n, p in net.named_parameters():
            assert_close(p.grad, clipped_mean(loop)[n], n)


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
@pytest.mark.parametrize("mode", ["store", "exact"])
def test_a_sample_that_is_not_finite_raises(mode, sampling):
    """Its clipped gradient would make all weights NaN."""
    net = network("revnet38", mode)
    model, _, criterion = private(net, sampling)
    images, labels = batch()
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"samples \[1\] of the batch are not finite"):
        criterion(model(images), labels).backward()


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
@pytest.mark.parametrize("mode", ["store", "invert"])
def test_a_layer_used_twice_and_tied_weights(mode, sampling):
    net, (x, labels) = tied_network(mode), tied_batch()
    expected = clipped_mean(looped(net, x, labels))
    model, optimizer, criterion = private(net, sampling)
    for _ in range(2):
        optimizer.zero_grad()
        criterion(model(x), labels).backward()
        optimizer.pre_step()
        for n, p in net.named_parameters():
            assert_close(p.grad, expected[n], n)


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
def test_frozen_layers(sampling):
    net = network("revnet38", "invert")
    for p in (*net.stem.parameters(), *net.stages[0].parameters(), net.fc.bias):
        p.requires_grad_(False)
    expected = clipped_mean(looped(net, *batch()))
    model, optimizer, criterion = private(net, sampling)
    images, labels = batch()
    criterion(model(images), labels).backward()
    optimizer.pre_step()
    for n, p in net.named_parameters():
        assert (p.grad is None) == (n not in expected)
        if n in expected:
            assert_close(p.grad, expected[n], n)


def test_accumulated_batches():
    """Two batches of one step: Opacus lists the gradients of both."""
    net = network("revnet38", "invert")
    loops = [looped(net, *batch(seed=seed)) for seed in (1, 2)]
    model, _, criterion = private(net)
    for seed in (1, 2):
        images, labels = batch(seed=seed)
        criterion(model(images), labels).backward()
    for n, p in net.named_parameters():
        for got, loop in zip(p.grad_sample, loops, strict=True):
            assert_close(got, loop[n], n)


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_accumulation_under_poisson_sampling_is_refused(mode):
    net, (x, labels) = tied_network(mode), tied_batch()
    model, _, criterion = private(net)
    model.forbid_grad_accumulation()
    criterion(model(x), labels).backward()
    with pytest.raises(ValueError, match="BatchMemoryManager"):
        criterion(model(x), labels).backward()


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
def test_sequences_in_branches_that_are_used_twice(sampling):
    torch.manual_seed(0)

    def block(width):
        layers = nn.Sequential(nn.Linear(width // 2, width // 2), nn.Tanh())
        return revzoo.ReversibleBlock(layers)

    inner = revzoo.ReversibleSequence([block(4)] * 2, memory="invert")
    outer = revzoo.ReversibleSequence([revzoo.ReversibleBlock(inner)] * 2, memory="invert")
    net, (x, labels) = outer.double(), tied_batch()
    expected = clipped_mean(looped(net, x, labels))
    model, optimizer, criterion = private(net, sampling)
    criterion(model(x), labels).backward()
    optimizer.pre_step()
    for n, p in net.named_parameters():
        assert_close(p.grad, expected[n], n)


@pytest.mark.parametrize("mode", ["store", "invert", "exact"])
def test_several_losses(mode):
    """Their sum is clipped as one, in one pass; or one after the other on a kept graph."""
    net = network("revnet38", mode)
    images, labels = batch()
    loop, other = looped(net, images, labels), looped(net, images, labels.flip(0))
    expected = clipped_mean({n: g + other[n] for n, g in loop.items()})
    model, optimizer, criterion = private(net, "ghost")
    logits = model(images)
    (criterion(logits, labels) + criterion(logits, labels.flip(0))).backward()
    optimizer.pre_step()
    for n, p in net.named_parameters():
        assert_close(p.grad, expected[n], n)
    net = network("revnet38", mode)
    model, _, criterion = private(net)
    logits = model(images)
    criterion(logits, labels).backward(retain_graph=True)
    criterion(logits, labels.flip(0)).backward()
    for n, p in net.named_parameters():
        assert_close(p.grad_sample[0], loop[n], n)
        assert_close(p.grad_sample[1], other[n], n)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
def test_hooks_are_gone_after_cleanup(sampling, wrapped):
    net = network("revnet38", "store")
    made, _, criterion = private(net, sampling, wrap_model=wrapped)
    images, labels = batch()
    criterion((made if wrapped else net)(images), labels).backward()
    loss = net(images).sum()
    made.cleanup()
    loss.backward()
    net(images).sum().backward()
    assert not any(m._forward_hooks or m._backward_hooks for m in net.modules())
    assert not any(hasattr(m, "activations") or hasattr(m, "max_batch_len") for m in net.modules())
    assert not any(p.__dict__.keys() & {"grad_sample", "_norm_sample"} for p in net.parameters())
    private(net)  # and may come again


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
def test_a_batch_that_poisson_sampling_left_empty(sampling):
    net = network("revnet38", "exact")
    model, optimizer, criterion = private(net, sampling, noise=1.0)
    images, labels = batch()
    criterion(model(images[:0]), labels[:0]).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_layer_that_a_step_skips_is_refused():
    """Its norms would come from the last step."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 5).double()

        def forward(self, x):
            return self.second(self.first(x) if x.mean() > 0 else x)

    x, labels = tied_batch()
    model, _, criterion = private(Skips(), "ghost")
    criterion(model(x.abs()), labels).backward()
    with pytest.raises(RuntimeError, match="'first' got no gradient"):
        criterion(model(-x.abs()), labels).backward()


def test_batch_normalisation_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match='norm="group"'):
        private(revzoo.create_model("revnet38"))


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
def test_layers_whose_rules_in_opacus_are_wrong_or_fail(sampling):
    """Nonzero padding, the padding index of embeddings, LayerNorm without bias."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
            self.embed = nn.Embedding(3, 4, padding_idx=1)
            self.norm = nn.LayerNorm(4, bias=False)
            self.fc = nn.Linear(4, 5)

        def forward(self, x):
            classes = x.detach()[:, 0].flatten(1).sign().long() + 1
            classes[:, 0] = 1
            x = self.conv(x).flatten(2).mT + self.embed(classes)
            return self.fc(self.norm(x).sin().sum(1))

    torch.manual_seed(0)
    net = Net().double()
    images, labels = batch()
    loop = looped(net, images, labels)
    model, optimizer, criterion = private(net, sampling)
    criterion(model(images), labels).backward()
    optimizer.pre_step()
    for n, p in net.named_parameters():
        assert_close(p.grad, clipped_mean(loop)[n], n)


def test_parameters_frozen_or_unfrozen_later():
    """Their gradients were in the step, and not in the norms."""
    net = network("revnet38", "invert")
    net.stem.requires_grad_(False)
    model, optimizer, criterion = private(net, "ghost")
    images, labels = batch()
    net.stem.requires_grad_(True)
    expected = clipped_mean(looped(net, images, labels))
    criterion(model(images), labels).backward()
    for n in expected.keys() - {f"stem.{n}" for n, _ in net.stem.named_parameters()}:
        assert_close(net.get_parameter(n).grad / len(images), expected[n], n)
    net.stem.requires_grad_(False)
    expected = clipped_mean(looped(net, images, labels))
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.pre_step()
    for n, e in expected.items():
        assert_close(net.get_parameter(n).grad, e, n)


def test_ghost_clipping_of_convolutions_and_norms_makes_no_gradients(monkeypatch):
    def refuse(*_):
        raise AssertionError("gradients of samples")

    monkeypatch.setattr("revzoo.private.capture.per_sample_gradients", refuse)
    monkeypatch.setattr(rules, "_of_any", refuse)
    model, _, criterion = private(network("revnet38", "exact"), "ghost")
    images, labels = batch()
    criterion(model(images), labels).backward()


def test_ghost_clipping_holds_one_branch():
    """Memory grows by gradients and norms with depth; in ``store`` by all inputs."""

    def peak(depth, mode):
        torch.manual_seed(0)
        branches = [
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2 * depth)
        ]
        pairs = zip(branches[::2], branches[1::2], strict=True)
        net = revzoo.ReversibleSequence(
            [revzoo.ReversibleBlock(f, g) for f, g in pairs], memory=mode
        )
        model, optimizer, criterion = private(net, "ghost")
        x, labels = torch.randn(512, 128), torch.arange(512) % 128
        criterion(model(x), labels).backward()
        optimizer.pre_step()
        with LiveMemory() as memory:
            criterion(model(x), labels).backward()
        return memory.peak

    stream, gradients = 512 * 64 * 4, 4 * 4 * (64 * 64 + 64) * 4  # 4 blocks of 4 layers
    norms = 4 * 4 * 2 * 512 * 4
    assert peak(8, "invert") - peak(4, "invert") < 2 * (gradients + norms) < 8 * stream
    assert peak(8, "store") - peak(4, "store") >= 16 * stream


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
def test_batch_normalisation_that_train_switched_on(sampling):
    """Frozen and in evaluation mode it is no layer of ours, but ``train()`` mixes samples again."""
    norm = nn.BatchNorm2d(4).eval().requires_grad_(False)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.Flatten(), nn.Linear(256, 5)).double()
    images, labels = batch()
    model, _, criterion = private(net, sampling)
    criterion(model(images), labels).backward()
    model.train()
    with pytest.raises(ValueError, match="batch normalisation in training"):
        criterion(model(images), labels).backward()


@pytest.mark.parametrize("sampling", ["hooks", "ghost"])
def test_rows_that_are_not_samples_are_refused(sampling):
    """This was torch's error of ``stack``."""

    rows = nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 8), nn.Unflatten(0, (3, -1)))
    net = nn.Sequential(nn.Flatten(1, 2), rows, nn.Flatten(), nn.Linear(192, 5)).double()
    images, labels = batch()
    model, _, criterion = private(net, sampling)
    with pytest.raises(ValueError, match=r"'1\.1' returned 72 rows for 3 samples"):
        criterion(model(images), labels).backward()
