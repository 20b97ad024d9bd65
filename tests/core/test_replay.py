"""The second evaluation of a step: kept graphs, nested sequences, unusual branches."""

import types

import pytest
import torch
from compare import error, gradients_in, grows, leaf_rows
from torch import nn

from revzoo import AdditiveCoupling, Invertible, ReversibleSequence, drift, set_memory
from revzoo.core.live import LiveMemory


@pytest.mark.parametrize("mode", ["offload", "invert"])
def test_a_branch_that_changes_what_it_has_saved(mode):
    """In ``recompute``, torch's checkpoint keeps aliases and does not look at their versions."""

    class Careless(nn.Module):
        def forward(self, x):
            h = x.tanh()
            saved = h.sin()
            h.add_(1)
            return saved + h

    net = ReversibleSequence([AdditiveCoupling(Careless()) for _ in range(2)], memory=mode)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(leaf_rows()).sum().backward()


def test_random_numbers_of_a_step_without_a_replay_of_its_own():
    # Its inverse drew the forward pass's random numbers, its recorded forward pass the next ones.
    class Noisy(Invertible):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

        def forward(self, x1, x2):
            return x2, x1 + nn.functional.dropout(x2.exp() * self.weight)

        def inverse(self, y1, y2):
            return y2 - nn.functional.dropout(y1.exp() * self.weight), y1

    net, results = ReversibleSequence([Noisy() for _ in range(3)]), []
    for mode in ("invert", "store"):
        torch.manual_seed(3)
        results.append(gradients_in(net, mode, leaf_rows()))
    assert error(*results) < 1e-12


@pytest.mark.parametrize("name", ["state", "step", "needs", "fn", "outputs", "record", "inputs"])
def test_keyword_arguments_of_any_name(name):
    class Takes(nn.Module):
        def forward(self, x, **context):
            return (x * context[name]).tanh()

    net = ReversibleSequence([AdditiveCoupling(Takes()) for _ in range(2)])
    net(leaf_rows(), **{name: torch.tensor(2.0)}).sum().backward()


@pytest.mark.parametrize("mode", ["recompute", "invert", "offload"])
def test_a_functional_transform_inside_a_branch(mode):
    """torch's own error asked to open an issue."""

    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.func.grad(lambda x: self.linear(x).tanh().sum())(x)

    net = ReversibleSequence([AdditiveCoupling(Slope())], memory=mode).double()
    with pytest.raises(RuntimeError, match=r"steps\.0 .*torch\.func.*use memory='store'"):
        net(leaf_rows())
    set_memory(net, "store")
    net(leaf_rows()).sum().backward()


def nested_net(outer, mode, *, inner=2, width=8):
    torch.manual_seed(0)

    def branch():
        steps = [
            AdditiveCoupling(nn.Sequential(nn.Linear(width, width), nn.Tanh()))
            for _ in range(inner)
        ]
        return nn.Sequential(ReversibleSequence(steps), nn.LayerNorm(2 * width))

    return ReversibleSequence([AdditiveCoupling(branch()) for _ in range(outer)], memory=mode)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_sequence_inside_a_branch_takes_no_more_memory_with_depth(mode, which):
    """The inner sequence's last state was kept for every step of the outer one."""
    peaks = {}
    for depth in (4, 32):
        options = {"outer": depth} if which == "outer" else {"outer": 4, "inner": depth}
        net = nested_net(mode=mode, **options)
        net(*torch.randn(2, 3, 16))[0].sum().backward()  # the first pass measures each sum
        x1, x2 = torch.randn(2, 2000, 16)
        state = x1.requires_grad_(), x2.requires_grad_()
        with LiveMemory() as memory:
            sum(t.square().sum() for t in net(*state)).backward()
            own = sum(p.nbytes for p in net.parameters()) + 2 * x1.nbytes
            peaks[depth] = memory.peak - own
    stream = 2000 * 16 * 4
    grows = 28 * stream if mode == "recompute" else 0  # inputs of each step are what it keeps
    assert peaks[32] - peaks[4] < grows + 2 * stream


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_gradients_of_a_sequence_inside_a_branch(mode):
    """Also a second time, for some of the parameters, and for gradients in ``recompute``."""
    net, results = nested_net(3, mode).double(), []
    grid = 14 if mode == "exact" else None
    for m in ("store", mode):
        set_memory(net, m, grid=grid)
        x = torch.cat((leaf_rows(), leaf_rows()), 1).repeat(1, 2).detach().requires_grad_()
        loss = net(x).square().sum()
        first = torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True)
        last = torch.autograd.grad(loss, list(net[2].parameters()), retain_graph=True)
        results.append([*first, *last])
        if mode == "recompute":
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            results[-1] += torch.autograd.grad(slope.square().sum(), [x, *net.parameters()])
    assert error(*results) < 1e-10


def test_the_mode_of_a_sequence_inside_a_branch_is_that_of_the_forward_pass():
    """In another mode, its replay saves other tensors."""
    net = nested_net(3, "invert").double()
    x = torch.cat((leaf_rows(), leaf_rows()), 1).repeat(1, 2).detach().requires_grad_()
    expected = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    loss = net(x).square().sum()
    set_memory(net, "store")
    assert error(torch.autograd.grad(loss, [x, *net.parameters()]), expected) < 1e-12


REPLAYED = ["recompute", "invert"]


