"""Torch's tests of ``torch.utils.checkpoint``, run on ``revzoo.checkpoint``.

Our own code, after the behaviours of ``TestAutograd``, ``TestNestedCheckpoint`` and
``TestSelectiveActivationCheckpoint`` in torch's test/test_autograd.py and of ``TestCheckpoint`` in
test/test_utils.py; each docstring names the original. Not here: tests that need several GPUs
(test_checkpointing_without_reentrant_dataparallel, test_get_device_states_recursive), torch's
private helpers (test_infer_device_state_recursive_meta), the warning for a missing
``use_reentrant`` (test_checkpoint_warns_if_use_reentrant_not_passed_explcitly: there is one way),
saved tensors that are freed on access (test_clear_saved_tensors_on_access: an option of autograd's)
and the errors of ``checkpoint_sequential`` (test_checkpoint_sequential_deprecated_*: it is
``checkpoint`` of each segment, tested below).
"""

# ruff: noqa: B023 -- functions that see a loop's variables are what a checkpoint must cope with

import contextlib
import functools
import itertools
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import revzoo
from revzoo import ReplayMismatchError, checkpoint


def vector(*shape, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape or (4,), generator=generator, dtype=torch.float64, **options)


def leaf(*shape, seed=0):
    return vector(*shape, seed=seed).requires_grad_()


def mlp(*layers):
    torch.manual_seed(0)
    middle = layers or (nn.ReLU(),)
    return nn.Sequential(nn.Linear(10, 8), *middle, nn.Linear(8, 5), nn.ReLU()).double()


class Counted:
    """A function that counts its calls; in a list, since a replay leaves attributes alone."""

    def __init__(self, fn):
        self.fn = fn
        self.log = []

    @property
    def calls(self):
        return len(self.log)

    def __call__(self, *args, **kwargs):
        self.log.append(revzoo.is_replaying())
        return self.fn(*args, **kwargs)


def both(fn, *inputs, **options):
    """Gradients of ``fn``'s output, checkpointed and plain, for the inputs that require it."""
    found = []
    for call in (functools.partial(checkpoint, fn, **options), fn):
        out = call(*inputs)
        outs = [out] if isinstance(out, torch.Tensor) else out
        outs = [o for o in outs if isinstance(o, torch.Tensor) and o.requires_grad]
        needs = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        found.append(torch.autograd.grad([o.square().sum() for o in outs], needs))
    return found


def assert_same(pair):
    for actual, expected in zip(*pair, strict=True):
        assert torch.equal(actual, expected)


# ---- test_utils.py, TestCheckpoint


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_segments_give_the_gradients_of_the_plain_model(use_reentrant, as_list):
    """test_checkpoint, test_checkpoint_module_list."""
    results = []
    for checkpointed in (True, False):
        net = mlp(nn.BatchNorm1d(8), nn.ReLU())
        parts = nn.ModuleList(net) if as_list else net
        x = leaf(3, 10)
        y = x
        for segment in (nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])):
            y = checkpoint(segment, y, use_reentrant=use_reentrant) if checkpointed else segment(y)
        y.sum().backward()
        results.append([y, x.grad, *(p.grad for p in net.parameters()), *net.buffers()])
    assert_same(results)


@pytest.mark.parametrize("early_stop", [True, False])
def test_each_segment_is_run_again_in_the_backward_pass(early_stop):
    """test_checkpoint_trigger."""
    fns = [Counted(lambda t: t * torch.tensor(2.0)) for _ in range(10)]
    y = leaf()
    for fn in fns:
        y = checkpoint(fn, y.exp(), early_stop=early_stop)
    assert [fn.calls for fn in fns] == [1] * 10
    y.sum().backward()
    assert [fn.calls for fn in fns] == [2] * 10


