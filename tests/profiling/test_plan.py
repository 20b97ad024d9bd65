"""The planner: plans stay within their budget, on models of every kind."""

import copy
import functools

import pytest
import torch
from compare import error
from torch import nn

import revzoo
from revzoo.profiling import clock
from revzoo.profiling.audit import audit
from revzoo.profiling.plan import Plan, Planner, largest, plan_memory, state_bytes
from revzoo.profiling.units import bytes_from, in_units

SHAPE = (16, 3, 32, 32)


def model_of(name="revnet38", **options):
    torch.manual_seed(0)
    if name == "revnet38":
        options.setdefault("units", (2, 2, 2))
    return revzoo.create_model(name, **options)


@functools.cache
def shared_planner(name="revnet38"):
    """Of ``model_of(name)``; tests only read it."""
    return Planner(model_of(name), SHAPE, clock=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("revnet38", {}),
        ("revnet38", {"memory": "exact"}),
        ("resnet32", {"units": (2, 2, 2)}),
        pytest.param("irevnet13", {}, marks=pytest.mark.slow),
        pytest.param("revvit_cifar", {}, marks=pytest.mark.slow),
    ],
)
def test_real_steps_stay_within_their_budgets(name, options):
    """The measured peak of a step equals the predicted one; larger budgets cost less time."""
    model = model_of(name, **options)
    planner = Planner(model, SHAPE, clock=False)
    plans = planner.frontier(3)
    assert len({tuple(plan.items()) for plan in plans}) > 1
    for plan in plans:
        assert plan.peak_bytes <= plan.budget
        revzoo.set_memory(model, plan)
        counted = audit(model, SHAPE, modes=[], real=True).peak_bytes
        assert counted == pytest.approx(plan.peak_bytes, rel=0.01)
        assert counted <= plan.budget
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)


def test_pure_modes_are_predicted_to_a_few_bytes():
    model = model_of()
    planner = shared_planner()
    for mode in ("store", "recompute", "exact"):
        revzoo.set_memory(model, mode)
        counted = audit(model, SHAPE, modes=[]).peak_bytes
        # the first replay of a norm allocates its scratch statistics, which later ones reuse
        few = 0 if mode == "store" else 2**13
        assert counted == pytest.approx(planner.pure(mode).peak, abs=few)


