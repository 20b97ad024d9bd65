"""Containers: one tensor or two streams, round trips, refusals."""

import collections
import copy
import math
import weakref

import pytest
import torch
from compare import assert_same_training, conv_net, error, images, leaf_rows, linear_net
from torch import nn

import revzoo
from revzoo import (
    AdditiveCoupling,
    AffineCoupling,
    Invertible,
    Merge,
    NotInvertibleError,
    Reversed,
    ReversibleBlock,
    ReversibleSequence,
    Step,
    check_inverse,
    set_drift_limit,
    set_memory,
)
from revzoo.core import tape
from revzoo.core.invertible import steps_in
from revzoo.core.live import LiveMemory
from revzoo.core.modes import MODES


class Stem(Step):
    streams = 1

    def forward(self, x):
        return x.sin(), x.cos()


def test_one_tensor_is_two_streams_merged():
    net, x = conv_net().eval(), images()
    y1, y2 = net(*x.chunk(2, dim=1))
    assert torch.equal(net(x), torch.cat((y1, y2), dim=1))


def test_round_trip():
    net, x = conv_net().eval(), images()
    assert (net.inverse(net(x)) - x).abs().max() < 1e-12
    x1, x2 = net.inverse(*net(*x.chunk(2, dim=1)))
    assert (torch.cat((x1, x2), dim=1) - x).abs().max() < 1e-12


def test_block_is_the_papers_equation():
    torch.manual_seed(0)
    f, g = nn.Linear(3, 3), nn.Linear(3, 3)
    x1, x2 = torch.randn(2, 3), torch.randn(2, 3)
    y1 = x1 + f(x2)
    y2 = x2 + g(y1)
    z1, z2 = ReversibleBlock(f, g, memory="invert")(x1, x2)
    assert torch.equal(z1, y1)
    assert torch.equal(z2, y2)


def test_a_stem_takes_the_tensor_whole():
    net = ReversibleSequence([Stem(), AdditiveCoupling(nn.Tanh())], memory="invert")
    x = torch.randn(2, 3)  # any number of channels works here, also an odd one
    y1, y2 = net(x)
    assert torch.equal(y1, x.cos())
    assert torch.equal(y2, x.sin() + x.cos().tanh())


def test_inverse_names_the_layer_that_loses_information():
    net = ReversibleSequence([Stem(), AdditiveCoupling(nn.Tanh())])
    with pytest.raises(NotInvertibleError, match="step 0 of 2, Stem"):
        net.inverse(torch.randn(2, 3), torch.randn(2, 3))


def test_odd_channels():
    with pytest.raises(ValueError, match=r"shape \(2, 7\).*expected an even number of channels"):
        linear_net()(torch.randn(2, 7, dtype=torch.float64))


def test_wrong_number_of_streams():
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="got 3 streams, expected the 2 that its first step takes"):
        linear_net()(x, x, x)


