import json
import random

import pytest
import torch
from small_weights import FACTS, OPTIONS, small, undescribed, write_entry
from torch.nn.utils import prune

import revzoo
from revzoo._files import json_bytes
from revzoo.core.invertible import all_steps
from revzoo.layers.make_reversible import described_runs, make_reversible, reversible_blocks
from revzoo.layers.side_bits import SideBits
from revzoo.models import REVNETS, RevNet, create_model, from_pretrained
from revzoo.weights.entry import read_entry
from revzoo.weights.errors import EntryError, WeightsError
from revzoo.weights.table import WeightsTable


def test_a_folder_holds_weights_entry_and_card(tmp_path):
    folder = tmp_path / "a" / "net"
    entry = small().save_pretrained(folder, **FACTS)
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    again = read_entry(folder / "config.json")
    assert json_bytes(again.plain()) == json_bytes(entry.plain())
    assert dict(entry.options) == OPTIONS
    assert (entry.license, entry.num_classes, entry.input_size) == ("MIT", 5, (3, 8, 8))
    assert undescribed(entry) == []
    assert entry.sha256 in (folder / "README.md").read_text()


def test_training_keywords_are_not_part_of_the_shape(tmp_path):
    model = create_model("revnet38", memory="store", drop_rate=0.1, drop_path_rate=0.1, dropout=0.1)
    assert model.save_pretrained(tmp_path).options == {}


@pytest.mark.parametrize(("created", "bits"), [(None, None), (None, 6), (4, None), (4, 2)])
def test_a_saved_network_has_its_present_side_bits(created, bits, tmp_path):
    """It was saved with the bits of its creation, so loaded it computed something else."""
    options = {**OPTIONS, "units": (2, 2, 1), "reversible_bits": created}
    model = make_reversible(create_model("resnet32", **options), bits).eval()
    entry = model.save_pretrained(tmp_path, classes=None, mean=None, std=None)
    assert entry.options.get("reversible_bits") == bits
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(from_pretrained(tmp_path).eval()(x), model(x))


def partly(model):
    make_reversible(model, 4, blocks=["stages.1.steps"])


def differing(model):
    reversible = make_reversible(model, 4)
    next(m for m in reversible.modules() if isinstance(m, SideBits)).bits = 2


@pytest.mark.parametrize("change", [partly, differing])
def test_a_saved_network_has_its_runs(change, tmp_path):
    """An entry had one number of bits for all blocks, so others could not be saved."""
    model = create_model("resnet32", **{**OPTIONS, "units": (3, 3, 3)}).eval()
    change(model)
    entry = model.save_pretrained(tmp_path, classes=None, mean=None, std=None)
    again = from_pretrained(tmp_path).eval()
    assert described_runs(again) == described_runs(model) == list(entry.options["reversible_runs"])
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(again(x), model(x))
    fewer = from_pretrained(tmp_path, reversible_bits=1)  # the runs stay
    paths = [row.path for row in reversible_blocks(model)]
    assert [(row.path, row.bits) for row in reversible_blocks(fewer)] == [(p, 1) for p in paths]


def test_an_entry_without_runs_has_all(tmp_path):
    """Entries of earlier versions have the bits alone."""
    options = {**OPTIONS, "units": (2, 2, 1)}
    model = make_reversible(create_model("resnet32", **options), 4).eval()
    model.save_pretrained(tmp_path, classes=None, mean=None, std=None)
    file = tmp_path / "config.json"
    entry = json.loads(file.read_text())
    del entry["options"]["reversible_runs"]
    file.write_text(json.dumps(entry))
    assert described_runs(from_pretrained(tmp_path)) == described_runs(model)
    entry["options"]["reversible_runs"] = ["stem:4 nowhere:4"]
    file.write_text(json.dumps(entry))
    with pytest.raises(EntryError, match=r"describes no network: reversible_runs: 'stem:4 nowhere"):
        from_pretrained(tmp_path)


def test_a_network_trained_further_keeps_the_facts_that_still_hold(tmp_path):
    write_entry(tmp_path, classes=tuple("abcde"))
    table = WeightsTable(tmp_path)
    model = create_model("revnet38", pretrained=True, table=table)
    entry = model.save_pretrained(tmp_path / "same")
    assert (entry.mean, entry.classes) == (FACTS["mean"], tuple("abcde"))
    assert (entry.recipe, entry.metrics, entry.license) == (None, {}, None)
    model.reset_classifier(3)
    entry = model.save_pretrained(tmp_path / "classes", classes=None, mean=None, std=None)
    assert (entry.num_classes, entry.classes) == (3, None)
    assert from_pretrained(tmp_path / "classes").num_classes == 3
    gray = create_model("revnet38", pretrained=True, in_chans=1, table=table)
    with pytest.raises(EntryError, match=r"pass mean=\.\.\., std=\.\.\. of"):
        gray.save_pretrained(tmp_path / "gray")
    entry = gray.save_pretrained(tmp_path / "gray", mean=None, std=None)
    assert (entry.mean, entry.in_chans) == (None, 1)


