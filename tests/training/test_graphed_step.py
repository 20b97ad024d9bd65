"""A training step as a CUDA graph equals an ordinary one; without a GPU, a stand-in captures."""

import copy
import logging

import pytest
import torch
from cuda_graphs import CAPTURES, use
from torch import nn

import revzoo


@pytest.fixture
def captured(monkeypatch):
    use(monkeypatch)


def setup(mode, device="cpu"):
    torch.manual_seed(0)
    model = revzoo.create_model("revnet38", units=(1, 1, 1), num_classes=5, memory=mode)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 5)
        for n in (4, 4, 4, 3, 4, 4)
    ]
    return model, optimizer, schedule, [tuple(t.to(device) for t in b) for b in batches]


def loop(mode, device="cpu"):
    model, optimizer, schedule, batches = setup(mode, device)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return losses, model.state_dict()


def graphed(mode, device="cpu", **options):
    model, optimizer, schedule, batches = setup(mode, device)
    loss = nn.functional.cross_entropy
    step = revzoo.graphed_step(model, loss, optimizer, batches[0], **options)
    losses = []
    for batch in batches:
        losses.append(step(batch))
        optimizer.zero_grad()  # has no effect
        schedule.step()
    return losses, model.state_dict(), step


@pytest.mark.parametrize("check_every", [1, 2, 200])
@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
def test_it_equals_a_loop(captured, mode, check_every):
    """Weights, statistics and losses; a batch of another size among the batches."""
    losses, state = loop(mode)
    found, graphed_state, step = graphed(mode, check_every=check_every)
    assert not step.reason
    assert len(CAPTURES) == 1
    torch.testing.assert_close(found, losses, rtol=0, atol=0)
    for name, value in state.items():
        assert torch.equal(graphed_state[name], value), name


def test_building_it_changes_nothing(captured):
    model, optimizer, _, batches = setup("exact")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    revzoo.graphed_step(model, nn.functional.cross_entropy, optimizer, batches[0])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


@pytest.mark.parametrize("graph", [False, True])
def test_unfrozen_parameters_train(graph, monkeypatch):
    """They join the optimiser later, or were in it all along; then they freeze again."""
    if graph:
        use(monkeypatch)
    found = []
    for own_loop in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        first, second, last = net
        first.requires_grad_(False)
        second.requires_grad_(False)
        optimizer = torch.optim.SGD([*second.parameters(), *last.parameters()], 0.1)
        x = torch.randn(2, 3)
        step = revzoo.graphed_step(net, lambda y: y.square().mean(), optimizer, x)
        for n in range(8):
            if n == 2:
                second.requires_grad_(True)
            if n == 4:
                optimizer.add_param_group({"params": [*first.requires_grad_(True).parameters()]})
            if n == 6:
                second.requires_grad_(False)
            if own_loop:
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            else:
                step(x)
        found.append(net.state_dict())
    assert (step.reason == "") == graph
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_weights_in_other_memory_are_captured_again(captured):
    """The graph went on with the old memory."""
    net, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = revzoo.graphed_step(net, lambda y: y.square().mean(), optimizer, x)
    net[0].weight.data = net[0].weight.data.clamp(0)
    step(x)
    net[1].running_mean = torch.zeros(4)
    step(x)
    step(x)
    assert len(CAPTURES) == 3