def test_an_inverse_takes_tensors():
    net = linear_net()
    outputs = net(*torch.randn(2, 2, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"got a tuple as stream 0.* one by one, inverse\(y1, y2\)"):
        net.inverse(outputs)


@pytest.mark.parametrize("memory", MODES)
def test_a_forward_of_the_wrong_width_names_the_step(memory):
    net = linear_net()
    set_memory(net, memory)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        net(torch.randn(2, 10, dtype=torch.float64))
    (note,) = error.value.__notes__
    assert "steps.0.steps.0 AdditiveCoupling, which got streams of shape (2, 5) and (2, 5)" in note


def test_a_forgotten_number_of_streams():
    class Shift(Invertible):
        def forward(self, x):
            return x + 1

        def inverse(self, y):
            return y - 1

    net = ReversibleSequence([Shift()])
    for call in (net, net.inverse):
        with pytest.raises(TypeError, match="positional arguments") as error:
            call(torch.randn(2, 4))
        note = error.value.__notes__[0]
        assert "takes `streams` = 2 of them" in note


def test_an_inverse_of_the_wrong_width_names_the_step():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        linear_net().inverse(torch.randn(2, 10, dtype=torch.float64))
    (note,) = error.value.__notes__
    assert "steps.2.steps.1 AdditiveCoupling, which got streams of shape (2, 5) and (2, 5)" in note


def test_a_member_that_is_not_a_step():
    with pytest.raises(TypeError, match=r"step 1 is a .*Linear, expected a revzoo\.Inv"):
        ReversibleSequence([AdditiveCoupling(nn.Identity()), nn.Linear(2, 2)])


@pytest.mark.parametrize("memory", MODES)
def test_an_input_of_the_wrong_type_is_named(memory):
    net = linear_net()
    set_memory(net, memory)
    with pytest.raises(RuntimeError, match="dtype") as error:
        net(torch.ones(2, 8, dtype=torch.int64))
    assert "(2, 4) and (2, 4) and type torch.int64" in error.value.__notes__[0]


def test_a_step_without_an_inverse_is_refused_at_once():
    """It was only in the backward pass."""

    class Double(Invertible):
        def forward(self, x1, x2):
            return 2 * x1, 2 * x2

    with pytest.raises(TypeError, match=r"Double must define inverse.*derive it from revzoo\.Step"):
        Double()


def test_a_class_is_not_a_step():
    with pytest.raises(TypeError, match="step 0 is the class AdditiveCoupling: create it"):
        ReversibleSequence([AdditiveCoupling])


def test_a_branch_of_another_shape():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(2, 1))])
    with pytest.raises(
        ValueError, match=r"Linear returned shape \(3, 1\) for a stream of shape \(3, 2\)"
    ):
        net(torch.randn(3, 4))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("batch", [0, 3])
