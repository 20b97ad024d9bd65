"""MemCNN's tests, run on ``revzoo.compat.memcnn`` beside the original.

Our own code, after memcnn/models/tests of version 1.5.2; each docstring names the original. Not
here: the tests of its private functions (test_get_set_device_states) and of deprecated aliases
(test_legacy_additive_coupling, test_legacy_affine_coupling: ``AdditiveBlock`` and ``AffineBlock``),
its trainer, data and loggers. Its tests expect that the forward pass empties the input's storage;
ours expect that no tensor of the caller is emptied.
"""

import copy
import importlib
import inspect
import re
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compare import error
from torch import nn

import revzoo
from revzoo.compat import memcnn
from revzoo.compat import memcnn as ours
from revzoo.core.guard import DriftError
from revzoo.core.live import LiveMemory

with warnings.catch_warnings():  # it was written for older versions of torch
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("memcnn")
    importlib.import_module("memcnn.models.revop")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "move-from-memcnn.md"
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch.cuda.amp, in memcnn
    pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning"),
]


class Branch(nn.Module):
    def __init__(self, channels=5, width=1):
        super().__init__()
        self.conv = nn.Conv2d(channels, width * channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(width * channels)

    def forward(self, x):
        return self.bn(self.conv(x)).tanh()


class Multiply(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1) * factor)

    def forward(self, x):
        return x * self.factor

    def inverse(self, y):
        return y / self.factor


class Identity(nn.Module):
    """Multiplies by one, or returns its input."""

    def __init__(self, forwards=False, backwards=False):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.forwards, self.backwards = forwards, backwards

    def forward(self, x):
        return x * self.factor if self.forwards else x

    def inverse(self, y):
        return y * self.factor if self.backwards else y


