"""Networks of torchvision and timm as models of the zoo."""

from importlib import import_module
from urllib.error import URLError

import pytest
import torch
import torchvision

import revzoo
from revzoo import _libraries
from revzoo._libraries import LIBRARIES, declared_names
from revzoo.interop.export import Export, export
from revzoo.layers.make_reversible import described_runs, reversible_blocks
from revzoo.layers.side_bits import SideBits
from revzoo.models.network import parts
from revzoo.models.wrapped import LibraryNetwork
from revzoo.training.checkpoint.files import CheckpointError, check_model_options
from revzoo.training.classifier import Classifier
from revzoo.weights.errors import DownloadError, StateMismatchError, UnknownWeightsError

NAMES = (
    ("torchvision:resnet18", {}, "net.fc"),
    ("timm:deit_tiny_distilled_patch16_224", {"img_size": 32}, "net.head"),
    ("timm:convnext_atto", {}, "net.head.fc"),
)


@pytest.mark.parametrize(("name", "options", "head"), NAMES, ids=[name for name, *_ in NAMES])
def test_a_librarys_network_is_a_model_of_the_zoo(name, options, head):
    pytest.importorskip(name.partition(":")[0])
    options |= {"num_classes": 7, "in_chans": 1, "reversible_bits": 4}
    model = revzoo.create_model(name, **options).eval()
    assert isinstance(model, LibraryNetwork)
    assert model.classifier == head
    images = torch.randn(2, 1, 32, 32)
    logits = model(images)
    assert logits.shape == (2, 7)
    if "distilled" not in name:  # that has two heads
        again = model.forward_head(model.forward_features(images))
        assert torch.allclose(again, logits, atol=1e-6)
    assert any(row.role == "joins" for row in reversible_blocks(model))
    found = [id(p) for part in parts(model) for p in part.parameters()]
    assert sorted(found) == sorted(map(id, model.parameters()))
    assert parts(model)[-1].name == head
    with torch.device("meta"):  # as the command line checks it
        revzoo.create_model(name, **options)


MAPS = (("test_vit", {"img_size": 32}, 4 * [64]),)