def test_autograd_grad_with_create_graph():
    """test_checkpoint_valid: torch refuses it where ``use_reentrant=True``; here both work."""
    net, x = mlp(nn.Tanh()), leaf(1, 10)
    found = []
    for call in (functools.partial(checkpoint, net, use_reentrant=True), net):
        (g,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        found.append([g, *torch.autograd.grad(g.square().sum(), x)])
    assert_same(found)


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_draws_the_same_mask(preserve):
    """test_checkpoint_rng_cpu, test_checkpoint_not_preserve_rng_state_and_without_reentrant.

    With ``preserve_rng_state=False`` torch may draw another mask; here it is the same one.
    """
    for seed in range(5):
        grads, states = [], []
        for checkpointed in (True, False):
            torch.manual_seed(seed)
            x = leaf(2000)
            first, second = nn.Dropout(), nn.Dropout()
            y = first(x)
            y = checkpoint(second, y, preserve_rng_state=preserve) if checkpointed else second(y)
            y.sum().backward()
            grads.append([x.grad])
            states.append(torch.get_rng_state())
        assert_same(grads)
        assert torch.equal(*states)


def test_an_argument_that_is_none():
    """test_checkpoint_non_tensor."""
    x = leaf()
    checkpoint(lambda a, b: a.exp() if b is None else a + b, x, None).sum().backward()
    assert torch.equal(x.grad, x.exp())


def scaled(t1, t2, scale, t3):
    t4 = t1 + t2 * t3
    t5 = t1 * t2 + t3
    t4 *= scale
    t5 *= scale
    return scale, t4, None, True, t5, "bar", t1


def test_inputs_and_outputs_that_are_not_tensors():
    """test_checkpoint_non_tensor_inputs_outputs."""
    grads = []
    for call in (functools.partial(checkpoint, scaled), scaled):
        t1, t2, t3 = leaf(10), leaf(10, seed=1), vector(10, seed=2)
        res = call(t1, t2, 3, t3)
        assert [r for r in res if not isinstance(r, torch.Tensor)] == [3, None, True, "bar"]
        assert torch.equal(res[6], t1)
        res[1].sum().backward(retain_graph=True)
        res[4].sum().backward()
        res[6].sum().backward()
        grads.append([t1.grad, t2.grad])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            res[4].sum().backward()
    assert_same(grads)


def test_no_tensors_at_all():
    """test_checkpoint_no_tensors."""
    assert checkpoint(scaled, 1.0, 2.0, 3, 4.0) == scaled(1.0, 2.0, 3, 4.0)


def test_one_of_the_inputs_needs_a_gradient():
    """test_checkpoint_partial_grad: torch's reentrant version raises where the output needs none;
    here, as in plain autograd, that is the backward pass's error."""
    x, other = leaf(), vector()
    checkpoint(lambda a, b: (a.exp(), b), x, other)[0].sum().backward()
    assert torch.equal(x.grad, x.exp())
    out = checkpoint(lambda a, b: a * 1, other, x)
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()


@pytest.mark.parametrize("retain", [False, True])
def test_recomputed_tensors_are_freed(retain):
    """test_checkpointing_without_reentrant_early_free."""
    refs, alive = [], []

    def fn(x):
        x.register_hook(lambda _: alive.append(sum(r() is not None for r in refs)))
        for _ in range(3):
            x = x**2
            refs.append(weakref.ref(x.untyped_storage()))
            x.register_hook(lambda _: alive.append(sum(r() is not None for r in refs)))
        return x.sum()

    x = leaf()
    y = checkpoint(lambda t: fn(t.exp()), x)
    assert sum(r() is not None for r in refs) == 0
    y.backward(retain_graph=retain)
    assert alive == [0, 1, 0, 0]
    del y
    assert sum(r() is not None for r in refs) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("by_argument", [True, False])
def test_dropout_on_a_gpu(by_argument):
    """test_checkpoint_rng_gpu; and with a tensor that is not an argument."""
    grads = []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        x = torch.ones(2000, device="cuda", requires_grad=True)
        drop = nn.Dropout()
        fn, args = (drop, (x,)) if by_argument else ((lambda: drop(x)), ())
        y = checkpoint(fn, *args) if checkpointed else fn(*args)
        y.square().sum().backward()
        grads.append([x.grad])
    assert_same(grads)


# ---- test_autograd.py, TestAutograd


def test_a_large_model_in_checkpoints():
    """test_checkpointing."""
    module = mlp(nn.ReLU())
    head = nn.Linear(20, 1).double()
    grads = []
    for checkpointed in (True, False):
        x = leaf(6, 10)
        feats = [checkpoint(module, part) if checkpointed else module(part) for part in x.split(1)]
        head(torch.stack(feats).flatten()[:20]).sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in module.parameters())])
        module.zero_grad()
    assert_same(grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outside", [True, False])
def test_autocast_is_restored_from_the_forward_pass(dtype, outside):
    """test_checkpointing_non_reentrant_autocast_cpu."""
    seen = []

    def fn(x, weight):
        with contextlib.nullcontext() if outside else torch.autocast("cpu", dtype=dtype):
            y = x @ weight
            seen.append((y.dtype, revzoo.is_replaying()))
            return (y @ weight.to(y.dtype)).tanh()

    grads = []
    for call in (functools.partial(checkpoint, fn), fn):
        x, w = (leaf(4, 4, seed=s).detach().float().requires_grad_() for s in (0, 1))
        with torch.autocast("cpu", dtype=dtype) if outside else contextlib.nullcontext():
            y = call(x, w)
        y.float().sum().backward()
        grads.append([x.grad, w.grad])
    assert seen == [(dtype, False), (dtype, True), (dtype, False)]
    assert_same(grads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_autocast_on_a_gpu_and_memory():
    """test_checkpointing_non_reentrant_autocast_gpu,
    test_checkpointing_without_reentrant_memory_savings."""
    peaks = []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        layers = [
            nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)])
            for _ in range(4)
        ]
        layers = nn.ModuleList(layers).cuda()
        x = torch.ones(8192, 512, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        y = x
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer in layers:
                y = checkpoint(layer, y) if checkpointed else layer(y)
        assert y.dtype is torch.bfloat16
        y.float().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - start)
        del y, layers, x
    assert peaks[0] < 0.75 * peaks[1]  # 0.69 on an H200


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_tensor_detached_inside(use_reentrant):
    """test_checkpointing_without_reentrant_detached_tensor: torch's reentrant one raises."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp(nn.ReLU())

        def forward(self, x):
            detached = self.layers(x.detach())
            with torch.no_grad():
                hidden = x.sin()
            return self.layers(x) * detached * hidden.sum()

    assert_same(both(Net(), leaf(3, 10), use_reentrant=use_reentrant))


def test_backward_twice_through_one_graph():
    """test_checkpointing_without_reentrant_correct_grad."""
    grads = []
    for checkpointed in (True, False):
        a = leaf()
        b = checkpoint(torch.exp, a) if checkpointed else a.exp()
        c = checkpoint(torch.sin, b) if checkpointed else b.sin()
        for _ in range(2):
            c.sum().backward(retain_graph=True)
        grads.append([a.grad])
    assert_same(grads)


@pytest.mark.parametrize("needs", [True, False])
def test_inputs_with_and_without_gradient(needs):
    """test_checkpointing_without_reentrant_input_requires_grad_True and _False.

    Asked at https://github.com/pytorch/pytorch/issues/7617.
    """
    net = mlp(nn.ReLU())
    runs = []
    for checkpointed in (True, False):
        x = vector(4, 10).requires_grad_(needs)
        fn = Counted(net)
        y = checkpoint(lambda t: fn(t), x) if checkpointed else fn(x)
        y.mean().backward()
        assert fn.calls == 1 + checkpointed
        runs.append([p.grad.clone() for p in net.parameters()] + ([x.grad] if needs else []))
        assert (x.grad is not None) is needs
        net.zero_grad()
    assert_same(runs)


def test_a_parameter_used_inside_and_outside():
    """test_checkpointing_without_reentrant_parameter_used_in_an_out."""
    runs = []
    for checkpointed in (True, False):
        w, x = leaf(4, 4), vector(4, 4, seed=1)
        y = checkpoint(lambda t: (t @ w).sin() @ w, x) if checkpointed else (x @ w).sin() @ w
        (y + x @ w).sum().backward()
        runs.append([w.grad])
    assert_same(runs)


class Exponential(torch.autograd.Function):
    """Saves an input and an output, some of which it never unpacks."""

    @staticmethod
    def forward(ctx, x, y):
        out = x.exp()
        ctx.save_for_backward(x, y, out)
        return out, y * 2

    @staticmethod
    def backward(ctx, g, h):
        _, _, out = ctx.saved_tensors
        return g * out, h * 2


def test_custom_functions():
    """test_checkpointing_without_reentrant_custom_function_works,
    test_custom_autograd_ac_early_stop,
    test_access_saved_tensor_twice_without_recomputation_works (saved_tensors read twice)."""

    def fn(x, y):
        a, b = Exponential.apply(x, y)
        return Exponential.apply(a * b, b)[0].tanh()

    assert_same(both(fn, leaf(), leaf(seed=1)))
    assert_same(both(fn, leaf(), leaf(seed=1), early_stop=False))
    counted = Counted(fn)
    y = checkpoint(counted, leaf(), leaf(seed=1))
    assert torch.equal(y.grad_fn._saved_result, y)


def test_context_managers_for_both_passes():
    """test_checkpointing_without_reentrant_with_context_fn."""
    entered = []

    @contextlib.contextmanager
    def note(name):
        entered.append(name)
        yield

    x = leaf()
    y = checkpoint(torch.sin, x, context_fn=lambda: (note("forward"), note("replay")))
    assert entered == ["forward"]
    y.sum().backward()
    assert entered == ["forward", "replay"]
    assert torch.equal(x.grad, x.cos())


def test_saved_objects_are_the_ones_recomputed():
    """test_checkpointing_without_reentrant_saved_object_identity: torch hands back the same tensor
    if it is an argument of the call, not an activation; here its values and memory are the same."""
    a, x = leaf(), leaf(seed=1)
    y = checkpoint(lambda t: t * a, x)
    assert y.grad_fn._saved_other is a or y.grad_fn._saved_other.data_ptr() == a.data_ptr()
    assert y.grad_fn._saved_self.data_ptr() == x.data_ptr()


Pair = namedtuple("Pair", ["first", "second"])


class Box:
    def __init__(self, t):
        self.t = t


@pytest.mark.parametrize("wrap", [dict, OrderedDict, list, Pair, Box], ids=lambda w: w.__name__)
def test_structures_in_and_out(wrap):
    """test_checkpointing_without_reentrant_arbitrary_input_output."""

    def packed(t):
        if wrap in (dict, OrderedDict):
            return wrap(k=t, n=[t * 2, "s"])
        if wrap is Pair:
            return Pair(t, {"x": 1})
        return wrap([t, 5]) if wrap is list else Box(t)

    def opened(p):
        if wrap in (dict, OrderedDict):
            return p["k"]
        return p.first if wrap is Pair else p[0] if wrap is list else p.t

    def fn(p):
        return packed(opened(p).sin().exp())

    x = leaf()
    found = []
    for call in (functools.partial(checkpoint, fn), fn):
        out = call(packed(x))
        assert type(out) is wrap
        found.append(torch.autograd.grad(opened(out).sum(), x))
    assert_same(found)


def passes(forward, replay):
    """A function that computes something else in its second pass."""
    calls = itertools.chain((forward,), itertools.repeat(replay))
    return lambda x: next(calls)(x)


def three(x):
    return x.sin().exp().sin()


def two(x):
    return x.sin().exp()


def two_others(x):
    return x.sin() * torch.tensor([1.0, 2.0]).repeat(2)


@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"debug": True}])
def test_a_replay_that_saves_less_is_an_error(options):
    """test_checkpoint_detects_non_determinism: fewer tensors."""
    y = checkpoint(passes(three, two), leaf(), **options)
    with pytest.raises(
        ReplayMismatchError, match=r"different number of tensors|unpacking tensors"
    ) as error:
        y.sum().backward()
    assert ("aten.exp" in str(error.value)) is options.get("debug", False)


def test_a_replay_that_saves_more():
    """test_checkpoint_detects_non_determinism: more tensors. Of a function, whose code may do
    anything, a replay runs to its end and compares values, unless ``determinism_check="none"``."""
    for early_stop in (True, False):
        y = checkpoint(passes(two, three), leaf(), early_stop=early_stop)
        with pytest.raises(ReplayMismatchError, match="trying to save more tensors"):
            y.sum().backward()
    x = leaf()
    checkpoint(passes(two, three), x, determinism_check="none").sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(two(x).sum(), x)[0])


def test_a_replay_with_other_shapes_is_an_error():
    """test_checkpoint_detects_non_determinism: metadata."""
    y = checkpoint(passes(two, lambda x: two(x[:2]).repeat(2)), leaf())
    with pytest.raises(ReplayMismatchError, match="different metadata"):
        y.sum().backward()


def test_a_replay_with_other_values_is_an_error_unless_nobody_checks():
    """Beyond test_checkpoint_detects_non_determinism: torch gives a wrong gradient here."""
    for early_stop in (True, False):
        y = checkpoint(passes(two, lambda x: two(x + 1)), leaf(), early_stop=early_stop)
        with pytest.raises(revzoo.DriftError):
            y.sum().backward()
    y = checkpoint(passes(two, lambda x: two(x + 1)), leaf(), determinism_check="none")
    y.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"determinism_check": "other"}, "expected 'default' or 'none'"),
        ({"debug": True, "context_fn": lambda: None}, "incompatible with non-default context_fn"),
    ],
)
def test_options_that_are_refused(options, message):
    """test_checkpoint_detects_non_determinism: arguments that do not go together."""
    with pytest.raises(ValueError, match=message):
        checkpoint(two, leaf(), **options)


def test_an_exception_leaves_everything_as_it_was():
    """test_checkpoint_valid_reset_on_error."""
    norm = nn.BatchNorm1d(3).double()

    def fails(x):
        y = norm(x)
        if revzoo.is_replaying():
            raise KeyError("in the replay")
        return y.exp()

    x = leaf(5, 3)
    state = torch.get_rng_state()
    y = checkpoint(fails, x)
    for _ in range(2):
        with pytest.raises(KeyError, match="in the replay"):
            y.sum().backward(retain_graph=True)
    assert norm.num_batches_tracked == 1
    assert not revzoo.is_replaying()
    assert torch.equal(torch.get_rng_state(), state)
    (g,) = torch.autograd.grad(checkpoint(two, x).sum(), x)
    assert torch.equal(g, torch.autograd.grad(two(x).sum(), x)[0])


def test_inside_a_compiled_function():
    """test_checkpoint_compile_no_recompile: inside ``torch.compile`` it is the plain call, which
    the compiler's own partitioner recomputes as it likes."""
    layer = nn.Linear(4, 4).double()
    compiled = torch.compile(
        lambda t: checkpoint(lambda u: layer(u).tanh(), t), backend="aot_eager", fullgraph=True
    )
    found = []
    for fn in (compiled, lambda t: layer(t).tanh()):
        for seed in range(2):
            x = leaf(3, 4, seed=seed)
            found.append(torch.autograd.grad(fn(x).sum(), x))
    torch.testing.assert_close(found[:2], found[2:])


