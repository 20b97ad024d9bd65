"""check_inverse measures errors correctly."""

import pytest
import torch
from compare import conv_net, images, linear_net
from torch import nn

from revzoo import (
    AdditiveCoupling,
    Invertible,
    NotInvertibleError,
    ReversibleBlock,
    ReversibleSequence,
    Squeeze,
    Step,
    check_inverse,
    create_model,
    is_invertible,
    set_memory,
)


class OffBy(Invertible):
    """An inverse that is wrong by a known amount."""

    def forward(self, x1, x2):
        return x1, x2

    def inverse(self, y1, y2):
        return y1 + 0.25, y2


def test_rows_per_step_and_dtype():
    steps = [Squeeze(2), AdditiveCoupling(nn.Conv2d(8, 8, 1))]
    net = ReversibleSequence(steps, memory="invert")
    before = [p.clone() for p in net.parameters()]
    report = check_inverse(net, torch.randn(2, 4, 4, 4))
    names = ["whole", "steps.0 Squeeze", "steps.1 AdditiveCoupling"]
    assert [row.name for row in report[:3]] == names
    assert len(report) == 9
    assert report.worst(torch.float64) < 1e-14
    assert 1e-9 < report.worst(torch.float32) < 1e-5 < report.worst(torch.bfloat16) < 0.1
    with pytest.raises(ValueError, match=r"torch.float16 was not checked: pass it"):
        report.worst(torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    title, head, *lines = str(report).splitlines()
    assert title == "largest error of inverse(forward(x)), relative to the largest x"
    assert head.split() == ["float64", "float32", "bfloat16"]
    assert [line.split()[:-3] for line in lines] == [row.name.split() for row in report[:3]]
    assert lines[1].split()[-3:] == ["0", "0", "0"]  # a squeeze moves values
    assert lines[2].endswith(f"{report[-1].relative:.1e}")
    assert len({len(line) for line in (head, *lines)}) == 1
    set_memory(net, "exact")
    assert all(row.absolute == 0 for row in check_inverse(net, torch.randn(2, 4, 4, 4)))


class Narrowed(Invertible):
    """Its streams leave in float32, from any dtype."""

    def forward(self, x1, x2):
        return x1.float(), x2.float()

    inverse = forward


def test_rows_have_the_dtype_that_was_asked_for():
    """Rows after a step that changes the type had that type, so no table was printed."""
    net = ReversibleSequence([Narrowed(), OffBy()], memory="invert")
    report = check_inverse(net, torch.ones(2, 4))
    assert [row.dtype for row in report[:3]] == [torch.float64] * 3
    assert "steps.1 OffBy      2.5e-01   2.5e-01   2.5e-01" in str(report)


def test_a_wrong_inverse_is_found_at_its_step():
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh()), OffBy()])
    report = check_inverse(net, 4 * torch.ones(1, 2), dtypes=[torch.float64])
    errors = {row.name: row.absolute for row in report}
    assert errors["steps.1 OffBy"] == 0.25
    assert errors["steps.0 AdditiveCoupling"] == 0
    assert errors["whole"] == 0.25


def test_statistics_and_random_state_stay():
    net = conv_net(dropout=0.5)
    before = [b.clone() for b in net.buffers()]
    state = torch.get_rng_state()
    check_inverse(net, images(), dtypes=[torch.float64])
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))


def test_what_has_no_inverse():
    with pytest.raises(NotInvertibleError, match="Linear has no inverse"):
        check_inverse(nn.Linear(2, 2), torch.zeros(1, 2))
    seq = ReversibleSequence([AdditiveCoupling(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match="pass the inputs of the module"):
        check_inverse(seq)


def test_the_parts_of_a_model_are_checked_on_what_reaches_them():
    """Every model of the zoo was refused: its forward, which ends in logits, has no inverse."""
    net = create_model("irevnet13", in_chans=1).eval()
    report = check_inverse(net, torch.rand(2, 1, 8, 8), dtypes=[torch.float32])
    names = [row.name for row in report]
    assert names[0] == "stem ReversibleSequence"
    assert names[-1] == "stages.1.steps.2 AdditiveCoupling"
    assert report.worst(torch.float32) == 0  # exact
    network = nn.Sequential(nn.Linear(4, 4), ReversibleSequence([OffBy()], memory="invert"))
    report = check_inverse(network, torch.ones(1, 4))
    assert report[0].name == "1 ReversibleSequence"
    assert report.worst(torch.float64) > 0.01


def test_complex_streams_keep_their_imaginary_part():
    """It was dropped, so a wrong inverse passed."""

    class Conjugate(Invertible):
        streams = 1

        def forward(self, x):
            return x.conj() * 2

        def inverse(self, y):
            return y / 2

    z = torch.randn(3, 8, dtype=torch.complex64)
    assert not is_invertible(Conjugate(), z)
    report = check_inverse(Conjugate(), z)
    assert report.worst(torch.float64) > 0.5 < report.worst(torch.float32)
    assert list(report.skipped) == [torch.bfloat16]


def test_rows_have_the_names_of_a_sequence():
    coupling = AdditiveCoupling(nn.Linear(2, 2))
    net = ReversibleSequence({"first": coupling, "inner": ReversibleSequence([OffBy()])})
    report = check_inverse(net, torch.randn(3, 4), dtypes=[torch.float32])
    names = ["whole", "steps.first AdditiveCoupling", "steps.inner.steps.0 OffBy"]
    assert [row.name for row in report] == names


class Conditioned(nn.Module):
    def forward(self, x, *, condition):
        return x.tanh() * condition


def test_a_condition_is_given_to_every_step_in_its_dtype():
    net = ReversibleSequence([AdditiveCoupling(Conditioned()) for _ in range(2)], memory="invert")
    report = check_inverse(net, torch.randn(30, 40), condition=torch.full((1, 20), 0.3))
    assert len(report) == 9
    assert report.worst(torch.float64) < 1e-14 < report.worst(torch.float32)


class Returns(Invertible):
    def __init__(self, back):
        super().__init__()
        self.back = back

    def forward(self, x1, x2):
        return x1, x2

    def inverse(self, y1, y2):
        return self.back(y1, y2)


@pytest.mark.parametrize(
    ("back", "error", "message"),
    [
        (lambda a, b: None, TypeError, "returned a NoneType"),
        (
            lambda a, b: a,
            ValueError,
            r"of whole returned .*\[\(3, 2\)\], expected \[\(3, 2\), \(3, 2\)\]",
        ),
        (lambda a, b: (a, b[:, :1]), ValueError, r"returned .*\[\(3, 2\), \(3, 1\)\]"),
    ],
)
def test_an_inverse_that_returns_something_else(back, error, message):
    with pytest.raises(error, match=message):
        check_inverse(Returns(back), torch.ones(3, 2), torch.ones(3, 2))


class Broken(OffBy):
    def inverse(self, y1, y2):
        return (y1 @ y2,)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (conv_net(), True),
        (ReversibleSequence([OffBy()]), False),
        (ReversibleSequence([Broken()]), False),
        (ReversibleSequence([Step()]), False),
        (nn.Identity(), False),
    ],
    ids=["net", "wrong", "broken", "without", "plain"],
)
def test_is_invertible_is_a_bool(module, expected):
    assert is_invertible(module, images()) is expected