@pytest.mark.parametrize(("name", "options", "channels"), MAPS, ids=[name for name, *_ in MAPS])
def test_feature_maps_of_timm(name, options, channels):
    timm = pytest.importorskip("timm")
    options |= {"features_only": True, "out_indices": [-4, -3, -2, -1]}
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for mode in ("exact", "store"):
        torch.manual_seed(0)
        net = revzoo.create_model(f"timm:{name}", reversible_bits=8, **options)
        revzoo.set_memory(net, mode, grid="auto")
        maps = net(images)
        loss = sum(m.square().mean() for m in maps)
        found.append([*maps, *torch.autograd.grad(loss, list(net.parameters()))])
    assert all(map(torch.equal, found[0][: len(maps)], found[1][: len(maps)]))
    torch.testing.assert_close(*found)
    assert net.feature_info.channels() == [m.shape[1] for m in maps] == channels
    assert net.feature_info.reduction() == [32 // m.shape[-1] for m in maps]
    assert "joins" in {row.role for row in reversible_blocks(net)}
    revzoo.make_reversible(net, None)
    theirs = timm.create_model(name, **options)
    with torch.no_grad():
        for p, q in zip(theirs.parameters(), net.parameters(), strict=True):
            p.copy_(q)
    assert all(map(torch.equal, net(images), theirs(images)))


def test_a_convolution_that_reads_no_image_does_not_change():
    """It was replaced by one for the image's channels, and the network could not run."""
    pytest.importorskip("timm")
    with torch.device("meta"):
        assert revzoo.create_model("timm:csatv2").input_layer is None
        with pytest.raises(ValueError, match=r"in_chans=1: timm:csatv2 takes images of 3 channels"):
            revzoo.create_model("timm:csatv2", in_chans=1)


def test_the_last_feature_maps_are_cut_off():
    pytest.importorskip("timm")
    whole = revzoo.create_model("timm:resnet18", reversible_bits=8)
    images = torch.randn(2, 3, 32, 32)
    features, maps = whole.forward_intermediates(images, indices=2)
    assert [tuple(t.shape) for t in (features, *maps)] == [
        (2, 512, 1, 1),
        (2, 256, 2, 2),
        (2, 512, 1, 1),
    ]
    with pytest.raises(ValueError, match="output_fmt='NLC'"):
        whole.forward_intermediates(images, output_fmt="NLC")
    short = revzoo.create_model("timm:resnet18", features_only=True, out_indices=[1, 3])
    names = {name.split(".")[2] for name, _ in short.named_parameters()}
    assert names == {"conv1", "bn1", "layer1", "layer2", "layer3"}
    assert [m.shape[1] for m in short(images)] == [64, 256]


def resnet(**options):
    return revzoo.create_model("torchvision:resnet18", **options)


def test_weights_go_to_the_library_and_back(tmp_path):
    theirs = torchvision.models.resnet18(num_classes=7)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    options = {"checkpoint_path": tmp_path / "theirs.pth", "reversible_bits": 2}
    model = resnet(num_classes=7, **options).eval()
    assert all(map(torch.equal, model.net.state_dict().values(), theirs.state_dict().values()))
    grey = resnet(num_classes=3, in_chans=1, **options)
    assert torch.equal(grey.net.conv1.weight, theirs.conv1.weight.sum(1, keepdim=True))
    assert torch.equal(grey.net.layer1[0].conv1.weight, theirs.layer1[0].conv1.weight)
    images = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(model(images), theirs.eval()(images), atol=1e-3)
    revzoo.make_reversible(model, None)
    assert torch.equal(model(images), theirs(images))


def test_a_saved_network_comes_back(tmp_path):
    pytest.importorskip("timm")
    model = revzoo.create_model(
        "timm:test_vit", num_classes=3, img_size=32, reversible_bits=3
    ).eval()
    facts = {"classes": ["a", "b", "c"], "mean": [0.5] * 3, "std": [0.5] * 3}
    entry = model.save_pretrained(tmp_path / "saved", **facts)
    assert entry.architecture == "timm:test_vit"
    again = revzoo.from_pretrained(tmp_path / "saved").eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), model(images))
    export(Export(network=model, image_size=32), tmp_path / "model.safetensors", kind="safetensors")


def paths(model):
    return [row.path for row in reversible_blocks(model)]


def test_only_runs_that_pay_are_reversible(tmp_path):
    """All 8 blocks were called reversible, of which one was inverted."""
    pair = ["net.layer1.0", "net.layer1.1"]
    model = resnet(reversible_bits=4, reversible_size=64).eval()
    assert paths(model) == pair
    assert model.default_memory == "exact"
    every = resnet(reversible_bits=4, reversible_runs="checkpoint")
    assert len(paths(every)) == len(paths(resnet(reversible_bits=4, reversible_runs="all"))) == 8
    images = torch.randn(2, 3, 64, 64)
    model.save_pretrained(tmp_path, classes=None, mean=None, std=None)
    again = revzoo.from_pretrained(tmp_path).eval()
    assert paths(again) == pair
    assert torch.equal(again(images), model(images))
    with pytest.raises(ValueError, match=r"reversible_runs=most: expected one of paying, check"):
        resnet(reversible_bits=4, reversible_runs="most")
    # no run of it pays
    small = revzoo.create_model("torchvision:mobilenet_v3_large", reversible_bits=4)
    assert (paths(small), small.default_memory) == ([], "store")
    with pytest.raises(ValueError, match=r"memory='exact': no run of blocks .* pays"):
        revzoo.create_model("torchvision:mobilenet_v3_large", reversible_bits=4, memory="exact")


