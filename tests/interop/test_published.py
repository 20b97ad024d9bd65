"""Published weights: MemCNN's models, the i-RevNet release's keys, errors."""

import pytest
import torch
from torch import nn

from revzoo import ConversionError, create_model, load_published, set_memory
from revzoo.interop.published import irevnet_spec
from revzoo.models.irevnet import FIRST_BLOCK, OTHER_BLOCKS
from revzoo.weights.errors import NotFiniteError

BLOCKS = {"resnet": ("BasicBlock", "Bottleneck"), "revnet": ("RevBasicBlock", "RevBottleneck")}
CIFAR = {  # blocks a stage, filters, bottleneck: MemCNN's config/experiments.json
    "resnet32": ([5, 5, 5], [16, 16, 32, 64], False),
    "resnet110": ([18, 18, 18], [16, 16, 32, 64], False),
    "resnet164": ([18, 18, 18], [16, 16, 32, 64], True),
    "revnet38": ([3, 3, 3], [32, 32, 64, 112], False),
    "revnet110": ([9, 9, 9], [32, 32, 64, 128], False),
    "revnet164": ([9, 9, 9], [32, 32, 64, 128], True),
}


def randomise(model):
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(std=0.2)
                m.running_var.uniform_(0.5, 2)
                m.weight.uniform_(0.5, 1.5)
                m.bias.normal_(std=0.2)
    return model.double().eval()


def memcnn(name, *, units=None, **options):
    from memcnn.models import resnet
    from memcnn.models.revop import InvertibleModuleWrapper

    layers, filters, bottleneck = CIFAR[name]
    defaults = {"strides": [1, 1, 2, 2], "init_kernel_size": 3, "batch_norm_fix": False}
    model = resnet.ResNet(
        getattr(resnet, BLOCKS[name[:6]][bottleneck]),
        units or layers,
        channels_per_layer=filters,
        **{"num_classes": 10, **defaults, **options},
    )
    for m in model.modules():
        if isinstance(m, InvertibleModuleWrapper):
            m.disable = True  # plain computation, which does not free the input
    return randomise(model)


memcnn_imports = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@memcnn_imports
@pytest.mark.parametrize("name", CIFAR)
def test_memcnns_networks_compute_the_same(name, tmp_path):
    torch.manual_seed(0)
    theirs = memcnn(name, num_classes=7)
    torch.save(theirs.state_dict(), tmp_path / "60000.pt")
    ours = load_published(tmp_path / "60000.pt", "memcnn")
    assert ours.spec[:2] == (f"{name}_memcnn", {})
    assert (ours.num_classes, ours.in_chans) == (7, 3)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(x)
        # Random statistics let the streams of revnet110 grow to 1e5, too far for one grid.
        fixed_point = ours.spec.architecture.startswith("revnet") and name != "revnet110"
        set_memory(ours, "exact" if fixed_point else "store")
        single = ours(x.float())
        set_memory(ours, "store")
        actual = ours.double()(x)
    # the weights were rounded to float32 on the way
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (single - expected).abs().max() <= 1e-5 * expected.abs().max()


