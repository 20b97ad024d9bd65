import json

import pytest

from revzoo.weights.entry import WeightsEntry, read_entry
from revzoo.weights.errors import EntryError
from revzoo.weights.table import SHIPPED

VALID = {
    "name": "revnet38.cifar10",
    "architecture": "revnet38",
    "num_classes": 2,
    "input_size": [3, 32, 32],
    "sha256": "0" * 64,
    "file": "revnet38.cifar10.safetensors",
}


def written(folder, values):
    path = folder / "entry.json"
    path.write_text(json.dumps(values))
    return path


def test_an_entry_survives_its_json(tmp_path):
    full = {
        **VALID,
        "url": "https://host/w",
        "options": {"units": [1, 1, 1]},
        "default": True,
        "classes": ["a", "b"],
        "mean": [0.1, 0.2, 0.3],
        "std": [1, 1, 1],
        "license": "MIT",
        "recipe": "python train.py",
        "metrics": {"test/acc": 0.9},
        "measured_on": "10,000 images",
    }
    entry = read_entry(written(tmp_path, full))
    assert json.loads(json.dumps(entry.plain())) == full
    assert entry == WeightsEntry(**full)
    assert (entry.folder, entry.in_chans, entry.undescribed()) == (tmp_path, 3, [])


def test_what_is_left_out_is_told(tmp_path):
    entry = read_entry(written(tmp_path, VALID))
    missing = ["mean", "std", "license", "recipe", "metrics", "measured_on"]
    assert entry.undescribed() == missing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 63}, "expected 64 hexadecimal digits"),
        ({"sha256": "G" * 64}, "expected 64 hexadecimal digits"),
        ({"sha256": "A" * 64}, "in lower case"),
        ({"sha256": 7}, "expected 64 hexadecimal digits"),
        ({"name": "revnet38/x"}, "expected architecture.dataset_recipe"),
        ({"name": "revnet110.x"}, "is not what the name begins with"),
        ({"file": None}, "file and url are both missing"),
        ({"file": "../x.safetensors"}, "without folders"),
        ({"file": "x.pt"}, r"\.safetensors file"),
        ({"url": "file:///etc/hosts"}, "expected https"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"classes": ["a"]}, "classes has 1 names, expected num_classes=2"),
        ({"input_size": [3, 32]}, r"expected \[channels, height, width\]"),
        ({"mean": [0.5]}, "expected 3 numbers, one per channel"),
        ({"std": [1, 1, float("nan")]}, "expected 3 numbers"),
        ({"std": [1, 1, 10**400]}, "expected 3 numbers"),
        ({"std": [1, 1, 0]}, r"std=\(1, 1, 0\), expected numbers above 0"),
        ({"crop_pct": 0}, "crop_pct=0, expected a share above 0, up to 1"),
        ({"crop_pct": 87.5}, "expected a share"),
        ({"crop_pct": "0.875"}, "expected a share"),
        ({"metrics": {"acc": "high"}}, "expected finite numbers"),
        ({"options": [1]}, "must be objects"),
        ({"nmae": "x"}, r"unknown fields \['nmae'\]"),
        ({"input_size": 3}, "another type"),
    ],
)
def test_a_field_that_is_not_valid_is_named(tmp_path, change, message):
    with pytest.raises(EntryError, match=message):
        read_entry(written(tmp_path, {**VALID, **change}))


def test_all_faults_are_told_at_once():
    with pytest.raises(EntryError, match=r"sha256.*num_classes"):
        WeightsEntry(**{**VALID, "sha256": "", "num_classes": -1})


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_file_that_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "entry.json"
    path.write_text(text)
    with pytest.raises(EntryError, match="JSON"):
        read_entry(path)


def test_missing_fields_are_named(tmp_path):
    path = written(tmp_path, {k: VALID[k] for k in VALID.keys() - {"sha256", "num_classes"}})
    with pytest.raises(EntryError, match=r"missing fields \['num_classes', 'sha256'\]"):
        read_entry(path)


def test_shipped_entries_are_complete_and_their_files_are_what_they_say():
    from revzoo.weights.files import read_bytes

    for entry in SHIPPED.entries.values():
        assert entry.undescribed() == [], entry.name
        assert len(entry.sha256) == 64
        if entry.file and (entry.folder / entry.file).is_file():
            read_bytes(entry)  # verifies the hash
        else:
            assert entry.url, f"{entry.name} has neither file nor url"
