import builtins
import collections
import io
import logging
import os
import pickle
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from two_processes import start

from revzoo.training.checkpoint import files
from revzoo.training.checkpoint.files import (
    CheckpointError,
    DamagedCheckpointError,
    PlainCheckpointIO,
    read_checkpoint,
    read_last,
    write_checkpoint,
)
from revzoo.weights.source import LAST, PREVIOUS


def state(number=0, **more):
    return {"state_dict": {"w": torch.full((1000,), float(number))}, "number": number, **more}


def save(path, number=0):
    write_checkpoint(state(number), path)
    return path


def test_a_written_checkpoint_is_read_back(tmp_path):
    plain = state(
        nested={"list": [1, 2.5, None, True, ("a", b"b")], 3: torch.ones(2, dtype=torch.bfloat16)},
        milestones=collections.Counter({5: 1}),
    )
    write_checkpoint(plain, tmp_path / "new" / "a.ckpt")
    found = read_checkpoint(tmp_path / "new" / "a.ckpt")
    assert found["nested"]["list"] == plain["nested"]["list"]
    assert torch.equal(found["nested"][3], plain["nested"][3])
    assert found["milestones"] == plain["milestones"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.ckpt"]


class Word(str):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.float64(1), "numpy.*scalar"),
        (Path("a"), "pathlib.PosixPath"),
        (len, "builtin"),
        (Word("a"), "test_files.Word"),
    ],
)
def test_what_no_run_could_read_is_not_written(value, named, tmp_path):
    path = save(tmp_path / LAST, 1)
    with pytest.raises(CheckpointError, match=f"last.ckpt is not written.*{named}.*expected"):
        write_checkpoint(state(2, callbacks={"x": [0, value]}), path)
    assert read_checkpoint(path)["number"] == 1
    assert [p.name for p in tmp_path.iterdir()] == [LAST]


