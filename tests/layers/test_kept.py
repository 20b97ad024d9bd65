"""A layer keeps between forward and backward only tensors that a gradient needs.

The test spoils each storage that a forward pass makes and leaves alive, in turn. If no gradient
changes and nothing raises, the storage was kept in vain.
"""

import copy
import weakref
from functools import partial

import layer_table
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import revzoo
from revzoo import AdditiveCoupling, AffineCoupling, set_memory
from revzoo.core import replay, tape
from revzoo.core.invertible import as_state
from revzoo.core.saved import SavedState
from revzoo.core.words import backing_tensors
from revzoo.models.components import (
    ACTIVATIONS,
    Branch,
    NormAct,
)
from revzoo.models.lean import Lean
from revzoo.models.revnet import MergedUnit, ResidualUnit, Stem, Transition, UnitPlan, shortcut
from revzoo.models.revvit import MLP, Attention

MODES = ("store", "invert", "exact")  # recompute is torch's checkpoint
NORMS = nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm
SMALL = 2048  # bytes, of what a channel has; a stream has 6144


_states = set()  # addresses of what tapes keep


class _Kept(SavedState):
    def __init__(self, state):
        super().__init__(state)
        _states.update(t.untyped_storage()._cdata for t in backing_tensors(state))


@pytest.fixture(autouse=True)
def no_guard(monkeypatch):
    """The guard keeps a few values of each stream, which no gradient needs."""
    monkeypatch.setattr(replay, "sample", lambda *_, **__: {})
    monkeypatch.setattr(replay, "sample_of", lambda _: None)
    monkeypatch.setattr(tape, "SavedState", _Kept)


class _Made(TorchDispatchMode):
    """The storages that operators return inside it, in order."""

    def __init__(self):
        super().__init__()
        self.refs = []
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        for t in tree_iter(returned):
            if isinstance(t, torch.Tensor) and (s := t.untyped_storage()) not in self._seen:
                self._seen.add(s)
                self.refs.append((weakref.ref(s), t.dtype))
        return returned


def spoil(storage, dtype):
    """NaN, or another value, at no new version."""
    t = torch.empty(0, dtype=dtype).set_(storage)
    if dtype.is_floating_point:
        t.data.fill_(float("nan"))
    elif dtype == torch.bool:
        t.data.logical_not_()
    else:
        t.data.zero_()  # indices stay in range


def gradients(net, state, spoilt=None):
    """Of the inputs and parameters; and what there was to spoil: (in a tape's state, bytes)."""
    net = copy.deepcopy(net)
    torch.manual_seed(0)
    state = [t.clone().requires_grad_() for t in state]
    _states.clear()
    with _Made() as made:
        # The test holds neither the net's inputs nor its outputs.
        outputs = [t * 1 for t in as_state(net(*[t * 1 for t in state]))]
    upstream = [torch.linspace(0.1, 1, t.numel()).view(t.shape).to(t) for t in outputs]
    theirs = {t.untyped_storage()._cdata for t in (*outputs, *net.buffers())}
    alive = [(s, kind) for ref, kind in made.refs if (s := ref()) is not None]
    small = max(SMALL, 8 * len(state[0]))  # a float64 for each sample: its scale
    kept = [(s, kind) for s, kind in alive if s._cdata not in theirs and s.nbytes() > small]
    found = [(s._cdata in _states, s.nbytes()) for s, _ in kept]
    if spoilt is not None:
        spoil(*kept[spoilt])
    del alive, kept
    wanted = [t for t in (*state, *net.parameters()) if t.requires_grad]
    return torch.autograd.grad(outputs, wanted, upstream, allow_unused=True), found


def same(a, b):
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def unneeded(net, state):
    """Bytes of the storages that no gradient needs. A tape keeps all streams of a state or none."""
    right, kept = gradients(net, state)
    needed = []
    for k in range(len(kept)):
        try:
            wrong, _ = gradients(net, state, k)
        except Exception:  # it was looked at
            needed.append(True)
        else:
            needed.append(not all(map(same, wrong, right)))
    whole = any(n and of_state for n, (of_state, _) in zip(needed, kept, strict=True))
    pairs = zip(needed, kept, strict=True)
    return [size for n, (of_state, size) in pairs if not n and not (whole and of_state)]


def frozen(net, what):
    """``net`` as a fine-tuning run has it."""
    for m in net.modules():
        is_norm = isinstance(m, NORMS)
        parameters = list(m.parameters(recurse=False))
        freeze = {
            "nothing": False,
            "norms in eval mode": is_norm,
            "weights": not is_norm,
            "affine": is_norm,
            "everything": True,
            "everything in eval mode": True,
        }[what]
        for p in parameters:
            p.requires_grad_(not freeze)
        if (is_norm and what == "norms in eval mode") or what == "everything in eval mode":
            m.eval()
    return net


