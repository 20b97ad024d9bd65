import json
import random

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
        ({"sha256": "G" * 64}, "expected 64 hexadecimal digits"),
        ({"sha256": "A" * 64}, "in lower case"),
        ({"sha256": 7}, "sha256=7, expected a string"),
        ({"name": "revnet38/x"}, "expected architecture.dataset_recipe"),
        ({"name": "revnet110.x"}, r"name='revnet110\.x', expected .* revnet38\.NAME"),
        ({"file": None}, "file and url are both missing"),
        ({"file": "../x.safetensors"}, "without folders"),
        ({"file": "x.pt"}, r"\.safetensors file"),
        ({"url": "file:///etc/hosts"}, "expected https"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"options": {"units": [1, [10**8]]}}, "options=.*expected no number beyond 10000"),
        ({"options": {"drop_rate": float("nan")}}, "options=.*expected no number beyond 10000"),
        ({"input_size": [10**9, 32, 32]}, "expected numbers of at most 16384"),
        ({"classes": ["a", "\ud800"]}, "classes holds items that are not names"),
        ({"classes": ["a"]}, "classes has 1 names, expected num_classes=2"),
        ({"input_size": [3, 32]}, r"expected \[channels, height, width\]"),
        ({"mean": [0.5]}, "expected 3 numbers, one per channel"),
        ({"std": [1, 1, float("nan")]}, "expected numbers above 0, at most 1e"),
        ({"std": [1, 1, 10**400]}, "expected numbers above 0, at most 1e"),
        ({"mean": [1e30, 0, 0]}, "expected numbers, at most 1e"),  # predicted from garbage
        # these allocated without limit in a prediction
        ({"input_size": [3, 10**9, 10**9]}, "expected numbers of at most 16384"),
        ({"crop_pct": 1e-4}, "expected a share above 0, up to 1"),
        ({"std": [1, 1, 0]}, r"std=\(1, 1, 0\), expected numbers above 0"),
        ({"crop_pct": 0}, "crop_pct=0, expected a share above 0, up to 1"),
        ({"crop_pct": 87.5}, "expected a share"),
        ({"crop_pct": "0.875"}, "expected a share"),
        ({"metrics": {"acc": "high"}}, "expected finite numbers"),
        ({"options": [1]}, r"options=\[1\], expected a mapping"),
        ({"nmae": "x"}, r"unknown fields \['nmae'\]"),
        ({"input_size": 3}, r"input_size=3, expected \[channels"),
        ({"url": ["https://x"]}, r"url=\['https://x'\], expected a string"),
        ({"url": "http://["}, "expected https"),
        ({"file": ["x"]}, "file=.*expected a string"),
        ({"classes": [1, 2]}, "items that are not names"),
        ({"default": "yes"}, "default='yes', expected true or false"),
    ],
)
def test_a_field_that_is_not_valid_is_named(tmp_path, change, message):
    path = written(tmp_path, {**VALID, **change})
    with pytest.raises(EntryError, match=message) as caught:
        read_entry(path)
    assert str(caught.value).startswith(str(path))


def test_deep_json_is_refused_by_name(tmp_path):
    """It raised a RecursionError that did not name the file."""
    path = tmp_path / "entry.json"
    for text in ("[" * 100_000, '{"options":' * 100_000):
        path.write_text(text)
        with pytest.raises(EntryError, match=r"entry\.json is not a readable JSON.*too deep"):
            read_entry(path)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """``content`` with a changed byte, a missing piece, or a random value."""
    data = bytearray(content)
    place = rng.randrange(len(data))
    kind = rng.randrange(3)
    if kind == 0:
        data[place] = rng.choice(b'[]{}",:0129-eE.nullNtf\x00\xff')
    elif kind == 1:
        del data[place : place + rng.randrange(1, 20)]
    else:
        values = (b"[1]", b"{}", b"null", b"true", b"-1", b"1e999", b'"x"', b"[[[1]]]", b"9" * 400)
        end = data.find(b",", place)
        start = data.rfind(b":", 0, place) + 1
        data[start:end] = rng.choice(values)
    return bytes(data)


def test_mutated_entries_are_read_or_refused_by_name(tmp_path):
    """A list as ``url`` raised an AttributeError."""
    rng, path = random.Random(0), tmp_path / "entry.json"
    full = {
        **VALID,
        "url": "https://x/y",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "classes": ["a", "b"],
    }
    content = json.dumps(full).encode()
    refused = 0
    for _ in range(300):
        path.write_bytes(mutated(content, rng))
        try:
            read_entry(path)
        except EntryError as error:
            refused += str(path) in str(error)
    assert refused > 200


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
    path = written(tmp_path, {k: VALID[k] for k in VALID.keys() - {"sha256", "num_classes"}})
    with pytest.raises(EntryError, match=r"missing fields \['num_classes', 'sha256'\]"):
        read_entry(path)


def test_shipped_entries_are_complete_and_their_files_are_what_they_say():
    from revzoo.weights.files import read_bytes

    for entry in SHIPPED.entries.values():
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
