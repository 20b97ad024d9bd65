"""Objects that a step reaches without owning them are replayed like its own."""

import collections
import copy
import functools
import gc
import pickle
import threading
import types
import weakref

import pytest
import torch
from compare import error
from torch import nn

from revzoo import (
    ActNorm,
    AdditiveCoupling,
    Invertible,
    ReversibleSequence,
    checkpoint,
    invertible_checkpoint,
    is_replaying,
    set_memory,
)
from revzoo.core.restore import code_names, search
from revzoo.core.restore.reach import reached

MODES = ["recompute", "invert"]
GLOBAL = {"norm": None, "mask": None}


def vectors(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


class Holder(nn.Module):
    """A branch that keeps a function, a list or a plain object as an attribute."""

    def __init__(self, thing, call=lambda thing, x: thing(x)):
        super().__init__()
        self.thing, self.call = thing, call

    def forward(self, x):
        return self.call(self.thing, x)


class Plain:
    def __init__(self, f):
        self.f = f

    def __call__(self, x):
        return self.apply(x)

    def apply(self, x):
        return self.f(x)


def by_global(x):
    return GLOBAL["norm"](x)


def holders(f):
    def named(x, *, f=f):
        return f(x)

    return {
        "closure": lambda: Holder(lambda x: f(x)),
        "default": lambda: Holder(named),
        "partial": lambda: Holder(functools.partial(lambda g, x: g(x), f)),
        "list": lambda: Holder([f], lambda fs, x: fs[0](x)),
        "dictionary": lambda: Holder({"f": f}, lambda fs, x: fs["f"](x)),
        "object": lambda: Holder(Plain(f)),
        "method": lambda: Holder(Plain(f).apply),
        "namespace": lambda: Holder(types.SimpleNamespace(f=f), lambda n, x: n.f(x)),
        "global": lambda: Holder(by_global),
        "function": lambda: lambda x: f(x),  # no Module at all
    }


WAYS = list(holders(None))


def branch_of(way, f):
    GLOBAL["norm"] = f
    return holders(f)[way]()


class Wrapped(nn.Module):
    """A residual function that is not a module, wrapped by a user's Module."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_statistics_of_a_reached_module_count_each_batch_once(mode, way):
    """BatchNorm behind a function counted twice."""
    norms = [nn.BatchNorm1d(4).double() for _ in range(2)]
    for norm, m in zip(norms, (mode, "store"), strict=True):
        net = ReversibleSequence([AdditiveCoupling(branch_of(way, norm))], memory=m)
        for seed in range(3):
            net(*vectors(2, 5, 4, seed=seed))[1].square().sum().backward()
    assert norms[0].num_batches_tracked == 3
    assert torch.equal(norms[0].running_var, norms[1].running_var)
    assert error([norms[0].weight.grad], [norms[1].weight.grad]) < 1e-12


def used(way, mask):
    """A branch that reads a tensor that it does not own."""
    GLOBAL["mask"] = mask
    listed, plain = [mask], Plain(mask)

    def by_name(x, mask=mask):
        return (x * mask).tanh()

    return {
        "attribute": lambda: Holder(mask, lambda m, x: (x * m).tanh()),
        "closure": lambda: Holder(lambda x: (x * mask).tanh()),
        "default": lambda: Holder(by_name),
        "list": lambda: Holder(listed, lambda ms, x: (x * ms[0]).tanh()),
        "object": lambda: Holder(plain, lambda p, x: (x * p.f).tanh()),
        "partial": lambda: Holder(functools.partial(torch.mul, mask)),
        "builtin": lambda: Holder(mask.mul),
        "global": lambda: Holder(lambda x: (x * GLOBAL["mask"]).tanh()),
    }[way]()


TENSOR_WAYS = ["attribute", "closure", "default", "list", "object", "partial", "builtin", "global"]


@pytest.mark.parametrize("way", TENSOR_WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_reached_tensor_changed_before_the_backward_is_an_error(mode, way):
    """A change smaller than the drift that is tolerated went unnoticed."""
    mask = torch.ones(4, dtype=torch.float64)
    net = ReversibleSequence([AdditiveCoupling(used(way, mask))], memory=mode)
    loss = sum(t.sum() for t in net(*vectors(2, 5, 4)))
    mask.mul_(1 + 1e-5)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_reached_things_replaced_before_the_backward_stand_in_their_place(mode):
    masks = [torch.full((4,), 2.0, dtype=torch.float64)]
    fn = Holder(masks, lambda ms, x: (x * ms[0]).tanh())
    results = []
    for m in (mode, "store"):
        fn.thing = masks
        fn.call = lambda ms, x: (x * ms[0]).tanh()
        masks[0] = torch.full((4,), 2.0, dtype=torch.float64)
        x = vectors(2, 5, 4)
        net = ReversibleSequence([AdditiveCoupling(fn)], memory=m)
        y = net(*x)
        masks[0] = torch.zeros(4, dtype=torch.float64)
        fn.thing, fn.call = [], None
        results.append(torch.autograd.grad(y[1].square().sum(), x))
        assert fn.thing == []
        assert fn.call is None
        assert masks[0].sum() == 0
    assert error(*results) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_a_submodule_replaced_before_the_backward(mode):
    results = []
    for m in (mode, "store"):
        torch.manual_seed(0)
        branch = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
        net = ReversibleSequence([AdditiveCoupling(branch)], memory=m)
        x = vectors(2, 5, 4)
        y = net(*x)
        branch[0] = other = nn.Linear(4, 4).double()
        branch.append(nn.Tanh())
        results.append(torch.autograd.grad(y[1].square().sum(), x))
        assert branch[0] is other
        assert len(branch) == 3
    assert error(*results) < 1e-12


def test_a_step_of_the_users_own_that_holds_a_function():
    norm = nn.BatchNorm1d(4).double()

    class Add(Invertible):
        def __init__(self, f):
            super().__init__()
            self.f = f

        def forward(self, x1, x2):
            return x2, x1 + self.f(x2)

        def inverse(self, y1, y2):
            return y2 - self.f(y1), y1

    net = ReversibleSequence([Add(lambda x: norm(x)) for _ in range(3)])
    net(*vectors(2, 5, 4))[1].square().sum().backward()
    assert norm.num_batches_tracked == 3
    assert all(p.grad is not None for p in norm.parameters())


def test_parameters_behind_a_function_alone_make_a_step_recorded():
    linear = nn.Linear(4, 4).double()
    results = []
    for m in ("invert", "store"):
        net = ReversibleSequence([AdditiveCoupling(Holder(lambda x: linear(x)))] * 2, memory=m)
        y = net(*vectors(2, 5, 4).detach())
        results.append(torch.autograd.grad(y[1].square().sum(), list(linear.parameters())))
    assert error(*results) < 1e-12


class Noisy(nn.Module):
    """Draws from its own generators, kept in many ways."""

    def __init__(self, way, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.generator = generator if way == "attribute" else None
        self.listed = [generator] if way == "list" else []
        self.named = {"g": [generator]} if way == "dictionary" else {}
        self.draw = (lambda: generator) if way == "closure" else None
        self.way = way

    def forward(self, x, generator=None):
        if self.way == "attribute":
            generator = self.generator
        elif self.way == "list":
            generator = self.listed[0]
        elif self.way == "dictionary":
            generator = self.named["g"][0]
        elif self.way == "closure":
            generator = self.draw()
        return (x * torch.rand(4, dtype=torch.float64, generator=generator)).tanh()


@pytest.mark.parametrize("way", ["attribute", "list", "dictionary", "closure", "keyword"])
@pytest.mark.parametrize("mode", [*MODES, "offload"])
def test_a_generator_of_its_own_is_drawn_from_again(mode, way):
    """It was not reset, so the replay drew the numbers of the next step."""
    results = []
    for m in (mode, "store"):
        net = ReversibleSequence([AdditiveCoupling(Noisy(way, i)) for i in range(3)], memory=m)
        given = torch.Generator().manual_seed(7)
        context = {"generator": given} if way == "keyword" else {}
        found = []
        for _ in range(2):
            x = vectors(2, 5, 4)
            net(*x, **context)[1].square().sum().backward()
            found.append(x.grad) if x.grad is not None else None
            found += torch.autograd.grad(net(*x, **context)[1].square().sum(), x)
        results.append([*found, torch.rand(3, generator=given)])
    assert error(*results) < 1e-12


def overriding(base, name, **arguments):
    """A module whose override of one of torch's or revzoo's methods draws from a generator."""
    generator = torch.Generator().manual_seed(1)

    def override(self, x, *rest):
        noise = torch.rand(x.shape, dtype=torch.float64, generator=generator)
        return getattr(base, name)(self, x + noise, *rest)

    return type("Override", (base,), {name: override})(**arguments)


@pytest.mark.parametrize(
    ("base", "name", "arguments"),
    [
        (
            nn.Conv1d,
            "_conv_forward",
            {"in_channels": 5, "out_channels": 5, "kernel_size": 3, "padding": 1},
        ),
        (ActNorm, "transform", {"channels": 5, "streams": 1}),
    ],
)
def test_an_override_that_only_library_code_calls_is_searched(base, name, arguments):
    """No code of the user loads its name, so its generator was not found."""
    results = []
    for m in ("recompute", "store"):
        branch = nn.Sequential(overriding(base, name, **arguments).double(), nn.Tanh())
        net = ReversibleSequence([AdditiveCoupling(branch)], memory=m).eval()
        torch.manual_seed(0)
        for p in net.parameters():
            nn.init.normal_(p)
        x = vectors(2, 2, 5, 4)
        net(*x)[1].square().sum().backward()
        results.append(x.grad)
    assert error([results[0]], [results[1]]) < 1e-12


def test_a_hook_of_a_submodule_does_not_hide_the_submodule():
    """The search met it first in the hook, counted it as searched, and missed its generator."""
    results = []
    for mode in ("recompute", "store"):
        net = ReversibleSequence([AdditiveCoupling(Noisy("closure", 1))], memory=mode)
        step = net.steps[0]
        step.register_forward_hook(functools.partial(lambda *_: None, *step.children()))
        x = vectors(2, 5, 4)
        net(*x)[1].square().sum().backward()
        results.append(x.grad)
    assert error([results[0]], [results[1]]) < 1e-12


def test_a_generator_among_a_functions_arguments():
    def fn(x, g):
        return x * (1 + torch.rand(4, dtype=torch.float64, generator=g))

    def inverse(y, g):
        return y / (1 + torch.rand(4, dtype=torch.float64, generator=g))

    results = []
    for call in (functools.partial(invertible_checkpoint, fn, inverse), fn):
        g = torch.Generator().manual_seed(2)
        x = vectors(5, 4)
        y = call(call(x, g).exp(), g)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        results.append([grad, torch.rand(3, dtype=torch.float64, generator=g)])
    assert error(*results) < 1e-12


def test_attributes_that_no_reached_code_loads_are_none_of_its_business():
    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4).double()
            self.total = torch.zeros(())

        def forward(self, x):
            y = invertible_checkpoint(
                lambda a, b: (b, a + self.net(b)), lambda a, b: (b - self.net(a), a), *x
            )
            loss = y[1].sum()
            self.log(loss)
            return loss

        def log(self, loss):
            self.total += loss.detach()

    Trainer()(vectors(2, 5, 4)).backward()


def test_the_search_keeps_no_step_alive():
    gc.disable()
    try:
        norm = nn.BatchNorm1d(4)
        step = AdditiveCoupling(Holder(lambda x: norm(x)))
        reached(step)
        ref = weakref.ref(step)
        del step
        assert ref() is None
    finally:
        gc.enable()


def test_a_searched_step_is_copied_and_pickled():
    step = AdditiveCoupling(nn.Linear(2, 2))
    first = reached(step)[0]
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert reached(other)[0] is not first
        assert reached(other)[1][0] is other
    assert reached(step)[0] is first


def test_the_search_is_repeated_only_after_a_change():
    branch = Holder([torch.ones(1)], lambda ts, x: x * ts[0])
    step = AdditiveCoupling(branch)
    first = reached(step)[0]
    branch.thing[0] = torch.zeros(1)
    assert reached(step)[0] is first
    branch.thing.append(torch.Generator())
    second = reached(step)[0]
    assert second is not first
    assert len(second.generators) == 1
    branch.register_forward_hook(lambda *_: None)
    assert reached(step)[0] is not second


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_searched_once(mode):
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(2, 2))], memory=mode)
    found = []
    for _ in range(3):
        net(torch.randn(3, 4)).sum().backward()
        found.append(reached(net[0])[0])
    assert found[0] is found[1] is found[2]


@pytest.mark.parametrize("change", ["another value", "deleted"])
@pytest.mark.parametrize("mode", MODES)
def test_values_of_a_class_changed_before_the_backward(mode, change):
    class Settings:
        scale, shift = 2.0, 1.0

    def scaled(x):
        return torch.tanh(Settings.scale * x + Settings.shift)

    x = vectors(3, 4)
    y = ReversibleSequence([AdditiveCoupling(scaled)], memory=mode)(x.detach(), x)
    plain = x.detach().requires_grad_()
    (plain.sum() + scaled(plain).sum()).backward()
    if change == "deleted":
        del Settings.shift
    else:
        Settings.shift = 5.0
    sum(t.sum() for t in y).backward()
    assert error(x.grad, plain.grad) < 1e-12
    # the caller's values are back
    assert Settings.scale == 2.0
    assert vars(Settings).get("shift", "deleted") == ("deleted" if change == "deleted" else 5.0)


class TakenError(Exception):
    """A replay called a method of a user's container."""


def guarded(base):
    """A container of a user's class; each method that it overrides empties it and raises."""

    def take(self, *_, **__):
        base.clear(self)
        raise TakenError

    methods = "get __getitem__ __setitem__ __delitem__ __iter__ __len__ __missing__ items keys"
    methods += " values copy clear update pop popitem append extend add"
    return type("Guarded", (base,), dict.fromkeys(methods.split(), take))()


def add(base, box, key, value):
    base.__setitem__(box, key, value) if issubclass(base, dict) else base.append(box, value)


@pytest.mark.parametrize(
    "base", [list, collections.deque, dict, collections.OrderedDict, collections.defaultdict]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_replay_calls_no_method_of_a_users_container(mode, base):
    box = guarded(base)
    add(base, box, 0, torch.tanh)
    add(base, box, 1, 1.0)
    take = dict.get if issubclass(base, dict) else base.__getitem__
    x = vectors(3, 4)
    for new in (torch.relu, 2.0):
        net = ReversibleSequence([AdditiveCoupling(lambda x: take(box, 0)(x))], memory=mode)
        y = net(x, x)
        add(base, box, 2, new)
        sum(t.sum() for t in y).backward()
    assert base.__len__(box) == (3 if issubclass(base, dict) else 4)
    assert take(box, 0) is torch.tanh


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_a_dictionary_outlives_a_replay(mode):
    class Recent(collections.OrderedDict):
        def __getitem__(self, key):
            self.move_to_end(key)
            return super().__getitem__(key)

    recent = Recent(a=2.0, b=3.0, c=4.0)
    x = vectors(3, 4)
    branch = AdditiveCoupling(lambda x: torch.tanh(x * recent["a"]))
    y = ReversibleSequence([branch], memory=mode)(x, x)
    assert list(recent) == ["b", "c", "a"]
    recent.move_to_end("b")
    sum(t.sum() for t in y).backward()
    assert list(recent) == ["c", "a", "b"]


def gradients(branch, mode, before_backward=lambda: None, **context):
    """The gradient of the input of ``branch`` by the mode, and by plain autograd."""
    x = vectors(3, 4)
    plain = x.detach().requires_grad_()
    (plain.sum() + branch(plain, **context).sum()).backward()
    y = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)(x.detach(), x, **context)
    before_backward()
    sum(t.sum() for t in y).backward()
    return x.grad, plain.grad


def tanh_of(scale):
    return lambda x: torch.tanh(scale * x)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_replay_restores_the_rest_and_frees_its_locks(mode):
    class Settings:
        scale = 1.0

    functions = [tanh_of(1.0) for _ in range(300)]
    dropout = nn.Dropout(0.5)
    net = ReversibleSequence(
        [AdditiveCoupling(lambda x: functions[7](dropout(x)) * Settings.scale)], memory=mode
    )

    def step():
        x = vectors(3, 4)
        return sum(t.sum() for t in net(x, x))

    y = step()
    functions.pop()
    Settings.scale = 6.0
    with pytest.raises(RuntimeError, match="has 299 items in the backward pass"):
        y.backward()
    assert Settings.scale == 6.0
    later = threading.Thread(target=lambda: step().backward(), daemon=True)
    later.start()
    later.join(20)
    assert not later.is_alive()


@pytest.mark.parametrize("mode", MODES)
def test_an_undo_that_fails_stops_no_other(mode):
    class Stubborn:
        __slots__ = ("scale",)

    class Settings:
        scale = 1.0

    stubborn = Stubborn()
    stubborn.scale = 1.0

    def branch(x):
        if is_replaying():
            # no value can be put back into the slot any more
            Stubborn.scale = 1.0
        return torch.tanh(x * stubborn.scale * Settings.scale)

    x = vectors(3, 4)
    y = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)(x, x)
    stubborn.scale = Settings.scale = 2.0
    with pytest.raises(RuntimeError, match="could not put a value of the caller back"):
        sum(t.sum() for t in y).backward()
    assert Settings.scale == 2.0
    assert not is_replaying()


