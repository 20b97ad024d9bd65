"""Per-sample gradients of single layers, against a loop over samples."""

import pytest
import torch
from per_sample_nets import Gain
from torch import nn
from torch.nn.utils import parametrizations, prune

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.private import gradients as rules
from revzoo.private.gradients import per_sample_gradients, refuse_unsupported, squared_norms


class Scaled(nn.Module):
    """A layer without a rule, with an inner layer that is not among its own parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        out = self.inner(x) * self.scale
        return out, out


LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "linear on tokens": (lambda: nn.Linear(6, 5, bias=False), (4, 3, 6)),
    "linear on a grid": (lambda: nn.Linear(6, 5), (4, 3, 2, 6)),
    "wide linear on few tokens": (lambda: nn.Linear(6, 50), (4, 3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, dilation=2, groups=2), (4, 4, 9)),
    "conv1d same": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (4, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), (4, 4, 7, 5)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, (3, 1), groups=2, padding=(1, 0)), (4, 4, 7, 5)),
    "wide conv2d": (lambda: nn.Conv2d(16, 32, 3), (4, 16, 4, 4)),
    "conv2d reflected": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        (4, 4, 7, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 3, 4, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (4, 6, 5, 3)),
    "group norm without places": (lambda: nn.GroupNorm(2, 6), (4, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 3, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm((3, 6), bias=False), (4, 3, 6)),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(6).eval(), (4, 6, 5, 3)),
    "unknown": (Scaled, (4, 6)),
    "one number": (Gain, (4, 6)),
}


def setting(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().double()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    x = torch.randn(shape, dtype=torch.float64)
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    return layer, x, torch.randn_like(out)


def looped(layer, x, gradient):
    """The gradients of a loop over samples, by name."""
    own = dict(layer.named_parameters(recurse=False))
    rows = []
    for i in range(len(x)):
        out = layer(x[i : i + 1])
        out = out[0] if isinstance(out, tuple) else out
        rows.append(torch.autograd.grad(out, own.values(), gradient[i : i + 1]))
    return {name: torch.stack(g) for name, g in zip(own, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize(
    "options", [{}, {"bias": False, "kdim": 6}, {"add_bias_kv": True, "add_zero_attn": True}]
)
@pytest.mark.parametrize("masks", ["none", "shared", "of samples"])
def test_attention_equals_a_loop(options, masks):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **options).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    q, k, v = (
        torch.randn(3, t, c, dtype=torch.float64) for t, c in ((4, 8), (5, layer.kdim), (5, 8))
    )
    gradient = torch.randn_like(q)
    padding = [[False] * 5, [False] * 3 + [True] * 2, [False] * 5]
    padding = None if masks == "none" else torch.tensor(padding)
    mask, of_samples = None, [None] * 3
    if masks == "shared":
        mask = torch.randn(4, 5, dtype=torch.float64)
        padding, of_samples = torch.where(padding, -2.0, 0.0).double(), [mask] * 3
    elif masks == "of samples":
        mask = (torch.randn(3 * 2, 4, 5) > 0) & (torch.arange(5) > 0)
        of_samples = mask.view(3, 2, 4, 5)
    own = rules.own_parameters(layer)
    rows = []
    for i, part in enumerate(of_samples):
        sample = (t[i : i + 1] for t in (q, k, v))
        hidden = None if padding is None else padding[i : i + 1]
        out = layer(*sample, hidden, masks == "none", part)[0]
        rows.append(torch.autograd.grad(out, own.values(), gradient[i : i + 1]))
    inputs = (q, k, v, padding, False, mask)
    gradients = per_sample_gradients(layer, inputs, gradient)
    norms = squared_norms(layer, inputs, gradient)
    assert [*gradients] == [*norms] == [*own]
    assert "out_proj.weight" in own
    for key, e in zip(own, zip(*rows, strict=True), strict=True):
        e = torch.stack(e)
        torch.testing.assert_close(gradients[key], e, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            norms[key], e.reshape(len(e), -1).square().sum(1), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("largest", [2**18, 1])
def test_gradients_and_norms_equal_a_loop(name, largest, monkeypatch):
    """Also if a batch is cut into parts, to bound its memory."""
    monkeypatch.setattr(rules, "LARGEST", largest)
    layer, x, gradient = setting(name)
    expected = looped(layer, x, gradient)
    gradients = per_sample_gradients(layer, [x], gradient)
    norms = squared_norms(layer, [x], gradient)
    assert gradients.keys() == norms.keys() == expected.keys()
    for key, e in expected.items():
        torch.testing.assert_close(gradients[key], e, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            norms[key], e.reshape(len(e), -1).square().sum(1), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("name", LAYERS)
def test_frozen_parameters_get_none_and_empty_batches_work(name):
    layer, x, gradient = setting(name)
    first, *others = (name for name, _ in layer.named_parameters(recurse=False))
    layer.get_parameter(first).requires_grad_(False)
    x, gradient = x[:0], gradient[:0]
    gradients = per_sample_gradients(layer, [x], gradient)
    assert [*gradients] == [*squared_norms(layer, [x], gradient)] == others
    for key, g in gradients.items():
        assert g.shape == (0, *layer.get_parameter(key).shape)


def test_a_batch_normalisation_in_training_is_refused():
    with pytest.raises(ValueError, match='norm="group"'):
        squared_norms(nn.BatchNorm2d(3), [torch.ones(2, 3, 4, 4)], torch.ones(2, 3, 4, 4))


def test_a_weight_that_a_hook_or_a_parametrization_computes_is_refused():
    """The rules would take it for the parameter: norms of another gradient."""
    with pytest.warns(FutureWarning):
        normed = nn.utils.weight_norm(nn.Linear(3, 3))
    pruned = prune.random_unstructured(nn.Linear(3, 3), "weight", amount=0.5)
    parametrized = parametrizations.weight_norm(nn.Linear(3, 3))
    for layer in (normed, pruned, parametrized):
        with pytest.raises(ValueError, match="remove_parametrizations"):
            squared_norms(layer, [torch.ones(2, 3)], torch.ones(2, 3))
    layer = nn.Linear(3, 3)
    layer.last_output = layer(torch.ones(2, 3))  # no parameter
    squared_norms(layer, [torch.ones(2, 3)], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
        (nn.Embedding(3, 3, max_norm=1.0), "set max_norm=None"),  # these raised torch's own errors
        (nn.GRU(3, 3), "is a recurrent layer"),
        (nn.MultiheadAttention(4, 2), "batch_first=True"),
        (revzoo.InvertibleBatchNorm(4), 'norm="group"'),
        (revzoo.ActNorm(4), "scale and shift from the first batch"),  # they were not private
    ],
)
def test_layers_without_gradients_of_samples_are_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(nn.Sequential(layer))


class Listed(nn.Module):
    """Reads its parameter from a list, where no transform can replace it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.list = [self.weight]

    def forward(self, x, other=None):
        return x * self.list[0]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Centred(Weighted):
    def forward(self, x):
        return (x - x.mean(0)) * self.weight


