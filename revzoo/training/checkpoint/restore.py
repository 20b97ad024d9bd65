"""Loads a trained model, with its classes and normalisation; checks a state to resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from revzoo._checks import Size
from revzoo.models import ImageNetwork, create_model
from revzoo.models.registry import change_bits
from revzoo.models.save import describing_save
from revzoo.models.weights_file import check_module
from revzoo.training.checkpoint.files import (
    CheckpointError,
    DamagedCheckpointError,
    read_checkpoint,
)
from revzoo.training.classifier import Classifier, facts_of, saved_data
from revzoo.training.resume import RunState
from revzoo.training.tasks.registry import task_class
from revzoo.training.tasks.regression import Regressor
from revzoo.weights.errors import EntryError, WeightsError
from revzoo.weights.source import SAVED, SUFFIX, is_distributed, resolve_source

EXPORTS = {
    ".pt2": "torch.export.load(FILE).module()(images)",
    ".onnx": "ONNX Runtime",
}  # files of ``revzoo export``, and how to run them
PARTS = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


@dataclass(frozen=True)
class Restored:
    """A trained classifier and its data."""

    module: Classifier  # in evaluation mode, on the CPU
    data_state: dict[str, Any]  # the state of the data module

    @property
    def network(self) -> ImageNetwork:
        network = self.module.model
        assert isinstance(network, ImageNetwork), "hyperparameters name models of the zoo"
        return network

    @property
    def image_size(self) -> Size | None:
        """The size of the images in pixels; None if the checkpoint lacks it."""
        return self.data_state.get("image_size")

    @property
    def in_chans(self) -> int:
        return self.network.in_chans

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a weights entry that describe the data, for pixels in [0, 1]."""
        return facts_of(self.data_state, self.network)


def restore(source: str | Path, *, bits: int | str | None = SAVED) -> Restored:
    """Load a trained classifier for evaluation.

    Args:
        source: a run's checkpoint (``.ckpt``), or its folder, for its best checkpoint; a
            safetensors file, or a folder from ``save_pretrained``; or the name of weights, such as
            ``revnet38.cifar10``.
        bits: bits of its reversible blocks; None for the plain network; ``"saved"`` keeps the bits
            that the weights were saved with.

    Raises:
        ValueError: the network cannot have these bits.
        CheckpointError: the file is damaged, is not a checkpoint of a run, or has NaN or Inf.
        WeightsError: there are no such weights, they are not valid, have NaN or Inf, or their entry
            lacks classes or normalisation.
    """
    source = resolve_source(source)
    path = Path(source)
    if path.suffix in EXPORTS:
        raise CheckpointError(
            f"{path} is an exported program, which has no classes and normalisation: give the "
            f"checkpoint or weights that it was made from, or run it by {EXPORTS[path.suffix]}"
        )
    # any other file counts as a checkpoint, under any name
    is_checkpoint = is_distributed(path) or (path.is_file() and path.suffix != SUFFIX)
    restored = _from_checkpoint(path) if is_checkpoint else _from_weights(source)
    change_bits(restored.network, bits)
    return restored


def _from_checkpoint(path: Path) -> Restored:
    state = read_checkpoint(path)
    data = saved_data(state)
    module = task_class((data or {}).get("task")).from_state(state, str(path))
    if data is None:
        raise CheckpointError(
            f"{path} does not have the classes and the normalisation of its training, as after "
            "training with your own DataModule: save them in Python, model = Classifier."
            f"load_from_checkpoint({str(path)!r}).model, then {describing_save()}, and give "
            "FOLDER; or use a checkpoint of a run of revzoo train"
        )
    module.lay_out(channels_last=False)  # the layout of training does not matter here
    return Restored(module.eval(), data)


def _from_weights(source: str | Path) -> Restored:
    model = create_model(source, pretrained=True)
    entry = model.entry
    assert entry is not None, "pretrained weights have one"
    facts = {name: getattr(entry, name) for name in ("classes", "mean", "std")}
    if lacking := [name for name, value in facts.items() if not value]:
        raise EntryError(
            f"the entry of the weights {source} lacks {', '.join(lacking)}: add them in Python, "
            f"model = revzoo.from_pretrained({str(source)!r}), then {describing_save(lacking)}, "
            "and give FOLDER; or use the checkpoint from which the weights were made"
        )
    data: dict[str, Any] = {
        "classes": list(facts["classes"]),
        "pixel_max": 1,  # an entry refers to pixels in [0, 1], a checkpoint perhaps to 0 to 255
        "normalisation": {"mean": list(facts["mean"]), "std": list(facts["std"])},
        "image_size": model.trained_size,
        "crop_pct": entry.crop_pct,
        **({} if entry.task is None else {"task": entry.task}),
    }
    if entry.target_mean and entry.target_std:
        data["targets"] = {"mean": list(entry.target_mean), "std": list(entry.target_std)}
    module = task_class(entry.task)(model)
    if isinstance(module, Regressor):
        module.standardise(data.get("targets"))
    return Restored(module.eval(), data)


def check_complete(
    state: Mapping[str, Any], where: str, *, data: str, callbacks: Sequence[pl.Callback] = ()
) -> None:
    """Refuse to resume from a state that lacks a part, or whose weights do not fit its model.

    Lightning ignores missing parts: without ``loops`` a run counts from 0 again, without
    ``callbacks`` it draws other random numbers. ``data`` is the name of the data module's class,
    ``callbacks`` are new instances of the run's; the state needs their keys.

    Raises:
        DamagedCheckpointError: names the parts.
    """
    lacking = [name for name in (*PARTS, data) if name not in state]
    # Lightning saves only callbacks that have a state
    keys = [RunState.__name__, *(c.state_key for c in callbacks if c.state_dict())]
    lacking += [f"callbacks[{key!r}]" for key in keys if key not in state.get("callbacks", {})]
    if lacking:
        raise DamagedCheckpointError(f"{where} lacks {', '.join(lacking)}: use another checkpoint")
    with torch.device("meta"):  # names and shapes, but no values
        task = (saved_data(state) or {}).get("task")
        module = task_class(task)(**state["hyper_parameters"])
    try:
        # whoever reads the values of a distributed checkpoint checks them
        check_module(module, state["state_dict"], where, values=not is_distributed(Path(where)))
    except WeightsError as error:
        raise DamagedCheckpointError(" ".join(str(error).split())) from None  # one line
