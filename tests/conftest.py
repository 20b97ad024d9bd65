"""For all tests: one seed, GPU tests that skip with a reason, restored global switches."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]

# processes that tests start by "forkserver" are forks of one that has imported these
multiprocessing.set_forkserver_preload(["pytest", "revzoo.cli.run.train"])
os.environ.pop("COLUMNS", None)  # from pytest-xdist: the output of tests is not a terminal


def pytest_collection() -> None:
    gc.disable()  # modules are not garbage


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def modules_are_no_garbage() -> None:
    """Else ``gc.collect()``, which a search for a batch size calls before each trial, takes a
    second: it goes through a million objects of the imported modules."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"no CUDA device is visible to torch {torch.__version__}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write the user's cache of plans and weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def global_switches_restored() -> Iterator[None]:
    """A run switches TF32, determinism, threads, the seed and the port of its process group for
    its process; a test may not."""
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    benchmark, tf32 = cudnn.benchmark, cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads, environment = torch.get_num_threads(), dict(os.environ)
    rng = torch.get_rng_state()
    torch.manual_seed(0)  # whatever modules draw when they are imported
    socket.setdefaulttimeout(None)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_float32_matmul_precision(precision)
    cudnn.benchmark, cudnn.allow_tf32 = benchmark, tf32
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.set_rng_state(rng)


@pytest.fixture(scope="session")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel installs it, built from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("revzoo", "configs"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run([sys.executable, *command], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture
def compose() -> Callable[..., dict[str, Any]]:
    """The checked-out configuration as plain containers, with overrides."""
    return lambda *overrides: copy.deepcopy(composed(overrides))


@functools.cache
def composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    from revzoo.cli.config import compose  # most tests need no Hydra

    return compose(overrides).config