def test_automatic_bits_fit_the_weights(tmp_path):
    """The bits are chosen after loading, and saved."""
    model = revzoo.create_model("resnet32.cifar10", pretrained=True, reversible_bits="auto").eval()
    plain = revzoo.create_model("resnet32.cifar10", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model(x)
    assert 0 < (model(x) - plain(x)).norm() / plain(x).norm() <= 0.005
    model.save_pretrained(tmp_path, classes=list("abcdefghij"), mean=[0.5] * 3, std=[0.5] * 3)
    assert described_runs(revzoo.from_pretrained(tmp_path)) == described_runs(model)


@pytest.mark.parametrize("bits", [4, "auto"])
def test_checkpoints_have_the_runs(bits):
    options = {"name": "torchvision:resnet18", "num_classes": 3, "reversible_bits": bits}
    options |= {"reversible_size": 64}
    module = Classifier({**options, "reversible_runs": "checkpoint"})
    for step in module.modules():
        if isinstance(step, SideBits):
            step.bits = 6
    state = {"hyper_parameters": dict(module.hparams), "state_dict": module.state_dict()}
    module.on_save_checkpoint(state)
    again = Classifier.from_state(state, "here").model
    assert described_runs(again) == described_runs(module.model)
    with pytest.raises(CheckpointError, match=r"reversible blocks net\.layer1\.0, .*others: give"):
        Classifier(options).on_load_checkpoint(state)
    if bits == 4:
        del state["reversible_runs"]  # of an earlier version, which converted all
        assert len(paths(Classifier.from_state(state, "here").model)) == 8


def test_the_zoos_resnets_take_reversible_bits(tmp_path):
    images = torch.randn(2, 3, 32, 32)
    plain = revzoo.create_model("resnet32.cifar10", pretrained=True).eval()
    model = revzoo.create_model("resnet32.cifar10", pretrained=True, reversible_bits=8).eval()
    assert {m.memory for m in model.modules() if isinstance(m, SideBits)} == {"exact"}
    difference = (model(images) - plain(images)).norm() / plain(images).norm()
    assert 0 < difference < 0.02
    model.save_pretrained(tmp_path, classes=list("abcdefghij"), mean=[0.5] * 3, std=[0.5] * 3)
    assert torch.equal(revzoo.from_pretrained(tmp_path).eval()(images), model(images))
    again = revzoo.make_reversible(revzoo.from_pretrained(tmp_path), bits=None)
    assert torch.equal(again.eval()(images), plain(images))
    # the entry still had the bits, so the plain network came back as a reversible one
    facts = {"classes": list("abcdefghij"), "mean": [0.5] * 3, "std": [0.5] * 3}
    again.save_pretrained(tmp_path / "plain", **facts)
    assert not revzoo.reversible_blocks(revzoo.from_pretrained(tmp_path / "plain"))
    revzoo.make_reversible(again, bits=2).save_pretrained(tmp_path / "two", **facts)
    assert revzoo.reversible_blocks(revzoo.from_pretrained(tmp_path / "two"))[0].bits == 2
    with pytest.raises(ValueError, match="revnet38 takes no reversible_bits: they make"):
        revzoo.create_model("revnet38", reversible_bits=4)


def test_errors_name_the_librarys_network():
    with torch.device("meta"):
        model = revzoo.create_model("torchvision:vgg11")
        with pytest.raises(ValueError, match=r"^torchvision:vgg11 has no run of blocks"):
            revzoo.make_reversible(model)
    with pytest.raises(ValueError, match=r"^torchvision:vgg11 holds no step"):
        revzoo.set_memory(model, "recompute")


@pytest.mark.parametrize(
    "name", ["torchvision:resnet51", "torchvision:os.system", "torchvision:", "timm:hf_hub:x/y"]
)
def test_names_that_no_library_lists(name):
    pytest.importorskip(name.partition(":")[0])
    with pytest.raises(ValueError, match=f"there is no model '{name}'"):
        revzoo.create_model(name)
    with pytest.raises((ValueError, CheckpointError), match=f"there is no model '{name}'|refused"):
        Classifier(check_model_options({"name": name}))


def test_suggested_networks_can_be_copied():
    """Names that begin like the given name come first, with the library."""
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match=r"did you mean 'torchvision:resnet1\d+'"):
        revzoo.create_model("torchvision:resnet19")
    with pytest.raises(ValueError, match=r"mean 'torchvision:vit_b_\d+' or 'torchvision:vit_b_"):
        revzoo.create_model("torchvision:vit_b")