@pytest.mark.parametrize("mode", MODES)
def test_what_was_deleted_before_the_backward_stays_deleted(mode):
    class Slots:
        __slots__ = ("scale",)

    class Base:
        scale = 5.0

    class Derived(Base):
        scale = 2.0

    slots = Slots()
    slots.scale = cell = 2.0

    def branch(x):
        return torch.tanh(x * slots.scale * cell * Derived.scale)

    def delete():
        nonlocal cell
        del cell, slots.scale, Derived.scale

    gradient, expected = gradients(branch, mode, delete)
    assert error(gradient, expected) < 1e-12
    assert not hasattr(slots, "scale")
    assert Derived.scale == 5.0
    with pytest.raises(NameError):
        assert cell


@pytest.mark.parametrize("mode", MODES)
def test_what_was_added_before_the_backward_is_hidden_from_the_replay(mode):
    class Slots:
        __slots__ = ("scale",)

    class Base:
        scale = 2.0

    class Derived(Base):
        pass

    slots = Slots()
    module = nn.Module()
    module.register_buffer("shift", None)
    values = torch.ones(4, dtype=torch.float64)

    def branch(x):
        x = x if module.shift is None else x + module.shift
        x = x + sum(b.sum() for b in module.buffers())
        scale = Derived.scale * getattr(slots, "scale", 1.0)
        return torch.tanh(x * scale * _scale_of_globals())

    def add():
        slots.scale = Derived.scale = globals()["_added_scale"] = 3.0
        module.shift = values
        module.register_buffer("new", values)

    try:
        gradient, expected = gradients(branch, mode, add)
        assert globals()["_added_scale"] == 3.0
    finally:
        globals().pop("_added_scale", None)
    assert error(gradient, expected) < 1e-12
    assert slots.scale == Derived.scale == 3.0
    assert module.shift is module.new is values


