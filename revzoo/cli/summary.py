"""What a run leaves behind: its resolved configuration and its final figures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf

from revzoo.training.callbacks import best_checkpoint_path

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
LIBRARIES = ("torch", "torchvision", "pytorch-lightning")


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Write the configuration, every reference resolved, as ``config.yaml``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(dict(config)), run_dir / CONFIG_FILE)


def describe_run(
    trainer: pl.Trainer, module: pl.LightningModule, *, seconds: float, figures: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of a finished run as plain values; ``seconds`` is the time of the training."""
    device = module.device
    best = best_checkpoint_path(trainer)
    root = os.path.realpath(trainer.default_root_dir)  # as Lightning resolves the checkpoint's path
    return {
        "metrics": dict(figures),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "train_seconds": round(seconds, 3),
        "parameters": sum(p.numel() for p in module.parameters()),
        "checkpoint": os.path.relpath(best, root) if best else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in LIBRARIES},
    }


def write_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Write ``summary.json``; a figure that is not finite stays readable as a word."""
    text = json.dumps(summary, indent=2, sort_keys=True)
    (run_dir / SUMMARY_FILE).write_text(text + "\n")