def test_layouts_and_empty_batches(memory_format, batch):
    net = conv_net(norm=lambda c: nn.GroupNorm(2, c))
    x = images(batch=batch).to(memory_format=memory_format).requires_grad_()
    grads = []
    for mode in ("invert", "store"):
        for step in net.modules():
            step.memory = mode
        grads.append(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


def test_streams_keep_their_dtype():
    # A float32 branch on bfloat16 streams: the sum must not widen the stream.
    class Wide(nn.Module):
        def forward(self, x):
            return x.float().tanh()

    net = ReversibleSequence([AdditiveCoupling(Wide()) for _ in range(3)])
    set_drift_limit(net, 0.1)
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    y = net(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16


def coupling(width=4):
    return AdditiveCoupling(nn.Linear(width, width)).double()


def test_a_block_of_one_function_copies_it():
    f = nn.Linear(4, 4)
    block = ReversibleBlock(f)
    g = block[1].branch
    assert block[0].branch is f
    assert g.weight is not f.weight
    assert torch.equal(g.weight, f.weight)


def test_steps_by_name():
    a, b = coupling(), coupling()
    seq = ReversibleSequence({"first": a, "second": b})
    seq.append(coupling()).insert(0, coupling(), name="start").extend([coupling()])
    assert [k.split(".")[1] for k in seq.state_dict() if k.endswith("weight")] == [
        "start",
        "first",
        "second",
        "3",
        "4",
    ]
    assert seq["first"] is seq[1] is seq[-4] is a
    assert [step.label for step in seq][:2] == ["steps.start", "steps.first"]
    with pytest.raises(
        KeyError, match=r"no step 'third'; steps: 'start', 'first', 'second', '3', '4'"
    ):
        seq["third"]
    for name in ("0", "a.b", ""):
        with pytest.raises(ValueError, match="without dots that is neither a number"):
            seq.append(coupling(), name=name)
    with pytest.raises(ValueError, match="two steps got the name 'first'"):
        seq.append(coupling(), name="first")
    with pytest.raises(TypeError, match=r"step 1 is a .*Linear"):
        seq.insert(1, nn.Linear(4, 4))
    assert len(seq) == 5


def test_a_slice_is_a_sequence_of_the_same_steps():
    seq = ReversibleSequence([coupling() for _ in range(5)])
    set_memory(seq[2], "recompute")
    x1, x2 = images(size=1).flatten(1).chunk(2, dim=1)
    part = seq[1:4]
    assert isinstance(part, ReversibleSequence)
    assert list(part) == list(seq)[1:4]
    assert [step.label for step in part] == ["steps.1", "steps.2", "steps.3"]
    assert [step.memory for step in part] == ["exact", "recompute", "exact"]
    y = seq[4:](*part(*seq[:1](x1, x2)))
    assert all(map(torch.equal, y, seq(x1, x2)))
    assert len(seq[5:]) == 0


def test_steps_are_replaced_and_deleted():
    seq = ReversibleSequence({"a": coupling(), "b": coupling(), "c": coupling()})
    a, b, c = seq
    seq["b"] = d = coupling()
    seq[-1] = b
    assert list(seq) == [a, d, b]
    del seq["a"]
    del seq[1:]
    assert list(seq) == [d]
    assert list(seq.state_dict()) == ["steps.b.branch.weight", "steps.b.branch.bias"]
    seq[1:] = [c, a]
    assert list(seq) == [d, c, a]
    seq[1:] = []
    with pytest.raises(IndexError):
        seq[1] = c
    with pytest.raises(TypeError):
        seq[0.0]
    with pytest.raises(ValueError, match="contains this sequence"):
        seq.append(ReversibleSequence([seq]))
    with pytest.raises(TypeError, match=r"expected a revzoo\.Invertible"):
        seq[0] = nn.Identity()
    assert list(seq) == [d]


def test_labels_of_a_sequence_inside_another_one_keep_their_prefix():
    outer = ReversibleSequence([ReversibleSequence([coupling()])])
    outer[0].append(coupling())
    assert outer[0][1].label == "steps.0.steps.1"


def test_repr_shows_the_mode_of_each_step():
    seq = ReversibleSequence([coupling() for _ in range(3)])
    set_memory(seq[1], "store")
    lines = [line.strip() for line in repr(seq).splitlines() if "Coupling" in line]
    assert lines == [
        "(0): AdditiveCoupling[exact](",
        "(1): AdditiveCoupling[store](",
        "(2): AdditiveCoupling[exact](",
    ]
    assert repr(ReversibleSequence([coupling() for _ in range(3)])).count("AdditiveCoupling") == 1
    assert "(a): AdditiveCoupling[exact](" in repr(ReversibleSequence({"a": coupling()}))


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
def test_a_sequence_that_grew_trains_as_one_built_at_once(mode):
    torch.manual_seed(0)
    steps = [coupling() for _ in range(4)]
    whole = ReversibleSequence(copy.deepcopy(steps))
    grown = ReversibleSequence({"a": steps[1]}).insert(0, steps[0]).extend(steps[2:])
    for seq in (whole, grown):
        set_memory(seq, mode)
    assert_same_training(grown, whole, images(size=1).flatten(1), tolerance=0)


class Gated(nn.Module):
    """A branch with its own loss."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        h = self.linear(x).tanh()
        return h, h.square().mean(), h.detach().amax()


class Measured(Invertible):
    """A step without a branch that has an extra output."""

    extras = 1
    exact = True

    def forward(self, x1, x2):
        return x2, x1, (x1 * x2).sum()

    def inverse(self, y1, y2):
        return y2, y1

    def log_det(self, x1, x2):
        return x1.new_zeros(len(x1))


def with_extras(mode):
    torch.manual_seed(0)
    first, second = AdditiveCoupling(Gated()), AdditiveCoupling(Gated())
    first.extras = second.extras = 2
    inner = ReversibleSequence([second, Measured()])
    net = ReversibleSequence([first, coupling(), inner, coupling()]).double()
    set_memory(net, mode)
    return net


@pytest.mark.parametrize("mode", MODES)
def test_extra_outputs_come_behind_the_streams(mode):
    results = []
    for each in (mode, "store"):
        net, x = with_extras(each), images(size=1).flatten(1).requires_grad_()
        assert net.extras == 5
        y, *extras = net(x)
        loss = y.square().sum() + extras[0] + 3 * extras[2] * extras[4]
        assert not extras[1].requires_grad
        results.append([*torch.autograd.grad(loss, [x, *net.parameters()]), *extras])
        assert (net.inverse(y) - x).abs().max() < (1e-3 if mode == "exact" else 1e-12)
        z, total = net.forward_with_log_det(x)
        assert torch.equal(total, torch.zeros(3))
        assert torch.autograd.grad(z.sum(), x)[0].isfinite().all()
    assert error(*results) < (1e-2 if mode == "exact" else 1e-10)


def test_extra_outputs_break_no_chain(monkeypatch):
    """Only the last streams are kept, even if the steps return other tensors."""
    net, x = with_extras("invert"), images(size=1).flatten(1).requires_grad_()
    kept = []

    def watch(run, step, state, context):
        outputs = run(step, state, context)
        if step.label:  # not the split and the merge
            kept.append(weakref.ref(outputs[1]))
        return outputs

    monkeypatch.setattr(tape, "watcher", watch)
    y = net(x)
    # `second` and `Measured` return the stream that the last coupling passes on
    assert [r() is not None for r in kept] == [False, False, True, True, False]
    y[0].sum().backward()


def test_extra_outputs_of_a_branch_are_announced():
    net = ReversibleSequence([AdditiveCoupling(Gated())])
    with pytest.raises(TypeError, match="set the coupling's extras"):
        net(torch.zeros(2, 8))
    net[0].extras = 2
    assert check_inverse(net, torch.randn(2, 8)).worst(torch.float64) < 1e-12
    assert Reversed(net)(torch.randn(2, 8)).shape == (2, 8)


def test_a_sequence_has_what_torchs_containers_have():
    missing = (set(vars(nn.Sequential)) | {"keys", "values", "items"}) - set(
        dir(ReversibleSequence)
    )
    assert missing == {"_get_item_by_idx"}
    a, b, c, d = (coupling() for _ in range(4))
    seq = ReversibleSequence({"a": a, "b": b})
    seq["tail"] = c  # was a KeyError
    seq += [d]
    assert list(seq) == [a, b, c, d]
    assert "tail" in seq  # was False: the steps were compared with the name
    assert "3" in seq
    assert d in seq
    assert "b " not in seq
    assert coupling() not in seq
    assert list(seq.keys()) == ["a", "b", "tail", "3"]
    assert list(seq.values()) == list(seq)
    assert dict(seq.items()) == {"a": a, "b": b, "tail": c, "3": d}
    assert all(seq[key] is step for key, step in seq.items())
    assert (seq.pop(), seq.pop("a"), list(seq)) == (d, a, [b, c])
    both = seq + ReversibleSequence([a, d])
    assert (list(both), list(both.keys())) == ([b, c, a, d], ["b", "tail", "2", "3"])
    assert list(2 * seq) == list(seq * 2) == [b, c, b, c]
    assert list(seq * 0) == []
    twice = seq[:]
    twice *= 2
    assert list(twice) == [b, c, b, c]
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal((seq + seq[:0])(x), seq(x))
    with pytest.raises(ValueError, match="two steps got the name 'b'"):
        seq + seq
    for operation in (lambda: seq + 1, lambda: seq * 1.5):
        with pytest.raises(TypeError, match=r"unsupported operand|multiply"):
            operation()
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"has no step {index}: it has 2 steps"):
            seq[index]


def test_an_added_step_takes_the_mode_of_the_sequence():
    """It kept the default of its class, so a sequence in ``invert`` got two modes."""
    for mode in ("store", "recompute", "invert", "exact"):
        seq = ReversibleSequence([coupling()], memory=mode)
        seq.append(ReversibleBlock(nn.Linear(4, 4))).insert(0, coupling()).extend([coupling()])
        seq[0] = coupling()
        seq[1:1] = [coupling()]
        seq["name"] = coupling()
        built = ReversibleSequence(copy.deepcopy(list(seq)), memory=mode)
        found, expected = (
            [(s.memory, s.grid) for s in steps_in(net).values()] for net in (seq, built)
        )
        assert found == expected
    set_memory(seq, "exact", grid=12)
    assert seq.append(coupling())[-1].grid == 12
    set_memory(seq[0], "store")
    assert seq[:2].append(coupling())[-1].memory == "exact"
    assert seq.append(AffineCoupling(nn.Linear(4, 8)))[-1].memory == "invert"  # does not fit exact
    assert seq[0].memory == "store"
    kept = ReversibleSequence([coupling()], memory=None)
    step = coupling()
    step.memory = "store"
    assert kept.append(step)[-1].memory == "store"


def test_steps_are_given_as_a_list():
    block = ReversibleBlock(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"ReversibleSequence\(\[a, b\]\)"):
        ReversibleSequence(block, block)
    with pytest.raises(TypeError, match=r"got one AdditiveCoupling: expected a list of steps"):
        ReversibleSequence(AdditiveCoupling(nn.Identity()))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (("f",), "f is 'f', expected a module or a function"),
        ((nn.Tanh(), "invert"), "g is 'invert', expected a module"),
        ((nn.Linear,), r"f is the class Linear, .*: create it first, Linear\(\.\.\.\)"),
    ],
)
def test_a_block_takes_two_residual_functions(functions, message):
    with pytest.raises(TypeError, match=message):
        ReversibleBlock(*functions)


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def nested_blocks():
    blocks = [ReversibleBlock(Doubled()) for _ in range(3)]
    return ReversibleSequence([blocks[0], ReversibleSequence(blocks[1:])], memory="store")


def test_streams_are_freed_after_their_last_use():
    x1, x2 = torch.randn(2, 1, 2**16)
    net = nested_blocks()
    with torch.no_grad(), LiveMemory() as memory:
        net(x1, x2)
    # the two streams of a coupling, the branch's value and the sum
    assert memory.peak / x1.nbytes == pytest.approx(4, rel=0.01)


def test_splits_and_merges_copy_no_words():
    """Words were multiplied by one before a merge, and a tensor was rounded before its split."""
    x = torch.randn(1, 16, 2**17, requires_grad=True)
    sequence = ReversibleSequence([ReversibleBlock(nn.Identity())], memory="exact")
    with LiveMemory() as memory:
        sequence(x)
    # the two streams and the tensor that holds both, each as floats and as words
    assert memory.peak / x.nbytes == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "override", "compiled"])
def test_inner_sequences_are_called_if_anybody_watches(kind):
    net = nested_blocks()
    block = net[1][0]
    called = []
    if kind == "forward":
        block.register_forward_hook(lambda *_: called.append(kind))
    elif kind == "pre":
        block.register_forward_pre_hook(lambda *_: called.append(kind))
    elif kind == "backward":
        block.register_full_backward_hook(lambda *_: called.append(kind))
    elif kind == "override":
        forward = block.forward
        block.forward = lambda *state: called.append(kind) or forward(*state)
    else:  # what compile() sets
        block._compiled_call_impl = lambda *state: called.append(kind) or block.forward(*state)
    state = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    y1, y2 = net(*state)
    (y1 + y2).sum().backward()
    assert called
    for y, plain in zip((y1, y2), nested_blocks()(*state), strict=True):
        assert torch.equal(y, plain)


def test_a_sum_of_sequences_keeps_names_also_in_place():
    def block():
        return revzoo.ReversibleBlock(nn.Linear(2, 2))

    first, second = (revzoo.ReversibleSequence({name: block()}) for name in "ab")
    names = list((first + second).keys())
    first += second
    assert list(first.keys()) == names == ["a", "b"]
    assert list(first.extend(second).keys()) == ["a", "b", "2"]  # a name that is taken


def test_streams_in_a_tuple_are_explained_by_log_det_too():
    sequence = revzoo.ReversibleSequence([revzoo.AdditiveCoupling(nn.Linear(2, 2))])
    with pytest.raises(TypeError, match="pass the streams one by one"):
        sequence.log_det((torch.zeros(1, 2), torch.zeros(1, 2)))


def test_a_step_named_by_a_number_is_refused():
    with pytest.raises(ValueError, match="a step got the name 0"):
        revzoo.ReversibleSequence({0: revzoo.ReversibleBlock(nn.Linear(2, 2))})


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_nested_streams(mode):
    """The guard took the largest value of a nested tensor, and an inverse wrote over one."""
    gradients = []
    for memory in ("store", mode):
        torch.manual_seed(0)
        block = ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4))
        seq = ReversibleSequence([block], memory=memory, dim=-1)
        offsets = torch.tensor([0, 2, 5])
        streams = [torch.nested.nested_tensor_from_jagged(torch.randn(5, 4), offsets) for _ in "ab"]
        _, y2 = seq(*streams)
        y2.values().square().sum().backward()
        gradients.append([p.grad for p in seq.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_sequence_of_one_stream_takes_and_gives_a_bare_tensor():
    class Double(Invertible):
        streams = 1

        def forward(self, x):
            return 2 * x

        def inverse(self, y):
            return y / 2

    net, x = ReversibleSequence([Double(), Double()]), leaf_rows()
    assert torch.equal(net(x), 4 * x)
    assert torch.equal(net.inverse(net(x)), x)


def test_tokens_are_split_along_another_dimension():
    """Asked at https://github.com/HomebrewML/revlib/issues/2."""
    torch.manual_seed(0)
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4))], dim=-1)
    x = torch.randn(2, 7, 8)
    y1, y2 = net(*x.chunk(2, dim=-1))
    assert torch.equal(net(x), torch.cat((y1, y2), dim=-1))
    assert torch.allclose(net.inverse(net(x)), x, atol=1e-6)