KINDS = {
    "additive": lambda lib, f: lib.AdditiveCoupling(f),
    "naive": lambda lib, f: lib.AffineCoupling(f, adapter=lib.AffineAdapterNaive),
    "sigmoid": lambda lib, f: lib.AffineCoupling(f, adapter=lib.AffineAdapterSigmoid),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def coupling(kind, lib=ours, seed=0):
    torch.manual_seed(seed)
    return KINDS[kind](lib, Branch(width=2 if kind == "sigmoid" else 1)).double()


def data(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape or (2, 10, 8, 8), dtype=torch.float64, generator=generator)


def gradients(fn, module, x):
    """Gradients of the squared output for the input and the parameters.

    The input is not a leaf: MemCNN writes to ``.grad`` itself, which doubles a leaf's gradient.
    """
    x = x.clone().requires_grad_()
    module.zero_grad()
    fn(x * 1).square().mean().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


def test_the_names_and_signatures_are_memcnns():
    assert sorted(ours.__all__) == sorted(theirs.__all__)
    for name in ours.__all__:
        found = [inspect.signature(getattr(lib, name)).parameters for lib in (ours, theirs)]
        assert [*found[0]] == [*found[1]], name
        assert [p.default for p in found[0].values()] == [p.default for p in found[1].values()]


@every_kind
def test_state_dicts_are_memcnns(kind):
    """Files of weights go both ways, in the order of MemCNN's keys."""
    wrappers = [lib.InvertibleModuleWrapper(coupling(kind, lib)) for lib in (ours, theirs)]
    x = data().requires_grad_()
    wrappers[0](x).sum().backward()  # a pass adds no key
    keys = [list(w.state_dict()) for w in wrappers]
    assert keys[0] == keys[1]
    wrappers[1].load_state_dict(wrappers[0].state_dict())
    y = [w.eval()._fn(x) for w in wrappers]
    torch.testing.assert_close(*y, rtol=0, atol=1e-14)


@every_kind
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_equal_the_original(kind, inverse, keep):
    """test_coupling_implementations_against_reference, test_normal_vs_invertible_module_wrapper,
    test_invertible_module_wrapper_fwd_bwd. In evaluation: in training MemCNN counts batches more
    than once, and for an affine coupling, more."""
    found = []
    for lib in (ours, theirs):
        module = coupling(kind, lib).eval()
        wrapper = lib.InvertibleModuleWrapper(module, keep_input=keep, keep_input_inverse=keep)
        found.append(gradients(wrapper.inverse if inverse else wrapper, module, data()))
        plain = module.inverse if inverse else module
        found.append(gradients(plain, module, data()))
    for other in found[1:]:
        assert error(found[0], other) < 1e-10


@every_kind
@pytest.mark.parametrize("keep", [False, True])
def test_training_counts_a_batch_once(kind, keep):
    """test_invertible_module_wrapper_fwd_bwd, in training: the buffers are plain training's."""
    plain, module = coupling(kind), coupling(kind)
    wrapper = ours.InvertibleModuleWrapper(module, keep_input=keep)
    for _ in range(2):
        found = gradients(wrapper, module, data()), gradients(plain, plain, data())
        assert error(*found) < 1e-10
    for a, e in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_any_invertible_function(keep, inverse):
    """test_invertible_module_wrapper_fwd_bwd with MultiplicationInverse."""
    module = Multiply().double()
    wrapper = ours.InvertibleModuleWrapper(module, keep_input=keep, keep_input_inverse=keep)
    fns = (wrapper.inverse, module.inverse) if inverse else (wrapper, module)
    assert error(*(gradients(fn, module, data()) for fn in fns)) < 1e-12
    assert ours.is_invertible_module(wrapper, (2, 3), test_input_dtype=torch.float64)


class Stack(nn.Module):
    def __init__(self, fn, depth, **options):
        super().__init__()
        wrap = ours.InvertibleModuleWrapper
        self.stack = nn.ModuleList([wrap(fn, **options) for _ in range(depth)])

    def forward(self, x):
        for module in self.stack:
            x = module.forward(x)
        return x

    def inverse(self, y):
        for module in reversed(self.stack):
            y = module.inverse(y)
        return y


@every_kind
def test_chains(kind):
    """test_chained_invertible_module_wrapper: several wrappers around one coupling."""
    shared = coupling(kind)
    found = []
    for options in ({}, {"disable": True}):
        module = copy.deepcopy(shared)
        stack = Stack(module, 3, **options)
        found.append([*gradients(stack, stack, data()), *module.buffers()])
    assert error(*found) < 1e-10


@pytest.mark.parametrize("inverse_first", [False, True])
def test_forward_inverse_and_several_backward_passes(inverse_first):
    """test_chained_invertible_module_wrapper_shared_fwd_and_bwd_train_passes: where MemCNN needs
    ``num_bwd_passes=2``, graphs that share a trunk are differentiated as in autograd, with
    ``retain_graph``."""
    found = []
    for options in ({"keep_input": True, "keep_input_inverse": True}, {}, {"disable": True}):
        stack = Stack(coupling("additive").eval(), 5, **options)
        first, second = (stack.inverse, stack) if inverse_first else (stack, stack.inverse)
        x = data().requires_grad_()
        y = first(x)
        backs = [second(y) for _ in range(3)]
        assert all(torch.allclose(b, x, atol=1e-8) for b in backs)
        for k, back in enumerate(backs):
            (back * data(seed=k)).square().mean().backward(retain_graph=k < 2)
        found.append([x.grad, *(p.grad for p in stack.parameters())])
    assert error(found[0], found[2]) < 1e-8
    assert error(found[1], found[2]) < 1e-8


@pytest.mark.parametrize("inverse", [False, True])
def test_disabled(inverse):
    """test_invertible_module_wrapper_disabled_versus_enabled; and inputs are not emptied."""
    fn = coupling("additive").eval()
    enabled, disabled = (ours.InvertibleModuleWrapper(fn, disable=d) for d in (False, True))
    x = data().requires_grad_()
    with torch.no_grad():
        y = [(w.inverse if inverse else w)(x) for w in (enabled, disabled)]
    assert torch.equal(*y)
    assert x.untyped_storage().nbytes() == x.nbytes


@every_kind
def test_inverse(kind):
    """test_invertible_module_wrapper_simple_inverse."""
    wrapper = ours.InvertibleModuleWrapper(coupling(kind).eval())
    x = data()
    assert (wrapper.inverse(wrapper(x.clone().requires_grad_())) - x).abs().max() < 1e-10


@every_kind
@pytest.mark.parametrize("keep", [False, True])
def test_an_input_that_is_used_again(keep, kind):
    """``x + f(x)``: MemCNN reads freed memory there.

    Asked at https://github.com/silvandeleemput/memcnn/issues/29.
    """
    found = []
    for disable in (False, True):
        module = coupling(kind)
        wrapper = ours.InvertibleModuleWrapper(module, keep_input=keep, disable=disable)
        found.append(gradients(lambda x: x.sin() + wrapper(x) * x, module, data()))  # noqa: B023
    assert error(*found) < 1e-10


@pytest.mark.parametrize("dim", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("kind", ["additive", "naive"])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4, 8, 12)])
def test_split_dim(dim, kind, shape):
    """test_split_dim: the branch sees halves along that dimension."""
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x.shape)
            return x.tanh()

    options = {} if dim is None else {"split_dim": dim}
    if kind == "naive":
        options["adapter"] = ours.AffineAdapterNaive
    model = (ours.AdditiveCoupling if kind == "additive" else ours.AffineCoupling)(
        Look(), **options
    )
    x = data(*shape).requires_grad_()
    for fn in (model, ours.InvertibleModuleWrapper(model)):
        y = fn(x)
        assert y.shape == x.shape
        assert torch.allclose(model.inverse(y), x)
    half = list(shape)
    half[1 if dim is None else dim] //= 2
    assert {*map(tuple, seen)} == {tuple(half)}


