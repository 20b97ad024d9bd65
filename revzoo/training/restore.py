"""A model back from a checkpoint, with the names of its classes and its normalisation.

What a checkpoint says about the model is held against an exact list before anything is built: a
checkpoint may come from anyone, and must not choose what is imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revzoo.training.checkpoints import CheckpointError, read_checkpoint
from revzoo.training.classifier import Classifier

HYPERPARAMETERS = ("model", "optim", "channels_last")
SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Restored:
    """A trained classifier and what its data were.

    Attributes:
        module: in evaluation mode, on the CPU.
        classes: names, by label.
        data_state: of the data module, for ``load_state_dict``.
        image_size: side in pixels; None in checkpoints that do not say.
        in_chans: channels of the images.
    """

    module: Classifier
    classes: list[str]
    data_state: dict[str, Any]
    image_size: int | None
    in_chans: int


def check_hyperparameters(given: Any) -> dict[str, Any]:
    """``given``, if it is what a classifier of the zoo takes, and nothing else.

    Names of models, keywords and options are checked by what they are given to; here it is made
    sure that there is nothing else: no other key, no mapping where a value belongs, no reference.

    Raises:
        CheckpointError: naming the key.
    """
    if not isinstance(given, dict) or "model" not in given:
        raise CheckpointError(
            "the checkpoint has no hyperparameters of a model: it was trained on a module that was "
            "handed over finished; load its state_dict into that module"
        )
    for key in given:
        if key not in HYPERPARAMETERS:
            raise _refused(str(key), f"expected only {', '.join(HYPERPARAMETERS)}")
    for section in ("model", "optim"):
        _check_options(given.get(section, {}), section, nested=("schedule",))
    if not isinstance(given.get("channels_last", False), bool):
        raise _refused("channels_last", "expected true or false")
    return given


def _check_options(options: Any, where: str, *, nested: tuple[str, ...] = ()) -> None:
    if not isinstance(options, dict):
        raise _refused(where, "expected a mapping")
    for key, value in options.items():
        name = f"{where}.{key}"
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_"):
            raise _refused(name, "expected the name of an option")
        if where == "optim" and key in nested:
            _check_options(value, name)
        else:
            _check_value(value, name)


def _check_value(value: Any, name: str) -> None:
    items = value if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if type(item) not in SCALARS:
            raise _refused(name, f"expected a number, word or list of them, got {item!r:.80}")
        if isinstance(item, str) and ("${" in item or "." in item or "/" in item):
            raise _refused(name, f"expected a plain word, got {item!r:.80}")


def _refused(key: str, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's hyperparameter {key} is refused: {why}")


def restore(path: str | Path) -> Restored:
    """The classifier of a checkpoint that a run has written, ready for evaluation.

    Raises:
        CheckpointError: if the file is damaged, or is not such a checkpoint.
    """
    state = read_checkpoint(path)
    hyper = check_hyperparameters(state.get("hyper_parameters"))
    data = _data_state(state, path)
    try:
        module = Classifier(hyper["model"], optim=hyper.get("optim"))
        module.load_state_dict(state["state_dict"])
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path} does not fit the model it names ({reason}): use the version of revzoo that "
            "has written it"
        ) from None
    in_chans = int(hyper["model"].get("in_chans", 3))
    return Restored(module.eval(), list(data["classes"]), data, data.get("image_size"), in_chans)


def _data_state(state: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """What the data module has saved; Lightning files it under the name of its class."""
    needed = {"classes", "normalisation"}
    found = [v for v in state.values() if isinstance(v, dict) and needed <= set(v)]
    if len(found) != 1:
        raise CheckpointError(
            f"{path} does not say which classes and which normalisation it was trained with: "
            "use a checkpoint of a run of revzoo-train"
        )
    return found[0]