class Dropped(Weighted):
    def forward(self, x):
        return nn.functional.dropout(x * self.weight)


class Attends(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(3, 1, 0.5, batch_first=True)


class Shared(Weighted):
    def forward(self, x, scale):
        return x * self.weight * scale


@pytest.mark.parametrize(
    ("layer", "inputs", "message"),
    [
        (Listed, [(4, 3)], "does not depend on its attribute 'weight'"),
        (Centred, [(4, 3)], "mixes samples"),
        (Dropped, [(4, 3)], "draws random numbers"),
        (Attends, [(4, 2, 3)] * 3, "attribute dropout of nn.MultiheadAttention"),
        (Shared, [(4, 3), (3,)], r"a tensor of shape \(3,\) for 4 samples"),
        (Shared, [(3, 3), (3,)], "or one of its inputs has no samples"),
    ],
)
def test_layers_that_a_transform_per_sample_gets_wrong_are_refused(layer, inputs, message):
    torch.manual_seed(0)
    layer, inputs = layer(), [torch.randn(shape) for shape in inputs]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            per_sample_gradients(layer, inputs, torch.randn_like(inputs[0]))


def test_hooks_of_the_user_run_around_the_layer_not_inside():
    """A hook that changes inputs does not change them again."""
    layer = nn.PReLU(3).double()
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    x = -torch.rand(2, 3, dtype=torch.float64)
    gradient = per_sample_gradients(layer, [x], torch.ones_like(x))["weight"]
    torch.testing.assert_close(gradient, x)


def test_squares_of_half_precision_do_not_overflow():
    layer, x = nn.Linear(3, 3), torch.full((2, 3), 200.0, dtype=torch.float16)
    norms = squared_norms(layer, [x], x)
    assert torch.equal(norms["weight"], torch.full((2,), 9 * 200.0**4))
    assert torch.equal(norms["bias"], torch.full((2,), 3 * 200.0**2))


def test_autocast_leaves_inputs_of_fewer_bits():
    layer, x = nn.PReLU(3), -torch.rand(2, 3).bfloat16()
    gradient = per_sample_gradients(layer, [x], torch.ones_like(x))["weight"]
    torch.testing.assert_close(gradient, x.float())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(64, 64), (16, 1024, 64)),
        (nn.Linear(512, 512), (64, 512)),
        (nn.Conv2d(32, 32, 3, padding=1), (16, 32, 32, 32)),
        (nn.Conv2d(64, 64, 3, padding=1, groups=64), (16, 64, 16, 16)),
        (nn.Conv2d(128, 128, 3, padding=1), (16, 128, 8, 8)),
        (nn.Conv2d(3, 192, 8, 8), (64, 3, 64, 64)),
        (nn.Conv3d(8, 8, 3, padding=1), (8, 8, 16, 16, 16)),
    ],
)
def test_norms_hold_no_more_than_twice_the_input(layer, shape):
    """If the gradients of all samples take up to 64 MiB."""
    x = torch.randn(shape)
    gradient = torch.randn_like(layer(x).detach())
    with LiveMemory() as memory:
        squared_norms(layer, [x], gradient)
    assert memory.peak <= 2 * max(x.nbytes, 2**20)


