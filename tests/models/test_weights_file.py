"""Files of tensors: their content; reading them runs no code."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import load, save_file
from small_weights import OPTIONS, write_entry
from torch import nn

from revzoo.models import create_model
from revzoo.models.weights_file import read_weights_file, safetensors_bytes, within_size_of
from revzoo.weights.errors import HashMismatchError, UnreadableWeightsError, WeightsError
from revzoo.weights.header import entry_of_file, metadata_of

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}


def assert_tensors(found):
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[k], TENSORS[k]) for k in TENSORS)


def test_safetensors_tell_their_architecture(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors_bytes(TENSORS, {"architecture": "revnet38"}))
    file = read_weights_file(path)
    assert_tensors(file.tensors)
    assert (file.architecture, file.where) == ("revnet38", str(path))


def test_safetensors_of_others_need_not(tmp_path):
    save_file(TENSORS, tmp_path / "w.safetensors")
    file = read_weights_file(tmp_path / "w.safetensors")
    assert_tensors(file.tensors)
    assert file.architecture is None


def test_the_same_weights_give_the_same_file():
    """safetensors writes the strings of a header in random order."""
    metadata = {"architecture": 'é \\ "revnet"', **{str(i): "text" for i in range(8)}}
    files = {safetensors_bytes(TENSORS, metadata) for _ in range(4)}
    assert len(files) == 1
    (data,) = files
    assert metadata_of(data, "") == metadata
    assert_tensors(load(data))


def test_tensors_that_share_memory_are_written_each():
    shared = torch.ones(2, 2)
    assert safetensors_bytes({"a": shared, "b": shared.t()}, {})


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_state_dicts_lose_the_names_of_wrappers(tmp_path, prefix, suffix):
    path = tmp_path / f"w{suffix}"
    torch.save({prefix + k: v for k, v in TENSORS.items()}, path)
    assert_tensors(read_weights_file(path).tensors)
    torch.save({"state_dict": {prefix + k: v for k, v in TENSORS.items()}}, path)
    assert_tensors(read_weights_file(path).tensors)


def test_a_checkpoint_of_training_gives_its_model_alone(tmp_path):
    state = {**{f"model.{k}": v for k, v in TENSORS.items()}, "metrics.x": torch.ones(1)}
    content = {"state_dict": state, "hyper_parameters": {"model": {"name": "revnet38"}}}
    torch.save(content, tmp_path / "w.ckpt")
    file = read_weights_file(tmp_path / "w.ckpt")
    assert_tensors(file.tensors)
    assert file.architecture == "revnet38"


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    torch.save({"a": Payload(tmp_path / "run")}, tmp_path / "w.pt")
    with pytest.raises(UnreadableWeightsError, match=r"names posix.mkdir: it was not loaded"):
        read_weights_file(tmp_path / "w.pt")
    assert not (tmp_path / "run").exists()
    torch.load(tmp_path / "w.pt", weights_only=False)
    assert (tmp_path / "run").exists()  # unguarded, it runs


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, suffix, size):
    path = tmp_path / f"w{suffix}"
    if suffix == ".pt":
        torch.save(TENSORS, path)
    else:
        path.write_bytes(safetensors_bytes(TENSORS, {"architecture": "revnet38"}))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnreadableWeightsError, match=r"w\."):
        read_weights_file(path)


def test_mutated_headers_of_safetensors_are_read_or_refused_by_name(tmp_path):
    """A deep list in a header raised a RecursionError that did not name the file."""
    rng, path, refused = random.Random(0), tmp_path / "w.safetensors", 0
    known = {"name": "revnet38.x", "architecture": "revnet38", "num_classes": 2}
    content = safetensors_bytes(TENSORS, {"in_chans": "3", "entry": json.dumps(known)})
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(300):
        header = bytearray(content[8:end])
        place = rng.randrange(len(header))
        new = rng.choice(
            (b"[" * 5000, b"[1]", b"null", b'"', b"9" * 5000, bytes([place % 256]), b"")
        )
        header[place : place + rng.randrange(1, 20)] = new
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        for read in (read_weights_file, entry_of_file):
            try:
                read(path)
            except WeightsError as error:
                refused += str(path) in str(error)
                assert str(path) in str(error)  # noqa: PT017
    assert refused > 300


@pytest.mark.parametrize(
    ("content", "message"),
    [([1, 2], "holds a list"), ({"a": torch.ones(1), "epoch": 3}, "not hold only tensors: epoch")],
)
def test_files_without_a_state_dict_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UnreadableWeightsError, match=message):
        read_weights_file(tmp_path / "w.pt")


@pytest.mark.parametrize(("name", "message"), [("w.pt", "no file"), ("w.npz", "unknown format")])
def test_missing_and_unknown_files_are_refused(tmp_path, name, message):
    if name.endswith("npz"):
        (tmp_path / name).touch()
    with pytest.raises(UnreadableWeightsError, match=message):
        read_weights_file(tmp_path / name)


def test_a_file_is_held_against_the_entry_beside_it(tmp_path):
    entry = write_entry(tmp_path)
    path = tmp_path / "revnet38.small.safetensors"
    options = {**OPTIONS, "checkpoint_path": path}
    assert create_model("revnet38", **options).num_classes == 5
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(HashMismatchError, match=f"expects {entry.sha256}"):
        create_model("revnet38", **options)
    path.with_suffix(".json").unlink()
    assert (
        create_model("revnet38", **options).num_classes == 5
    )  # the checkpoint does not name its architecture


def test_a_layer_much_larger_than_the_file_is_refused_before_it_fills_the_memory():
    with (
        pytest.raises(UnreadableWeightsError, match="much larger than its 0 tensors"),
        within_size_of({}, "w"),
    ):
        nn.Linear(2**15, 2**14)
    nn.Linear(2, 2)  # the limit has ended
