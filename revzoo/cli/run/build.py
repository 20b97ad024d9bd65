"""Builds the parts of a run from plain configuration sections.

Classes come from tables: a configuration holds names, and unknown names are refused. We do not use
Hydra's ``instantiate``: it imports any path that a configuration names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.loggers import Logger
from pytorch_lightning.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import nn

from revzoo._checks import in_section, package_needed, short_size
from revzoo.cli.config import check_mode, device_kind
from revzoo.cli.run.folder import METRICS_FILE
from revzoo.cli.schema import MODES, model_names
from revzoo.cli.terminal import ConfigError
from revzoo.data import ImageData
from revzoo.data.registry import DATA
from revzoo.models.pretrained import find_model
from revzoo.models.registry import MODELS, WEIGHTS_ARGUMENTS, create_model, default_memory
from revzoo.training.callbacks.registry import CALLBACKS, ChecksModel, build_callbacks
from revzoo.training.checkpoint.files import PlainCheckpointIO
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import (
    allow_unused_parameters,
    is_first_process,
    limit_waits,
    started_together,
)
from revzoo.training.optim.optimizers import OptimSpec
from revzoo.training.resume import GracefulStop
from revzoo.training.tasks.registry import task_class
from revzoo.training.tasks.segmentation import Segmenter

PROFILERS: dict[str, type[Any]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def build_data(data: Mapping[str, Any], task: str | None = None) -> ImageData:
    """The data module of a checked ``data`` section; it reads no files.

    Raises:
        ConfigError: its labels are for another task than ``task``.
    """
    options, kind = {key: data[key] for key in data if key != "_target_"}, DATA[data["_target_"]]
    if "task" in options:  # sets that have the option serve several tasks
        options["task"] = options["task"] or task
    try:
        built = kind(**options)
    except ValueError as error:
        raise in_section("data", error) from error
    if task not in (None, built.task):
        raise ConfigError(
            f"task={task}, but the labels of {kind.__name__} are for task={built.task}: leave task "
            "out, or choose other data"
        )
    return built


def for_task(config: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The configuration with the task of the data, and the figure that callbacks compare."""
    figure = config.get("monitor") or task_class(task).monitor
    callbacks = dict(config["callbacks"])
    for name in ("best_checkpoint", "early_stopping"):
        options = callbacks.get(name)
        if options is not None and options.get("monitor") is None:
            check_mode(name, figure, options.get("mode"))
            callbacks[name] = {**options, "monitor": figure}
    return {**config, "task": task, "callbacks": callbacks}


def data_name(config: Mapping[str, Any]) -> str:
    """The name of the data module's class, which is the key of its state in checkpoints."""
    return DATA[config["data"]["_target_"]].__name__


def model_spec(config: Mapping[str, Any], *, num_classes: int, in_chans: int) -> dict[str, Any]:
    """The arguments of ``create_model`` for data with these numbers of classes and channels."""
    mode = config["memory"]["mode"]
    # a run with a planned mode starts with the model's default, see run/memory_plan.py
    memory = mode if mode in MODES else None
    return {**config["model"], "memory": memory, "num_classes": num_classes, "in_chans": in_chans}


def build_module(
    config: Mapping[str, Any], *, num_classes: int, in_chans: int, sizes: Sequence[int]
) -> Classifier:
    """The Lightning module of the run's task, for images of a size that it takes."""
    spec = model_spec(config, num_classes=num_classes, in_chans=in_chans)
    if spec.get("reversible_bits"):
        spec["reversible_size"] = short_size(sizes)
    channels_last = config["precision"]["channels_last"]
    module = task_class(config.get("task"))(
        spec, optim=config["optim"], channels_last=channels_last
    )
    network: Any = module.model
    name = config["model"]["name"]
    if network.dense and module.task != "segmentation":
        raise ConfigError(
            f"model={name} gives a class for each pixel: expected data with masks, such as "
            "data=shapes"
        )
    if module.task == "segmentation" and not network.dense:
        raise ConfigError(
            f"model={name} gives a class for each image: expected data with one label an image; or "
            "take a U-Net, such as model=iunet2d"
        )
    if (axes := len(sizes)) != network.dims:
        raise ConfigError(
            f"model={name} takes images of {network.dims} dimensions, the data have {axes}: take a "
            f"U-Net of {axes}, such as model=iunet{axes}d"
        )
    if name in model_names():
        network.check_size(*sizes)
    else:
        from revzoo.cli.commands._models import try_image  # ours run at all sizes that they check

        remedies = ["data.image_size={size}"] * ("image_size" in config["data"])
        # not all networks of a library take it
        if "img_size" in config["model"] and len({*sizes}) == 1:
            remedies.append(f"model.img_size={sizes[-1]}")
        remedy = f"; try {' or '.join(remedies)}" if remedies else ""
        try_image(network, sizes, in_chans, remedy=remedy)
    if config.get("surface_distances"):
        measure_surfaces(module)
    if config["precision"]["trainer"] == "64-true":
        module.double()  # Lightning restores a checkpoint's weights before it converts the module
    return module.train()


