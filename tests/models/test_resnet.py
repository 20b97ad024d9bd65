import pytest
import torch

from revzoo.models import RESNETS, create_model
from revzoo.models.unit import ResidualUnit

# Counts of the reference implementation of arXiv 1707.04585; one class more costs features + 1.
CIFAR10 = {
    "resnet32": (464_154, 64),
    "resnet56": (853_018, 64),
    "resnet110": (1_727_962, 64),
    "resnet164": (1_703_258, 256),
}
# Counts of MemCNN 1.5.2's models.
MEMCNN = {
    "resnet32_memcnn": (466_906, 472_756),
    "resnet110_memcnn": (1_730_714, 1_736_564),
    "resnet164_memcnn": (1_704_154, 1_727_284),
}
IMAGENET = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


def count(name, num_classes):
    with torch.device("meta"):
        model = create_model(name, num_classes=num_classes)
    return sum(p.numel() for p in model.parameters())


def imagenet_count(units):
    """Parameters of a pre-activation bottleneck ResNet with 1000 classes, term by term."""
    total = 3 * 64 * 49 + 2 * 64  # stem
    width = 64
    for inner, depth in zip((64, 128, 256, 512), units, strict=True):
        total += width * 4 * inner  # projection
        for _ in range(depth):
            convolutions = width * inner + 9 * inner**2 + inner * 4 * inner
            total += convolutions + 2 * (width + inner + inner)
            width = 4 * inner
    total -= 2 * 64  # the first unit has no leading normalisation
    return total + 2 * width + 1000 * (width + 1)


@pytest.mark.parametrize("name", CIFAR10)
def test_parameters_of_the_cifar_variants(name):
    expected, features = CIFAR10[name]
    assert count(name, 10) == expected
    assert count(name, 100) == expected + 90 * (features + 1)


@pytest.mark.parametrize("name", IMAGENET)
def test_parameters_of_the_imagenet_variants(name):
    assert count(name, 1000) == imagenet_count(IMAGENET[name])


@pytest.mark.parametrize("name", MEMCNN)
def test_parameters_of_memcnns_variants(name):
    assert (count(name, 10), count(name, 100)) == MEMCNN[name]


def test_every_variant_is_counted():
    assert set(RESNETS) == {*CIFAR10, *IMAGENET, *MEMCNN}


def test_units_have_one_stream_and_no_inverse():
    units = [unit for stage in create_model("resnet32").stages for unit in stage]
    assert len(units) == 15
    assert all(isinstance(u, ResidualUnit) and not u.invertible for u in units)


def test_imagenet_variants_reduce_the_image_32_fold():
    model = create_model("resnet50", units=(1, 1, 1, 1)).eval()
    assert model.forward_features(torch.randn(1, 3, 65, 64)).shape == (1, 2048, 3, 2)