@memcnn_imports
def test_keywords_complete_what_shapes_leave_open(tmp_path):
    path = tmp_path / "a.pt"
    theirs = memcnn("revnet38", units=[1, 2, 1], strides=[1, 1, 1, 2], batch_norm_fix=True).float()
    old = {k.replace("._fn.", ".rev_block."): v for k, v in theirs.state_dict().items()}
    torch.save({"epoch": 3, "model": old}, path)
    model = load_published(path, "memcnn", strides=(1, 1, 2), convention="memcnn_fix")
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(model(x), theirs(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(load_published(path, "memcnn")(x), theirs(x), rtol=1e-2)


IREVNETS = {
    "cifar": {"name": "irevnet163", "num_classes": 4, "in_chans": 3},
    "other": {
        "name": "irevnet163",
        "num_classes": 3,
        "in_chans": 3,
        "units": (1, 2),
        "strides": (1, 1),
        "channels": (4, 8),
        "bottleneck": 2,
        "dropout": 0.0,
    },
}


def release_keys(model):
    """The state dict under the names of the i-RevNet release."""
    renamed, block = {}, -1
    for key, value in model.state_dict().items():
        *path, layer, leaf = key.split(".")
        if layer in ("norm1", "conv1") and (layer == "norm1" or block < 0) and leaf == "weight":
            block += 1
        places = OTHER_BLOCKS if block else FIRST_BLOCK
        module = f"stack.{block}.bottleneck_block.{places[layer]}" if path else layer
        module = {"norm": "bn1", "fc": "linear"}.get(module, module)
        renamed[f"module.{module}.{leaf}"] = value
    return renamed


@pytest.mark.parametrize("kind", IREVNETS)
def test_irevnets_are_recognised_by_their_shapes(kind, tmp_path):
    torch.manual_seed(0)
    spec = IREVNETS[kind]
    model = randomise(create_model(**spec)).float()
    path = tmp_path / "model_best.pth.tar"
    kept = {k: v for k, v in release_keys(model).items() if "num_batches" not in k}
    torch.save({"epoch": 90, "arch": "i-revnet", "state_dict": kept}, path)
    ours = load_published(path, "irevnet", memory="exact")
    assert (ours.num_classes, ours.in_chans) == (model.num_classes, model.in_chans)
    assert ours.variant == model.variant
    assert not ours.training
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        exact = ours(x)
        assert torch.equal(exact, model(x))
        set_memory(model, "store")
        expected = model.double()(x.double())
    assert (exact - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_bijective_imagenet_network_is_recognised():
    with torch.device("meta"):
        model = create_model("irevnet301", num_classes=1000)
    keys = {k.removeprefix("module."): v for k, v in release_keys(model).items()}
    assert irevnet_spec(keys) == {
        "name": "irevnet301",
        "num_classes": 1000,
        "in_chans": 3,
    }


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(nn.Linear(2, 2).state_dict(), path)
    for source in ("irevnet", "memcnn"):
        with pytest.raises(ConversionError, match=f"not a checkpoint of '{source}'.*bias, weight"):
            load_published(path, source)
    with pytest.raises(ValueError, match="source=tf: expected one of irevnet, memcnn, revnet"):
        load_published(path, "tf")
    with pytest.raises(FileNotFoundError):
        load_published(tmp_path / "none.pt", "memcnn")
    torch.save({"epoch": 3}, path)
    with pytest.raises(ConversionError, match="holds no state_dict"):
        load_published(path, "memcnn")


def test_weights_that_do_not_fit_the_network_named_are_listed(tmp_path):
    path = tmp_path / "a.pt"
    model = create_model("irevnet13", units=(1, 1), in_chans=1)
    torch.save(release_keys(model) | {"module.extra": torch.ones(1)}, path)
    with pytest.raises(
        ConversionError, match=r"(?s)missing: stages\.1\.steps\.1.*unexpected: extra"
    ):
        load_published(path, "irevnet", name="irevnet13")


@pytest.mark.parametrize(("value", "message"), [(torch.nan, "NaN or Inf"), (1, "int64")])
def test_weights_that_are_not_weights_are_refused(value, message, tmp_path):
    """NaN loaded silently, and whole numbers were converted."""
    model = create_model("irevnet13", units=(1, 1), in_chans=1)
    weights = release_keys(model)
    key = next(k for k, v in weights.items() if v.dim() == 4)
    weights[key] = torch.full_like(
        weights[key], value, dtype=torch.int64 if value == 1 else torch.float32
    )
    torch.save(weights, tmp_path / "model.pth")
    with pytest.raises((ConversionError, NotFiniteError), match=message):
        load_published(tmp_path / "model.pth", "irevnet", units=(1, 1))