@pytest.mark.parametrize(
    ("facts", "message"), [({"licence": "MIT"}, "licence"), ({"mean": (1,)}, "mean")]
)
def test_a_fact_that_is_none_writes_nothing(tmp_path, facts, message):
    with pytest.raises(EntryError, match=message):
        small().save_pretrained(tmp_path / "net", **facts)
    assert not (tmp_path / "net").exists()


def pruned(model):
    prune.l1_unstructured(model.fc, "weight", 0.5)


def other_epsilon(model):
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.eps = 0.3


def hidden_by_the_classifier(model):
    torch.nn.init.zeros_(model.fc.weight)
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if isinstance(child, torch.nn.ReLU):
                setattr(m, name, torch.nn.GELU())


def not_finite(model):
    with torch.no_grad():
        model.fc.weight[0] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pruned, "has other tensors; undo weight_norm, pruning(.|\n)*missing: fc.weight"),
        (other_epsilon, "computes something else with the same weights"),
        (hidden_by_the_classifier, "computes something else with the same weights"),
        (lambda model: model.to("meta"), "lies on the meta device"),
        (not_finite, r"NaN or Inf in fc\.weight"),
    ],
)
def test_a_network_that_its_description_would_not_restore_is_refused(change, message, tmp_path):
    """It was saved, and loading it failed or gave another function."""
    model = create_model("revnet38", **OPTIONS)
    change(model)
    before = torch.get_rng_state()
    with pytest.raises(WeightsError, match=message):
        model.save_pretrained(tmp_path / "net", **FACTS)
    assert not (tmp_path / "net").exists()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_of_any_memory_mode_is_saved(tmp_path):
    """The comparison ran in the modes of the two networks, with other grids: one left its range."""
    model = create_model("revnet38", **OPTIONS)
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.running_var.mul_(0.35)
    revzoo.set_memory(model, "exact", grid=4)
    model.save_pretrained(tmp_path, **FACTS)
    assert {step.memory for step in all_steps(model).values()} >= {"exact"}
    assert torch.equal(from_pretrained(tmp_path).fc.weight, model.fc.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_of_any_precision_is_saved(dtype, tmp_path):
    model = small().to(dtype)
    model.save_pretrained(tmp_path, **FACTS)
    loaded = from_pretrained(tmp_path)
    assert all(map(torch.equal, values(loaded), values(model)))


def values(model):
    return [v.double() for v in model.state_dict().values()]


def test_a_network_without_a_name_is_refused(tmp_path):
    with pytest.raises(EntryError, match="make it with create_model"):
        RevNet(REVNETS["revnet38"]).save_pretrained(tmp_path)


def test_a_saved_network_does_not_follow_later_changes(tmp_path):
    model = small()
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.fc.weight.add_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_new_head_asks_for_the_facts_of_its_data(tmp_path):
    """A fine-tuned model was saved with the mean, deviation and classes of its pretraining."""
    write_entry(tmp_path, classes=tuple("abcde"))
    model = create_model("revnet38", pretrained=True, table=WeightsTable(tmp_path))
    model.reset_classifier(5)  # the same number of other classes
    with pytest.raises(
        EntryError, match=r"classes=\.\.\., mean=\.\.\., std=\.\.\. of its training data"
    ):
        model.save_pretrained(tmp_path / "net")
    assert not (tmp_path / "net").exists()
    facts = {"classes": tuple("vwxyz"), "mean": (0.1,) * 3, "std": (0.5,) * 3}
    entry = model.save_pretrained(tmp_path / "net", **facts)
    assert (entry.classes, entry.mean, entry.std) == tuple(facts.values())


def test_a_saved_folder_with_flipped_bits_is_refused_by_name(tmp_path):
    """An option with another name raised an error without the file."""
    network = create_model("revnet38", units=(1, 1, 1))
    network.save_pretrained(tmp_path, mean=[0.5] * 3, std=[0.5] * 3)
    rng, refused = random.Random(0), 0
    for file in ("model.safetensors", "config.json"):
        path = tmp_path / file
        content = path.read_bytes()
        places = [content.index(b"units") + 2] if file == "config.json" else []
        places += [rng.randrange(len(content)) for _ in range(8)]
        for place in places:
            flipped = bytearray(content)
            flipped[place] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped if place % 3 or place in places[:1] else content[:place])
            try:
                found = from_pretrained(tmp_path)
            except WeightsError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017
                refused += 1
            else:
                pairs = zip(found.parameters(), network.parameters(), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
        path.write_bytes(content)
    assert refused > 10
