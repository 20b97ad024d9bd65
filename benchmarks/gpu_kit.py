"""Everything that needs a GPU, in twelve minutes on one H100, the most valuable first.

    python benchmarks/gpu_kit.py --out results          # or: make gpu OUT=results STAGES=1,2
    python benchmarks/gpu_kit.py --out results --stages 5 --images DIR    # CIFAR-10 as folders
    python benchmarks/gpu_kit.py --out results --dry    # tiny sizes, on a CPU

Stage 1 runs the GPU tests (planned: 3 minutes, at most 4), stage 2 the modes as graphs and with
compiled branches (4, at most 9), stage 3 the peers and the modes without graphs (2, at most 4),
stage 4 training steps as CUDA graphs, in a plain loop and in ``revzoo train`` (3, at most 8), stage
5, which needs images, the papers' recipe for a RevNet and its ResNet (all that is left). Each
report is a file in ``--out``, written as it grows, so an end that comes early loses only what has
not run. A command that fails does not end the others; one that does not fit into the time left is
skipped and named. With the same ``--out``, the kit runs what has not ended well yet, and resumes a
training that was stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_OK = {False: "ok", True: "ok on the CPU"}  # key: whether it is a dry run


class Job(NamedTuple):
    """One command.

    Attributes:
        name: of its report.
        limit: seconds after which it is stopped, on a GPU.
        script: in this folder; "" for pytest.
        arguments: on a GPU; a run's folder replaces ``{run}``, the folder of images ``{images}``.
        dry: on a CPU.
    """

    name: str
    limit: int
    script: str
    arguments: tuple[str, ...]
    dry: tuple[str, ...]


def _modes(dtype: str, *extra: str) -> tuple[str, ...]:
    return ("--batch", "512", "--rounds", "5", "--dtype", dtype, *extra)


def _train(model: str, *modes: str) -> Job:
    options = ("--models", model, "--modes", *modes, "--rounds", "2")
    dry = (*options, "--batch", "2", "--images", "20", "--precision", "fp32")
    options += ("--images", "12800")  # revnet110 takes half a second a step without a graph
    return Job(f"train_graph_{model}", 80, "bench_train_graph.py", options, dry)


_DRY = ("--models", "revnet38", "--batch", "2", "--rounds", "2")
_DRY_PEERS = ("--blocks", "1", "--batch", "2", "--channels", "4", "--size", "4", "--rounds", "2")
_DRY_LARGE = (*_DRY, "--size", "64")
_LARGE = ("--size", "224", "--models", "revnet56", "revvit_base", "irevnet301")
_LARGE = (*_LARGE, "torchvision:resnet50", "torchvision:vit_b_16")
_RECIPE = ("experiment=cifar_revnet", "data=imagefolder", "data.root={images}", "precision=tf32")
_DRY_RECIPE = ("experiment=cifar_revnet", "data=digits", "debug=smoke", "hydra.run.dir={run}")
_PEERS = ("--blocks", "12", "--batch", "512", "--channels", "64", "--channels-last")
STAGES: dict[int, tuple[Job, ...]] = {
    1: (
        Job(
            "tests",
            180,
            "",
            ("-m", "gpu", "-n", "8", "--timeout", "90"),
            ("-m", "gpu", "--collect-only"),
        ),
        # not marked gpu: they also run interpreted, on a CPU
        Job(
            "triton_kernels",
            60,
            "",
            ("tests/core/test_triton_kernels.py",),
            ("tests/core/test_triton_kernels.py", "--collect-only"),
        ),
    ),
    2: (
        Job("modes_graph_bf16", 90, "bench_modes.py", _modes("bfloat16", "--graph"), _DRY),
        Job("modes_graph_fp32", 90, "bench_modes.py", _modes("float32", "--graph"), _DRY),
        Job(
            "compiled_graph_bf16",
            120,
            "bench_modes.py",
            _modes("bfloat16", "--graph", "--compiled", "--models", "revnet38"),
            (*_DRY, "--compiled"),
        ),
        Job(
            "compiled_bf16",
            120,
            "bench_modes.py",
            _modes("bfloat16", "--compiled", "--models", "revnet38"),
            (*_DRY, "--compiled"),
        ),
        Job(
            "modes_224_graph_bf16",
            120,
            "bench_modes.py",
            (*_LARGE, "--dtype", "bfloat16", "--graph", "--batch", "32", "--rounds", "5"),
            _DRY_LARGE,
        ),
    ),
    3: (
        Job("peers_bf16", 60, "bench_peers.py", (*_PEERS, "--dtype", "bfloat16"), _DRY_PEERS),
        Job("peers_fp32", 60, "bench_peers.py", (*_PEERS, "--dtype", "float32"), _DRY_PEERS),
        Job("modes_bf16", 90, "bench_modes.py", _modes("bfloat16"), _DRY),
    ),
    4: (
        Job("graphed_bf16", 120, "bench_graphed.py", ("--dtype", "bfloat16"), _DRY),
        Job("graphed_fp32", 120, "bench_graphed.py", ("--dtype", "float32"), _DRY),
        _train("revnet38", "store", "exact"),
        _train("revnet110", "exact"),
        _train("resnet110", "store"),
    ),
    5: tuple(
        Job(
            f"recipe_{model}",
            600,
            "../train.py",
            (*_RECIPE, f"model={model}", "hydra.run.dir={run}"),
            (*_DRY_RECIPE, f"model={model}"),
        )
        for model in ("revnet38", "resnet32")
    ),
}


def run(job: Job, out: Path, seconds: float, *, images: Path | None, dry: bool) -> str:
    """Run one command with its output in a file; returns what became of it."""
    command = [sys.executable]
    command += [str(HERE / job.script)] if job.script else ["-m", "pytest", "-q"]
    if not job.script:
        command += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    folder = (out / job.name).absolute()
    arguments: tuple[str, ...] = ("--resume", str(folder))
    if not (folder / "config.yaml").exists():
        arguments = job.dry if dry else job.arguments
    if "data.root={images}" in arguments and images is None:
        return f"{job.name}: skipped, needs --images DIR with train/CLASS and test/CLASS"
    command += [word.format(run=folder, images=images) for word in arguments]
    path = out / f"{job.name}.{'md' if job.script else 'txt'}"
    start, limit = time.monotonic(), seconds if dry else min(job.limit, seconds)
    with path.open("w") as file:
        try:
            done = subprocess.run(
                command,
                cwd=HERE.parent,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
                },
            )
            outcome = _OK[dry] if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
    return f"{job.name}: {outcome}, {time.monotonic() - start:.0f} s, {path.name}"


def main() -> int:
    """Run the stages; the exit code is 1 if a command failed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--stages", default="1,2,3,4", help="numbers with commas between")
    parser.add_argument("--images", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--seconds", type=float, default=720, help="for everything")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    args = parser.parse_args()
    try:
        jobs = [job for number in args.stages.split(",") for job in STAGES[int(number)]]
    except (KeyError, ValueError):
        parser.error(f"--stages {args.stages}: expected some of 1, 2, 3, 4, 5, such as 1,3")
    args.out.mkdir(parents=True, exist_ok=True)
    summary, end = args.out / "summary.txt", time.monotonic() + args.seconds
    known = summary.read_text().splitlines() if summary.exists() else []
    lines = {line.partition(":")[0]: line for line in known}
    done = f": {_OK[args.dry]}, "
    for job in jobs:
        left = end - time.monotonic()
        if done in lines.get(job.name, ""):
            pass
        elif left < min(20, job.limit):
            lines[job.name] = f"{job.name}: skipped, {max(left, 0):.0f} s were left"
        else:
            lines[job.name] = run(job, args.out, left, images=args.images, dry=args.dry)
        print(lines[job.name], flush=True)
        summary.write_text("\n".join(lines.values()) + "\n")
    return int(any(done not in lines[job.name] for job in jobs))


if __name__ == "__main__":
    raise SystemExit(main())