class SplitChannels(nn.Module):
    def forward(self, x):
        return x[:, :2].clone(), x[:, 2:].clone()

    def inverse(self, a, b):
        return torch.cat([a, b], dim=1)


class ConcatenateChannels(nn.Module):
    def forward(self, a, b):
        return torch.cat([a, b], dim=1)

    def inverse(self, x):
        return x[:, :2].clone(), x[:, 2:].clone()


@pytest.mark.parametrize("disable", [True, False])
def test_several_tensors(disable):
    """test_multi: modules of several inputs and outputs, of uneven size."""
    split = ours.InvertibleModuleWrapper(SplitChannels(), disable=disable)
    concat = ours.InvertibleModuleWrapper(ConcatenateChannels(), disable=disable)
    assert ours.is_invertible_module(split, test_input_shape=(1, 3, 32, 32))
    assert ours.is_invertible_module(concat, test_input_shape=((1, 2, 8, 8), (1, 1, 8, 8)))
    x = data(1, 3, 8, 8).requires_grad_()
    a, b = split(x)
    concat(a.sin(), b.exp()).sum().backward()
    expected = torch.cat([x[:, :2].cos(), x[:, 2:].exp()], dim=1)
    torch.testing.assert_close(x.grad, expected.detach())


def kept(depth, **options):
    """Bytes that a chain keeps between forward and backward pass."""
    stack = nn.ModuleList(
        [
            ours.InvertibleModuleWrapper(coupling("additive", seed=i), **options)
            for i in range(depth)
        ]
    )
    x = data(2, 10, 32, 32).requires_grad_()
    with LiveMemory() as memory:
        y = x
        for module in stack:
            y = module(y)
        return memory.now / x.nbytes


def test_memory_of_a_chain():
    """test_memory_saving_invertible_model_wrapper, on the CPU too."""
    growth = {
        name: (kept(12, **options) - kept(2, **options)) / 10
        for name, options in (
            ("invert", {}),
            ("recompute", {"keep_input": True}),
            ("store", {"disable": True}),
        )
    }
    assert growth["invert"] < 0.05  # copies of statistics
    assert 0.9 < growth["recompute"] < 2.2 < growth["store"]


# ---- is_invertible_module


def test_modules_with_and_without_an_inverse():
    """test_is_invertible_module, test_is_invertible_module_wrapped, _with_invalid_inverse."""

    class Wrong(nn.Module):
        def forward(self, x):
            return x * 4

        def inverse(self, y):
            return y * 8

    zero = Identity(backwards=True)
    with torch.no_grad():
        zero.factor.zero_()
    shape = (1, 10, 10, 10)
    for lib in (ours, theirs):
        for wrap in (lambda m: m, lib.InvertibleModuleWrapper):
            assert not lib.is_invertible_module(wrap(nn.Conv2d(10, 10, 1)), shape)
            assert not lib.is_invertible_module(wrap(Wrong()), shape)
            assert not lib.is_invertible_module(wrap(zero), shape)
            assert lib.is_invertible_module(wrap(lib.AdditiveCoupling(Branch())), shape)


