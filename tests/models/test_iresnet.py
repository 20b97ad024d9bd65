"""i-ResNets: formula, parameters, memory modes, inverse."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_trains_as_stored

import revzoo
from revzoo.models import create_model
from revzoo.models.network import ImageSizeError

TINY = {"units": (2, 1), "inner": (4, 3), "strides": (1, 2), "padding": 2, "image_size": 8}


def small(**keywords):
    torch.manual_seed(0)
    model = create_model("iresnet64", **{**TINY, "num_classes": 5, **keywords}).double()
    model(images(batch=8))  # the first batch sets the ActNorms
    return model


def images(side=8, batch=2):
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, side, side, generator=generator).double()


def test_parameters():
    with torch.device("meta"):
        model = create_model("iresnet64")
    blocks = (
        7 * (2 * c + (9 * c * m + m) + (m * m + m) + (9 * m * c + c))
        for c, m in ((16, 32), (64, 64), (256, 128))
    )
    assert sum(p.numel() for p in model.parameters()) == sum(blocks) + 2 * 256 + 257 * 10


def test_a_network_is_its_formula():
    model = small(memory="store").eval()
    x = images()
    _, maps = model.forward_intermediates(x)
    x = F.pad(x, (0, 0, 0, 0, 0, 2))
    steps = iter([step for stage in model.stages for step in stage])
    for step in steps:
        if type(step).__name__ == "Squeeze":
            assert torch.allclose(x, maps[0], rtol=0, atol=1e-12)
            x = step(x)  # the channels' order is the i-RevNet's, tested there
            step = next(steps)
        x = step.log_scale.exp().view(-1, 1, 1) * x + step.shift.view(-1, 1, 1)
        layers = list(next(steps).branch)
        y = x
        for layer in layers:
            if isinstance(layer, torch.nn.ELU):
                y = torch.where(y > 0, y, y.exp() - 1)
            else:
                sigma = F.conv2d(layer.vector, layer.weight, padding=layer.padding).norm()
                margin = 1e-5 if layer.kernel_size == (3, 3) else 0
                weight = layer.weight / (max(1, sigma / 0.9) + margin)
                y = F.conv2d(y, weight, layer.bias, padding=layer.padding)
        x = x + y
        assert len(layers) == (5 if step is model.stages[0][0] else 6)
    assert torch.allclose(maps[1], x, rtol=0, atol=1e-12)
    norm = model.norm
    x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5)
    pooled = x.relu().mean((2, 3))
    expected = pooled @ model.fc.weight.T + model.fc.bias
    assert torch.allclose(model(images()), expected, rtol=0, atol=1e-12)


def test_weights_of_the_release_load():
    """Its singular vectors are flat, and of one pixel for 1x1 convolutions."""
    model, other = small(units=(1, 2)).eval(), small(units=(1, 2)).eval()
    theirs, blocks = {}, [step for stage in other.stages for step in stage]
    blocks = [step for step in blocks if type(step).__name__ != "Squeeze"]
    sides = []
    for i, (norm, block) in enumerate(zip(blocks[::2], blocks[1::2], strict=True)):
        start = f"stack.{i}"
        for p in (norm.log_scale, norm.shift):
            torch.nn.init.normal_(p)
        theirs |= {f"{start}.actnorm._log_scale": norm.log_scale}
        theirs |= {f"{start}.actnorm._shift": norm.shift}
        for j, layer in enumerate(block.branch):
            if isinstance(layer, torch.nn.ELU):
                continue
            torch.nn.init.normal_(layer.weight)
            v = torch.randn(layer.vector.shape).double()
            if layer.kernel_size == (1, 1):
                v = v[..., :1, :1]
            v /= v.norm()
            area = layer.vector.numel() // v.numel()
            layer.vector = v.expand_as(layer.vector) / area**0.5
            conv = f"{start}.bottleneck_block.{j}"
            theirs |= {f"{conv}.weight_orig": layer.weight, f"{conv}.bias": layer.bias}
            theirs |= {f"{conv}.weight_v": v.flatten(), f"{conv}.weight_u": torch.ones(3)}
            theirs |= {f"{conv}.weight_sigma": torch.ones(1)}
        sides.append(layer.vector.shape[-1])
    assert sides == [8, 8, 4]  # the first block after the squeeze: maps of twice the size
    ends = {"bn1": other.norm, "logits": other.fc}
    theirs |= {f"{k}.{leaf}": t for k, m in ends.items() for leaf, t in m.state_dict().items()}
    theirs["prior_mu"] = torch.zeros(9)
    torch.nn.init.normal_(model.stages[0][0].log_scale)
    model.load_state_dict(model.adapt_state_dict(theirs))
    assert torch.allclose(model(images()), other(images()), rtol=0, atol=1e-12)
    fresh = create_model("iresnet64", **TINY)
    assert not fresh.stages[0][0].initialised
    fresh.load_state_dict(fresh.adapt_state_dict(fresh.state_dict()))  # its own stay
    assert not fresh.stages[0][0].initialised


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_training_equals_store(mode):
    assert_trains_as_stored(small(), mode, images())


def test_the_inverse():
    model = small().eval()
    with torch.no_grad():
        assert torch.allclose(model.inverse(model.encode(images())), images(), rtol=0, atol=1e-10)
    assert model.invertible


def test_feature_maps_and_head():
    net = create_model("iresnet64", **TINY, features_only=True).double()
    assert [m.shape for m in net(images(12))] == [(2, 5, 12, 12), (2, 20, 6, 6)]
    model = small(num_classes=0)
    assert model(images()).shape == (2, 20)
    model.reset_classifier(3)
    assert model(images()).shape == (2, 3)


def test_errors():
    with pytest.raises(ImageSizeError, match="multiples of 2, since this model squeezes them"):
        small()(images(9))
    with pytest.raises(ValueError, match=r"strides=\(1, 3\): expected 1"):
        small(strides=(1, 3))
    with pytest.raises(ValueError, match="fixed-point iteration"):
        small(memory="exact")


def test_an_audit_of_a_fresh_network():
    """Its ActNorms have seen no batch, and the audit has no values to set them from."""
    model = create_model("iresnet64", **TINY)
    audits = revzoo.audit(model, (64, 3, 8, 8)).audits
    kept = {mode: audit.kept_bytes for mode, audit in audits.items()}
    assert kept["store"] > 2 * kept["recompute"] > 2 * kept["invert"]
    assert not model.stages[0][0].initialised
