"""Files of tensors: their content; reading them runs no code."""

import argparse
import os
import random
import tarfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load, save_file
from small_weights import OPTIONS, write_entry
from torch import nn
from torch.serialization import set_crc32_options

from revzoo.interop.published import load_published
from revzoo.models import create_model
from revzoo.models.weights_file import read_state_dict, read_weights_file, safetensors_bytes
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.weights.entry import entry_of_file, metadata_of
from revzoo.weights.errors import HashMismatchError, UnreadableWeightsError, WeightsError

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
    assert metadata_of(data) == metadata
    assert_tensors(load(data))


def test_tensors_that_share_memory_are_written_each():
    shared = torch.ones(2, 2)
    assert safetensors_bytes({"a": shared, "b": shared.t()}, {})


@pytest.mark.parametrize("prefix", ["", "module.module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("keys", [[], ["state_dict"], ["model", "state_dict"]])
def test_state_dicts_lose_their_wrappers(tmp_path, prefix, keys):
    content = {prefix + k: v for k, v in TENSORS.items()}
    for key in reversed(keys):
        content = {key: content, "epoch": 3, "args": {"lr": 0.1}}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=bool(prefix))
    assert_tensors(read_weights_file(tmp_path / "w.pth").tensors)


def test_a_checkpoint_of_training_gives_its_model_alone(tmp_path):
    state = {**{f"model.{k}": v for k, v in TENSORS.items()}, "metrics.x": torch.ones(1)}
    content = {"state_dict": state, "hyper_parameters": {"model": {"name": "revnet38"}}}
    torch.save(content, tmp_path / "w.ckpt")
    file = read_weights_file(tmp_path / "w.ckpt")
    assert_tensors(file.tensors)
    assert file.architecture == "revnet38"


class Payload:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    torch.save({"a": Payload(os.mkdir, str(tmp_path / "run"))}, tmp_path / "w.pt")
    with pytest.raises(UnreadableWeightsError, match=r"was not loaded.*GLOBAL posix.mkdir"):
        read_weights_file(tmp_path / "w.pt")
    assert not (tmp_path / "run").exists()
    torch.load(tmp_path / "w.pt", weights_only=False)
    assert (tmp_path / "run").exists()  # unguarded, it runs


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("other", [argparse.Namespace(lr=0.1), nn.Linear(1, 1)])
def test_other_objects_beside_the_weights_are_refused(tmp_path, other, zipped):
    content = {"state_dict": TENSORS, "other": other}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnreadableWeightsError, match=r"a\.pt was not loaded.*state_dict\(\)"):
        read_weights_file(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_tensors_cannot_leave_their_storage(tmp_path):
    storage = torch.ones(4).storage()
    bad = Payload(torch._utils._rebuild_tensor_v2, storage, 2, (8,), (1,), False, OrderedDict())
    torch.save({"state_dict": {"w": bad}}, tmp_path / "a.pt")
    with pytest.raises(UnreadableWeightsError, match=r"a\.pt is damaged.*storage"):
        read_weights_file(tmp_path / "a.pt")


def test_tar_files_are_refused(tmp_path):
    with tarfile.open(tmp_path / "b.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(UnreadableWeightsError, match=r"b\.pt was not loaded.*tar"):
        read_weights_file(tmp_path / "b.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, suffix, size):
    path = tmp_path / f"w{suffix}"
    if suffix == ".pt":
        torch.save(TENSORS, path)
    else:
        path.write_bytes(safetensors_bytes(TENSORS, {"architecture": "revnet38"}))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnreadableWeightsError, match=r"w\."):
        read_weights_file(path)


@pytest.mark.parametrize("new", [b"[" * 5000, b"[1]", b"null", b'"', b"9" * 5000, b"\xff", b""])
def test_a_damaged_header_of_safetensors_is_refused_by_name(tmp_path, new):
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors_bytes(TENSORS, {"architecture": "revnet38"})[:8] + new)
    for read in (read_weights_file, entry_of_file):
        with pytest.raises(WeightsError, match=str(path)):
            read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds no state_dict"),
        ({"epoch": 3}, "holds no state_dict"),
        ({"a": torch.ones(1), "epoch": 3}, "not hold only tensors: epoch"),
    ],
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


READERS = {
    "zoo": read_weights_file,
    "model": lambda path: create_model("revnet38", checkpoint_path=path),
    "training": read_checkpoint,
    "published": lambda path: load_published(path, "memcnn"),
}
WEIGHT = torch.arange(1000.0)


def save(path):
    torch.save({"state_dict": {"w": WEIGHT}}, path)
    return path.read_bytes()


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_of_a_weight_is_found_by_every_reader(tmp_path, reader):
    path = tmp_path / "a.pt"
    whole = save(path)
    damaged = bytearray(whole)
    damaged[whole.index(WEIGHT.numpy().tobytes()) + 402] ^= 0x3F
    path.write_bytes(damaged)
    assert not torch.equal(torch.load(path)["state_dict"]["w"], WEIGHT), "torch says nothing"
    with pytest.raises((RuntimeError, ValueError), match=r"a\.pt is damaged.*checksum of a/data/0"):
        READERS[reader](path)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_without_sums_are_read(tmp_path, zipped):
    set_crc32_options(False)
    try:
        content = {"state_dict": {"w": WEIGHT}}
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    finally:
        set_crc32_options(True)
    assert torch.equal(read_weights_file(tmp_path / "a.pt").tensors["w"], WEIGHT)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:.torch.load. received")
@pytest.mark.parametrize("reader", READERS)
def test_a_program_is_not_loaded(tmp_path, reader, monkeypatch):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "a.pt")
    monkeypatch.setattr(torch.jit, "load", lambda *args, **options: pytest.fail("it was loaded"))
    with pytest.raises((RuntimeError, ValueError), match=r"a\.pt was not loaded.*TorchScript"):
        READERS[reader](tmp_path / "a.pt")


def test_damaged_archives_are_refused_by_name(tmp_path):
    """Damaged names and versions in an archive's directory raised errors of ``zipfile``."""
    path, rng = tmp_path / "a.pt", random.Random(0)
    whole = save(path)
    directory, refused = whole.index(b"PK\x01\x02"), 0
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[rng.randrange(directory, len(whole))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_weights_file(path)
        except WeightsError as error:
            refused += str(path) in str(error)
            assert str(path) in str(error)  # noqa: PT017
    assert refused > 8


def test_a_pipe_is_not_a_checkpoint(tmp_path):
    """Opening a pipe blocks until a writer comes."""
    os.mkfifo(tmp_path / "a.pt")
    for read in READERS.values():
        with pytest.raises((RuntimeError, ValueError), match=r"there is no .*a\.pt"):
            read(tmp_path / "a.pt")


def test_a_tensor_beside_the_weights_does_not_make_them_unreadable(tmp_path):
    path = tmp_path / "model_best.pth.tar"
    torch.save({"epoch": 3, "state_dict": TENSORS, "best_acc1": torch.tensor(1.0)}, path)
    assert_tensors(read_state_dict(path).tensors)