def test_a_plan_changes_memory_not_gradients():
    model = model_of(memory="exact").double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    planner = Planner(model, tuple(images.shape), clock=False)

    def gradients(setting):
        revzoo.set_memory(model, setting)
        model.zero_grad()
        model(images).logsumexp(1).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    middle = planner.plan((planner.least + planner.pure("store").peak) // 2 + 2**17)
    assert len(set(middle.values())) > 1
    wanted = gradients("exact")
    assert error(gradients(middle), wanted) < 1e-10
    assert all(map(torch.equal, gradients(dict(middle)), gradients(middle)))


def test_auto_takes_the_inverting_modes_peak():
    planner = Planner(model_of("revnet38", units=(3, 3, 3)), (64, 3, 32, 32), clock=False)
    inverting, auto = planner.pure("exact"), planner.balanced()
    assert auto.peak_bytes <= 1.02 * inverting.peak
    assert auto.seconds < inverting.cost / 1e9
    assert {"recompute", "exact"} <= set(auto.values())


def test_auto_stores_where_that_takes_no_more():
    """A narrow chain before a wide head: inverting saves nothing at the peak."""
    steps = [revzoo.ReversibleBlock(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
    net = nn.Sequential(revzoo.ReversibleSequence(steps), nn.Linear(4, 4000), nn.Linear(4000, 5))
    assert set(Planner(net, (2048, 4), clock=False).balanced().values()) == {"store"}


def test_auto_takes_the_leanest_plan_if_none_is_as_lean_as_the_inverting_mode(monkeypatch):
    planner = shared_planner()
    monkeypatch.setattr("revzoo.profiling.plan.SLACK", 0.5)
    assert planner.balanced().modes == planner.leanest.modes
    assert planner.balanced().budget > 0


def test_the_least_budget_is_reported_and_possible():
    planner = shared_planner()
    with pytest.raises(revzoo.BudgetError, match=r"at least .* MiB .* batch of about \d+") as error:
        planner.plan("8MB")
    least = str(error.value).split("at least ")[1].split(" for")[0].replace(" ", "")
    assert planner.plan(bytes_from(least) + 2**14)
    with pytest.raises(
        revzoo.BudgetError,
        match=r"^budget=1 bytes is .* use a larger budget \(with a unit, .*\) or a smaller model$",
    ):
        planner.plan(1)


def test_a_printed_plan_says_which_steps_have_a_mode():
    modes = {f"stages.{i}.steps.{k}": "exact" for i in range(2) for k in range(4)}
    modes |= {"stages.1.steps.3": "store", "stages.1.steps.1": "store"}
    _, *lines = str(Plan(modes, 2**20, 0.5, 2**21)).splitlines()
    assert lines[:2] == ["stages.0  4 exact", "stages.1  2 store, 2 exact"]
    assert " ".join(map(str.strip, lines[2:-1])) == (
        "steps.0: exact; steps.1: store; steps.2: exact; steps.3: store"
    )
    net = Plan({"net.layer1.0.a": "exact", "net.layer2.0.a": "store"}, 1, 1, 1, "exact")
    assert "\nnet.layer1  1 exact\nnet.layer2  1 store\n" in str(net)
    assert str(net).endswith("; inverting mode: exact")
    modes["stages.1.steps.2"] = "store"
    assert "steps.0: exact; steps.1 to steps.3: store" in str(Plan(modes, 2**20, 0.5, 2**21))


@pytest.mark.parametrize(
    "budget", [0, -1, True, None, "4 gigs", "-4GiB", "GiB", "", "9" * 400, float("nan")]
)
def test_budgets_that_are_none_are_refused(budget):
    with pytest.raises(ValueError, match="expected a positive number of bytes"):
        plan_memory(model_of(), SHAPE, budget=budget)


def test_budgets_as_people_write_them():
    assert bytes_from("4GiB") == bytes_from("4 gib") == 2**32
    assert bytes_from("4GB") == 4 * 10**9
    assert bytes_from("1PiB") == 2**50
    assert bytes_from("1.5e3") == 1500
    assert bytes_from("500MB") == 500 * 10**6
    assert in_units(3 * 2**29) == "1.5 GiB"


def test_a_plan_is_data_and_text():
    plan = plan_memory(model_of(), SHAPE, budget="1GiB", clock=False)
    assert isinstance(plan, Plan)
    assert plan.modes == dict(plan)
    assert set(plan.values()) == {"store"}
    assert "stages.0  4 store" in str(plan)
    assert "of 1,024 MiB" in str(plan)


def test_a_plan_says_what_its_peak_includes():
    """A run's plan includes the optimiser's state, an audit does not, and neither said so."""
    planner = Planner(model_of(), SHAPE, clock=False, extra="2MiB")
    plan = planner.plan("1GiB")
    assert plan.extra == 2**21
    first = str(plan).splitlines()[0]
    assert first == "peak: weights, gradients, input, activations, and 2 MiB for the optimiser"
    without = plan_memory(model_of(), SHAPE, "1GiB", clock=False)
    assert str(without).startswith("peak: weights, gradients, input and activations; not the opt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_times_come_from_the_clock(monkeypatch, dtype):
    """They scale the nominal ones, so they change no plan."""
    seen, seconds = [], []
    for time in (1e-2, 2e-2):
        monkeypatch.setattr(
            clock, "step_seconds", lambda _, images, time=time: seen.append(images.dtype) or time
        )
        planner = Planner(model_of().to(dtype), SHAPE)
        budget = (planner.least + planner.pure("store").peak) // 2
        plan = planner.plan(budget)
        seconds.append(plan.seconds)
        assert planner.pure("store").cost < plan.seconds * 1e9 < planner.pure("exact").cost
        nominal = Planner(model_of().to(dtype), SHAPE, clock=False).plan(budget)
        assert plan.modes == nominal.modes
        assert time / 0.1 < plan.seconds / nominal.seconds < time / 1e-3
    assert {*seen} == {dtype}
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_the_clock_runs_a_training_step(monkeypatch):
    """Also on the meta device, under ``no_grad``; the random state stays."""
    run, trained = clock.step_seconds, []

    def time(network, images):
        seconds = run(network, images)
        trained.append(all(p.grad is not None for p in network.parameters()))
        return seconds

    monkeypatch.setattr(clock, "step_seconds", time)
    state = torch.get_rng_state()
    with torch.no_grad(), torch.device("meta"):
        assert Planner(model_of(), SHAPE).pure("store").cost > 0
    assert trained
    assert all(trained)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("factor", [1, 3])
def test_the_other_inverting_mode_is_estimated(monkeypatch, factor):
    """From one more counted step, with the measured speed."""
    monkeypatch.setattr("revzoo.profiling.plan.speed", lambda *_: factor)
    model = model_of(units=(1, 1, 1))
    planned, other = (Planner(model, SHAPE, inverting=m) for m in ("exact", "invert"))
    assert planned.pures().keys() == {"store", "recompute", "exact", "invert"}
    # not equal: the first replay of a norm allocates its scratch statistics, which later ones reuse
    estimate, measured = planned.pures()["invert"], other.pure("invert")
    assert estimate.peak == pytest.approx(measured.peak, abs=2**13)
    assert estimate.cost == pytest.approx(measured.cost, rel=0.01)
    assert planned.pure("offload") is None


def test_without_a_step_to_invert_there_is_nothing_to_estimate_from():
    plain = Planner(model_of("resnet32", units=(1, 1, 1)), SHAPE, clock=False)
    assert plain.pures().keys() == {"store", "recompute"}


def test_features_that_the_model_keeps_count():
    """The first forward pass keeps no features of an earlier one; ``store`` was 7 % too low."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.features = model_of(), None

        def forward(self, x):
            self.features = self.net.forward_features(x)
            return self.net.forward_head(self.features)

    model = Keeps()
    planner = Planner(model, SHAPE, clock=False)
    for mode, pure in planner.pures().items():
        revzoo.set_memory(model, mode)
        model(torch.randn(SHAPE)).sum().backward()
        counted = audit(model, SHAPE, modes=[], real=True).peak_bytes
        assert counted == pytest.approx(pure.peak, rel=0.01)


def test_a_step_that_is_called_twice_counts_in_each_mode():
    """It was inverted although the table said ``store``."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [revzoo.ReversibleBlock(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3)]
            self.steps = revzoo.ReversibleSequence(blocks)

        def forward(self, x):
            return self.steps[0](self.steps(x))

    planner = Planner(Twice(), (4, 16, 32, 32), clock=False)
    for mode, pure in planner.pures().items():
        net = Twice()
        revzoo.set_memory(net, mode)
        counted = audit(net, (4, 16, 32, 32), modes=[]).peak_bytes
        assert counted == pytest.approx(pure.peak, rel=0.001)


def test_calls_that_differ_from_pass_to_pass_are_refused():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [revzoo.ReversibleBlock(nn.Linear(4, 4)) for _ in range(2)]
            self.steps, self.passes = revzoo.ReversibleSequence(blocks), 0

        def forward(self, x):
            self.passes += 1
            return self.steps[1](x) if self.passes == 2 else self.steps(x)

    with pytest.raises(ValueError, match="does not call the same steps each time"):
        Planner(Skips(), (8, 8), clock=False)


def test_a_second_plan_inverts_in_the_same_mode():
    """After a plan without inverted steps, the next one inverted in ``invert``, which drifts."""
    model = model_of()
    revzoo.set_memory(model, plan_memory(model, SHAPE, "1GiB", clock=False))
    assert "exact" not in {step.memory for step in model.modules() if isinstance(step, revzoo.Step)}
    assert plan_memory(model, SHAPE, "1GiB", clock=False).inverting == "exact"


def test_without_the_clock_a_plan_is_the_same_everywhere():
    again = Planner(model_of(), SHAPE, clock=False)
    assert again.pure("store").cost == shared_planner().pure("store").cost


def test_planning_changes_no_layer_that_a_patched_forward_holds():
    """A copy of the model shares it: statistics saw random images, gradients stayed."""
    conv, norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    branch = nn.Sequential(conv, norm)
    branch.forward = lambda x: norm(conv(x))
    chain = revzoo.ReversibleSequence([revzoo.AdditiveCoupling(branch)])
    net = nn.Sequential(nn.Conv2d(16, 16, 1), chain)
    before = copy.deepcopy(norm.state_dict())
    Planner(net, (4, 16, 8, 8), clock=False)
    assert all(torch.equal(t, before[k]) for k, t in norm.state_dict().items())
    assert conv.weight.grad is None
    assert norm.weight.grad is None


def test_draws_after_the_last_saved_tensor_count():
    """A replay continues until it has drawn all numbers: a plan needed 8 % more than it said."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            convs = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)]
            norms = [nn.BatchNorm2d(4) for _ in range(2)]
            self.layers = nn.Sequential(convs[0], norms[0], nn.ReLU(), convs[1], norms[1])

        def forward(self, x):
            y = self.layers(x)
            return y + 0.1 * torch.randn_like(y)

    chain = revzoo.ReversibleSequence([revzoo.AdditiveCoupling(Noisy()) for _ in range(3)])
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), chain)
    for plan in Planner(net, SHAPE, clock=False).frontier(6):
        revzoo.set_memory(net, plan)
        real = audit(net, SHAPE, modes=[], real=True).peak_bytes
        assert plan.peak_bytes == pytest.approx(real, rel=0.01)


def test_steps_inside_a_reversible_block_follow_the_plan():
    """They kept their mode, so the peak was up to 1.7 times the planned one."""
    net = revzoo.create_model("resnet32", units=(2, 2, 1))
    revzoo.make_reversible(net, bits=3)
    shape = (16, 3, 32, 32)
    plan = Planner(net, shape, clock=False).leanest
    revzoo.set_memory(net, plan)
    peak = audit(net, shape, modes=[], real=True).peak_bytes
    assert plan.peak_bytes == pytest.approx(peak, rel=0.01)


def test_planning_changes_nothing():
    model = model_of()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    plan_memory(model, SHAPE, budget="1GiB")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_chains_with_layers_between_them():
    def chain():
        blocks = [
            revzoo.ReversibleBlock(
                *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(2))
            )
            for _ in range(3)
        ]
        return revzoo.ReversibleSequence(blocks)

    torch.manual_seed(0)
    net = nn.Sequential(
        chain(), nn.MaxPool2d(2), nn.Tanh(), chain(), nn.Flatten(), nn.LazyLinear(5)
    )
    net(torch.zeros(2, 8, 16, 16))
    shape = (64, 8, 16, 16)
    for plan in Planner(net, shape, clock=False).frontier(3):
        revzoo.set_memory(net, plan)
        counted = audit(net, shape, modes=[], real=True).peak_bytes
        assert counted <= plan.budget
        assert counted == pytest.approx(plan.peak_bytes, rel=0.01)


def test_a_budget_for_storing_counts_no_other_plan(monkeypatch):
    planner = Planner(model_of(), SHAPE, clock=False)
    monkeypatch.setattr(planner, "_step_in", None)
    plan = planner.plan("1GiB")
    assert {*plan.values()} == {"store"}
    assert [*plan] == [*shared_planner().leanest]
    assert plan.peak_bytes == planner.pure("store").peak


def test_a_step_that_is_called_twice_has_one_mode():
    torch.manual_seed(0)
    first, second = (revzoo.ReversibleBlock(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    net = revzoo.ReversibleSequence([first, second, first])
    leanest, fastest = Planner(net, (64, 16), clock=False).frontier(2)
    for plan, mode in ((leanest, "exact"), (fastest, "store")):
        revzoo.set_memory(net, plan)
        assert audit(net, (64, 16), modes=[], real=True).peak_bytes <= plan.budget
        assert plan["steps.0.steps.0"] == mode


def test_the_frontier_of_a_chain_in_which_every_step_runs_twice():
    block = revzoo.ReversibleBlock(nn.Linear(8, 8), nn.Linear(8, 8))
    plans = Planner(revzoo.ReversibleSequence([block, block]), (64, 16), clock=False).frontier(3)
    assert [set(plan.values()) for plan in plans] == [{"exact"}, {"exact"}, {"store"}]


class PlainTensors(nn.Module):
    """Keeps tensors that are neither parameters nor buffers, one of them its last output."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), torch.full((4,), 2.0)
        self.tables = [{"order": torch.arange(4).flip(0)}]

    def forward(self, x):
        self.last = self.linear(x)[:, self.tables[0]["order"]] * self.scale
        return self.last


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_in_plain_attributes(device):
    with torch.device(device):
        net = revzoo.ReversibleSequence([revzoo.ReversibleBlock(PlainTensors())])
        net(torch.zeros(2, 8))  # keeps an output that is not a leaf of its graph
    assert plan_memory(net, (16, 8), budget="1GiB").keys() == {
        "steps.0.steps.0",
        "steps.0.steps.1",
    }


def test_tensors_in_plain_attributes_are_not_activations():
    net = nn.Sequential(revzoo.ReversibleBlock(PlainTensors()), nn.Flatten())
    reports = [audit(net, (1024, 8), modes=["store"], real=real) for real in (False, True)]
    for report in reports:
        buffers = 2 * 4 * (4 + 8)  # two scales in float32, two orders in int64
        assert report.audits["store"].kinds["buffer"] == buffers
    fake, real = (report.audits["store"].peak_bytes for report in reports)
    assert fake == real


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Tanh(), nn.Linear(2, 2))])

    def forward(self, x):
        return self.steps(x) if float(x.sum()) < 1e9 else x


def test_a_model_that_looks_at_values_is_refused():
    with pytest.raises(ValueError, match="Looking reads values"):
        plan_memory(Looking(), (4, 4), budget="1GiB")
    assert audit(Looking(), (4, 4), modes=[], real=True).peak_bytes > 0


def test_frozen_parts_and_evaluation_mode():
    model = model_of().eval()
    model.stem.requires_grad_(False)
    model.stages[0].requires_grad_(False)
    planner = Planner(model, SHAPE, clock=False)
    plan = planner.plan((planner.least + planner.pure("store").peak) // 2 + 2**17)
    assert not model.training
    revzoo.set_memory(model, plan)
    assert audit(model, SHAPE, modes=[], real=True).peak_bytes <= plan.budget


def test_models_without_steps_or_training_are_refused():
    with pytest.raises(ValueError, match="has no step to plan"):
        plan_memory(nn.Linear(3, 3), (4, 3), budget="1GiB")
    net = nn.Sequential(nn.Linear(8, 8), revzoo.ReversibleBlock(nn.Linear(4, 4)))
    net.forward = net[0].forward
    with pytest.raises(ValueError, match="Sequential calls none of its 2 steps"):
        plan_memory(net, (4, 8), budget="1GiB")
    with pytest.raises(ValueError, match="unfreeze"):
        plan_memory(model_of().requires_grad_(False), SHAPE, budget="1GiB")
    with pytest.raises(ValueError, match="expected one of invert, exact"):
        plan_memory(model_of(), SHAPE, budget="1GiB", inverting="store")


def test_the_optimisers_state():
    with torch.device("meta"):
        model = model_of()
    trained = sum(p.nbytes for p in model.parameters())
    assert state_bytes(torch.optim.SGD(model.parameters(), lr=1)) == 0
    assert state_bytes(torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)) == trained
    counters = 4 * len([*model.parameters()])  # the step count of each parameter
    assert state_bytes(torch.optim.AdamW(model.parameters(), lr=1)) == 2 * trained + counters


def test_steps_without_an_inverse_are_recomputed_where_memory_is_short():
    planner = shared_planner()
    plan = planner.plan(planner.least + 2**18)
    assert plan["stages.1.steps.0"] == "recompute"
    assert "exact" in plan.values()


@pytest.mark.parametrize("start", [1, 10, 500])
@pytest.mark.parametrize(("power", "budget"), [(1, 7777), (2, 7777), (1, 45), (2, 2000)])
def test_the_largest_is_found_in_few_calls(start, power, budget):
    calls = []

    def need(n):
        calls.append(n)
        return 40 + 3 * n**power

    found = largest(need, budget, start=start, power=power)
    assert need(found) <= budget < need(found + 1)
    assert len(calls) <= 6  # two of them above


def test_impossible_numbers_are_passed_over():
    """Images must be multiples of 4."""
    found = largest(lambda n: n * n if n % 4 == 0 else None, 1700, start=32, power=2)
    assert found == 40


def test_nothing_may_fit():
    assert largest(lambda n: 100 + n, 50, start=8) is None
    assert largest(lambda n: None, 50, start=8, most=16) is None
