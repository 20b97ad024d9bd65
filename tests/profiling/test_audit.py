"""Audits: the memory that a step keeps, counted on fake and real tensors."""

import csv
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.core.modes import MODES
from revzoo.core.twins import copied, images_for
from revzoo.profiling.audit import audit
from revzoo.profiling.count import trace_step
from revzoo.profiling.plan import Planner
from revzoo.profiling.units import in_one_unit, peak_note

SMALL = {"units": (2, 2, 2)}
SHAPE = (16, 3, 32, 32)


def small(memory="invert"):
    torch.manual_seed(0)
    return revzoo.create_model("revnet38", memory=memory, **SMALL)


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
def test_fake_and_real_steps_agree(mode):
    model = small(mode)
    fake, real = (audit(model, SHAPE, modes=[], real=r) for r in (False, True))
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    assert fake.kept_bytes == pytest.approx(real.kept_bytes, rel=0.01)


# the tracker's hooks keep the tensors of replays alive, so it cannot judge the inverting modes
@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_the_peak_is_the_one_that_torchs_tracker_sees(mode):
    model = small(mode)
    counted = audit(model, SHAPE, modes=[]).peak_bytes
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    images, labels = torch.randn(SHAPE), torch.zeros(SHAPE[0], dtype=torch.int64)
    tracker = MemTracker()
    tracker.track_external(model, images)
    with tracker:
        nn.functional.cross_entropy(model(images), labels).backward()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    total = next(v for k, v in snapshot.items() if str(k).endswith("Total"))
    assert counted == pytest.approx(total, rel=0.01)


def frozen_norms(model):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval().requires_grad_(False)


def frozen_convolutions(model):
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            m.requires_grad_(False)


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
@pytest.mark.parametrize("freeze", [frozen_norms, frozen_convolutions])
def test_layers_keep_as_little_as_in_a_plain_step(mode, freeze):
    """Counting used hooks, and a frozen layer with a hook keeps its input: up to twice as much."""
    model = small(mode)
    freeze(model)
    images = torch.randn(SHAPE)
    model(images).sum().backward()
    with LiveMemory() as live:
        model(images).sum().backward()
    counted = audit(model, SHAPE, modes=[]).activation_bytes
    assert counted == pytest.approx(live.peak, rel=0.01)


def test_rows_tell_what_a_linear_net_keeps():
    net = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 5))
    report = audit(net, (64, 10))
    # the ReLU's output, saved by itself and by the linear layer after it
    hidden = report.rows[0]
    assert (hidden.module, hidden.operation, hidden.shape) == ("1", "relu", "64x100")
    assert (hidden.bytes, hidden.saved) == (64 * 100 * 4, 2)
    assert report.kept_bytes == sum(row.bytes for row in report.rows)
    parameters = sum(p.nbytes for p in net.parameters())
    kinds = report.audits["store"].kinds
    assert kinds["parameter"] == kinds["gradient"] == parameters
    assert report.peak_bytes == sum(kinds.values())


def test_modes_are_counted_side_by_side():
    report = audit(small("recompute"), SHAPE)
    assert list(report.audits) == ["recompute", "store", "invert", "exact"]
    kept = {mode: one.kept_bytes for mode, one in report.audits.items()}
    assert kept["store"] > 2 * kept["recompute"] > 2 * kept["invert"]
    assert report.kept_bytes == kept["recompute"]
    text = str(report)
    assert "stages.0" in text
    assert ", autograd: " in text
    assert ", revzoo: " in str(audit(small("exact"), SHAPE, modes=[]))  # words


def test_an_audit_changes_nothing():
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    audit(model, SHAPE, real=True, modes=["store"])
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert {m.memory for m in model.modules() if isinstance(m, revzoo.Step)} == {"invert"}
    assert model.training


def in_a_backward_hook(count):
    x, results = torch.ones(2, requires_grad=True), []
    y = 2 * x
    y.register_hook(lambda gradient: results.append(count()))
    y.sum().backward()
    return results[0]


def in_detect_anomaly(count):
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        anomaly = torch.autograd.detect_anomaly()
    with anomaly:
        return count()


def in_inference_mode(count):
    with torch.inference_mode():
        return count()


