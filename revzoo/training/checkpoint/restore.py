"""Loads a trained model from a checkpoint or from weights, with its classes and normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revzoo._checks import did_you_mean
from revzoo.data.errors import DataError
from revzoo.data.state import check_state
from revzoo.models import ImageNetwork, create_model
from revzoo.models.pretrained import SUFFIX
from revzoo.models.registry import MODELS
from revzoo.training.checkpoint.files import BEST, CHECKPOINTS, CheckpointError, read_checkpoint
from revzoo.training.classifier import Classifier, data_states, facts_of
from revzoo.weights.entry import HUB
from revzoo.weights.errors import EntryError
from revzoo.weights.table import SHIPPED, WeightsTable

UNIT = 1  # the largest pixel value to which mean and std of an entry refer


@dataclass(frozen=True)
class Restored:
    """A trained classifier and its data.

    Attributes:
        module: in evaluation mode, on the CPU.
        classes: names, by label.
        data_state: the state of the data module.
        image_size: side in pixels; None if the checkpoint lacks it.
        in_chans: channels of the images.
    """

    module: Classifier
    classes: list[str]
    data_state: dict[str, Any]
    image_size: int | None
    in_chans: int

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a weights entry that describe the data, for pixels in [0, 1]."""
        assert isinstance(self.module.model, ImageNetwork), "hyperparameters name models of the zoo"
        return facts_of(self.data_state, self.module.model)


def restore(source: str | Path, *, table: WeightsTable | None = None) -> Restored:
    """Load a trained classifier for evaluation.

    Args:
        source: a run's checkpoint (``.ckpt``); a safetensors file, or a folder from
            ``save_pretrained``; or the name of weights, such as ``revnet38.cifar10``.
        table: the table of weights by name; None for the package's.

    Raises:
        CheckpointError: the file is damaged, is no checkpoint of a run, or has NaN or Inf.
        WeightsError: there are no such weights, they are not valid, have NaN or Inf, or their entry
            lacks classes or normalisation.
    """
    text, path = str(source), Path(source)
    if (path / CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"{path} is the folder of a run: give one of its checkpoints, such as "
            f"{path / CHECKPOINTS / BEST}"
        )
    is_name = text.partition(".")[0] in MODELS or text.startswith(HUB)
    if (path.suffix == SUFFIX and path.is_file()) or path.is_dir():
        return _from_weights(source, table)
    if is_name and not path.is_file():
        return _from_weights(source, table)
    if not path.suffix and not path.exists():
        names = (SHIPPED if table is None else table).names()
        raise CheckpointError(
            f"there are no weights {text!r}{did_you_mean(text, names) or '.'} Known are "
            f"{', '.join(names)}; or give the path of a .ckpt file"
        )
    return _from_checkpoint(path)


def _from_checkpoint(path: Path) -> Restored:
    state = read_checkpoint(path)
    module = Classifier.from_state(state, str(path))
    data = _data_state(state, path)
    module.lay_out(channels_last=False)  # the layout of training does not matter here
    network = module.model
    assert isinstance(network, ImageNetwork), "hyperparameters name models of the zoo"
    try:
        check_state(data, num_classes=network.num_classes, in_chans=network.in_chans)
    except DataError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
    return Restored(module.eval(), data["classes"], data, data.get("image_size"), network.in_chans)


def _from_weights(source: str | Path, table: WeightsTable | None) -> Restored:
    model = create_model(source, pretrained=True, table=table)
    entry = model.entry
    assert entry is not None, "pretrained weights have one"
    lacking = [name for name in ("classes", "mean", "std") if not getattr(entry, name)]
    if entry.classes is None or entry.mean is None or entry.std is None:
        raise EntryError(
            f"the entry of the weights {source} lacks {', '.join(lacking)}: add these fields to "
            "NAME.json, or use the checkpoint from which the weights were made"
        )
    normalisation = {"mean": list(entry.mean), "std": list(entry.std)}
    classes = list(entry.classes)
    data = {"classes": classes, "pixel_max": UNIT, "normalisation": normalisation}
    data |= {"image_size": entry.input_size[-1], "crop_pct": entry.crop_pct}
    module = Classifier(model).eval()
    return Restored(module, classes, data, entry.input_size[-1], entry.in_chans)


def _data_state(state: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """The saved state of the data module; Lightning's key for it is the name of its class."""
    states = data_states(state)
    if len(states) != 1:
        raise CheckpointError(
            f"{path} does not have the classes and the normalisation of its training: use a "
            "checkpoint of a run of revzoo train"
        )
    return states[0]