def test_an_optimiser_of_a_part(captured):
    """A second optimiser finds new gradients, and none of the capture."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    x = torch.randn(2, 3)
    optimizer = torch.optim.SGD(net[1].parameters(), 0.0)
    step = revzoo.graphed_step(net, lambda y: y.square().mean(), optimizer, x)
    assert all(p.grad is None for p in net.parameters())
    step(x)
    expected = net[0].weight.grad.clone()
    net.zero_grad()
    step(x)
    step(x)
    assert torch.equal(net[0].weight.grad, expected)


def test_an_error_while_building_it_changes_nothing(captured):
    model, optimizer, _, batches = setup("exact")
    before = copy.deepcopy(model.state_dict())

    def fails(outputs, labels):
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        revzoo.graphed_step(model, fails, optimizer, batches[0])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_guard_checks_every_nth_step(captured):
    class Odd(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale + (revzoo.is_replaying() and self.scale > 1)

    odd = Odd()
    steps = [revzoo.AdditiveCoupling(nn.Linear(2, 2)), revzoo.AdditiveCoupling(odd)]
    net = revzoo.ReversibleSequence(steps, memory="exact")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(3, 4)
    step = revzoo.graphed_step(net, lambda y: y.square().mean(), optimizer, x, check_every=3)
    odd.scale = 2.0
    step(x)
    step(x)
    with pytest.raises(revzoo.DriftError):
        step(x)
    assert net[0].drift_limit == revzoo.Step.drift_limit


def test_a_grid_that_adapts_is_captured_again(captured):
    net = revzoo.ReversibleSequence([revzoo.AdditiveCoupling(nn.Linear(2, 2)) for _ in range(2)])
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    x = torch.randn(3, 4)
    step = revzoo.graphed_step(net, lambda y: y.square().mean(), optimizer, x, check_every=1)
    step(x)
    assert len(CAPTURES) == 1
    with torch.no_grad():
        for coupling in net:
            coupling.branch.weight.mul_(30)
    with pytest.raises(revzoo.RangeError, match="compute the step again"):
        step(x)
    assert len(CAPTURES) == 2
    step(x)
    assert len(CAPTURES) == 2


def test_what_cannot_be_captured_runs_without(monkeypatch, caplog):
    """On a CPU, and if the capture fails: the same result, and one line that says why."""
    caplog.set_level(logging.INFO, logger="revzoo")
    losses, state = loop("exact")
    found, graphed_state, step = graphed("exact")
    assert step.reason == "the batch is on cpu, not on a GPU"
    torch.testing.assert_close(found, losses, rtol=0, atol=0)
    assert caplog.text.count("without a CUDA graph: the batch is on cpu") == 1

    def fails(run):
        raise RuntimeError("the step reads a value\nmore")

    use(monkeypatch, fails)
    found, graphed_state, step = graphed("exact")
    assert step.reason == "the step reads a value"
    for name, value in state.items():
        assert torch.equal(graphed_state[name], value), name


def test_activations_on_the_host_are_not_captured(captured):
    _, _, step = graphed("offload")
    assert step.reason == "memory=offload keeps activations on the host"
    assert CAPTURES == []


def test_arguments():
    model, optimizer, _, batches = setup("store")
    step = revzoo.graphed_step(model, lambda y: y.sum(), optimizer, batches[0][0])
    assert step(batches[0][0]).shape == ()
    broken = revzoo.graphed_step(model, lambda y: (y.sum(), 1), optimizer, batches[0][0])
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'backward'"):
        broken(batches[0][0])
    for wrong in ("images", [], (batches[0][0], 3)):
        with pytest.raises(TypeError, match="expected a tensor, or a tuple of tensors"):
            revzoo.graphed_step(model, nn.functional.cross_entropy, optimizer, wrong)
    with pytest.raises(TypeError, match=r"optimizer is a float: expected a torch\.optim"):
        revzoo.graphed_step(model, nn.functional.cross_entropy, 0.1, batches[0])
    with pytest.raises(ValueError, match="check_every=0"):
        revzoo.graphed_step(
            model, nn.functional.cross_entropy, optimizer, batches[0], check_every=0
        )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
def test_on_a_gpu_it_equals_a_loop(mode):
    torch.backends.cudnn.deterministic = True
    losses, state = loop(mode, "cuda")
    found, graphed_state, step = graphed(mode, "cuda")
    assert not step.reason
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(graphed_state[name], value, rtol=1e-3, atol=1e-4)