@pytest.mark.parametrize("mode", ["offload", *REPLAYED])
@pytest.mark.parametrize("kind", ["buffer", "made"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_in_a_branch(mode, kind, layout):
    """They have no storage to identify them: "Cannot access storage of SparseTensorImpl"."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("adjacency", torch.eye(5).to_sparse(layout=layout))

        def forward(self, x):
            a = self.adjacency.to(x.dtype)
            if kind == "made":
                a = (torch.eye(5, dtype=x.dtype) * 2).to_sparse(layout=layout)
            return (torch.sparse.mm(a, x) @ self.weight).tanh()

    results = []
    for m in (mode, "store"):
        torch.manual_seed(0)
        net = ReversibleSequence([AdditiveCoupling(Graph()) for _ in range(3)], memory=m)
        results.append(gradients_in(net.double(), m, leaf_rows()))
    assert error(*results) < 1e-12


@pytest.mark.parametrize("mode", REPLAYED)
def test_a_model_converted_before_the_backward_is_an_error(mode):
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))], memory=mode)
    loss = net(torch.randn(5, 8, requires_grad=True)).sum()
    net.double()
    with pytest.raises(RuntimeError, match="dtype"):
        loss.backward()


def traced(module):
    return torch.jit.trace(module, torch.ones(2, 4))


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("compiled", [torch.jit.script, traced])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_branch_of_torchscript(mode, compiled):
    """Its tables of parameters have no ``get``."""
    torch.manual_seed(0)
    steps = [AdditiveCoupling(compiled(nn.Linear(4, 4))) for _ in range(2)]
    net, x = ReversibleSequence(steps), leaf_rows().detach().float().requires_grad_()
    grid = "auto" if mode == "exact" else None
    expected = gradients_in(net, "store", x, grid=grid)
    torch.testing.assert_close(
        gradients_in(net, mode, x, grid=grid), expected, rtol=1e-4, atol=1e-5
    )


class Stashes(nn.Module):
    """Keeps its own loss: in an attribute, or in a list."""

    def __init__(self):
        super().__init__()
        self.linear, self.losses = nn.Linear(4, 4), []

    def forward(self, x):
        value = self.linear(x).tanh()
        self.aux = value.square().mean()
        self.losses.append(value.square().mean())
        return value


@pytest.mark.parametrize("read", [lambda b: b.aux, lambda b: b.losses[0]])
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_loss_that_forward_keeps(mode, read):
    """``autograd.grad()`` left its part of the gradient out, without an error."""
    results = []
    for m in (mode, "store"):
        torch.manual_seed(0)
        net = ReversibleSequence([AdditiveCoupling(Stashes()) for _ in range(2)], memory=m)
        loss = net(leaf_rows().detach().float()).sum() + sum(read(step.branch) for step in net)
        if m in ("invert", "exact"):
            with pytest.raises(RuntimeError, match=r"a gradient reached .*extras"):
                torch.autograd.grad(loss, list(net.parameters()))
            return
        results.append(torch.autograd.grad(loss, list(net.parameters())))
    assert error(*results) < 1e-6


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_gradients_of_an_activation_that_a_hook_keeps(mode):
    """As for Grad-CAM: the replay's activation, which has the gradient."""
    found, kept = [], {}
    for m in (mode, "store"):
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        net = ReversibleSequence(map(AdditiveCoupling, branches), memory=m).double()
        branches[1][0].register_forward_hook(lambda _, args, y: kept.update(y=y) or y.retain_grad())
        net(leaf_rows()).square().sum().backward()
        found.append([kept["y"].grad])
    assert error(*found) < 1e-5


@pytest.mark.parametrize("way", ["list", "tuple", "dict", "object"])
@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_graphs_in_containers_that_each_forward_pass_replaces_are_freed(mode, way):
    """Each graph that was dropped without a backward pass kept the one before it."""

    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), None

        def forward(self, x):
            value = self.linear(x).tanh() * (1 if self.kept is None else 2)
            aux = value.square().mean()
            self.kept = {
                "list": [aux],
                "tuple": ((aux,),),
                "dict": {"aux": [aux]},
                "object": types.SimpleNamespace(aux=aux),
            }[way]
            return value

    net = ReversibleSequence([AdditiveCoupling(Replaces())], memory=mode)
    assert not grows(lambda: net(torch.ones(2, 8, requires_grad=True)))


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_a_graph_that_a_replay_leaves_in_a_list_is_freed(mode):
    """It held the tape through the hook that packed its saved tensors."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.losses = nn.Linear(4, 4), []

        def forward(self, x):
            value = self.linear(x).tanh()
            self.losses.clear()
            self.losses.append(value.square().mean())
            return value

    net = ReversibleSequence([AdditiveCoupling(Keeps())], memory=mode)
    assert not grows(lambda: net(torch.ones(2, 8, requires_grad=True)).sum().backward())


@pytest.mark.parametrize("train", [True, False])
def test_layers_with_other_kernels_without_gradients(train):
    """``exact`` inverted them without gradients: other last bits, and so a DriftError."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    torch.manual_seed(0)
    branch = Recurrent() if train else nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    steps = [AdditiveCoupling(nn.Linear(8, 8)), AdditiveCoupling(branch)]
    seq = ReversibleSequence(steps, memory="exact", dim=-1).train(train)
    # the first output does not depend on the last step, which is only inverted
    y1, _ = seq(*torch.randn(2, 3, 5, 8, requires_grad=True))
    y1.sum().backward()
    assert drift(seq) == {"steps.0": 0, "steps.1": 0}
