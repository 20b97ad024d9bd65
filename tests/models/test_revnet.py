import pytest
import torch
from compare import error, twin

from revzoo import ReversibleBlock, set_memory
from revzoo.models import REVNETS, RevNet, create_model
from revzoo.models.unit import Transition

# Counts of the reference implementation of arXiv 1707.04585; one class more costs features + 1.
CIFAR10 = {
    "revnet38": (464_890, 112),
    "revnet110": (1_729_194, 128),
    "revnet164": (1_748_778, 512),
}
IMAGENET = {"revnet56": 27_553_128, "revnet104": 45_428_072}
# Counts of MemCNN 1.5.2's models.
MEMCNN = {
    "revnet38_memcnn": (573_994, 584_164),
    "revnet110_memcnn": (1_854_890, 1_866_500),
    "revnet164_memcnn": (1_983_786, 2_029_956),
}


def count(name, num_classes):
    with torch.device("meta"):
        model = create_model(name, num_classes=num_classes)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CIFAR10)
def test_parameters_of_the_cifar_variants(name):
    expected, features = CIFAR10[name]
    assert count(name, 10) == expected
    assert count(name, 100) == expected + 90 * (features + 1)


@pytest.mark.parametrize("name", IMAGENET)
def test_parameters_of_the_imagenet_variants(name):
    assert count(name, 1000) == IMAGENET[name]


@pytest.mark.parametrize("name", MEMCNN)
def test_parameters_of_memcnns_variants(name):
    assert (count(name, 10), count(name, 100)) == MEMCNN[name]


def test_every_variant_is_counted():
    assert set(REVNETS) == {*CIFAR10, *IMAGENET, *MEMCNN}


@pytest.mark.parametrize("branch", ["basic", "bottleneck"])
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_memcnns_transitions_train_as_stored(branch, mode):
    torch.manual_seed(0)
    model = create_model("revnet38_memcnn", units=(2, 2, 1), branch=branch, memory="store").double()
    other = twin(model, mode)
    set_memory(model, "store", grid="auto" if mode == "exact" else None)
    x = torch.randn(4, 3, 9, 10, dtype=torch.float64)
    for net in (model, other):
        torch.nn.functional.cross_entropy(net(x), torch.arange(4)).backward()
    actual, expected = ([p.grad for p in net.parameters()] for net in (other, model))
    assert error(actual, expected) <= (0 if mode == "exact" else 1e-10)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", ["revnet38", "revnet164_memcnn", "resnet32", "irevnet163"])
def test_normalisation_and_activation_are_chosen_by_keyword(name, norm):
    model = create_model(name, units=(2, 1, 1), norm=norm, activation="silu")
    kinds = {"batch": torch.nn.BatchNorm2d, "group": torch.nn.GroupNorm, "none": ()}
    modules = list(model.modules())
    assert any(isinstance(m, kinds[norm]) for m in modules) is (norm != "none")
    assert not any(isinstance(m, torch.nn.modules.batchnorm._NormBase) for m in modules) or (
        norm == "batch"
    )
    assert not any(isinstance(m, torch.nn.ReLU) for m in modules)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "transitions"),
    [("revnet38", {(1, 0), (2, 0)}), ("revnet164", {(0, 0), (1, 0), (2, 0)})],
)
def test_only_units_that_change_shape_lack_an_inverse(name, transitions):
    found = set()
    for i, stage in enumerate(create_model(name).stages):
        for j, unit in enumerate(stage):
            assert isinstance(unit, Transition if (i, j) in transitions else ReversibleBlock)
            if not unit.invertible:
                found.add((i, j))
    assert found == transitions


@pytest.mark.parametrize("name", ["revnet38", "revnet164"])
def test_only_the_very_first_branch_skips_its_activation(name):
    keys = [k for k in create_model(name).state_dict() if k.endswith("conv1.weight")]
    norms = [k for k in create_model(name).state_dict() if k.endswith("norm1.weight")]
    assert len(keys) == 2 * sum(REVNETS[name].units)
    skipped = {k.removesuffix("conv1.weight") for k in keys} - {
        k.removesuffix("norm1.weight") for k in norms
    }
    assert skipped == {keys[0].removesuffix("conv1.weight")}


def test_stages_of_revnet38_are_inverted_from_their_outputs():
    torch.manual_seed(0)
    stage = create_model("revnet38").double().eval().stages[0]
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64), torch.randn(2, 16, 8, 8, dtype=torch.float64)
    y = stage(*x)
    for inverted, original in zip(stage.inverse(*y), x, strict=True):
        assert torch.allclose(inverted, original, rtol=0, atol=1e-12)
    assert not torch.allclose(y[0], x[0])


def test_imagenet_variants_reduce_the_image_32_fold():
    model = create_model("revnet56", units=(1, 1, 1, 1)).eval()
    assert model.forward_features(torch.randn(1, 3, 65, 64)).shape == (1, 3328, 3, 2)


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match=r"channels=65: expected a multiple of 2"):
        create_model("revnet38", widths=(32, 65, 112))


def test_a_variant_can_be_built_without_the_registry():
    model = RevNet(REVNETS["revnet38"], num_classes=3, memory="store")
    assert model(torch.randn(1, 3, 8, 8).expand(2, -1, -1, -1)).shape == (2, 3)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_three_steps_equal_store_in_float64(dropout):
    torch.manual_seed(0)
    reference = create_model("revnet38", memory="store", dropout=dropout).double()
    model = twin(reference, "invert")
    x, labels = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.arange(4)
    for net in (model, reference):
        torch.manual_seed(1)
        for _ in range(3):  # gradients add up; without updates the inputs of all branches are equal
            torch.nn.functional.cross_entropy(net(x), labels).backward()
    actual, expected = ([p.grad for p in net.parameters()] for net in (model, reference))
    assert error(actual, expected) < 1e-10
    for a, e in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(a, e)
    assert model.stem[0].norm.num_batches_tracked == 3
