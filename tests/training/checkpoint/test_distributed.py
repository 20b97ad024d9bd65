"""Distributed checkpoints: each process writes its parts; one process reads all of them."""

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from two_processes import run

from revzoo import from_pretrained
from revzoo.models.checkpoint_folder import checksum
from revzoo.models.weights_file import read_state_dict, read_weights_file
from revzoo.training.checkpoint import distributed, files
from revzoo.training.checkpoint.distributed import write_distributed
from revzoo.training.checkpoint.files import (
    DamagedCheckpointError,
    read_checkpoint,
    read_last,
    write_checkpoint,
)
from revzoo.weights.errors import UnknownWeightsError, UnreadableWeightsError
from revzoo.weights.source import BEST, LAST, PLAIN_PART, PREVIOUS, checkpoint_of, find_entry

WHOLE = torch.arange(15.0).reshape(5, 3)  # 3 rows in process 0, 2 in process 1
SCALE = torch.tensor([2.0, 3.0], dtype=torch.bfloat16)


def state(mesh, number):
    def divided(whole):
        return distribute_tensor(whole, mesh, [Shard(0)])

    return {
        "state_dict": {"w": divided(WHOLE + number), "mean": torch.tensor(number)},
        "optimizer_states": [{"state": {0: {"scale": divided(SCALE)}}, "param_groups": [0.1]}],
        "number": number,
    }


def refusal(path, content):
    """What an attempt to save raises in this process."""
    try:
        write_distributed(content, path)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def save_all(folder, rank):
    mesh = init_device_mesh("cpu", (2,))
    for number in range(3):
        write_distributed(state(mesh, number), folder / LAST)
    (folder / ".best.ckpt.saving").mkdir(exist_ok=True)  # what a kill has left
    (folder / ".best.ckpt.saving/shard-00009-x.safetensors").touch()
    torch.distributed.barrier()
    for number in range(2):
        write_distributed(state(mesh, number), folder / BEST)
    refused = [refusal(folder / LAST, {**state(mesh, 3), "callbacks": {"x": Path("a")}})]
    fsync = os.fsync

    def full(*_):
        raise OSError(28, "No space left on device")

    for process in range(2):
        os.fsync = full if process == rank else fsync
        refused.append(refusal(folder / LAST, state(mesh, 3)))
    os.fsync = fsync
    known = distributed.checksum
    if rank == 1:
        distributed.checksum = full
    refused.append(refusal(folder / LAST, state(mesh, 3)))
    distributed.checksum = known
    refused.append(refusal(folder / f"host{rank}" / LAST, state(mesh, 3)))
    # a folder that the system does not remove
    (folder / ".stuck.ckpt.saving").mkdir(exist_ok=True)
    (folder / ".stuck.ckpt.saving/shard-00009-x.safetensors").touch()
    remove, distributed.remove = distributed.remove, lambda path: None
    refused.append(refusal(folder / "stuck.ckpt", state(mesh, 3)))
    distributed.remove = remove
    torch.distributed.barrier()
    remove(folder / ".stuck.ckpt.saving")
    return refused


