import json

import numpy as np
import pytest
from small_weights import undescribed

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
    assert (entry.folder, entry.in_chans) == (tmp_path, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 63}, "expected 64 hexadecimal digits"),
        ({"sha256": "A" * 64}, "in lower case"),
        ({"sha256": 7}, "sha256=7, expected a string"),
        ({"name": "revnet38/x"}, r"name='revnet38/x', expected .* revnet38\.NAME"),
        ({"name": "revnet110.x"}, r"name='revnet110\.x', expected .* revnet38\.NAME"),
        ({"file": None}, "url=None, expected .* or a file beside"),
        ({"file": "../x.safetensors"}, "without folders"),
        ({"file": "x.pt"}, r"\.safetensors file"),
        ({"url": "file:///etc/hosts"}, "expected https"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"classes": ["a"]}, r"classes=\('a',\), expected names, num_classes=2"),
        ({"classes": [1, 2]}, r"classes=\(1, 2\), expected names"),
        ({"class_set": "imagenet"}, "class_set='imagenet', expected one of imagenet-1k"),
        ({"class_set": "imagenet-1k", "classes": ["a", "b"]}, "without classes"),
        ({"input_size": [3]}, r"expected \[channels, height, width\]"),
        ({"input_size": 3}, "input_size=3, expected a list"),
        ({"mean": [0.5]}, "expected numbers, one for each channel"),
        ({"mean": [0, 0, float("inf")]}, "expected numbers, one"),
        ({"std": [1, 1, float("nan")]}, "expected numbers above 0"),
        ({"std": [1, 1, 0]}, r"std=\(1, 1, 0\), expected numbers above 0"),
        ({"crop_pct": 0}, "crop_pct=0, expected a share above 0, up to 1"),
        ({"crop_pct": 87.5}, "expected a share"),
        ({"metrics": {"acc": "high"}}, "expected finite numbers"),
        ({"options": [1]}, r"options=\[1\], expected a mapping"),
        ({"nmae": "x"}, r"unknown fields \['nmae'\]"),
        ({"url": ["https://x"]}, r"url=\['https://x'\], expected a string"),
        ({"default": "yes"}, "default='yes', expected true or false"),
    ],
)
def test_a_field_that_is_not_valid_is_named(tmp_path, change, message):
    path = written(tmp_path, {**VALID, **change})
    with pytest.raises(EntryError, match=message) as caught:
        read_entry(path)
    assert str(caught.value).startswith(str(path))


def test_all_faults_are_reported_at_once():
    with pytest.raises(EntryError, match=r"sha256.*num_classes"):
        WeightsEntry(**{**VALID, "sha256": "", "num_classes": -1})


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_file_that_is_not_an_object_is_refused(tmp_path, text):
    path = tmp_path / "entry.json"
    path.write_text(text)
    with pytest.raises(EntryError, match="JSON"):
        read_entry(path)


def test_missing_fields_are_named(tmp_path):
    path = written(tmp_path, {k: VALID[k] for k in VALID.keys() - {"name", "num_classes"}})
    with pytest.raises(EntryError, match=r"missing fields \['name', 'num_classes'\]"):
        read_entry(path)


def test_shipped_entries_are_complete_and_their_files_are_what_they_say():
    from revzoo.weights.files import read_bytes

    for entry in SHIPPED.entries.values():
        assert entry.parameters, entry.name
        assert "store" in entry.mib, entry.name
        if entry.is_published_file:
            assert entry.license, entry.name
            assert entry.citation, entry.name
            # no library on which the package depends has the names of ImageNet-22k
            if entry.num_classes != 21841:
                assert len(entry.with_classes().classes) == entry.num_classes
            continue
        assert undescribed(entry) == [], entry.name
        assert len(entry.sha256) == 64
        if entry.file and (entry.folder / entry.file).is_file():
            read_bytes(entry)  # verifies the hash
        else:
            assert entry.url, f"{entry.name} has neither file nor url"


def test_metrics_of_numpy_are_plain_numbers():
    """They were accepted, and then json raised a TypeError."""
    entry = WeightsEntry(**{**VALID, "metrics": {"test/acc": np.float32(0.5), "images": 3}})
    assert json.dumps(entry.plain()["metrics"]) == '{"test/acc": 0.5, "images": 3}'
