"""A user's classifier, registered under a name, is a model of the zoo."""

import copy
import pickle

import pytest
import torch
from torch import nn

import revzoo
from revzoo.interop.export import Export, export
from revzoo.models.network import ImageSizeError, parts
from revzoo.models.registry import MODELS
from revzoo.training.classifier import Classifier


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Net(nn.Module):
    def __init__(self, num_classes=10, in_chans=3, width=8, depths=(3,), name_of_head="head"):
        super().__init__()
        self.stem = nn.Conv2d(in_chans, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(sum(depths))))
        self.mix = nn.Linear(width, width)  # as many outputs as classes if num_classes=width
        self.head = nn.Linear(width, num_classes, bias=False)

    def forward(self, x):
        return self.head(self.mix(self.blocks(self.stem(x)).mean((2, 3))))


def fixed(num_classes, in_chans):
    """For images of 6x6 pixels only; its first convolution reads pixels of four places."""
    net = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * in_chans, 4, 1), nn.Flatten())
    net.append(nn.Linear(36, num_classes))
    net.image_size = 6
    return net


def inverting(num_classes, in_chans):
    def branch():
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())

    blocks = [revzoo.ReversibleBlock(branch(), branch()) for _ in range(3)]
    middle = revzoo.ReversibleSequence(blocks, memory="exact")
    return nn.Sequential(
        nn.Conv2d(in_chans, 8, 3),
        middle,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


@pytest.fixture(autouse=True)
def models(monkeypatch):
    monkeypatch.setattr("revzoo.models.registry.MODELS", table := type(MODELS)(MODELS))
    monkeypatch.setattr("revzoo.training.checkpoint.files.MODELS", table)
    for name, build in (("mynet", Net), ("fixed", fixed), ("inverting", inverting)):
        revzoo.register_model(name, build)


def images(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_classes", [3, 8])
def test_an_own_module_computes_as_without_the_zoo(num_classes):
    torch.manual_seed(0)
    plain = Net(num_classes, in_chans=1, width=8, depths=(1, 2))
    torch.manual_seed(0)
    model = revzoo.create_model("mynet", num_classes=num_classes, in_chans=1, depths=(1, 2))
    x = images(2, 1, 9, 12)
    assert torch.equal(model(x), plain(x))
    assert (model.classifier, model.num_features) == ("net.head", 8)
    assert torch.equal(model.forward_head(model.forward_features(x)), model(x))
    assert [part.name for part in parts(model)][-1] == "net.head"
    assert repr(model).startswith("Net(")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.eval()(x), model.eval()(x))


def test_it_becomes_reversible_and_comes_back_from_a_folder(tmp_path):
    model = revzoo.create_model("mynet", num_classes=2, reversible_bits=4, width=4)
    assert revzoo.reversible_blocks(model)[0].path == "net.blocks.0"
    model.save_pretrained(tmp_path, classes=["a", "b"], mean=[0.5] * 3, std=[0.5] * 3)
    again = revzoo.from_pretrained(tmp_path)
    assert torch.equal(again.eval()(images(2, 3, 8, 8)), model.eval()(images(2, 3, 8, 8)))
    grey = revzoo.from_pretrained(tmp_path, num_classes=5, in_chans=1)
    assert grey(images(2, 1, 8, 8)).shape == (2, 5)
    assert grey.net.head.bias is None
    assert torch.equal(grey.net.stem.weight, model.net.stem.weight.sum(1, keepdim=True))


def test_a_file_of_the_module_alone_loads(tmp_path):
    torch.save(Net(width=4).state_dict(), tmp_path / "own.pt")
    model = revzoo.create_model("mynet", width=4, checkpoint_path=tmp_path / "own.pt")
    assert torch.equal(model.net.mix.weight, torch.load(tmp_path / "own.pt")["mix.weight"])


@pytest.mark.parametrize("alone", [True, False])
def test_a_file_decides_the_numbers_of_classes_and_channels(alone, tmp_path):
    """It had 10 classes, with random weights, and 3 channels."""
    model = revzoo.create_model("mynet", num_classes=7, in_chans=1)
    torch.save((model.net if alone else model).state_dict(), tmp_path / "own.pt")
    again = revzoo.create_model("mynet", checkpoint_path=tmp_path / "own.pt")
    assert (again.num_classes, again.in_chans) == (7, 1)
    assert torch.equal(again.net.head.weight, model.net.head.weight)


def test_no_classes():
    model = revzoo.create_model("mynet", num_classes=0)
    assert model(images(2, 3, 8, 8)).shape == (2, 8)
    model.reset_classifier(3)
    assert model(images(2, 3, 8, 8)).shape == (2, 3)


def test_a_module_for_one_image_size(tmp_path):
    model = revzoo.create_model("fixed", in_chans=2).eval()
    assert model(images(1, 2, 6, 6)).shape == (1, 10)
    with pytest.raises(ImageSizeError, match="7 x 7 pixels: expected 6 x 6; resize the images"):
        model(images(1, 2, 7, 7))
    model.save_pretrained(tmp_path, classes=None, mean=None, std=None)
    assert torch.equal(
        revzoo.from_pretrained(tmp_path).eval()(images(1, 2, 6, 6)), model(images(1, 2, 6, 6))
    )


def test_steps_inside_keep_their_mode_unless_one_is_given():
    x = images(2, 3, 12, 12)
    kept = {}
    for memory in (None, "store"):
        model = revzoo.create_model("inverting", memory=memory)
        assert model.default_memory == (memory or "exact")
        kept[memory] = revzoo.audit(model, x.shape).kept_bytes
    assert kept[None] < kept["store"]


class Bare(nn.Module):
    def __init__(self, num_classes, in_chans):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(in_chans))
        self.last = nn.Sequential(nn.Linear(in_chans, num_classes))

    def forward(self, x):
        return self.last(x.mean((2, 3)) * self.scale)