@pytest.mark.parametrize("within", [in_inference_mode, in_detect_anomaly, in_a_backward_hook])
def test_counts_do_not_depend_on_where_they_are_made(within):
    """In a backward hook, every tensor seemed to be made by the backward pass."""

    def count():
        peaks = [audit(net, (16, 8), modes=[], real=real).peak_bytes for real in (False, True)]
        planner = Planner(net, (16, 8), clock=False)
        return *peaks, planner.plan("1GiB").peak_bytes, planner.chain

    blocks = [revzoo.ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    net = revzoo.ReversibleSequence(blocks)
    count()  # the first real step makes the guard's tables, which later ones share
    assert within(count) == count()


def test_the_optimisers_state_counts():
    model = small()
    plain = audit(model, SHAPE, modes=[])
    more = audit(model, SHAPE, modes=[], extra=1000)
    assert more.peak_bytes == plain.peak_bytes + 1000
    assert more.activation_bytes == plain.activation_bytes


def test_files(tmp_path):
    report = audit(small(), SHAPE)
    report.to_csv(tmp_path / "rows.csv")
    report.plot(tmp_path / "step.png")
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    by_mode = {
        mode: sum(int(r["bytes"]) for r in rows if r["mode"] == mode) for mode in report.audits
    }
    assert by_mode == {mode: one.kept_bytes for mode, one in report.audits.items()}
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_series_has_the_peak():
    model = small()
    report = audit(model, SHAPE, modes=[])
    levels, turn = report.audits["invert"].series()
    totals = [sum(values) for values in zip(*levels.values(), strict=True)]
    trace = trace_step(copied(model), images_for(model, SHAPE))
    assert 0 < turn < len(totals)
    # between two operators; within one, its input and its result may both be alive
    assert max(totals) == pytest.approx(trace.peak - trace.base, rel=0.02)


@pytest.mark.parametrize(
    "shape", [8, None, "4x3x8x8", (), (0, 3, 32, 32), (4, 3, 32.0, 32), (4, -3, 32, 32)]
)
def test_shapes_that_are_none_are_refused(shape):
    for count in (audit, functools.partial(revzoo.plan_memory, budget="1GiB")):
        with pytest.raises(ValueError, match=r"input_shape=.*: expected positive whole numbers"):
            count(small(), shape)


@pytest.mark.parametrize("extra", [float("nan"), float("inf"), -1, "lots", None, True])
def test_extra_bytes_that_are_none_are_refused(extra):
    for count in (audit, functools.partial(revzoo.plan_memory, budget="1GiB")):
        with pytest.raises(ValueError, match=r"extra=.*: expected 0 or a positive number of bytes"):
            count(small(), SHAPE, extra=extra)


@pytest.mark.parametrize("model", [None, 3, "revnet38", nn.Linear, [nn.Linear(2, 2)]])
def test_models_that_are_none_are_refused(model):
    for count in (audit, functools.partial(revzoo.plan_memory, budget="1GiB")):
        with pytest.raises(TypeError, match=r"model is .*: expected an nn.Module"):
            count(model, SHAPE)


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.steps = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Linear(4, 4))])
        self.table = nn.Embedding(3, 8)
        self.forward = functools.partial(forward, self)


@pytest.mark.parametrize(
    ("forward", "got"),
    [
        (lambda net, x: net.steps(x).detach(), "a tensor"),
        (lambda net, x: (x, {"class": x.argmax(1)}), "a tuple"),
        (lambda net, x: None, "a NoneType"),
    ],
)
def test_a_model_without_a_trained_output_is_refused(forward, got):
    for count in (audit, functools.partial(revzoo.plan_memory, budget="1GiB")):
        with pytest.raises(ValueError, match=f"returned {got}, in which nothing requires gradient"):
            count(Net(forward), (4, 8))


def test_an_error_of_the_model_tells_its_input():
    net = Net(lambda net, x: net.steps(net.table(x)))
    for real in (False, True):
        with pytest.raises(RuntimeError, match="indices") as error:
            audit(net, (4, 8), real=real)
        (note,) = error.value.__notes__
        assert "one random torch.float32 tensor of shape (4, 8)" in note
        assert "such as integers" in note


def test_arguments_of_other_types():
    with pytest.raises(TypeError, match=r"is a tensor: give its shape, \(2, 3, 8, 8\)"):
        audit(small(), torch.zeros(2, 3, 8, 8))
    with pytest.raises(TypeError, match=r"modes='exact': expected a list, \['exact'\]"):
        audit(small(), SHAPE, modes="exact")
    with pytest.raises(TypeError, match=r"model is 'resnet50': expected an nn.Module"):
        revzoo.make_reversible("resnet50")


def test_a_frozen_model_has_no_training_step():
    with pytest.raises(ValueError, match="unfreeze"):
        audit(small().requires_grad_(False), SHAPE)


def test_models_on_the_meta_device():
    with torch.device("meta"):
        model = revzoo.create_model("revnet38", **SMALL, memory="invert")
    assert audit(model, SHAPE, modes=[]).peak_bytes == audit(small(), SHAPE, modes=[]).peak_bytes
    with pytest.raises(ValueError, match="meta"):
        audit(model, SHAPE, real=True)


def test_blocks_that_were_made_reversible():
    torch.manual_seed(0)
    net = revzoo.make_reversible(revzoo.create_model("resnet32", units=(4, 1, 1)), 4)
    net(torch.randn(2, 3, 32, 32))
    report = audit(net, SHAPE, modes=[])
    assert report.plain.kept_bytes == audit(revzoo.make_reversible(net, None), SHAPE).kept_bytes
    kept = [line.split() for line in str(report).splitlines() if line.startswith("plain ")]
    assert kept[0][1:3] == [f"{report.plain.kept_bytes / 2**20:.2f}", "MiB"]
    assert report.plain.kept_bytes > 2 * report.kept_bytes