# ---- test_autograd.py, TestNestedCheckpoint


def nested(depth, fn=torch.sin, **options):
    def run(x):
        return fn(x).exp() if depth == 0 else checkpoint(nested(depth - 1, fn, **options), fn(x))

    return run


def plain(depth, fn=torch.sin):
    return lambda x: fn(x).exp() if depth == 0 else plain(depth - 1, fn)(fn(x))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_checkpoints_inside_checkpoints(early_stop, depth):
    """test_nested_checkpoint: first and second derivatives, backward twice."""
    x = leaf()
    run, expected = nested(depth, early_stop=early_stop), plain(depth)
    found = []
    for fn in (lambda t: checkpoint(run, t, early_stop=early_stop), expected):
        y = fn(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum(), x)
        found.append([g, h, again])
    assert_same(found)


@pytest.mark.parametrize("early_stop", [True, False])
def test_two_checkpoints_inside_one(early_stop):
    """test_nested_checkpoint_two_children."""

    def children(x, call):
        a = call(lambda t: t.sin().exp(), x)
        return call(lambda t: (t * a).cos(), a) + call(torch.tanh, x)

    inner = functools.partial(checkpoint, early_stop=early_stop)
    x = leaf()
    found = [
        torch.autograd.grad(inner(lambda t: children(t, inner), x).sum(), x),
        torch.autograd.grad(children(x, lambda fn, t: fn(t)).sum(), x),
    ]
    assert_same(found)