def test_the_previous_checkpoint_is_kept(tmp_path):
    for number in range(3):
        save(tmp_path / LAST, number)
    assert read_checkpoint(tmp_path / LAST)["number"] == 2
    assert read_checkpoint(tmp_path / PREVIOUS)["number"] == 1
    save(tmp_path / "best.ckpt")
    save(tmp_path / "best.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {LAST, PREVIOUS, "best.ckpt"}


def test_without_hard_links_the_previous_checkpoint_is_kept_too(tmp_path, monkeypatch):
    def refused(self, target):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    for number in range(2):
        save(tmp_path / LAST, number)
    assert read_checkpoint(tmp_path / LAST)["number"] == 1
    assert read_checkpoint(tmp_path / PREVIOUS)["number"] == 0


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = save(tmp_path / LAST, 1)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(path, 2)
    assert read_checkpoint(path)["number"] == 1
    assert [p.name for p in tmp_path.iterdir()] == [LAST]


def test_file_and_folder_are_synced(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda h: (events.append(str(Path(f"/proc/self/fd/{h}").readlink())), fsync(h))
    )
    monkeypatch.setattr(
        Path, "replace", lambda s, t: (events.append(f"{s.name}->{t.name}"), replace(s, t))
    )
    for _ in range(2):
        events.clear()
        save(tmp_path / LAST)
    temporary = tmp_path / ".last.ckpt.saving"
    assert events == [str(temporary), ".last.ckpt.saving->last.ckpt", str(tmp_path)]


class Hostile:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("legacy", [False, True])
def test_no_pickle_is_executed(tmp_path, legacy):
    path, target = tmp_path / "a.ckpt", tmp_path / "executed"
    hostile = {"state_dict": {}, "x": Hostile(target)}
    if legacy:
        path.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        read_checkpoint(path)
    with pytest.raises(CheckpointError):
        PlainCheckpointIO().load_checkpoint(path, weights_only=False)
    assert not target.exists()
    if not legacy:
        torch.load(path, weights_only=False)
        assert target.exists()  # the attack works without the check


def test_every_cut_and_every_flipped_bit_is_found(tmp_path):
    whole = save(tmp_path / "a.ckpt").read_bytes()
    good = read_checkpoint(tmp_path / "a.ckpt")["state_dict"]["w"]
    path, rng = tmp_path / "b.ckpt", random.Random(0)
    for _ in range(40):
        path.write_bytes(whole[: rng.randrange(len(whole))])
        with pytest.raises(CheckpointError, match=r"b\.ckpt is damaged, cut off or not"):
            read_checkpoint(path)
    for _ in range(80):
        place = rng.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read_checkpoint(path)  # bits between the entries of the archive have no meaning
        except CheckpointError:
            continue
        assert torch.equal(found["state_dict"]["w"], good), place


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a checkpoint"),
        (b"<html>", "not a checkpoint"),
        ({"a": 1}, r"got \['a'\]"),
        ([1], "got list"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    path = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no file .*a\.ckpt"):
        read_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"there is no file .*last\.ckpt"):
        read_last(tmp_path)


def test_the_previous_checkpoint_replaces_a_damaged_one(tmp_path, caplog, monkeypatch):
    for number in range(2):
        save(tmp_path / LAST, number)
    (tmp_path / LAST).write_bytes((tmp_path / LAST).read_bytes()[:-100])
    for rank in ("1", "0"):  # the first process says so for all
        monkeypatch.setenv("LOCAL_RANK", rank)
        with caplog.at_level(logging.WARNING):
            path, found = read_last(tmp_path)
        assert (path.name, found["number"]) == (PREVIOUS, 0)
        assert len(caplog.messages) == (rank == "0")
    assert "cut off" in caplog.text
    assert "use another copy of it" not in caplog.text
    assert "previous.ckpt" in caplog.text
    save(tmp_path / LAST, 2)  # the damaged one must not become the previous one
    assert read_checkpoint(tmp_path / PREVIOUS)["number"] == 0


def test_a_file_that_the_system_does_not_open_is_not_damaged(tmp_path, monkeypatch):
    """A run resumed from the epoch before, and renamed its good ``last.ckpt``."""
    last = save(save(tmp_path / LAST, 1), 2)
    opened = open

    def refuse(file, *args, **keywords):
        if str(file) == str(last):
            raise PermissionError(13, "Permission denied", str(last))
        return opened(file, *args, **keywords)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", refuse)
    with pytest.raises(PermissionError, match=str(last)):
        read_last(tmp_path)
    assert last.exists()


def checker(*, damaged=(), refused=()):
    """A check that refuses states with these numbers as damaged, or as another run's."""

    def check(found, path):
        if found["number"] in damaged:
            raise DamagedCheckpointError(f"{path} is bad")
        if found["number"] in refused:
            raise CheckpointError(f"{path}: of another run")

    return check


@pytest.mark.parametrize(
    ("check", "outcome", "names"),
    [
        (checker(), LAST, {LAST, PREVIOUS}),
        (checker(damaged=[1]), PREVIOUS, {PREVIOUS, f"{LAST}.damaged"}),
        (
            checker(damaged=[0, 1]),
            r"last.ckpt is bad; the one before it, too: .*previous\.ckpt is bad",
            {LAST, PREVIOUS},
        ),
        (checker(refused=[1]), r"last\.ckpt: of another run$", {LAST, PREVIOUS}),
        (checker(damaged=[1], refused=[0]), r"previous\.ckpt: of another run$", {LAST, PREVIOUS}),
    ],
)
def test_the_previous_checkpoint_replaces_one_that_fails_its_check(check, outcome, names, tmp_path):
    for number in range(2):
        save(tmp_path / LAST, number)
    if outcome in names:
        path, found = read_last(tmp_path, check)
        assert (path.name, found["number"]) == (outcome, int(outcome == LAST))
    else:
        with pytest.raises(CheckpointError, match=outcome) as got:
            read_last(tmp_path, check)
        assert "\n" not in str(got.value)
    assert {p.name for p in tmp_path.iterdir()} == names


def save_forever(folder, number, pipe):
    """Save checkpoints, and report each after it is written."""
    while True:
        weights = torch.full((200_000,), float(number))
        write_checkpoint({"state_dict": {"w": weights}, "number": number}, folder / LAST)
        os.write(pipe, number.to_bytes(4, "big"))
        number += 1


def newest(folder):
    """The newest state; every file with the name of a checkpoint must be complete."""
    numbers = [-1]
    for name in (LAST, PREVIOUS):
        if (folder / name).exists():
            found = read_checkpoint(folder / name)
            assert (found["state_dict"]["w"] == found["number"]).all()
            numbers.append(found["number"])
    return max(numbers)


def kill_while_saving(_, folder, kills):
    """Forks a process that saves, kills it and checks the files; this one must have no threads."""
    torch.set_num_threads(1)
    rng, unfinished = random.Random(0), 0
    for _ in range(kills):
        before = newest(folder)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_forever(folder, before + 1, writing)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            acknowledged = file.read()[-4:]
        assert newest(folder) >= (int.from_bytes(acknowledged, "big") if acknowledged else before)
        unfinished += any(folder.glob(".*"))
    folder.with_name("unfinished").write_text(str(unfinished))


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_lose_no_checkpoint(kills, tmp_path):
    (tmp_path / "run").mkdir()
    start(kill_while_saving, tmp_path / "run", kills, count=1)
    # some kills came in the middle of a save
    assert int((tmp_path / "unfinished").read_text()) >= kills // 10


def test_lightning_writes_and_reads_through_it(tmp_path):
    plugin = PlainCheckpointIO()
    plugin.save_checkpoint(state(4), tmp_path / LAST)
    assert plugin.load_checkpoint(tmp_path / LAST)["number"] == 4
    plugin.remove_checkpoint(tmp_path / LAST)
    assert not (tmp_path / LAST).exists()
    assert files.TEMPORARY not in "".join(p.name for p in tmp_path.iterdir())


def test_only_an_hour_of_failed_saves_ends_the_run(tmp_path, monkeypatch, caplog):
    """A failed save is logged as an error; the run ends if no save succeeds for an hour."""
    clock, io, blocked = [100.0], PlainCheckpointIO(), tmp_path / "file"
    monkeypatch.setattr(files.time, "monotonic", lambda: clock[0])
    blocked.write_text("no folder")
    io.save_checkpoint(state(), blocked / LAST)
    assert [r.levelname for r in caplog.records if "The run continues" in r.message] == ["ERROR"]
    assert blocked / LAST in io.failed
    clock[0] += 3000
    io.save_checkpoint(state(), blocked / LAST)
    io.save_checkpoint(state(), tmp_path / LAST)  # one success is enough
    for _ in range(2):
        clock[0] += 3000
        io.save_checkpoint(state(), blocked / LAST)
    clock[0] += 1000
    with pytest.raises(CheckpointError, match=r"cannot write .*file/last.ckpt"):
        io.save_checkpoint(state(), blocked / LAST)