def test_a_report_fits_into_80_columns():
    report = str(audit(revzoo.create_model("resnet32", reversible_bits=4), (2, 3, 32, 32)))
    assert max(map(len, report.splitlines())) <= 80
    assert "(the model's mode)" in report
    vit = revzoo.create_model("revvit_cifar", memory="store", depth=12)  # has long paths
    report = str(audit(vit, (2, 3, 32, 32), modes=[]))
    assert max(map(len, report.splitlines())) <= 80


def test_a_report_says_what_its_peak_includes_and_has_the_order_of_the_table():
    """A plan's peak seemed to be comparable, and its modes had another order."""
    lines = str(audit(small(), SHAPE)).splitlines()
    assert lines[2] == peak_note()
    assert [line.split()[0] for line in lines[5:10]] == [*MODES]
    told = "offload     keeps every activation, in host memory: it helps on a GPU only"
    assert lines[6] == told
    with_momentum = str(audit(small(), SHAPE, extra="2MiB", modes=[]))
    assert peak_note(2**21, in_one_unit(2**20)) in with_momentum
    assert "offload" not in with_momentum


def test_a_report_has_one_unit_and_one_meaning_of_kept():
    """Sizes of one table were in bytes, KiB and MiB, and ``kept`` stood for two numbers."""
    report = audit(small(), SHAPE)
    lines = str(report).splitlines()
    assert {line.split()[1] for line in lines if line.startswith("      ")} <= {"MiB", "model's"}
    total = f"{report.kept_bytes / 2**20:.2f} MiB"
    assert f"invert: the {total} kept, by part of the model" in lines
    assert not any(line.endswith(" kept") for line in lines)
    assert "(outside)" in report.audits["invert"].stages
    assert "loss" not in {stage for a in report.audits.values() for stage in a.stages}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)


def test_models_with_torchs_checkpoint():
    kept = [revzoo.audit(Checkpointed(), (4, 8), real=real).kept_bytes for real in (False, True)]
    assert kept[0] == kept[1] > 0


def test_a_table_in_one_unit():
    assert [in_one_unit(2**20)(n) for n in (2**31, 2**20, 2**10, 0)] == [
        *("2,048.00 MiB", "1.00 MiB", "<0.01 MiB", "0.00 MiB")
    ]
    assert in_one_unit(2**20 - 1)(2**9) == "0.50 KiB"
    assert [in_one_unit(2**31)(n) for n in (2**31, 2**20, 2**10)] == [
        *("2,048 MiB", "1 MiB", "<1 MiB")
    ]
    assert [in_one_unit(2**33)(n) for n in (2**33, 2**30 + 2**29, 2**20)] == [
        *("8.00 GiB", "1.50 GiB", "<0.01 GiB")
    ]


def test_parameters_in_a_closure_keep_their_gradients():
    """A patched forward reads the model's own layers, and got gradients without values."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain, weight = net[0].forward, net[0].weight
    net[0].forward = lambda x: plain(x).tanh()
    for gradient in (None, torch.ones(4, 4)):
        for real in (False, True):
            weight.grad = gradient
            audit(net, (2, 4), real=real)
            assert weight.grad is gradient
            assert gradient is None or torch.equal(gradient, torch.ones(4, 4))


@pytest.mark.parametrize("real", [False, True])
def test_random_numbers_of_a_forward_pass(real):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.generator = torch.Generator()

        def forward(self, x):
            noise = torch.rand(4, generator=self.generator)
            return x * self.weight * noise * np.random.rand() * random.random()

    net = Noisy()
    before = net.generator.get_state(), np.random.get_state()[2], random.getstate()
    report = audit(net, (2, 4), real=real)
    assert report.kept_bytes > 0
    assert torch.equal(net.generator.get_state(), before[0])
    assert (np.random.get_state()[2], random.getstate()) == before[1:]


def test_complex_outputs():
    net = nn.Linear(4, 4, dtype=torch.complex64)
    wrapped = nn.Sequential(Complex(), net)
    reports = [audit(wrapped, (2, 4), real=real) for real in (False, True)]
    assert len({report.peak_bytes for report in reports}) == 1


class Complex(nn.Module):
    def forward(self, x):
        return x.to(torch.complex64)


def test_a_picture_leaves_the_callers_backend(tmp_path):
    """Each picture switched matplotlib to files, so a notebook no longer showed its pictures."""
    import matplotlib

    matplotlib.use("svg")
    try:
        audit(revzoo.create_model("irevnet13"), (2, 3, 8, 8), modes=[]).plot(tmp_path / "a.png")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use("agg")