def test_nested_inputs_and_outputs_that_are_not_tensors():
    """test_nested_checkpoint_non_tensor_inputs_and_outputs."""

    def inner(k, pair, factor):
        x, y = pair
        return {"out": (x * y * factor).sin()}, k + 1

    def outer(x, y):
        out, k = checkpoint(inner, 1, (x, y), factor=2.0)
        return (out["out"].exp() * k, k), "end"

    x, y = leaf(), leaf(seed=1)
    (out, k), end = checkpoint(outer, x, y)
    assert (k, end) == (2, "end")
    expected = (x * y * 2.0).sin().exp() * 2
    assert_same([torch.autograd.grad(o.sum(), [x, y]) for o in (out, expected)])


def test_keywords():
    """test_nested_checkpoint_kwargs."""

    def inner(x, *, blah=None, ok=None):
        return x.sin() * ok if blah is None else x.cos() * blah

    def outer(x, *, w, fn):
        return checkpoint(fn, x, ok=w).exp() + checkpoint(fn, x, blah=3.0)

    x, w = leaf(), leaf(seed=1)
    out = checkpoint(outer, x, w=w, fn=inner)
    expected = (x.sin() * w).exp() + x.cos() * 3.0
    assert_same([torch.autograd.grad(o.sum(), [x, w]) for o in (out, expected)])


