"""Mode offload: tensors that move, tensors that stay, and checks."""

import pytest
import torch
from compare import leaf_rows, linear_net
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import revzoo
from revzoo import set_memory
from revzoo.core import saved as offload
from revzoo.core.saved import offloaded


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()


def test_gradients_equal_plain_autograd():
    net, x = linear(), torch.ones(2, 4, dtype=torch.float64)
    with offloaded(net):
        y = net(x)
    actual = torch.autograd.grad(y.sum(), list(net.parameters()))
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_tensors_on_the_cpu_are_not_copied():
    net, x = linear(), torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    with offloaded(net):
        y = x.sin()
    assert y.grad_fn._saved_self.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_an_activation_changed_in_place_is_an_error():
    net = linear()
    with offloaded(net):
        y = net(torch.ones(2, 4, dtype=torch.float64))
    y.detach().add_(1)  # tanh saved it
    with pytest.raises(RuntimeError, match=r"shape \(2, 4\) is at version 1; expected version 0"):
        y.sum().backward()


def test_activations_of_another_device_move_and_weights_stay():
    with FakeTensorMode():
        net = nn.Linear(4, 4, device="cuda")
        hooks = offloaded(net)
        weight = hooks.pack_hook(net.weight)
        moved = hooks.pack_hook(torch.zeros(2, device="cuda"))
        assert weight.tensor.device.type == "cuda"
        assert moved.copy.device.type == "cpu"
        assert hooks.unpack_hook(moved).device.type == "cuda"


def test_weights_of_a_reversible_block_stay(monkeypatch):
    """The step of a block does not own it, so the block's weights were copied in every pass."""
    copied = []

    def moved(copy, device):
        copied.append(tuple(copy.shape))
        return offload.Versioned.of(copy)

    monkeypatch.setattr(offload, "_STAYS", ("meta",))  # as if the CPU were a GPU
    monkeypatch.setattr(offload, "_Moved", moved)
    monkeypatch.setattr(offload, "_unpack", offload.Versioned.get)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    net = revzoo.make_reversible(nn.TransformerEncoder(layer, 2))
    revzoo.set_memory(net, "offload")
    net(torch.randn(3, 5, 16)).sum().backward()
    assert copied
    assert not {tuple(p.shape) for p in net.parameters() if p.dim() > 1} & {*copied}


def test_offload_sees_parameters_changed_on_the_cpu():
    # save_on_cpu keeps an alias of what is on the CPU already and checks no version.
    net = linear_net()
    set_memory(net, "offload")
    y = net(leaf_rows())
    with torch.no_grad():
        net[0][0].branch[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
