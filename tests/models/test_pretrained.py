"""Trained weights in models: lookup order, adaptation, validation before loading."""

import hashlib
import json
import re
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_weights import OPTIONS, change, small, write_entry

import revzoo
from revzoo.models import create_model, from_pretrained, list_models
from revzoo.models.pretrained import load_weights
from revzoo.models.save import pack
from revzoo.models.weights_file import TensorFile
from revzoo.weights.errors import (
    ArchitectureMismatchError,
    EntryError,
    HashMismatchError,
    NotFiniteError,
    StateMismatchError,
    UnknownWeightsError,
    UnreadableWeightsError,
    WeightsError,
)
from revzoo.weights.table import WeightsTable


@pytest.fixture
def table(tmp_path):
    write_entry(tmp_path, classes=tuple("abcde"))
    return WeightsTable(tmp_path)


@pytest.fixture
def file(tmp_path, table):
    return tmp_path / "revnet38.small.safetensors"


def same(model, other, *, but=()):
    own, others = model.state_dict(), other.state_dict()
    assert own.keys() == others.keys()
    differing = {k for k in own if not torch.equal(own[k], others[k])}
    return differing == set(but)


@pytest.mark.parametrize("name", ["revnet38", "revnet38.small"])
def test_a_name_gives_its_weights(table, name):
    model = create_model(name, pretrained=True, table=table)
    assert same(model, small())
    assert model.training
    assert (model.num_classes, model.entry.classes) == (5, tuple("abcde"))


def test_pretrained_models_are_listed(table):
    assert list_models(pretrained=True, table=table) == ["revnet38.small"]
    assert list_models("resnet*", pretrained=True, table=table) == []
    assert set(list_models(pretrained=True)) == set(revzoo.weights.table.SHIPPED.entries)


def test_without_weights_the_tag_gives_the_shape_and_the_bare_name_does_not(table):
    torch.manual_seed(1)
    tagged = create_model("revnet38.small", table=table)
    assert (tagged.num_classes, tagged.variant.units, tagged.entry) == (5, (1, 2, 1), None)
    assert not same(tagged, small())
    assert create_model("revnet38", table=table).variant.units == (3, 3, 3)


def test_other_classes_start_the_classifier_afresh_and_load_the_rest(table, caplog):
    caplog.set_level("INFO", logger="revzoo")
    model = create_model("revnet38", pretrained=True, num_classes=7, table=table)
    reference = small()
    reference.reset_classifier(7)
    assert same(model, reference, but=["fc.weight"])  # biases start at zero
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 7)
    assert "does not have 7 classes" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize("channels", [1, 4])
def test_other_image_channels_adapt_the_stem_and_load_the_rest(table, channels, caplog):
    caplog.set_level("INFO", logger="revzoo")
    model = create_model("revnet38", pretrained=True, in_chans=channels, table=table)
    reference = small(in_chans=channels)
    reference.load_state_dict(
        {**small().state_dict(), "stem.steps.0.conv.weight": model.stem[0].conv.weight}
    )
    assert same(model, reference)
    gray = torch.randn(2, 1, 8, 8)
    ours = model.stem[0].conv(gray.expand(-1, channels, -1, -1))
    theirs = small().stem[0].conv(gray.expand(-1, 3, -1, -1))
    if channels in (1, 3):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert 0.3 < ours.std() / theirs.std() < 3
    assert f"is for images of 3 channels: the first layer is adapted to {channels}" in caplog.text


def test_a_long_list_of_misfits_is_cut(table):
    """The 144 tensors of the missing blocks filled 90 lines of a terminal."""
    with pytest.raises(StateMismatchError, match=r"\n  \d+ missing: .* and \d+ more$") as caught:
        create_model("revnet38", pretrained=True, units=(2, 2, 1), table=table)
    assert len(str(caught.value)) < 1000
    assert len(caught.value.missing) > 20


def test_options_of_the_entry_yield_to_the_callers(table):
    model = create_model("revnet38", pretrained=True, memory="recompute", dropout=0.1, table=table)
    assert model.stages[0].memory == "recompute"
    with pytest.raises(StateMismatchError, match="missing"):
        create_model("revnet38", pretrained=True, units=(2, 2, 1), table=table)


def test_feature_maps_of_pretrained_weights(table):
    net = create_model(
        "revnet38", pretrained=True, features_only=True, out_indices=(0, -1), table=table
    )
    x = torch.randn(2, 3, 8, 8)
    expected = small().eval().forward_features(x)
    maps = net.eval()(x)
    assert [y.shape[1] for y in maps] == net.feature_info.channels() == [4, 8]
    assert torch.equal(small().eval().norm(maps[1]).relu(), expected)


