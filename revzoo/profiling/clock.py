"""Clocks, and the speed of this machine.

A plan compares steps by FLOPs and bytes (:func:`revzoo.profiling.count.nominal_cost`). To give its
time in seconds, we time one small network of the layers that most networks spend their time in.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from revzoo.core.twins import fake_twin, images_for
from revzoo.profiling.count import default_loss, trace_step

_SHAPE = (2, 64, 32, 32)  # about 10 nominal milliseconds: Python's constant part is small beside it


def speed(like: Tensor) -> float:
    """Measured over nominal time of a training step, on the device and in the dtype of ``like``."""
    # half the work in a convolution and its norm, half in a linear layer
    with like.device:
        layers = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(2)
        network = nn.Sequential(*layers, nn.Linear(1024, 1024), nn.GELU()).to(like.dtype)
    twin, images = fake_twin(network), images_for(network, _SHAPE)
    nominal = sum(trace_step(twin, images_for(twin, _SHAPE)).costs)
    # the first run also warms up, and other programs only add time
    return 1e9 * min(step_seconds(network, images) for _ in range(4)) / nominal


def step_seconds(model: nn.Module, images: Tensor) -> float:
    """Seconds of a forward and backward pass."""
    start = now(images.device)
    torch.autograd.backward(default_loss(model(images)))
    return now(images.device) - start


def now(device: torch.device) -> float:
    """Seconds on a clock, after the device has finished its work.

    With one thread we use the thread's clock, which stops while other programs have the core.
    """
    wait_for(device)
    if device.type != "cuda" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work: kernels run after their call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