def test_a_plain_network_stores(tmp_path):
    model = revzoo.create_model("mynet", num_classes=2, memory="store")
    model.save_pretrained(tmp_path, classes=["a", "b"], mean=[0.5] * 3, std=[0.5] * 3)
    again = revzoo.from_pretrained(tmp_path, memory="store")
    export(Export(network=again, image_size=8), tmp_path / "net.safetensors", kind="safetensors")
    with pytest.raises(ValueError, match=r"no step.*'recompute'"):
        revzoo.create_model("mynet", memory="recompute")


def test_every_parameter_is_in_one_part():
    revzoo.register_model("bare", Bare)
    for name in ("mynet", "fixed", "inverting", "bare"):
        model = revzoo.create_model(name)
        found = [id(p) for part in parts(model) for p in part.parameters()]
        assert sorted(found) == sorted(map(id, model.parameters()))


def odd(num_classes, in_chans, dims=(4,), dropout=0.0):
    """Reads a value of a tensor, adds to a tuple, and has an option of the zoo's name."""
    rate = torch.linspace(0, 1, 3)[0].item()
    widths = dims.__add__((8,))
    drops = [nn.Dropout(dropout)] if dropout else []
    first = nn.Conv2d(in_chans, widths[0], 3)
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(rate), *drops]
    return nn.Sequential(first, *pool, nn.Linear(widths[0], num_classes))


def test_odd_constructors(tmp_path):
    """They failed on the meta device, with a list for the tuple, and when they were saved."""
    revzoo.register_model("odd", odd)
    with torch.device("meta"):
        revzoo.create_model("odd")
    model = revzoo.create_model("odd", dims=[6], dropout=0.5)
    model.save_pretrained(tmp_path, classes=None, mean=None, std=None)
    x = images(2, 3, 8, 8)
    assert torch.equal(revzoo.from_pretrained(tmp_path).eval()(x), model.eval()(x))


def test_modules_without_a_classifier():
    revzoo.register_model("conv", lambda num_classes, in_chans: nn.Conv2d(in_chans, 4, 1))
    revzoo.register_model("nothing", lambda num_classes, in_chans: None)
    with pytest.raises(ValueError, match=r"\(num_classes=10\) returned a Conv2d without an nn"):
        revzoo.create_model("conv")
    with pytest.raises(TypeError, match=r"returned None: expected an nn\.Module"):
        revzoo.create_model("nothing")
    with pytest.raises(ValueError, match=r"no keyword 'wdth'.* did you mean 'width'"):
        revzoo.create_model("mynet", wdth=3)


def test_a_keyword_that_no_checkpoint_can_hold_is_refused_before_training():
    """The run trained, and then its checkpoint could not be loaded."""
    assert Classifier({"name": "mynet", "depths": [1, 2], "name_of_head": "fc"})
    with pytest.raises(ValueError, match=r"model.name_of_head is refused.*choose a number"):
        Classifier({"name": "mynet", "name_of_head": nn.Linear})