def measure_surfaces(module: Classifier) -> None:
    """Let the tests of a module measure ``surface_distances``.

    Raises:
        ConfigError: its task has no masks.
    """
    if not isinstance(module, Segmenter):
        raise ConfigError(
            f"surface_distances=true with task={module.task}: there are no masks; leave it out"
        )
    module.surface_distances = True


def check_network(
    config: Mapping[str, Any], callbacks: Sequence[pl.Callback], network: nn.Module
) -> None:
    """Check that the network meets the requirements of the callbacks."""
    names = {CALLBACKS[name]: name for name, o in config["callbacks"].items() if o is not None}
    for callback in callbacks:
        try:
            if isinstance(callback, ChecksModel):
                callback.check_model(network)
        except ValueError as error:
            kind = type(callback)
            raise in_section(f"callbacks.{names.get(kind, kind.__name__)}", error) from error


def check_parts(config: Mapping[str, Any]) -> None:
    """Build what needs no files, on the ``meta`` device: before several runs, for their errors."""
    OptimSpec.of(config["optim"])
    callbacks = build_callbacks(config["callbacks"], run_dir=Path())
    build_data(config["data"], config.get("task"))
    # any numbers: the data are not read yet
    spec = model_spec(config, num_classes=10, in_chans=3)
    start = {key: spec.pop(key) for key in WEIGHTS_ARGUMENTS if key in spec}
    with torch.device("meta"):  # which has no values to load
        model = create_model(spec.pop("name"), **spec)
    if start.get("pretrained") and not start.get("checkpoint_path"):
        # check that the weights exist; the run downloads them later
        find_model(config["model"]["name"], known=MODELS, pretrained=True)
    check_network(config, callbacks, model)


def build_loggers(
    config: Mapping[str, Any], *, run_dir: Path, first_step: int | None = None
) -> list[Logger]:
    """The run's loggers: ``metrics.csv`` and the section's logger; an empty list for ``none``.

    Log rows from ``first_step`` on, where a resumed run starts, are replaced.
    """
    options = dict(config["logger"])
    kind = options.pop("kind")
    if kind is None:  # logger=none
        return []
    from revzoo.training.loggers import EXTRAS, LOGGERS, MetricsCSV

    loggers: list[Logger] = [MetricsCSV(run_dir / METRICS_FILE, first_step=first_step)]
    if kind in EXTRAS and find_spec(kind) is None:
        raise ConfigError(package_needed(f"logger={kind} needs the package", kind))
    # MetricsCSV ignores the other processes itself
    if kind != "csv" and is_first_process():
        loggers.append(LOGGERS[kind](run_dir, run_description(config), first_step, **options))
    return loggers


def run_description(config: Mapping[str, Any]) -> dict[str, str | int | float]:
    """A short description of a run, for tables that compare runs: numbers in columns of numbers.

    TensorBoard shows the columns in alphabetical order.
    """
    data, optim, trainer = config["data"], config["optim"], config["trainer"]
    place = data.get("table") or data.get("root")
    root = f" {Path(place).name}" if place else ""
    name = str(config["model"]["name"]).partition(".")[0]
    bits = config["model"].get("reversible_bits")
    default = default_memory(name, bits) if name in MODELS else "default"
    ends = {"max_epochs": "epochs", "max_steps": "steps"}
    length = {name: trainer[key] for key, name in ends.items() if (trainer.get(key) or -1) > 0}
    best, kind = config["callbacks"].get("best_checkpoint") or {}, task_class(config.get("task"))
    return {
        **length,
        "task": kind.task,
        "monitor": best.get("monitor") or kind.monitor,
        "batch": data.get("batch_size", 0),
        "data": data["_target_"].rpartition(".")[2] + root,
        "memory": config["memory"]["mode"] or default,
        "model": config["model"]["name"],
        "seed": config["seed"],
        "lr": optim["lr"],
        "optimizer": optim["name"],
        "precision": config["precision"]["trainer"],
        "weight_decay": optim["weight_decay"],
    }


