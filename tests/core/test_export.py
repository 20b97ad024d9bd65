"""torch's own graphs, as captured by torch.export, torch.jit and a whole-model compile."""

import contextlib
from collections import Counter

import pytest
import torch
from compare import conv_net, error, images

import revzoo
from revzoo import set_memory
from revzoo.core.modes import MODES

# What is exported has floating-point streams.
ROUNDING = {mode: 1e-15 if mode == "exact" else 0 for mode in MODES}


def evaluated(mode):
    net = conv_net(depth=1, dropout=0.5).eval()
    set_memory(net, mode)
    return net


def operators(exported):
    return Counter(str(n.target) for n in exported.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad])
def test_export_equals_eager(mode, context):
    net, x = evaluated(mode), images(size=4)
    with context():
        exported = torch.export.export(net, (x,))
    other = images(size=4, seed=5)
    assert error([exported.module()(other)], [net(other)]) <= ROUNDING[mode]


def test_the_exported_graph_holds_no_bookkeeping():
    graphs = [torch.export.export(evaluated(m), (images(size=4),)) for m in ("invert", "store")]
    assert operators(graphs[0]) == operators(graphs[1])


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_strict_export(mode):
    torch._dynamo.reset()
    net, x = evaluated(mode), images(size=4)
    exported = torch.export.export(net, (x,), strict=True)
    assert torch.equal(exported.module()(x), net(x))


def test_training_goes_on_after_an_export():
    # Fake tensors of the export had stayed in the guard's table of places, for every later model.
    net, x = evaluated("invert"), images(size=7)
    torch.export.export(net, (x,))
    set_memory(reference := conv_net(depth=1).eval(), "store")
    results = [
        torch.autograd.grad(n(x).square().sum(), list(n.parameters())) for n in (net, reference)
    ]
    assert error(*results) < 1e-12


def test_export_of_a_model():
    torch.manual_seed(0)
    model = revzoo.create_model("revnet38", units=(1, 1, 1), memory="invert").eval()
    x = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    several = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(exported.module()(several), model(several))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_equals_eager(mode):
    net = evaluated(mode)
    traced = torch.jit.trace(net, (images(size=4),))
    other = images(size=4, seed=5)
    assert error([traced(other)], [net(other)]) <= ROUNDING[mode]


@pytest.mark.parametrize("mode", ["store", "invert"])
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad])
def test_a_compiled_model_is_one_graph(mode, context):
    torch._dynamo.reset()
    net, x = evaluated(mode), images(size=4)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with context():
        assert error([compiled(x)], [net(x)]) < 1e-12
