"""Checkpoints with foreign objects: we read their tensors and run none of their code."""

import argparse
import io
import pickle
import sys
import tarfile
import types
import zipfile
from collections import OrderedDict

import pytest
import torch
from torch import nn

from revzoo import ConversionError
from revzoo.interop.foreign import Placeholder, read_tensors

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
        {"args": argparse.Namespace(lr=0.1), "model": {"state_dict": TENSORS}, "best": {1, 2}},
        {"args": [argparse.Namespace(), io.StringIO], "net": TENSORS},
    ],
)
def test_state_dicts_are_found(content, zipped, tmp_path):
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert_same(read_tensors(tmp_path / "a.pt"))


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_model_pickled_whole_gives_its_tensors_without_its_class(zipped, tmp_path, monkeypatch):
    module = types.ModuleType("gone")
    kind = type("Net", (nn.Module,), {"__module__": "gone"})
    module.Net = kind
    monkeypatch.setitem(sys.modules, "gone", module)
    net = kind()
    net.inner = nn.DataParallel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
    content = {"model": nn.DataParallel(net), "acc": 94.5}
    torch.save(content, tmp_path / "a.t7", _use_new_zipfile_serialization=zipped)
    monkeypatch.delitem(sys.modules, "gone")
    assert_same(read_tensors(tmp_path / "a.t7"), net.state_dict())


@pytest.mark.parametrize("zipped", [True, False])
def test_calls_in_a_file_are_not_made(zipped, tmp_path, capsys):
    marker = tmp_path / "marker"
    attacks = [
        Attack(open, str(marker), "w"),
        Attack(exec, f"open({str(marker)!r}, 'w')"),
        Attack(__import__, "antigravity"),
        Attack(print, "loaded"),
    ]
    content = {"state_dict": TENSORS, "history": attacks}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert_same(read_tensors(tmp_path / "a.pt"))
    assert not marker.exists()
    assert "antigravity" not in sys.modules
    assert capsys.readouterr().out == ""


def test_a_call_in_the_place_of_a_tensor_is_refused(tmp_path):
    content = {"w": torch.ones(1), "v": Attack(print, "x")}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=r"'v' is <\w*builtin\w*\.print, not loaded>"):
        read_tensors(tmp_path / "a.pt")


def test_tensors_cannot_leave_their_storage(tmp_path):
    storage = torch.ones(4).storage
    rebuild = torch._utils._rebuild_tensor_v2
    bad = Attack(rebuild, storage(), 2, (8,), (1,), False, OrderedDict())
    foreign = argparse.Namespace()
    torch.save({"state_dict": {"w": bad}, "args": foreign}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match="are out of bounds for storage"):
        read_tensors(tmp_path / "a.pt")


def test_what_holds_no_state_dict_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    for content in ({"epoch": 3}, [torch.ones(1)], {"model": argparse.Namespace()}):
        torch.save(content, path)
        with pytest.raises(ConversionError, match="holds no state_dict"):
            read_tensors(path)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", pickle.dumps({"a": 1})])
def test_other_files_are_refused(content, tmp_path):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ConversionError, match=r"a\.pt"):
        read_tensors(tmp_path / "a.pt")


def test_programs_and_tar_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/constants.pkl", b"")
    with pytest.raises(ConversionError, match="TorchScript"):
        read_tensors(tmp_path / "a.pt")
    with tarfile.open(tmp_path / "b.pt", "w"):
        pass
    with pytest.raises(ConversionError, match=r"torch 0\.1"):
        read_tensors(tmp_path / "b.pt")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "a.pt")


def test_placeholders_do_nothing():
    thing = Placeholder(1, key=2)
    thing.append(1)
    thing.extend([1])
    thing["a"] = 1
    assert vars(thing) == {}