@pytest.mark.parametrize("seed", [1, 42, 900000])
def test_seeds_and_the_global_random_state(seed):
    """test_is_invertible_module_random_seeds; MemCNN seeds the global generator."""
    state = torch.get_rng_state()
    assert ours.is_invertible_module(Identity(True, True), (1,), random_seed=seed)
    assert torch.equal(torch.get_rng_state(), state)


def test_tensors_that_are_shared():
    """test_is_invertible_module_shared_outputs, _shared_tensors."""

    class Twice(nn.Module):
        def forward(self, x):
            y = x * x
            return y, y

        def inverse(self, y, y2):
            return torch.max(y.sqrt(), y2.sqrt())

    for module in (Twice(), Identity(), Identity(True, False)):
        with pytest.warns(UserWarning, match="are the same tensor"):
            assert ours.is_invertible_module(module, (1, 2, 5, 5))
    assert ours.is_invertible_module(Identity(True, True), (1, 2, 5, 5))
    wrapper = ours.InvertibleModuleWrapper(Identity(), keep_input=True, keep_input_inverse=True)
    x = data().requires_grad_()
    (wrapper(x) + wrapper.inverse(x)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize(
    "shape", ["string", (2.3, 1.4), None, True, ((1, 3), 12.4), ((1, 3), False), ()]
)
def test_shapes_that_are_none(shape):
    """test_is_invertible_module_type_check_input_shapes."""
    with pytest.raises(ValueError, match="expected a shape, or a tuple of shapes"):
        ours.is_invertible_module(Identity(True, True), shape)


# ---- deprecated in MemCNN


@pytest.mark.parametrize("kind", ["additive", "affine"])
def test_reversible_block(kind):
    """test_reversible_block_notimplemented."""
    branch, x = nn.Conv2d(10, 10, 3, padding=1), torch.zeros(1, 20, 10, 10)
    options = {"coupling": kind, "adapter": ours.AffineAdapterNaive}
    with pytest.warns(DeprecationWarning, match="InvertibleModuleWrapper"):
        block = ours.ReversibleBlock(branch, **options)
    assert isinstance(block, ours.InvertibleModuleWrapper)
    assert (block.inverse(block(x)) - x).abs().max() < 1e-6
    with pytest.raises(NotImplementedError, match="expected 'additive' or 'affine'"):
        ours.create_coupling(branch, coupling="unknown")
    with pytest.warns(DeprecationWarning, match="no effect"):
        ours.AdditiveCoupling(branch, implementation_fwd=1)


# ---- beyond its tests


def test_branches_that_are_replaced_and_modules_that_are_copied():
    fn = coupling("additive").eval()
    wrapper = ours.InvertibleModuleWrapper(fn)
    x = data().requires_grad_()
    before = wrapper(x)
    twin = copy.deepcopy(wrapper)
    fn.Fm = Branch().double().eval()
    assert torch.equal(twin(x), before)
    assert not torch.equal(wrapper(x), before)
    assert torch.equal(wrapper(x), fn(x))
    twin._fn.Fm.conv.weight.data.zero_()
    assert not torch.equal(twin(x), before)


def test_the_gradient_of_a_leaf_is_written_once():
    """MemCNN's is twice as large."""
    found = []
    for lib in (ours, theirs):
        x = data().requires_grad_()
        lib.InvertibleModuleWrapper(coupling("additive", lib).eval())(x).square().mean().backward()
        found.append(x.grad)
    torch.testing.assert_close(2 * found[0], found[1])


def test_hooks_on_branches_run():
    """MemCNN calls ``Fm.forward`` and passes them by."""
    fn, seen = coupling("additive"), []
    fn.Fm.register_forward_hook(lambda *_: seen.append(1))
    ours.InvertibleModuleWrapper(fn)(data().requires_grad_())
    assert seen == [1]


def test_activations_are_freed():
    fn = coupling("additive")
    refs = []
    for branch in (fn.Fm, fn.Gm):
        branch.conv.register_forward_hook(lambda _m, _i, out: refs.append(weakref.ref(out)))
    y = ours.InvertibleModuleWrapper(fn)(data().requires_grad_())
    assert [r() for r in refs] == [None, None]
    y.sum().backward()


def test_the_page_runs():
    """docs/how-to/move-from-memcnn.md: MemCNN's README, block after block."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert len(blocks) >= 6
    assert not torch.allclose(names["Y2"], names["Y"])  # test_minimal


def test_wrappers_have_their_own_options_instead_of_memory_modes():
    """revzoo's functions said that the model has no steps, and an audit called it ``store``."""
    wrapper = ours.InvertibleModuleWrapper(ours.AdditiveCoupling(nn.Linear(4, 4)))
    net = nn.Sequential(wrapper, nn.Linear(8, 8))
    name = r"'0' \(InvertibleModuleWrapper\)"
    with pytest.raises(ValueError, match=f"{name} has no memory mode to set to 'store': .*keep_in"):
        revzoo.set_memory(net, "store")
    with pytest.raises(ValueError, match=f"{name} has no memory mode to plan: set its keep_input"):
        revzoo.plan_memory(net, (4, 8), "10MiB")
    with pytest.raises(ValueError, match=f"^{name} has no memory mode to set to 'invert'"):
        revzoo.set_memory(net, {"0": "invert"})
    with pytest.raises(ValueError, match=r"^InvertibleModuleWrapper has no memory mode"):
        revzoo.set_memory(wrapper, "store")
    with pytest.raises(ValueError, match="disable instead"), revzoo.memory(net, "store"):
        pass
    for keep, disable, mode in (
        (False, False, "invert"),
        (True, False, "recompute"),
        (True, True, "store"),
    ):
        wrapper.keep_input, wrapper.disable = keep, disable
        assert list(revzoo.audit(net, (4, 8)).audits) == [mode]


def test_a_module_without_an_inverse_is_refused_where_it_needs_one():
    """It was an AttributeError."""
    wrapper = ours.InvertibleModuleWrapper(nn.Linear(4, 4), keep_input=True)
    assert wrapper(torch.zeros(2, 4)).shape == (2, 4)
    wrapper.keep_input = False
    for call in (wrapper, wrapper.inverse):
        with pytest.raises(TypeError, match=r"got a Linear, which has no inverse\(\)"):
            call(torch.zeros(2, 4))


def test_a_coupling_is_not_a_step_and_the_error_says_which_one_is():
    with pytest.raises(TypeError, match=r"memcnn\.AdditiveCoupling, expected.*ReversibleBlock\(f"):
        revzoo.ReversibleSequence([ours.AdditiveCoupling(nn.Linear(4, 4))])


class _Shifted(ours.AdditiveCoupling):
    def forward(self, x):
        return super().forward(x) + 1

    def inverse(self, y):
        return super().inverse(y - 1)


def test_a_wrapper_calls_a_couplings_own_forward():
    """It was ignored, silently."""
    coupling = _Shifted(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.randn(3, 4)
    assert torch.equal(ours.InvertibleModuleWrapper(coupling)(x), coupling(x))


@pytest.mark.parametrize("keep", [False, True])
def test_a_couplings_hooks_run(keep):
    """They were passed by, silently."""
    coupling = ours.AdditiveCoupling(nn.Linear(2, 2), nn.Linear(2, 2))
    coupling.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    coupling.inverse = lambda y: ours.AdditiveCoupling.inverse(coupling, y) / 2
    x = torch.randn(3, 4)
    values = []
    for disable in (True, False):
        leaf = x.clone().requires_grad_()
        y = ours.InvertibleModuleWrapper(coupling, keep_input=keep, disable=disable)(leaf)
        y.square().sum().backward()
        values.append((y, leaf.grad))
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize("keep", [False, True])
def test_a_hook_that_only_looks_changes_nothing(keep):
    """It led to one step with the coupling's inverse, which draws dropout in another order."""
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(2)]
    wrapper = ours.InvertibleModuleWrapper(ours.AdditiveCoupling(*branches), keep_input=keep)
    gradients = []
    for hook in (None, lambda *_: None):
        if hook is not None:
            wrapper._fn.register_forward_hook(hook)
        torch.manual_seed(1)
        x = torch.randn(6, 8, requires_grad=True)
        wrapper(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_compiled_coupling_keeps_its_memory_mode(monkeypatch):
    """Its forward would be traced as a whole, which keeps every activation."""
    seen, original = [], ours.run_checkpoint
    monkeypatch.setattr(ours, "run_checkpoint", lambda *args: seen.append(1) or original(*args))
    coupling = ours.AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
    coupling.compile(backend="eager")
    ours.InvertibleModuleWrapper(coupling)(torch.randn(2, 8).requires_grad_()).sum().backward()
    assert seen


def test_values_are_not_rounded_to_a_grid():
    """They were, as in mode exact, also where nothing is inverted."""
    zero = nn.Linear(4, 4)
    for p in zero.parameters():
        nn.init.zeros_(p)
    coupling, x = ours.AdditiveCoupling(zero), torch.full((1, 8), 1e-9)
    assert torch.equal(coupling(x), x)
    for keep_input, disable in ((False, False), (True, False), (True, True)):
        wrapper = ours.InvertibleModuleWrapper(coupling, keep_input=keep_input, disable=disable)
        assert torch.equal(wrapper(x.clone().requires_grad_()), x)


def test_a_coupling_leaves_the_modes_in_its_branches():
    inner = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Linear(2, 2))], memory="recompute")
    wrapper = ours.InvertibleModuleWrapper(ours.AdditiveCoupling(inner))
    wrapper(torch.randn(2, 8).requires_grad_())
    assert {step.memory for step in inner} == {"recompute"}