def test_a_sequence_that_ends_in_one_stream_is_inverted():
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh()), Merge()])
    x = torch.randn(2, 3, 4)
    back = net.inverse(net(*x))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(back, x, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: revzoo.SpatialPadding(1.5), r"padding=1\.5: expected two numbers"),
        (lambda: revzoo.SpatialPadding(True), "padding=True: expected two numbers"),
        (lambda: revzoo.Squeeze(2.0), r"factor=2\.0: expected a whole number"),
        (lambda: revzoo.InvertibleFlatten((2.5,)), r"shape=\(2\.5,\): expected the sizes"),
        (lambda: revzoo.InvertibleFlatten((2, 3), start_dim=1.0), r"start_dim=1\.0.*expected"),
        (lambda: revzoo.ReversibleSequence([], split=2), r"split=2: expected .* two whole numbers"),
        (
            lambda: revzoo.ReversibleSequence(collections.OrderedDict(append=nn.Identity())),
            "name 'append'",
        ),
    ],
)
def test_arguments_of_the_wrong_type_are_named(make, message):
    """They raised a TypeError or KeyError of Python, or were accepted."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inverses_of_values_that_are_not_finite(value):
    """It could not convert NaN to an integer. The other row is right."""
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4))])
    y = torch.randn(2, 8)
    expected = net.inverse(y)
    y[0, 0] = value
    x = net.inverse(y)
    assert x[0].isnan().all()
    assert torch.equal(x[1:], expected[1:])