def test_a_name_like_no_other_has_no_suggestion():
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match=r"there is no model 'torchvision:foobar'.*\)$"):
        revzoo.create_model("torchvision:foobar")


def test_checkpoints_may_name_networks_alone():
    assert check_model_options({"name": "torchvision:resnet18", "num_classes": 3})
    with pytest.raises(CheckpointError, match=r"model.name is refused"):
        check_model_options({"name": "elsewhere:resnet18"})
    with pytest.raises(ValueError, match="there is no model 'torchvision:resnet51'"):
        resnet(network="torchvision:resnet51")


def test_what_a_librarys_network_cannot_do():
    model = resnet()
    with pytest.raises(ValueError, match=r"feature maps of ResNet are unknown: use torchvision"):
        revzoo.create_model("torchvision:resnet18", features_only=True)
    with pytest.raises(revzoo.NotInvertibleError, match="has no inverse"):
        model.inverse(torch.randn(1, 512))
    with pytest.raises(ValueError, match="cannot change"):
        model.reset_classifier(3, "max")
    with pytest.raises(ValueError, match=r"refuses img_size=64"):
        resnet(img_size=64)
    with pytest.raises(ValueError, match="no linear classifier"):
        revzoo.create_model("torchvision:squeezenet1_0")
    with torch.device("meta"):
        vit = revzoo.create_model("torchvision:vit_b_16", img_size=32)
    assert vit.classifier == "net.heads.head"
    with pytest.raises(ValueError, match=r"64 x 64 pixels: expected 32 x 32"):
        vit.check_size(64, 64)
    assert (vit.image_size, model.image_size) == (32, 224)


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_are_read_without_an_import(library):
    if library == "timm":
        pytest.importorskip("timm")
    models = import_module("timm" if library == "timm" else "torchvision.models")
    listed = models.list_models(**({} if library == "timm" else {"module": models}))
    assert declared_names(library) == tuple(sorted(listed))


def test_an_unknown_name_that_a_library_has():
    with pytest.raises(ValueError, match="torchvision's is 'torchvision:resnet18'"):
        revzoo.create_model("resnet18")
    with pytest.raises(UnknownWeightsError, match="torchvision's is 'torchvision:resnet18'"):
        revzoo.create_model("resnet18", pretrained=True)


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_of_a_library_are_listed(library, monkeypatch):
    pytest.importorskip(library)
    names = revzoo.list_models(f"{library}:*")
    assert f"{library}:resnet18" in names
    assert len(names) == len(declared_names(library))
    assert revzoo.list_models(["revnet38", f"{library}:resnet18"])[0] == "revnet38"
    for name in (library, f"{library}:"):
        with pytest.raises(ValueError, match=rf"'{library}:NAME'|{library}:NAME, see list_models"):
            revzoo.create_model(name)
    with pytest.raises(UnknownWeightsError, match=rf"'{library}:NAME', see list_models"):
        revzoo.create_model(library, pretrained=True)
    monkeypatch.setattr(_libraries, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"pip install {library}"):
        revzoo.list_models(f"{library}:*")


@pytest.mark.parametrize(("side", "remedy"), [(32, "img_size=32"), (40, "224 x 224; resize")])
def test_a_transformer_names_the_image_sizes(side, remedy):
    with torch.device("meta"):
        model = revzoo.create_model("torchvision:vit_b_16")
    with pytest.raises(ValueError, match=rf"{remedy}.*data\.image_size=224"):
        model(torch.zeros(1, 3, side, side))


