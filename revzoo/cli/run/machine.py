"""Checks that depend on this machine: its devices, the folder of images, how it started us.

They do not import Lightning, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from revzoo._checks import cores, number_of
from revzoo.cli.terminal import ConfigError

Config = Mapping[str, Any]


def check_machine(config: Config) -> None:
    """Check the device, the precision and the number of processes of a checked configuration.

    Raises:
        ConfigError: naming the option, and one that works here.
    """
    trainer, precision = config["trainer"], config["precision"]
    device, devices = device_kind(trainer["accelerator"]), str(trainer["devices"])
    # on a CPU, Lightning starts any number of processes
    if device == "cpu" and devices.isdecimal() and int(devices) > 4 * cores():
        raise ConfigError(
            f"trainer.devices={devices} processes for {number_of(cores(), 'core')}: "
            f"expected at most {4 * cores()}"
        )
    if device == "cpu" and precision["trainer"] == "16-mixed":
        raise ConfigError("precision=fp16 needs a GPU, this run is on the CPU: use precision=fp32")
    if device == "mps" and precision["trainer"] == "64-true":
        raise ConfigError("precision=fp64 is not supported on mps: use trainer=cpu")
    if device != "cuda" and trainer.get("cuda_graph") is True:
        raise ConfigError(
            f"trainer.cuda_graph=true needs an NVIDIA GPU, this run is on {device}: use "
            "trainer.cuda_graph=auto, which captures steps where there is one"
        )
    if device != "cuda" and precision["tf32"]:
        raise ConfigError(
            f"precision=tf32 is a format of NVIDIA GPUs, this run is on {device}: use "
            "precision=fp32"
        )


def check_root(data: Config) -> None:
    """Check that the folder of an image folder exists."""
    if data["_target_"] == "revzoo.data.ImageFolder":
        root = Path(data["root"]).expanduser().absolute()
        if not root.is_dir():
            raise ConfigError(
                f"image folder {root} does not exist: set data.root=DIR, the folder above "
                "train/CLASS/*.jpg"
            )


def device_kind(accelerator: str) -> str:
    """The type of a run's device: ``cpu``, ``cuda`` or ``mps``.

    Raises:
        ConfigError: this machine has no such device.
    """
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    fitting = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}
    for kind in fitting.get(accelerator, (accelerator,)):
        if available[kind]:
            return kind
    raise ConfigError(
        f"trainer.accelerator={accelerator}: torch {torch.__version__} finds no such device; use "
        "trainer.accelerator=cpu or auto"
    )


def check_started_together(overrides: Sequence[str], *, several: bool) -> None:
    """Check that processes of ``torchrun`` or ``srun`` share one run and one folder.

    Args:
        overrides: the command line.
        several: whether it starts several runs (``-m``, ``revzoo sweep``).

    Raises:
        ConfigError: naming the option to add.
    """
    from revzoo.training.distributed import started_together

    count = started_together()
    if count == 1:
        return
    if several:
        raise ConfigError(
            f"torchrun or srun has started {count} processes, and each would start all runs: start "
            "several runs without torchrun and srun"
        )
    if not any(override.startswith("hydra.run.dir=") for override in overrides):
        raise ConfigError(
            f"torchrun or srun has started {count} processes, which need one folder: add "
            "hydra.run.dir=outputs/NAME, with a new name"
        )