def test_norms_of_any_layer_take_a_part_of_the_batch_at_a_time(monkeypatch):
    """The gradients of all samples took 16 MiB beside the layer's own forward and backward pass."""
    layer, x = nn.MultiheadAttention(128, 4, batch_first=True), torch.randn(64, 16, 128)

    def peak():
        with LiveMemory() as memory:
            squared_norms(layer, [x, x, x], torch.ones_like(x))
        return memory.peak

    peak()  # the first call checks the layer
    in_parts = peak()
    monkeypatch.setattr(rules, "LARGEST", 2**30)
    assert in_parts < peak() / 4


def test_an_attention_with_a_forward_of_its_own():
    """Only torch's own was known."""

    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x.cos())[0]

    torch.manual_seed(0)
    layer, x = Own(8, 2, batch_first=True).double(), torch.randn(3, 4, 8, dtype=torch.float64)
    gradient = torch.randn_like(x)
    found = per_sample_gradients(layer, [x], gradient)
    for i in range(3):
        rows = torch.autograd.grad(layer(x[i : i + 1]), layer.parameters(), gradient[i : i + 1])
        for g, row in zip(found.values(), rows, strict=True):
            torch.testing.assert_close(g[i], row, rtol=1e-10, atol=1e-10)


class Pulled(Weighted):
    """Mixes samples in training, but not the only sample of a batch with itself alone."""

    def forward(self, x):
        return (x + x.mean(0) if self.training else x)[:, None] * self.weight


@pytest.mark.parametrize("first", ["one sample", "evaluation"])
def test_a_layer_is_checked_until_it_could_mix(first):
    """The first call was the only check; one sample, or evaluation, passed it."""
    torch.manual_seed(0)
    layer, x = Pulled(), torch.randn(4, 3)
    layer.train(first == "one sample")
    part = x[:1] if first == "one sample" else x
    per_sample_gradients(layer, [part], torch.randn(len(part), 1, 3))
    layer.train()
    with pytest.raises(ValueError, match="mixes samples"):
        per_sample_gradients(layer, [x], torch.randn(4, 1, 3))


def test_norms_of_a_large_layer_are_checked(monkeypatch):
    """Norms take a part of the batch at a time: parts of one sample passed the check."""
    monkeypatch.setattr(rules, "LARGEST", 1)
    torch.manual_seed(0)
    layer, x = Pulled(), torch.randn(4, 3)
    layer.weight = nn.Parameter(torch.ones(64, 3))  # more values than the input
    with pytest.raises(ValueError, match="mixes samples"):
        squared_norms(layer, [x], torch.randn(4, 64, 3))


def test_a_layer_that_changes_its_input_is_refused():
    """This was torch's error, which does not name the layer."""

    class InPlace(Weighted):
        def forward(self, x):
            return x.mul_(self.weight)

    with pytest.raises(ValueError, match="InPlace has parameters and changes its input"):
        per_sample_gradients(InPlace(), [torch.ones(4, 3)], torch.ones(4, 3))


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: nn.LayerNorm(3)])
def test_a_layer_whose_forward_was_replaced_has_no_rule(make):
    """Libraries replace ``forward`` on an instance: the rules of its class were wrong for it."""
    torch.manual_seed(0)
    layer, x = make(), torch.randn(2, 3)
    forward = layer.forward
    layer.forward = lambda x: 3 * forward(x)
    gradient = torch.randn(2, 3)
    expected = per_sample_gradients(make(), [x], 3 * gradient)
    for name, norm in squared_norms(layer, [x], gradient).items():
        torch.testing.assert_close(norm, expected[name].flatten(1).square().sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_zero_up_to_rounding_pass_the_check(dtype):
    """The norm removes the bias: its gradient is rounding, which differs between the two sums."""
    torch.manual_seed(0)
    layer, norm = nn.ConvTranspose2d(3, 4, 2, stride=2).to(dtype), nn.InstanceNorm2d(4)
    x = torch.randn(4, 3, 32, 32, dtype=dtype)
    out = layer(x)
    (gradient,) = torch.autograd.grad(norm(out).sin().sum(), out)
    for measure in (per_sample_gradients, squared_norms):
        assert measure(layer, [x], gradient)["bias"].abs().max() < 1e-3 * gradient.norm()


def test_a_layer_without_inputs_is_refused():
    """Its rows are no samples. With as many of them, this was torch's error about shapes."""

    class Matrix(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self):
            return self.weight.exp()

    with pytest.raises(ValueError, match="Matrix was called without a tensor"):
        squared_norms(Matrix(), [], torch.ones(3, 3))
