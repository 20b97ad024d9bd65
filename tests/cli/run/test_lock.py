from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from revzoo.cli.main import main
from revzoo.cli.run.folder import LOCK_FILE, locked

HOLDER = """
import sys, time
from pathlib import Path
from revzoo.cli.run.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_second_program_names_the_holder_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            with pytest.raises(SystemExit) as end, locked(tmp_path):
                pass
        finally:
            holder.kill()  # SIGKILL, as out of memory: no clean-up runs
        assert f"in use by process {holder.pid} on " in str(end.value)
    with locked(tmp_path):
        assert str(holder.pid) not in (tmp_path / LOCK_FILE).read_text()


def test_child_programs_do_not_inherit_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with locked(tmp_path):
        child.kill()
    child.wait()


FORKING = """
import os, sys, time
from pathlib import Path
from revzoo.cli.run.folder import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(100)
"""


def test_a_fork_of_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        fork = int(holder.stdout.readline())
        try:
            with pytest.raises(SystemExit, match="in use"), locked(tmp_path):
                pass
            holder.kill()
            holder.wait()
            with locked(tmp_path):
                pass
        finally:
            holder.kill()
            os.kill(fork, signal.SIGKILL)


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"])
def test_the_processes_of_one_run_share_the_lock(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)  # another test of the process may leave one
    with locked(tmp_path):
        monkeypatch.setenv(variable, "1")
        with locked(tmp_path):
            pass


def test_a_folder_in_use_stays_unchanged(tmp_path: Path) -> None:
    """A second program had overwritten ``.hydra/`` and the log before the lock refused it."""
    run_dir = tmp_path / "run"
    (run_dir / ".hydra").mkdir(parents=True)
    files = {run_dir / ".hydra" / "config.yaml": "first", run_dir / "train.log": "begun"}
    for path, text in files.items():
        path.write_text(text)
    with locked(run_dir):
        for start in ([f"hydra.run.dir={run_dir}"], [f"hydra.run.dir={run_dir}", "data=cifar10"]):
            with pytest.raises(SystemExit, match="is in use by process"):
                main(["train", "trainer=cpu", *start])
    assert {path: path.read_text() for path in files} == files
    assert set(run_dir.rglob("*")) == {*files, run_dir / ".hydra", run_dir / LOCK_FILE}
