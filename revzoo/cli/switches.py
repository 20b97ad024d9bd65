"""Switches of the whole process that a run sets, and how they come back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# set by Lightning: for a deterministic run the first two, by its seeding the others
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "HOROVOD_FUSION_THRESHOLD",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)


@contextmanager
def switches_restored() -> Iterator[None]:
    """After a run, determinism, cuDNN's search and TensorFloat-32 are as they were before.

    Torch's random state is not: it is where the run has left it.
    """
    cudnn = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, tf32 = cudnn.benchmark, cudnn.allow_tf32
    precision = torch.get_float32_matmul_precision()
    variables = {name: os.environ.get(name) for name in VARIABLES}
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        cudnn.benchmark, cudnn.allow_tf32 = benchmark, tf32
        torch.set_float32_matmul_precision(precision)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