FROZEN = (
    "nothing",
    "norms in eval mode",
    "weights",
    "affine",
    "everything",
    "everything in eval mode",
)


def transition():
    return Transition(
        Branch(4, out_channels=6, stride=2),
        g=Branch(6, out_channels=6),
        shortcuts=tuple(shortcut(UnitPlan(4, 6, 2, "basic", True, 0.0)) for _ in range(2)),
    )


def merged():
    projection = Lean(nn.Conv2d(8, 12, 1, stride=2, bias=False), nn.BatchNorm2d(12))
    return MergedUnit(Branch(8, out_channels=12, stride=2), shortcut=projection)


def basic(norm="batch", activation="relu", **options):
    norm_act = NormAct(norm, activation)
    return AdditiveCoupling(Branch(4, out_channels=4, norm_act=norm_act, **options))


TABLE = {
    **{f"basic, {name}": partial(basic, activation=name) for name in ACTIVATIONS},
    "basic, group": partial(basic, "group"),
    "basic, group, elu": partial(basic, "group", "elu"),
    "basic, no norm": partial(basic, "none"),
    "basic, no norm, leaky_relu": partial(basic, "none", "leaky_relu"),
    "basic, dropout": partial(basic, dropout=0.3),
    "bottleneck": lambda: AdditiveCoupling(
        Branch(4, out_channels=4, kernels=(1, 3, 1), inner=1, dropout=0.3)
    ),
    "triple": lambda: AdditiveCoupling(
        Branch(4, out_channels=4, kernels=(3, 3, 3), inner=2, dropout=0.3, dropout_at_conv=True)
    ),
    "affine": lambda: AffineCoupling(Branch(4, out_channels=8)),
    "transition": transition,
    "merged": merged,
    "residual": lambda: ResidualUnit(Branch(4, out_channels=4), shortcut=nn.Identity()),
    "stem": lambda: Stem(4, channels=8, out_streams=2, downsample=False),
    "stem of ImageNet": lambda: Stem(4, channels=8, out_streams=2, downsample=True),
    "attention": lambda: AdditiveCoupling(Attention(8, heads=2, dropout=0.2)),
    **{
        f"mlp, {name}": lambda name=name: AdditiveCoupling(MLP(8, hidden=16, activation=name))
        for name in ("gelu", "relu")
    },
}
# A pair of streams of 6144 bytes, unless the layer is of another shape.
SHAPES = {"attention": (3, 32, 8), "mlp, gelu": (3, 32, 8), "mlp, relu": (3, 32, 8)}


def build(name):
    torch.manual_seed(0)
    net = TABLE[name]()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    return net.double()


def check(build, mode, state, subsets=FROZEN):
    found = {}
    for what in subsets:
        net = frozen(build(), what)
        try:
            set_memory(net, mode)
        except ValueError:
            pytest.skip("the mode does not apply")
        if kept := unneeded(net, state):
            found[what] = kept
    assert not found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_kept_that_no_gradient_needs(name, mode):
    torch.manual_seed(1)
    shape = SHAPES.get(name, (3, 4, 8, 8))
    count = TABLE[name]().streams
    check(partial(build, name), mode, [torch.randn(shape).double() for _ in range(count)])


BATCH = {"linear, wider": 4000, "patches": 4000}  # a layer's own matrix is small beside it


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", layer_table.LAYERS)
def test_nor_by_an_invertible_layer(name, mode):
    state = layer_table.inputs(name, batch=BATCH.get(name, 2000))
    # a chain keeps its last output, also where the gradient of a linear layer does not need it
    subsets = ("nothing", "everything", "everything in eval mode")[: 1 if mode == "invert" else 3]
    if mode == "invert" and name.startswith("haar"):
        subsets = ()
    check(partial(layer_table.build, name), mode, state, subsets)


MODELS = {
    "revnet38": {"units": (1, 1, 1)},
    "resnet32": {"units": (1, 1, 1)},
    "irevnet13": {},
    "revvit_cifar": {"depth": 2, "img_size": 8, "width": 32},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_nor_by_a_model(name, mode):
    def build():
        torch.manual_seed(0)
        return revzoo.create_model(name, **MODELS[name]).double()

    model = build()
    check(build, mode, [torch.randn(4, model.in_chans, 8, 8).double()], FROZEN[:2])
