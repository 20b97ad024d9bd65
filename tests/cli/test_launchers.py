"""Two processes on gloo, started by each launcher in the guide."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
GUIDE = (ROOT / "docs" / "guide" / "runs.md").read_text()
DDP = (
    "trainer=ddp",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "+model.units=[1,1,1]",
    "trainer.limit_train_batches=3",
    "trainer.limit_test_batches=1",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SRUN = """#!{python}
# Two tasks of one step, like srun; a signal to the step goes to both.
import os, signal, subprocess, sys
tasks = []
for rank in ("0", "1"):
    own = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_NTASKS": "2",
           "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "2",
           "SLURM_NODELIST": "localhost"}}
    tasks.append(subprocess.Popen(sys.argv[1:], env={{**os.environ, **own}}))
signal.signal(signal.SIGUSR2, lambda *args: [task.terminate() for task in tasks])
open("srun.pid", "w").write(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""


def environment(tmp_path, **more):
    left_out = ("PYTHONPATH", "HYDRA_FULL_ERROR")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    return {**env, "OMP_NUM_THREADS": "1", **more}


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def wait_for(text, log, process):
    deadline = time.monotonic() + 300
    while text not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)


def test_each_job_of_a_multirun_is_distributed(tmp_path):
    command = [sys.executable, TRAIN, "-m", "seed=0,1", *DDP, "trainer.max_epochs=1"]
    done = subprocess.run(
        [*command, "hydra.sweep.dir=jobs"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Launching 2 jobs") == 1
    for job in ("0", "1"):
        assert summary(tmp_path / "jobs" / job)["steps"] == 3
        assert done.stdout.count(f"folder   jobs/{job}\n") == 1


def test_a_signal_ends_lightnings_processes(tmp_path):
    command = [sys.executable, TRAIN, *DDP, "trainer.max_epochs=1000", "hydra.run.dir=run"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_for("epoch 2/", tmp_path / "run" / "train.log", process)
        process.terminate()
        output, _ = process.communicate(timeout=120)  # until the last process closes the pipe
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert len(re.findall(r"to resume: \S*revzoo train --resume", output)) == 1
    assert summary(tmp_path / "run")["stopped"] == "stopped by SIGTERM"


def test_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    options = [*DDP, "trainer.max_epochs=1", "hydra.run.dir=run"]
    done = subprocess.run(
        [*torchrun, TRAIN, *options],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["steps"] == 3
    assert len((tmp_path / "run" / "sessions.jsonl").read_text().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_script_for_slurm(tmp_path):
    """The guide's script, as two tasks on one machine, with a fake srun and scontrol."""
    script = GUIDE.split("## SLURM")[1].split("```bash\n")[1].split("```")[0]
    gpus = "trainer.devices=4 trainer.num_nodes=2"
    assert gpus in script
    options = f"{' '.join(DDP)} trainer.max_epochs=8"
    script = script.replace(f"trainer=ddp {gpus}", options)
    script = script.replace("model=revnet110 data=cifar10", "").replace("train.py", TRAIN)
    (tmp_path / "job.sh").write_text(script.replace("srun python", f"srun {sys.executable}"))
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> queued\n')
    for program in ("srun", "scontrol"):
        (tmp_path / program).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = environment(tmp_path, PATH=path, SLURM_JOB_ID="41234", SLURM_JOB_NAME="train")
    run_dir = tmp_path / "outputs" / "slurm-41234"
    job = ["bash", "job.sh"]
    with subprocess.Popen(job, cwd=tmp_path, env=env, text=True) as process:
        wait_for("epoch 2/", run_dir / "train.log", process)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR2)
        assert process.wait(120) == 143
    assert (tmp_path / "queued").read_text() == "requeue 41234\n"
    assert summary(run_dir)["stopped"] == "stopped by SIGTERM"
    assert subprocess.run(job, cwd=tmp_path, env=env, check=False).returncode == 0
    assert (summary(run_dir)["steps"], summary(run_dir)["stopped"]) == (24, None)
    assert (tmp_path / "queued").read_text() == "requeue 41234\n"
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["slurm-41234"]