def build_trainer(
    config: Mapping[str, Any],
    *,
    run_dir: Path,
    stop: GracefulStop | None = None,
    first_step: int | None = None,
) -> pl.Trainer:
    """Lightning's Trainer with the run's callbacks, loggers and precision.

    ``stop`` ends the run at a signal; ``first_step`` is the step at which a resumed run starts.
    """
    loggers = build_loggers(config, run_dir=run_dir, first_step=first_step)
    specs = dict(config["callbacks"])
    if not loggers:
        specs["learning_rate"] = None  # it refuses to start without a logger
    callbacks = build_callbacks(specs, run_dir=run_dir)
    if stop is not None:
        # Lightning moves callbacks that save after it
        callbacks.append(stop)
    options = dict(config["trainer"])
    graph, accelerator = options.pop("cuda_graph", "auto"), options.get("accelerator", "auto")
    if graph and device_kind(accelerator) == "cuda":
        from revzoo.training.callbacks.cuda_graph import CudaGraph

        callbacks.append(CudaGraph())  # last: it compares what the others have changed
    # given only by name, Lightning's profilers just log their table
    if (profiler := options.pop("profiler", None)) is not None:
        # hooks that record the names of modules would make steps recompute
        unhooked = {"record_module_names": False} if profiler == "pytorch" else {}
        profiler = PROFILERS[profiler](dirpath=run_dir, filename="profile", **unhooked)
    trainer = make_trainer(
        **options,
        profiler=profiler,
        precision=config["precision"]["trainer"],
        callbacks=callbacks,
        logger=loggers,
        default_root_dir=run_dir,
        # otherwise Lightning adds a checkpoint callback, or refuses ours
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
    )
    if specs.get("finetuning") is not None:
        allow_unused_parameters(trainer)  # frozen parameters get no gradient
    return trainer


def make_trainer(**options: Any) -> pl.Trainer:
    """Lightning's Trainer, reading and writing checkpoints with our plugin."""
    plugins: list[Any] = [PlainCheckpointIO()]
    if options.get("strategy") == "fsdp2":
        import revzoo.training.fsdp2  # noqa: F401  # registers the strategy with Lightning

        plugins = []  # it brings its own
        options["inference_mode"] = False  # torch could not train weights that it gathered in it
    timeout = options.pop("timeout", None)
    try:
        trainer = pl.Trainer(
            **options,
            plugins=plugins,
            enable_model_summary=False,  # the start of the log has it in one line
        )
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
    except TypeError as error:  # max_time={dayz: 1}
        raise ConfigError(f"trainer: {error}") from error
    if timeout is not None:
        limit_waits(trainer, timeout)
    return trainer


def check_launcher(trainer: pl.Trainer) -> None:
    """Check that as many processes have been started as the trainer has.

    Otherwise each would train alone, all in one folder, or wait for others that never come.
    """
    count, devices, nodes = started_together(), trainer.num_devices, trainer.num_nodes
    if count not in (1, devices * nodes):
        raise ConfigError(
            f"torchrun or srun has started {count} processes, but trainer.devices={devices} * "
            f"trainer.num_nodes={nodes} is {devices * nodes}: add trainer=ddp trainer.devices=N, "
            "the processes of a machine, and trainer.num_nodes=N, the machines"
        )
    if nodes > 1 and count == 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"trainer.num_nodes={nodes}: start the run on each machine with torchrun or srun, or "
            "set MASTER_ADDR and NODE_RANK there; otherwise it would wait for the others in vain"
        )


def apply_precision(precision: Mapping[str, Any]) -> None:
    """Switch TensorFloat-32 on or off for this process.

    Torch uses it for convolutions by default, so they do not compute in float32.
    """
    torch.set_float32_matmul_precision("high" if precision["tf32"] else "highest")
    # the other switch is for matrix products only
    torch.backends.cudnn.allow_tf32 = bool(precision["tf32"])