def test_beyond_the_range_of_its_grid_a_module_is_not_invertible():
    net = ReversibleSequence([AdditiveCoupling(nn.Identity())])
    set_memory(net, "exact", grid=22)  # in float64 exact below 2048
    assert is_invertible(net, torch.full((1, 2), 1000.0))
    assert not is_invertible(net, torch.full((1, 2), 2000.0))


def test_is_invertible_takes_integers():
    """It raised an error about dtypes, while check_inverse made them floats."""
    block = ReversibleBlock(nn.Linear(4, 4))
    assert is_invertible(block, torch.arange(16).view(2, 8))


def test_is_invertible_without_inputs_asks_the_steps():
    assert is_invertible(ReversibleSequence([OffBy()]))
    assert not is_invertible(ReversibleSequence([OffBy(), Step()]))


def test_is_invertible_changes_nothing_and_raises_what_the_forward_pass_raises():
    net = conv_net(dropout=0.5)
    assert not is_invertible(net, images())  # nobody draws the masks again, in reverse order
    net = ReversibleSequence([net[0][0]])
    before, state = [b.clone() for b in net.buffers()], torch.get_rng_state()
    assert is_invertible(net, images())
    assert all(map(torch.equal, before, net.buffers()))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="expected an even number of channels"):
        is_invertible(net, images(channels=7))


def test_lazy_layers_get_their_weights_in_the_copy():
    """torch's AttributeError said nothing."""
    net = ReversibleSequence([ReversibleBlock(nn.LazyLinear(4))])
    x = torch.randn(8, 8)
    state = torch.get_rng_state()
    assert check_inverse(net, x).worst(torch.float64) < 1e-12
    assert is_invertible(net, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(isinstance(p, nn.UninitializedParameter) for p in net.parameters())


def test_a_model_gets_integers_as_they_are_and_all_its_parts_must_run():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.body = ReversibleSequence([AdditiveCoupling(nn.Linear(2, 2))], dim=-1)
            self.used = True

        def forward(self, ids):
            x = self.embed(ids)
            return self.body(x) if self.used else x

    model = Tokens()
    report = check_inverse(model, torch.tensor([[0, 3, 4]]))
    assert not report.skipped
    assert report.worst(torch.float32) == 0
    model.used = False
    with pytest.raises(NotInvertibleError, match="Tokens did not call its part body"):
        check_inverse(model, torch.tensor([[0, 3, 4]]))


def test_check_inverse_reports_nan():
    class Broken(Invertible):
        def forward(self, x1, x2):
            return x1, x2

        def inverse(self, y1, y2):
            return y1, y2 * float("nan")

    report = check_inverse(ReversibleSequence([Broken()]), torch.randn(2, 4))
    assert not report.worst(torch.float64) < 1


def test_check_inverse_on_a_grid():
    net = linear_net().float()
    set_memory(net, "exact")
    report = check_inverse(net, torch.randn(4, 8))
    assert {row.dtype for row in report} == {torch.float64, torch.float32, torch.bfloat16}
    assert all(report.worst(dtype) == 0 for dtype in (torch.float32, torch.bfloat16))


def test_check_inverse_where_an_inverse_lacks_a_dtype():
    """It crashed on torch.linalg, which knows no bfloat16."""

    class Mixes(Invertible):
        streams = 1

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

        def forward(self, x):
            return x @ self.weight

        def inverse(self, y):
            return torch.linalg.solve(self.weight, y, left=False)

    report = check_inverse(ReversibleSequence([Mixes()]), torch.randn(3, 4))
    assert {row.dtype for row in report} == {torch.float64, torch.float32}
    assert report.worst(torch.float32) < 1e-5
    assert "bfloat16" in str(report)
    assert "not implemented" in report.skipped[torch.bfloat16]
    with pytest.raises(ValueError, match=r"bfloat16 was not checked: .*not implemented"):
        report.worst(torch.bfloat16)

    class Broken(Mixes):
        def inverse(self, y):
            raise RuntimeError("broken in every type")

    with pytest.raises(RuntimeError, match="broken in every type"):
        check_inverse(ReversibleSequence([Broken()]), torch.randn(3, 4))