def test_a_damaged_file_gives_no_model(table, file):
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(HashMismatchError):
        create_model("revnet38", pretrained=True, table=table)


def test_weights_that_are_not_known_are_refused(table):
    with pytest.raises(UnknownWeightsError, match=r"'revnet38\.tiny'; did you mean"):
        create_model("revnet38.tiny", pretrained=True, table=table)
    with pytest.raises(UnknownWeightsError, match="revnet110"):
        create_model("revnet110", pretrained=True, table=table)


def test_weights_of_another_architecture_are_refused(table, file):
    with pytest.raises(ArchitectureMismatchError, match="of revnet38, expected resnet32"):
        create_model("resnet32", checkpoint_path=file, **OPTIONS)


def broken(tensors):
    del tensors["norm.weight"]
    tensors["extra"] = torch.ones(1)
    tensors["stages.0.steps.0.steps.0.branch.conv1.weight"] = torch.ones(1, 2, 3, 3)
    tensors["norm.num_batches_tracked"] = torch.tensor(1.0)
    return tensors


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(file):
    tensors = broken(load_file(file))
    model = small(seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(StateMismatchError) as caught:
        load_weights(model, TensorFile(tensors, "here"), architecture="revnet38")
    assert caught.value.missing == ["norm.weight"]
    assert caught.value.unexpected == ["extra"]
    first, second = caught.value.misshapen
    assert first == "norm.num_batches_tracked (file: () float32, model: () int64)"
    assert "conv1.weight (file: (1, 2, 3, 3) float32, model: (2, 2, 3, 3) float32)" in second
    assert "here" in str(caught.value)
    assert isinstance(caught.value, WeightsError)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_local_file_comes_before_everything(table, file, tmp_path):
    other = small(seed=9)
    save_file(other.state_dict(), tmp_path / "mine.safetensors")
    path = tmp_path / "mine.safetensors"
    model = create_model("revnet38.small", pretrained=True, checkpoint_path=path, table=table)
    assert same(model, other)
    assert model.entry is None


def test_a_local_file_tells_classes_and_channels(tmp_path):
    torch.save(small(in_chans=2).state_dict(), tmp_path / "w.pt")
    model = create_model("revnet38", checkpoint_path=tmp_path / "w.pt", **OPTIONS)
    assert (model.num_classes, model.in_chans) == (5, 2)
    with pytest.raises(UnreadableWeightsError, match="no file"):
        create_model("revnet38", checkpoint_path=tmp_path / "none.pt")


def test_a_folder_stands_for_its_weights(tmp_path):
    """The folder of a run was "no file", though commands take it."""
    model = small()
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    best.parent.mkdir(parents=True)
    torch.save(model.state_dict(), best)
    model.save_pretrained(tmp_path / "saved")
    for folder in ("run", "run/checkpoints", "saved"):
        assert same(create_model("revnet38", **OPTIONS, checkpoint_path=tmp_path / folder), model)


def test_a_download_into_a_chosen_cache(tmp_path, table, file, monkeypatch):
    data = file.read_bytes()
    file.unlink()
    change(tmp_path, "revnet38.small", url="https://host/w.safetensors")

    def download(url, target, *, sha256):
        assert (url, sha256) == ("https://host/w.safetensors", hashlib.sha256(data).hexdigest())
        target.parent.mkdir(parents=True)
        target.write_bytes(data)

    monkeypatch.setattr("revzoo.weights.files.download", download)
    cache = tmp_path / "cache"
    model = create_model("revnet38", pretrained=True, cache_dir=cache, table=table)
    assert same(model, small())
    assert [p.suffix for p in cache.iterdir()] == [".safetensors"]


@pytest.mark.parametrize("as_text", [True, False])
def test_a_saved_folder_gives_the_model_back(tmp_path, as_text):
    model = small(in_chans=2)
    model.save_pretrained(tmp_path / "net")
    source = str(tmp_path / "net") if as_text else tmp_path / "net"
    assert same(from_pretrained(source), model)
    assert not same(create_model(source), model)
    assert from_pretrained(source, num_classes=3).num_classes == 3


def test_a_repository_of_the_hub_gives_the_model_back(tmp_path, monkeypatch):
    model = small()
    model.save_pretrained(tmp_path)
    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = lambda *, filename, **_: str(tmp_path / filename)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert same(from_pretrained("hf-hub:me/net"), model)
    assert same(create_model("hf-hub:me/net", pretrained=True), model)


def test_a_folder_named_as_a_model_does_not_stand_in_for_it(tmp_path, monkeypatch):
    small(num_classes=3).save_pretrained(tmp_path / "revnet38")
    monkeypatch.chdir(tmp_path)
    assert create_model("revnet38").num_classes == 10


def test_an_i_revnet_is_not_loaded_for_other_channels():
    """It has no first convolution to adapt: zeros would have replaced the trained channels."""
    with pytest.raises(StateMismatchError, match=r"1 channels, model: 3; .* convert the images"):
        create_model("irevnet13", pretrained=True, in_chans=3)


def test_a_file_states_its_image_channels(tmp_path):
    create_model("irevnet13", in_chans=2).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    assert create_model("irevnet13", checkpoint_path=path).in_chans == 2


@pytest.mark.parametrize(
    ("value", "suffix"), [(float("nan"), ".pt"), (-float("inf"), ".safetensors")]
)
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value, suffix):
    path, model = tmp_path / f"w{suffix}", small()
    with torch.no_grad():
        model.fc.weight[0, :2] = value
    (save_file if suffix == ".safetensors" else torch.save)(model.state_dict(), path)
    options = {**OPTIONS, "checkpoint_path": path}
    with pytest.raises(NotFiniteError, match=r"NaN or Inf in fc.weight \(2 of 40 values\): "):
        create_model("revnet38", **options)
    loaded = create_model("revnet38", **options, allow_nonfinite=True)
    assert torch.equal(loaded.fc.weight.isfinite(), model.fc.weight.isfinite())


