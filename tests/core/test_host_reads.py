"""The host reads no value between the start of a step and the end of its backward pass.

On a GPU such a read waits for the device. The guard reads its figures once, when autograd has
computed the last gradient. A training step in a CUDA graph reads none, metrics included.
"""

from contextlib import nullcontext
from functools import partial, partialmethod

import pytest
import pytorch_lightning as pl
import torch
from cuda_graphs import use
from small_task import TINY, loader, trainer
from torch.utils._python_dispatch import TorchDispatchMode

import revzoo
from revzoo.core import conditions, guard, kernels, tape
from revzoo.training import Classifier, build_callbacks
from revzoo.training.callbacks import cuda_graph
from revzoo.training.graphed_step import captured
from revzoo.training.step_retry import FiniteLoss

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


STEPS = [(mode, "sgd") for mode in ("store", "recompute", "invert", "exact")]
STEPS += [("exact", "adamw"), ("exact", "muon")]


def compares(name, mode):
    """Whether the guard reads a figure: in recompute, of code other than plain layers only."""
    return mode in ("invert", "exact") or (mode == "recompute" and name == "revvit_cifar")


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
def test_no_value_is_read_before_the_last_gradient(name, mode, checks, monkeypatch):
    torch.manual_seed(0)
    model = revzoo.create_model(name, **MODELS[name])
    revzoo.set_memory(model, mode)
    images = torch.randn(4, model.in_chans, 8, 8)
    monkeypatch.setattr(kernels, "_FREE_TO_READ", set())
    model(images)  # the first pass reads how far values grow
    for _ in range(2):  # the second step knows what the first has found
        with _Watch():
            model(images).logsumexp(1).mean().backward()
    assert len(checks) == (2 if compares(name, mode) else 0)
    for check in checks:
        check()


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_without_the_guard_no_value_is_read_at_all(name, mode, monkeypatch):
    monkeypatch.setattr(kernels, "_FREE_TO_READ", set())
    torch.manual_seed(0)
    model = revzoo.create_model(name, **MODELS[name])
    revzoo.set_memory(model, mode)
    images = torch.randn(4, model.in_chans, 8, 8)

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model(images).logsumexp(1).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    if compares(name, mode):
        with pytest.raises(HostReadError), _Watch():
            gradients()
    revzoo.set_drift_limit(model, None)
    with _Watch():
        found = gradients()
    assert all(map(torch.equal, found, expected))


@pytest.fixture
def capturing(monkeypatch):
    """As if a CUDA graph were captured."""
    for module in (tape, conditions):
        monkeypatch.setattr(module, "capturing_cuda_graph", lambda: True)


def small_net(branch, mode="exact"):
    steps = [revzoo.AdditiveCoupling(branch()) for _ in range(3)]
    net = revzoo.ReversibleSequence(steps)
    revzoo.set_memory(net, mode)
    return net


def train_step(net):
    net(torch.randn(2, 8, generator=torch.Generator().manual_seed(0))).sum().backward()


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_guarded_step_is_refused_while_a_graph_is_captured(mode, capturing):
    net = small_net(lambda: torch.nn.Linear(4, 4), mode)
    with pytest.raises(RuntimeError, match=r"CUDA graph.*set_drift_limit\(model, None\)"):
        train_step(net)
    revzoo.set_drift_limit(net, None)
    train_step(net)


def test_a_step_that_draws_is_refused_while_a_graph_is_captured(request):
    class Draws(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.rand(4)

    nets = [small_net(lambda kind=kind: kind(4, 4)) for kind in (Draws, torch.nn.Linear)]
    for net in nets:
        revzoo.set_drift_limit(net, None)
        train_step(net)  # shows what draws
    request.getfixturevalue("capturing")
    with pytest.raises(RuntimeError, match=r"may draw random numbers.*remove dropout"):
        train_step(nets[0])
    train_step(nets[1])


@pytest.mark.parametrize(("mode", "optim"), STEPS)
def test_a_training_step_in_a_graph_reads_no_value(mode, optim, monkeypatch, tmp_path):
    """Forward to average, and metrics; the fused optimisers are one operation each."""
    use(monkeypatch)
    monkeypatch.setitem(cuda_graph.ON_DEVICE, "cpu", ("fused",))
    monkeypatch.setattr(kernels, "_FREE_TO_READ", set())
    watched = []
    plain = Classifier.training_step

    def training_step(module, *args):
        watched.append(module.in_graph)
        with _Watch() if module.in_graph else nullcontext():
            return plain(module, *args)

    monkeypatch.setattr(Classifier, "training_step", training_step)
    recipe = {"name": optim, "lr": 0.1, "sgd_lr": 0.1 if optim == "muon" else None}
    module = Classifier({**TINY, "memory": mode}, optim={**recipe, "label_smoothing": 0.1})
    callbacks = [*build_callbacks({"ema": {}}, run_dir=tmp_path), cuda_graph.CudaGraph()]
    trainer(tmp_path, callbacks=callbacks, gradient_clip_val=0.1).fit(module, loader())
    assert watched[3:] == 5 * [True]


class Fused(pl.Callback):
    """The fused optimiser is one operation; others count on the host, also on a GPU."""

    def on_train_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group |= {"fused": True} if "fused" in group else {}


@pytest.mark.parametrize(("mode", "optim"), [*STEPS, ("offload", "sgd")])
def test_a_training_step_without_a_graph_reads_no_value(mode, optim, monkeypatch, tmp_path):
    """Apart from the guard, and from the check of the loss, which on a GPU reads in few steps."""
    monkeypatch.setattr(FiniteLoss, "_read", lambda *args: None)
    monkeypatch.setattr(kernels, "_FREE_TO_READ", set())
    watched = []
    plain = pl.LightningModule.optimizer_step

    def optimizer_step(module, *args, **kwargs):  # forward, backward, clipping and metrics, too
        watched.append(module.trainer.global_step)
        # the first steps find how far values grow, and make the optimiser's state
        with _Watch() if len(watched) > 2 else nullcontext():
            return plain(module, *args, **kwargs)

    monkeypatch.setattr(pl.LightningModule, "optimizer_step", optimizer_step)
    recipe = {"name": optim, "lr": 0.1, "sgd_lr": 0.1 if optim == "muon" else None}
    module = Classifier({**TINY, "memory": mode}, optim={**recipe, "label_smoothing": 0.1})
    revzoo.set_drift_limit(module, None)
    callbacks = [*build_callbacks({"ema": {}}, run_dir=tmp_path), Fused()]
    trainer(tmp_path, callbacks=callbacks, gradient_clip_val=0.1).fit(module, loader())
    assert len(watched) > 4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_training_step_in_a_cuda_graph(mode):
    """The graph repeats the gradients of the step that was captured, on other images."""
    torch.manual_seed(0)
    model = revzoo.create_model("revnet38", units=(2, 1, 1)).cuda()
    revzoo.set_memory(model, mode)
    revzoo.set_drift_limit(model, None)
    images = torch.randn(4, 3, 8, 8, device="cuda")
    model.eval()  # the same statistics in each step

    def step():
        model.zero_grad(set_to_none=False)
        model(images).logsumexp(1).mean().backward()

    replay = captured(step)
    images.copy_(torch.randn(4, 3, 8, 8))
    replay()
    found = [p.grad.clone() for p in model.parameters()]
    step()
    for a, p in zip(found, model.parameters(), strict=True):
        assert (a - p.grad).abs().max() <= 1e-5 * p.grad.abs().max() + 1e-7
