"""Checkpoints of other programs: we read their tensors, and refuse files with other objects."""

import argparse
import pickle
import tarfile
from collections import OrderedDict

import pytest
import torch
from torch import nn

from revzoo import ConversionError
from revzoo.interop.foreign import read_tensors

TENSORS = {"w": torch.arange(6.0).view(2, 3).T, "n": torch.tensor(3), "h": torch.ones(2).half()}


class Attack:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def assert_same(found, expected=TENSORS):
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        TENSORS,
        OrderedDict(TENSORS),
        {"state_dict": {f"module.{k}": v for k, v in TENSORS.items()}, "epoch": 3},
        {"args": {"lr": 0.1}, "model": {"state_dict": TENSORS}, "best": {1, 2}},
    ],
)
def test_state_dicts_are_found(content, zipped, tmp_path):
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert_same(read_tensors(tmp_path / "a.pt"))


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("zipped", [True, False])
def test_files_with_other_objects_are_refused_with_the_way_out(zipped, tmp_path, capsys):
    path = tmp_path / "a.pt"
    for other in (
        argparse.Namespace(lr=0.1),
        nn.Linear(1, 1),
        Attack(print, "loaded"),
        Attack(open, str(tmp_path / "marker"), "w"),
    ):
        content = {"state_dict": TENSORS, "other": other}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ConversionError, match=r"a\.pt was not loaded.*state_dict\(\)"):
            read_tensors(path)
    assert not (tmp_path / "marker").exists()
    assert capsys.readouterr().out == ""


def test_a_value_in_the_place_of_a_tensor_is_refused(tmp_path):
    torch.save({"w": torch.ones(1), "v": 2.5}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=r"not hold only tensors: v;"):
        read_tensors(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_tensors_cannot_leave_their_storage(tmp_path):
    storage = torch.ones(4).storage
    rebuild = torch._utils._rebuild_tensor_v2
    bad = Attack(rebuild, storage(), 2, (8,), (1,), False, OrderedDict())
    torch.save({"state_dict": {"w": bad}}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=r"a\.pt is damaged.*storage"):
        read_tensors(tmp_path / "a.pt")


def test_what_holds_no_state_dict_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    for content in ({"epoch": 3}, [torch.ones(1)], {"model": 3}):
        torch.save(content, path)
        with pytest.raises(ConversionError, match="holds no state_dict"):
            read_tensors(path)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", pickle.dumps({"a": 1})])
def test_other_files_are_refused(content, tmp_path):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ConversionError, match=r"a\.pt"):
        read_tensors(tmp_path / "a.pt")


def test_tar_files_are_refused(tmp_path):
    with tarfile.open(tmp_path / "b.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(ConversionError, match=r"b\.pt was not loaded.*tar"):
        read_tensors(tmp_path / "b.pt")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "a.pt")


def test_a_tensor_beside_the_weights_does_not_make_them_unreadable(tmp_path):
    state = {"weight": torch.ones(2)}
    path = tmp_path / "model_best.pth.tar"
    torch.save({"epoch": 3, "state_dict": state, "best_acc1": torch.tensor(1.0)}, path)
    assert read_tensors(path).keys() == state.keys()
