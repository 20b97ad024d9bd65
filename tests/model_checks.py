"""Checks that the tests of several families of models share."""

import torch
import torch.nn.functional as F
from compare import error, twin

from revzoo import set_memory
from revzoo.models import create_model


def assert_trains_as_stored(model, mode, x, *, drops=False, tolerance=1e-9):
    """Two passes of ``model`` in ``mode`` have the loss, gradients and buffers of ``store``.

    Bit for bit, but for gradients in ``invert``. With ``drops``, each pass has its own masks.
    """
    other = twin(model, mode)
    set_memory(model, "store", grid="auto" if mode == "exact" else None)
    losses = []
    for net in (model, other):
        torch.manual_seed(1)
        for _ in range(2):
            logits = net(x)
            labels = torch.arange(len(x)).view(-1, *[1] * (logits.dim() - 2))
            losses.append(F.cross_entropy(logits, labels.expand(len(x), *logits.shape[2:])))
            losses[-1].backward()
    assert losses[:2] == losses[2:]
    assert not drops or losses[0] != losses[1]
    actual, expected = ([p.grad for p in net.parameters()] for net in (other, model))
    assert error(actual, expected) <= (tolerance if mode == "invert" else 0)
    for a, e in zip(other.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, e)


def assert_exact_is_near_store(model, x, *, tolerance):
    """Gradients of ``exact`` are those of ``store`` on its grid, and near those without a grid."""
    gradients = []
    for mode, grid in (("store", None), ("store", "auto"), ("exact", None)):
        set_memory(model, mode, grid=grid)
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    plain, on_grid, exact = gradients
    assert all(map(torch.equal, on_grid, exact))
    assert error(exact, plain) < tolerance


def assert_features(whole, x, indices, *arguments, **keywords):
    """``create_model(..., features_only=True)`` gives the maps of ``whole``.

    Each of its parameters gets a gradient.
    """
    net = create_model(*arguments, **keywords, features_only=True, out_indices=indices).double()
    assert net.network.load_state_dict(whole.state_dict(), strict=False).missing_keys == []
    maps = net.eval()(x)
    for info, found in zip(net.feature_info, maps, strict=True):
        assert found.shape[1:] == (info.num_chs, *(n // info.reduction for n in x.shape[2:]))
    expected = whole.forward_intermediates(x, indices, intermediates_only=True)
    assert all(map(torch.equal, maps, expected))
    sum(m.square().sum() for m in maps).backward()
    assert all(p.grad is not None for p in net.parameters())


def under_published_names(model):
    """The tensors of ``model`` by the names of its release."""
    theirs = {new: old for old, new in model.published_keys()}
    tensors = {}
    for key, t in model.state_dict().items():
        module, _, leaf = key.rpartition(".")
        tensors[theirs[key] if key in theirs else f"{theirs.get(module, module)}.{leaf}"] = t
    return tensors