def test_a_network_that_a_plugin_registers_in_timm(monkeypatch):
    timm = pytest.importorskip("timm")
    with pytest.raises(ValueError, match="no model 'timm:my_plugin'"):
        _libraries.check_library_name("timm:my_plugin")
    monkeypatch.setattr(timm, "list_models", lambda: ["my_plugin"])
    assert _libraries.check_library_name("timm:my_plugin") == ("timm", "my_plugin")


def offline(*args, **kwargs):
    raise URLError("Name or service not known")


@pytest.mark.parametrize(
    ("name", "address"),
    [
        (
            "torchvision:resnet18",
            "download.pytorch.org/models/resnet18-f37072fd.pth",
        ),
        ("timm:resnet18", "huggingface.co/timm/resnet18.a1_in1k"),
    ],
)
def test_a_failed_download_names_address_and_remedies(name, address, monkeypatch, tmp_path):
    library = name.partition(":")[0]
    pytest.importorskip(library)
    if library == "timm":
        monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # nothing downloaded before
    monkeypatch.setattr("torch.hub.download_url_to_file", offline)
    with pytest.raises(DownloadError) as caught:
        revzoo.create_model(name, pretrained=True)
    for part in (name, f"https://{address} (", "Name or service", "+model.checkpoint_path=FILE"):
        assert part in str(caught.value)
    assert "model.pretrained=false" in str(caught.value)


def test_pretrained_networks_have_the_classes_of_the_weights(monkeypatch):
    """They had 10 random ones, also in `revzoo export NAME --pretrained`."""
    theirs = torchvision.models.resnet18().eval()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *a, **k: theirs.state_dict()
    )
    model = resnet(pretrained=True, reversible_bits=None).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), theirs(images))
    assert (model.num_classes, resnet().num_classes) == (1000, 10)
    assert resnet(pretrained=True, num_classes=3)(images).shape == (2, 3)


def test_weights_that_the_library_does_not_publish():
    pytest.importorskip("timm")
    with pytest.raises(UnknownWeightsError, match="timm publishes no weights of vovnet57a: give"):
        revzoo.create_model("timm:vovnet57a", pretrained=True)


def test_weights_from_before_batch_norm_counted(tmp_path):
    theirs = torchvision.models.resnet18(num_classes=7).eval()
    state = {k: t for k, t in theirs.state_dict().items() if "num_batches_tracked" not in k}
    torch.save(state, tmp_path / "old.pth")
    model = resnet(num_classes=7, checkpoint_path=tmp_path / "old.pth").eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), theirs(images))
    del state["bn1.running_mean"]
    torch.save(state, tmp_path / "broken.pth")
    with pytest.raises(StateMismatchError, match=r"1 missing: net\.bn1\.running_mean"):
        resnet(num_classes=7, checkpoint_path=tmp_path / "broken.pth")


@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_a_network_with_classifiers_of_training_alone():
    """It could not train, and its features failed in evaluation, as did inception_v3's."""
    model = revzoo.create_model("torchvision:googlenet", num_classes=3)
    x = torch.randn(2, 3, 64, 64)
    assert model(x).shape == (2, 3)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model.forward_head(model.forward_features(x)), model(x))


@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_a_file_with_classifiers_of_training_alone_loads(tmp_path):
    net = torchvision.models.googlenet(weights=None, init_weights=False)
    torch.save(net.state_dict(), tmp_path / "g.pt")
    model = revzoo.create_model("torchvision:googlenet", checkpoint_path=tmp_path / "g.pt")
    assert torch.equal(model.net.conv1.conv.weight, net.conv1.conv.weight)


def test_a_fresh_classifier_has_the_precision_of_the_network():
    model = revzoo.create_model("torchvision:resnet18", num_classes=3).bfloat16()
    model.reset_classifier(5)
    assert model(torch.randn(2, 3, 64, 64, dtype=torch.bfloat16)).shape == (2, 5)
