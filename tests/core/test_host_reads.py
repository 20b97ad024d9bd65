"""The host reads no value between the start of a step and the end of its backward pass.

On a GPU such a read waits for the device. The guard reads its figures once, when autograd has
computed the last gradient.
"""

from functools import partial, partialmethod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import revzoo
from revzoo.core import guard

READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)
MODELS = {
    "revnet38": {"units": (2, 1, 1), "dropout": 0.1},
    "irevnet13": {},
    "revvit_cifar": {"depth": 2, "img_size": 8, "width": 32},
}


class HostReadError(Exception):
    pass


class _Watch(TorchDispatchMode):
    """Raises where the host reads values; random states are on the host anyway."""

    def __enter__(self):
        self._patches = pytest.MonkeyPatch()
        for name in ("tolist", "cpu", "numpy", "item"):
            self._patches.setattr(torch.Tensor, name, partialmethod(_read, name))
        return super().__enter__()

    def __exit__(self, *exception):
        self._patches.undo()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS and args[0].dtype != torch.uint8:
            _read(args[0], str(func))
        return func(*args, **(kwargs or {}))


def _read(t, name):
    raise HostReadError(f"{name} of {t.dtype} {tuple(t.shape)}")


@pytest.fixture
def checks(monkeypatch):
    """The guard's checks, which would run as a backward pass ends."""
    found = []
    plain = guard._Pass.check
    monkeypatch.setattr(guard._Pass, "check", lambda self: found.append(partial(plain, self)))
    return found


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_no_value_is_read_before_the_last_gradient(name, mode, checks):
    torch.manual_seed(0)
    model = revzoo.create_model(name, **MODELS[name])
    revzoo.set_memory(model, mode)
    images = torch.randn(4, model.in_chans, 8, 8)
    for _ in range(2):  # the second step knows what the first has found
        with _Watch():
            model(images).logsumexp(1).mean().backward()
    assert len(checks) == (0 if mode == "store" else 2)
    for check in checks:
        check()