def test_weights_that_overflow_in_the_networks_precision_are_refused(tmp_path):
    """They were finite in the file, in float64, and loaded as Inf."""
    state = small().state_dict()
    torch.save({**state, "fc.weight": state["fc.weight"].double() * 1e200}, tmp_path / "w.pt")
    with pytest.raises(NotFiniteError, match=r"NaN or Inf in fc\.weight \(40 of 40 values\)"):
        create_model("revnet38", **OPTIONS, checkpoint_path=tmp_path / "w.pt")


def test_an_entry_that_contradicts_its_file_is_refused(tmp_path):
    """The model kept it: it had five logits and the names of three classes."""
    small().save_pretrained(tmp_path, classes=list("abcde"), mean=None, std=None)
    config = tmp_path / "config.json"
    entry = json.loads(config.read_text()) | {"num_classes": 3, "classes": list("abc")}
    config.write_text(json.dumps(entry))
    with pytest.raises(EntryError, match="classifier of 5 classes, but its entry says num_classes"):
        from_pretrained(tmp_path)


def test_a_single_file_describes_its_model(tmp_path, table, file):
    lone = tmp_path / "elsewhere" / "revnet38.safetensors"  # starts like an architecture
    lone.parent.mkdir()
    lone.write_bytes(file.read_bytes())
    model = from_pretrained(lone)
    assert same(model, small())
    assert (model.entry.classes, model.entry.mean) == (tuple("abcde"), (0.5, 0.4, 0.3))
    lone.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UnreadableWeightsError, match="not a complete safetensors file"):
        from_pretrained(lone)
    save_file(small().state_dict(), lone)
    with pytest.raises(UnreadableWeightsError, match="does not describe its model"):
        from_pretrained(lone)


def test_an_entry_beside_a_file_goes_before_its_header(tmp_path, table, file):
    change(tmp_path, "revnet38.small", classes=list("vwxyz"))
    assert from_pretrained(file).entry.classes == tuple("vwxyz")
    change(tmp_path, "revnet38.small", sha256="0" * 64)
    with pytest.raises(HashMismatchError):
        from_pretrained(file)


@pytest.mark.parametrize("text", ['{"model_type": "other"}', "[1]", "{", '{"file": "other"}'])
def test_a_foreign_config_beside_a_file_is_none_of_it(tmp_path, text):
    model = small()
    path = tmp_path / "w.safetensors"
    path.write_bytes(pack(model, file=path.name, facts={})[0])
    (tmp_path / "config.json").write_text(text)
    assert same(from_pretrained(path), model)


@pytest.mark.parametrize("kept", [3, {"model": 3}, [1]])
def test_hyperparameters_that_are_none_do_not_make_weights_unreadable(tmp_path, kept):
    model = small()
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    torch.save({"hyper_parameters": kept, "state_dict": tensors}, tmp_path / "w.ckpt")
    assert same(create_model("revnet38", **OPTIONS, checkpoint_path=tmp_path / "w.ckpt"), model)


@pytest.mark.parametrize(
    "entry",
    ["[]", "{", '{"_target_": "os.system"}', '{"name": "revnet38", "architecture": "resnet32"}'],
)
def test_a_header_that_is_not_an_entry_is_refused(tmp_path, entry):
    path = tmp_path / "w.safetensors"
    save_file(small().state_dict(), path, metadata={"entry": entry})
    with pytest.raises(WeightsError, match=re.escape(str(path))):
        from_pretrained(path)