def test_a_wrong_inverse_names_the_module_and_the_option_of_its_wrapper():
    """The message named a function and checkpoint(), which a user of MemCNN's names never calls."""

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return 2 * self.scale * x

        def inverse(self, y):
            return y / 3 / self.scale

    wrappers = [ours.InvertibleModuleWrapper(Halved()) for _ in range(3)]
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(DriftError, match=r"Halved \w+: .*Remedy: set keep_input=True on the Inv"):
        nn.Sequential(*wrappers)(x).sum().backward()
    y = x
    for wrapper in wrappers:
        y = wrapper.inverse(y)
    with pytest.raises(DriftError, match=r"Halved\.inverse \w+: .*set keep_input_inverse=True"):
        y.sum().backward()


def test_the_page_maps_the_names_of_memcnns_submodules():
    """ "Change the import" did not say how to change ``from memcnn.models.revop import ...``."""
    page = " ".join(PAGE.read_text().split())
    for module in ("memcnn.models.revop", "`.additive`", "`.affine`"):
        assert module in page
    names = ["InvertibleModuleWrapper", "ReversibleBlock", "create_coupling"]
    names += ["is_invertible_module", "AdditiveCoupling", "AffineCoupling"]
    names += ["AffineAdapterNaive", "AffineAdapterSigmoid"]
    assert set(names) <= set(ours.__all__)


def test_an_inverse_that_draws_inside_a_forward_pass():
    """The inverse put the random state back, so its step seemed to draw nothing."""
    results = []
    for disable in (True, False):
        torch.manual_seed(0)
        branch = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
        coupling = memcnn.AdditiveCoupling(branch, nn.Linear(4, 4))
        y = torch.randn(4, 8, requires_grad=True)
        x = memcnn.InvertibleModuleWrapper(coupling, disable=disable).inverse(y)
        state = torch.get_rng_state()
        x.square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        results.append([y.grad, *(p.grad for p in coupling.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_threads_that_share_a_wrapper():
    """One took the memory mode away that the other had set."""
    wrapper = ours.InvertibleModuleWrapper(ours.AdditiveCoupling(nn.Linear(2, 2)))
    inside = threading.Barrier(2, timeout=60)

    def wait(*args):
        inside.wait()

    wrapper._fn.register_forward_pre_hook(wait)

    def train(_):
        x = torch.ones(3, 4, requires_grad=True)
        wrapper(x).sum().backward()
        return x.grad

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(train, range(2))
    assert torch.equal(first, second)