def _scale_of_globals():
    try:
        return _added_scale
    except NameError:
        return 1.0


@pytest.mark.parametrize(
    "load",
    [
        lambda c: float(c.__doc__),
        lambda c: c.__match_args__[0],
        lambda c: c.__annotations__["scale"],
        lambda c: c.__parameters__,
    ],
    ids=["doc", "match_args", "annotations", "parameters"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_branch_computes_with_what_python_keeps_about_a_class(mode, load):
    class Settings:
        """2.0"""

        __match_args__ = (2.0,)
        __annotations__ = {"scale": 2.0}
        __parameters__ = 2.0

    def change():
        Settings.__doc__ = "3.0"
        Settings.__match_args__ = (3.0,)
        Settings.__annotations__["scale"] = 3.0
        Settings.__parameters__ = 3.0

    gradient, expected = gradients(lambda x: torch.tanh(x * load(Settings)), mode, change)
    assert error(gradient, expected) < 1e-12


class Conditioned(nn.Module):
    def forward(self, x, cond):
        return cond.norm(torch.tanh(cond.f(x) * cond.scales[0]))


@pytest.mark.parametrize("change", ["f", "scales", "hook"])
@pytest.mark.parametrize("mode", [*MODES, "checkpoint"])
def test_an_argument_changed_before_the_backward(mode, change):
    cond = types.SimpleNamespace(f=tanh_of(2.0), scales=[2.0], norm=nn.Identity())

    def replace():
        if change == "f":
            cond.f = tanh_of(3.0)
        elif change == "scales":
            cond.scales = [3.0]
        else:
            cond.norm.register_forward_hook(lambda module, inputs, output: 3 * output)

    if mode == "checkpoint":
        x = vectors(3, 4)
        plain = x.detach().requires_grad_()
        Conditioned()(plain, cond).sum().backward()
        y = checkpoint(Conditioned(), x, cond)
        replace()
        y.sum().backward()
        gradient, expected = x.grad, plain.grad
    else:
        gradient, expected = gradients(Conditioned(), mode, replace, cond=cond)
    assert error(gradient, expected) < 1e-12
    assert len(cond.norm._forward_hooks) == (change == "hook")
    if change == "scales":
        assert cond.scales == [3.0]


@pytest.mark.parametrize(
    "box",
    [{0: None, 1: 1.0}, [None, 1.0], collections.deque([None, 1.0])],
    ids=["dict", "list", "deque"],
)
@pytest.mark.parametrize("mode", MODES)
def test_an_object_among_numbers_is_found(mode, box):
    box = copy.copy(box)
    norm = nn.BatchNorm1d(4).double()

    def branch(x):
        return torch.tanh(x) if box[0] is None else torch.tanh(box[0](x))

    net = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)
    x = vectors(3, 4)
    for _ in range(3):  # by then the step has its last search
        sum(t.sum() for t in net(x, x)).backward()
    box[0] = norm
    sum(t.sum() for t in net(x, x)).backward()
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("change", ["deleted", "moved", "added"])
@pytest.mark.parametrize("kind", ["numbers", "functions", "tensors", "modules"])
@pytest.mark.parametrize("mode", MODES)
def test_entries_have_the_order_of_the_forward_pass(mode, kind, change):
    holder = nn.Module()
    make = {
        "numbers": float,
        "functions": lambda i: float(i).__mul__,
        "tensors": lambda i: torch.tensor(float(i), dtype=torch.float64),
        "modules": scaling_module,
    }[kind]
    table = holder._modules if kind == "modules" else {}
    table |= {"a": make(2), "b": make(3), "c": make(5)}

    def branch(x):
        scale = 1.0
        for v in table.values():
            scale = v(scale) + 1 if callable(v) else scale * v + 1
        return torch.tanh(x * scale / 50)

    def before_backward():
        if change == "deleted":
            del table["b"]
        elif change == "moved":
            table["a"] = table.pop("a")
        else:
            table["d"] = make(7)

    gradient, expected = gradients(branch, mode, before_backward)
    assert error(gradient, expected) < 1e-12
    assert "".join(table) == {"deleted": "ac", "moved": "bca", "added": "abcd"}[change]


def scaling_module(scale):
    module = nn.Module()
    module.forward = lambda v: scale * v
    return module


@pytest.mark.parametrize("mode", MODES)
def test_a_class_replaced_before_the_backward(mode):
    class Two:
        scale, shift = 2.0, 1.0

    class Three:
        scale, shift = 3.0, 1.0

    kinds = {"kind": Two}
    gradient, expected = gradients(
        lambda x: torch.tanh(x * kinds["kind"].scale + kinds["kind"].shift),
        mode,
        lambda: kinds.update(kind=Three),
    )
    assert error(gradient, expected) < 1e-12
    assert kinds["kind"] is Three


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_made_by_the_first_forward_pass_keeps_its_gradient(mode):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = None

        def forward(self, x):
            if self.shift is None:
                self.shift = nn.Parameter(x.new_ones(4))
            return torch.tanh(x + self.shift)

    lazy = Lazy()
    x = vectors(3, 4)
    y = ReversibleSequence([AdditiveCoupling(lazy)], memory=mode)(x, x)
    made = lazy.shift
    sum(t.sum() for t in y).backward()
    assert lazy.shift is made
    assert made.grad is not None


def test_the_search_keeps_no_class_alive():
    def build():
        held = Plain(None)

        class Branch(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                return self.linear(x) if held else x

        step = AdditiveCoupling(Branch())
        ReversibleSequence([step], memory="recompute")(*torch.ones(2, 3, 4))
        return weakref.ref(held)

    held = build()
    gc.collect()
    assert held() is None


def test_the_search_of_a_linked_list_expands_each_object_once(monkeypatch):
    head = None
    for _ in range(100):
        head = types.SimpleNamespace(next=head, scale=2.0)
    expanded = []
    expand = search.Search._expand
    monkeypatch.setattr(
        search.Search, "_expand", lambda self, thing: (expanded.append(thing), expand(self, thing))
    )
    reached(AdditiveCoupling(lambda x: x * head.next.scale))
    assert len(expanded) < 300


@pytest.mark.parametrize("mode", MODES)
def test_a_method_replaced_before_the_backward(mode):
    class Scaled(nn.Module):
        def forward(self, x):
            return torch.tanh(self.scaled(x) * self.factor)

        def scaled(self, x):
            return 2 * x

        @property
        def factor(self):
            return 2.0

    def replace():
        Scaled.scaled = triple
        Scaled.factor = property(lambda self: 3.0)

    def triple(self, x):
        return 3 * x

    gradient, expected = gradients(Scaled(), mode, replace)
    assert error(gradient, expected) < 1e-12
    assert Scaled.scaled is triple


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_method_replaced_between_two_steps_is_searched(mode: str) -> None:
    """The functions of a class were cached: a norm of the new one counted each batch twice."""

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activate(x)

        def activate(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    norm = nn.BatchNorm1d(4)
    net = ReversibleSequence([AdditiveCoupling(Branch())], memory=mode)

    def step() -> None:
        x = torch.randn(5, 4, requires_grad=True)
        sum(t.sum() for t in net(x, x)).backward()

    step()
    Branch.activate = lambda self, x: norm(x)  # type: ignore[method-assign]
    for _ in range(3):
        step()
    assert norm.num_batches_tracked == 3


@pytest.mark.parametrize("mode", ["recompute", "invert"])
@pytest.mark.parametrize("kind", [collections.UserDict, collections.UserList, collections.ChainMap])
def test_containers_written_in_python(kind, mode):
    """Their items are those of built-in containers in ``data`` or ``maps``."""

    class Passing(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.linear, self.shared = nn.Linear(4, 4).double(), shared

        def forward(self, x):
            y = (self.linear(x) + self.shared[0]).tanh()
            self.shared[0] = y
            return y

    found = []
    for each in ("store", mode):
        torch.manual_seed(0)
        shared = kind([0.0] if kind is collections.UserList else {0: 0.0})
        net = ReversibleSequence([AdditiveCoupling(Passing(shared)) for _ in range(3)])
        set_memory(net, each)
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        net(x).square().sum().backward()
        found.append(x.grad)
    assert (found[0] - found[1]).abs().max() < 1e-12


EMA = nn.Linear(4, 4)


class _Described(nn.Linear):
    def extra_repr(self):
        return f"{super().extra_repr()}, average {EMA.weight.norm():.2f}"

    def reset_parameters(self):
        self.weight.data.normal_()
        self.bias.data.zero_()


def test_overrides_that_no_forward_pass_calls_are_not_searched():
    """A module that only they name had to stay unchanged, and .data made each step slow."""
    net = ReversibleSequence([AdditiveCoupling(_Described(4, 4))], memory="invert")
    y = net(torch.randn(2, 8, requires_grad=True))
    with torch.no_grad():
        EMA.weight.mul_(0.9)
    y.sum().backward()
    assert code_names.called_by_bases(_Described) == {"forward"}
    assert code_names.called_by_bases(type("C", (nn.Conv2d,), {})) == {"forward", "_conv_forward"}