@pytest.mark.parametrize("early_stop", [True, False])
def test_hooks_registered_inside_belong_to_the_graph_of_the_forward_pass(early_stop):
    """test_nested_checkpoint_same_graph: they fire once, with the true gradient."""
    seen = []

    def fn(t):
        y = t.sin().cos()
        z = y.sin()
        z.grad_fn.register_hook(lambda *_: seen.append("node"))
        y.register_hook(lambda g: seen.append(g) or 2 * g)
        return z

    x = leaf()
    run = functools.partial(checkpoint, fn, early_stop=early_stop)
    checkpoint(run, x, early_stop=early_stop).sum().backward()
    assert len(seen) == 2
    y = x.sin().cos()
    assert torch.equal(seen[1], y.cos())
    expected = torch.autograd.grad(y.sin().sum(), x)[0]
    assert torch.equal(x.grad, 2 * expected)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_backward_pass_inside_a_backward_pass(early_stop):
    """test_nested_checkpoint_reentrant_backwards: a hook differentiates the same graph."""

    def fn(t):
        y = t.sin().cos()
        return y, y.sin()

    grads = []
    for call in (functools.partial(checkpoint, fn, early_stop=early_stop), fn):
        x = leaf()
        y, z = call(x)
        total = y.sum()
        z.grad_fn.register_hook(lambda *_: total.backward(retain_graph=True))
        z.sum().backward(retain_graph=True)
        grads.append([x.grad])
    assert_same(grads)


