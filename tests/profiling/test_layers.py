"""An audit counts what a real step keeps of torch's layers, and reports what it cannot count."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch_layers import TOKENS, TORCH_LAYERS, Called, indices

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.core.twins import images_for
from revzoo.profiling import count
from revzoo.profiling.audit import audit
from revzoo.profiling.count import default_loss
from revzoo.profiling.plan import Planner

SMALL = 512
"""Bytes of scalars that only torch's allocator counts."""


def allocated(model, x):
    """Bytes of torch's allocator that a forward pass leaves allocated, from torch's profiler."""
    default_loss(model(x)).backward()  # makes gradients and lazy tables
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = default_loss(model(x))
    events = profiler.profiler.kineto_results.events()
    del loss
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", TORCH_LAYERS)
def test_an_audit_counts_what_a_real_step_keeps(name):
    """The workspace of an LSTM, nine tenths of what it keeps, was counted as empty."""
    make, shape, fakes = TORCH_LAYERS[name]
    torch.manual_seed(0)
    model = make()
    real = audit(model, shape, modes=[], real=True)
    kept = allocated(model, images_for(model, shape))
    assert real.kept_bytes == pytest.approx(kept, rel=0.01, abs=SMALL)
    if not fakes:
        with pytest.raises(ValueError, match=r"reads values .* Use audit\(real=True\)"):
            audit(model, shape, modes=[])
        return
    fake = audit(model, shape, modes=[])
    assert fake.kept_bytes == pytest.approx(real.kept_bytes, rel=0.01)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    assert fake.uncounted == []


class Streams(nn.Module):
    """Blocks whose branches are torch's layers."""

    def __init__(self, row, depth=3):
        super().__init__()
        # a large batch: a real step also keeps random states, 5 KB each, and the guard's samples
        self.shape = (16 * row.shape[0], 2 * row.shape[1], *row.shape[2:])
        self.steps = revzoo.ReversibleSequence(
            revzoo.ReversibleBlock(row.make()) for _ in range(depth)
        )

    def forward(self, x):
        return self.steps(x)


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
@pytest.mark.parametrize(
    "name", ["lstm", "encoder layer", "attention, dropout", "batchnorm", "unfold and fold"]
)
def test_steps_of_torchs_layers(name, mode):
    torch.manual_seed(0)
    model = Streams(TORCH_LAYERS[name])
    revzoo.set_memory(model, mode)
    for _ in range(2):  # the first makes the table of the places that the guard samples
        real = audit(model, model.shape, modes=[], real=True)
    fake = audit(model, model.shape, modes=[])
    assert fake.kept_bytes == pytest.approx(real.kept_bytes, rel=0.01)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)


def test_a_plan_of_lstms_holds_its_budget():
    model = Streams(TORCH_LAYERS["lstm"], depth=4)
    planner = Planner(model, model.shape, clock=False)
    for plan in planner.frontier(3):
        revzoo.set_memory(model, plan)
        real = audit(model, model.shape, modes=[], real=True).peak_bytes
        assert real <= plan.budget
        assert real == pytest.approx(plan.peak_bytes, rel=0.01)


def test_a_workspace_that_cannot_be_sized_is_reported(monkeypatch):
    def fails(func, args, kwargs, outputs):
        if str(func) == "aten.mkldnn_rnn_layer.default":
            raise RuntimeError("no such device\nat line 1")
        return outputs

    monkeypatch.setattr(count, "with_real_sizes", fails)
    model = Streams(TORCH_LAYERS["lstm"], depth=2)
    report = audit(model, model.shape)
    (note,) = report.uncounted
    assert note == (
        "the workspace of mkldnn_rnn_layer, whose size only a real step knows (no such device)"
    )
    lines = str(report).splitlines()
    assert f"not counted: {note}" in " ".join(map(str.strip, lines))
    assert max(map(len, lines)) <= 80
    assert note in " ".join(str(Planner(model, model.shape, clock=False).leanest).split())


def with_compiled_relu(net):
    net[1].compile()
    return net


@pytest.mark.parametrize(
    ("compiled", "where"), [(torch.compile, "the model"), (with_compiled_relu, "1")]
)
def test_a_compiled_network_is_counted_as_the_eager_one(compiled, where):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    plain = audit(net, (4, 8))
    report = audit(compiled(net), (4, 8))
    assert report.kept_bytes == plain.kept_bytes
    (note,) = report.uncounted
    assert note == f"the effect of torch.compile on {where}: the eager step is counted"


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.jit.script, r"the model is TorchScript \(Recursive.*the nn.Module"),
        (lambda net: torch.jit.trace(net, torch.ones(4, 8)), "the model is TorchScript"),
        (lambda net: nn.Sequential(net, torch.jit.script(net)), "the module '1' is TorchScript"),
    ],
)
def test_torchscript_is_refused(make, message):
    """The error claimed that no parameter requires gradient."""
    model = make(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    for real in (False, True):
        with pytest.raises(TypeError, match=message):
            audit(model, (4, 8), real=real)
    with pytest.raises(TypeError, match=message):
        revzoo.plan_memory(model, (4, 8), "1GiB")


def test_lazy_layers_are_refused_until_a_batch_initialises_them():
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    for real in (False, True):
        with pytest.raises(ValueError, match=r"'1' is a LazyLinear without weights: .*no_grad"):
            audit(model, (4, 8), real=real)
    with torch.no_grad():
        model(torch.ones(4, 8))
    assert audit(model, (4, 8)).kept_bytes > 0


class Graph(nn.Module):
    """Multiplies by a sparse matrix."""

    def __init__(self, matrix, *, buffer):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        if buffer:
            self.register_buffer("matrix", matrix)
        else:
            self.matrices = [matrix]

    def forward(self, x):
        matrix = self.matrix if "matrix" in self._buffers else self.matrices[0]
        return matrix @ self.linear(x.flatten(0, 1))


def sparse_embedding():
    return Called(nn.Embedding(100, 64, sparse=True), lambda layer, x: layer(indices(x, 100)))


def multiplied(layer, x):
    return torch.sparse.mm(torch.eye(256).to_sparse(), layer(x.flatten(0, 1)))


def nested(layer, x):
    return layer(torch.nested.nested_tensor([*x], layout=torch.jagged)).values()


SPARSE = {
    "embedding": (sparse_embedding, (8, 32), "sparse_coo: .* Make it dense"),
    "buffer": (lambda: Graph(torch.eye(256).to_sparse(), buffer=True), TOKENS, "sparse_coo"),
    "list": (lambda: Graph(torch.eye(256).to_sparse_csr(), buffer=False), TOKENS, "sparse_csr"),
    "constant": (lambda: Called(nn.Linear(64, 64), multiplied), TOKENS, "sparse_coo"),
}


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's, about its beta state and its invariants
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_refused(name, real):
    make, shape, message = SPARSE[name]
    with pytest.raises(ValueError, match=f"layout torch.{message}"):
        audit(make(), shape, real=real)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_live_memory_counts_nested_tensors():
    model = Called(nn.Linear(64, 64), nested)
    x = images_for(model, TOKENS)
    kept = allocated(model, x)
    with LiveMemory() as live:
        loss = default_loss(model(x))
    assert live.now == pytest.approx(kept, rel=0.01)
    del loss