@pytest.fixture(scope="module")
def saved():
    """The folder of checkpoints, and what the processes could not save."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name), run(partial(save_all, Path(name)))


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "copied"))


def test_one_process_reads_all(saved):
    folder, _ = saved
    for name, number in {LAST: 2, PREVIOUS: 1, BEST: 1}.items():
        found = read_checkpoint(folder / name)
        assert torch.equal(found["state_dict"]["w"], WHOLE + number)
        assert torch.equal(found["optimizer_states"][0]["state"][0]["scale"], SCALE)
        assert found["state_dict"]["mean"] == number == found["number"]
        assert found["optimizer_states"][0]["param_groups"] == [0.1]
        assert torch.equal(read_state_dict(folder / name).tensors["w"], WHOLE + number)


def test_each_process_writes_its_part_alone(saved):
    sizes = [file.stat().st_size for file in sorted((saved[0] / LAST).glob("*.safetensors"))]
    assert len(sizes) == 2
    assert sizes[0] - sizes[1] == WHOLE[0].nbytes


def test_without_values_tensors_are_empty(saved):
    found = read_checkpoint(saved[0] / LAST, values=False)
    assert found["state_dict"]["w"].is_meta
    assert found["state_dict"]["w"].shape == WHOLE.shape
    assert not found["state_dict"]["mean"].is_meta


def test_all_processes_refuse_together(saved):
    """With one that fails, the others waited for it."""
    folder, (first, second) = saved
    assert first == second
    what, disk0, disk1, unread, apart, stuck = first
    assert what.startswith("CheckpointError: ")
    assert "its state holds pathlib.PosixPath" in what
    for text in (disk0, disk1, unread):
        assert text.startswith("UnwritableCheckpointError: cannot write ")
        assert "No space left" in text
    assert "another machine has written shard-00002" in apart
    assert "hydra.run.dir" in apart
    assert "shard-00009" in stuck
    assert "an earlier save has left it" in stuck
    # nothing of them is left
    assert {path.name for path in folder.iterdir()} == {LAST, PREVIOUS, BEST, "host0", "host1"}
    assert not (folder / "host0" / LAST).exists()


def test_damage_falls_back_to_the_previous_one(copied):
    last = copied / LAST
    file = next(last.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"safetensors is damaged.*use another copy"):
        read_checkpoint(last)
    for _ in range(2):  # the second finds an earlier damaged folder
        path, found = read_last(copied)
        assert path == copied / PREVIOUS
        assert found["number"] == 1
        assert (copied / f"{LAST}.damaged" / file.name).read_bytes() == content
        shutil.copytree(copied / f"{LAST}.damaged", last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda last: next(last.glob("*.safetensors")).unlink(), "is not a file in the folder"),
        (lambda last: (last / "a.safetensors").touch(), "a.safetensors is damaged, or of another"),
        (lambda last: (last / PLAIN_PART).write_bytes(b"x"), "meta.pt is damaged, cut off or"),
        (lambda last: torch.save({"state": 1}, last / PLAIN_PART), "lacks the state or the check"),
        (lambda last: os.mkfifo(last / "a.safetensors"), "a.safetensors is not a file in the"),
        (lambda last: named(last, {"../../a": 0, 1: "x"}), "../../a is not a file in the folder"),
        (lambda last: renamed(last), "does not hold the tensors that it names"),
        # torch would leave rows as they are in memory
        (lambda last: moved(last, 0, 1), r"the parts of state_dict.w are not those of \(5, 3\)"),
        (lambda last: moved(last, 1, -1), r"the parts of state_dict.w are not those of \(5, 3\)"),
        (lambda last: moved(last, 1, 1), r"the parts of state_dict.w are not those of \(5, 3\)"),
        (lambda last: moved(last, 1, "x"), "does not hold the tensors that it names"),
    ],
)
def test_what_is_not_whole_is_refused(change, message, copied):
    change(copied / LAST)
    with pytest.raises(UnreadableWeightsError, match=message) as error:
        read_state_dict(copied / LAST)
    assert str(error.value).count("use another copy of it") == 1


def named(last, sums):
    content = torch.load(last / PLAIN_PART)
    content["checksums"] |= sums
    torch.save(content, last / PLAIN_PART)


def moved(last, shard, by):
    """Rows of ``w`` claim another place, in a folder whose checksums are right."""
    file = sorted(last.glob("*.safetensors"))[shard]
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    places = json.loads(metadata["DCP_SHARDING_INFO"])
    offset = places["state_dict.w"]["saved_offsets"]
    offset[0] = by if isinstance(by, str) else offset[0] + by
    metadata["DCP_SHARDING_INFO"] = json.dumps(places)
    save_file(tensors, file, metadata)
    named(last, {file.name: checksum(file)})


def renamed(last):
    content = torch.load(last / PLAIN_PART)
    content["state"]["state_dict"]["v"] = content["state"]["state_dict"].pop("w")
    torch.save(content, last / PLAIN_PART)


def test_a_file_replaces_a_folder(copied):
    """A run may go on with another trainer."""
    write_checkpoint({"state_dict": {}, "number": 5}, copied / LAST)
    assert read_checkpoint(copied / LAST)["number"] == 5
    assert read_checkpoint(copied / PREVIOUS)["number"] == 2
    write_checkpoint({"state_dict": {}, "number": 6}, copied / BEST)
    assert read_checkpoint(copied / BEST)["number"] == 6
    assert not [path for path in copied.iterdir() if path.name.startswith(".")]


def test_a_link_to_a_folder_is_replaced(copied):
    """It stayed as a hidden link, in whose place no later folder could be moved."""
    for name in (BEST, LAST):
        for number in range(3):
            (copied / name).rename(copied / f"{name}{number}")
            (copied / name).symlink_to(copied / f"{name}{number}")
            write_checkpoint({"state_dict": {}, "number": number}, copied / name)
            assert read_checkpoint(copied / name)["number"] == number
        assert read_checkpoint(copied / f"{name}0")["state_dict"]
    assert not [path for path in copied.iterdir() if path.name.startswith(".")]


def test_any_name(copied):
    """Commands took a file of the folder for weights."""
    other = (copied / BEST).rename(copied / "other.v2")
    assert torch.equal(read_weights_file(other).tensors["w"], WHOLE + 1)
    assert checkpoint_of(other) == other
    assert find_entry(other) is None
    with pytest.raises(UnknownWeightsError, match="is a run or its checkpoint, not weights"):
        from_pretrained(f"{copied / LAST}/")
    (copied / LAST / PLAIN_PART).unlink()
    with pytest.raises(UnreadableWeightsError, match=f"there is no file .*{PLAIN_PART}"):
        read_weights_file(copied / LAST)


def test_another_process_has_renamed_a_damaged_one(copied, monkeypatch):
    def read(path, **options):
        if path.name == LAST:
            raise FileNotFoundError(path / "shard-00002")
        return read_checkpoint(path, **options)

    monkeypatch.setattr(files, "read_checkpoint", read)
    assert read_last(copied)[0] == copied / PREVIOUS


def test_checksums_are_of_the_bytes(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"123456789")
    assert checksum(tmp_path / "a.safetensors") == 0xCBF43926  # the check value of CRC-32