def test_a_function_that_differentiates_inside_itself():
    """Beyond torch's tests: torch runs the function once more inside its forward pass."""

    def fn(t):
        (g,) = torch.autograd.grad(t.sin().exp().sum(), t, create_graph=True)
        return g * t

    assert_same(both(fn, leaf(), determinism_check="none"))


def test_an_early_stop_leaves_out_what_comes_after_the_last_saved_tensor():
    """test_nested_checkpoint_set_early_stop. To compare values, a replay runs to the end."""
    for early_stop, expected in ((True, 1), (False, 2)):
        tail = Counted(torch.clone)
        x = leaf()
        y = checkpoint(
            lambda t: tail(t.sin().exp()), x, early_stop=early_stop, determinism_check="none"
        )
        y.sum().backward()
        assert tail.calls == expected


def test_nothing_is_recomputed_where_nothing_is_saved():
    """test_nested_checkpoint_set_early_stop_no_recompution_needed."""
    for early_stop in (True, False):
        fn = Counted(torch.clone)
        checkpoint(fn, leaf(), early_stop=early_stop).sum().backward()
        assert fn.calls == 1


# ---- test_autograd.py, TestSelectiveActivationCheckpoint


def test_chosen_operators_are_not_computed_again():
    """test_flops_and_mem, test_policy_with_state."""
    x, w = leaf(4, 4), leaf(4, 4, seed=1)

    def fn(x, w):
        return ((x @ w).sin() @ w).cos() @ w

    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    class Multiplications(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    counts, grads = [], []
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for options in ({"context_fn": contexts}, {}):
        y = checkpoint(fn, x, w, early_stop=False, **options)
        with Multiplications() as mode:
            grads.append(torch.autograd.grad(y.sum(), [x, w]))
        counts.append(mode.count)
    assert counts[1] - counts[0] == 3  # of the forward pass
    assert_same([grads[0], torch.autograd.grad(fn(x, w).sum(), [x, w])])
    assert_same(grads)


# ---- torch issue 96136: open problems of non-reentrant checkpointing


def test_statistics_count_a_batch_once():
    """Torch counts it twice.

    Asked at https://github.com/pytorch/pytorch/issues/96136.
    """
    runs = []
    for checkpointed in (True, False):
        net = mlp(nn.BatchNorm1d(8), nn.ReLU())
        for seed in range(3):
            x = leaf(6, 10, seed=seed)
            (checkpoint(net, x) if checkpointed else net(x)).square().sum().backward()
        runs.append([*net.buffers(), *(p.grad for p in net.parameters())])
    assert_same(runs)
    assert net[1].num_batches_tracked == 3


def test_flags_buffers_and_generators_are_restored_from_the_forward_pass():
    """Torch uses their values at the time of the backward pass."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout()
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

        def forward(self, x, generator):
            self.calls += 1
            noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
            return (self.drop(x.sin()) * self.calls * noise).exp()

    runs = []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        net, generator, x = Net(), torch.Generator().manual_seed(3), leaf(100)
        call = functools.partial(checkpoint, net) if checkpointed else net
        y = call(x, generator)
        net.eval()
        y.sum().backward()
        runs.append([x.grad, net.calls, torch.rand(3, generator=generator)])
    assert_same(runs)


def test_variables_that_are_bound_anew_are_reported():
    """In torch, all the lambdas silently run the last layer."""
    y = leaf(2, 4)
    for layer in [nn.Linear(4, 4).double() for _ in range(3)]:
        y = checkpoint(lambda t: layer(t).tanh(), y)
    with pytest.raises(revzoo.DriftError, match="changed since"):
        y.sum().backward()


def test_a_decorator():
    """``checkpoint`` without a function, as in torch 2.10."""

    @checkpoint(early_stop=False)
    def fn(x, factor=1.0):
        """Its own docstring."""
        return (x * factor).exp()

    x = leaf()
    fn(x, factor=2.0).sum().backward()
    assert fn.__doc__ == "Its own docstring."
    assert torch.equal(x.grad, 2 * (x * 2).exp())
    with pytest.raises(ValueError, match="pass fn first"):
        checkpoint(None, x)


def test_torchvisions_densenet(monkeypatch):
    """A program written for torch's checkpoint, run with ours: the network equals one that keeps
    its activations, statistics included. With torch's checkpoint it does not."""
    from torchvision.models.densenet import DenseNet

    def train(efficient):
        torch.manual_seed(0)
        net = DenseNet(8, (2, 3), 16, memory_efficient=efficient, drop_rate=0.1).double()
        x = vector(4, 3, 32, 32)
        for _ in range(2):
            net(x).square().mean().backward()
        return [*(p.grad for p in net.parameters()), *net.buffers()]

    stored = train(False)
    assert not all(map(torch.equal, train(True), stored))
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    assert_same([train(True), stored])
