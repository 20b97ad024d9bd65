"""Validates the hyperparameters of a checkpoint against an exact list before they are used.

A checkpoint may come from anyone, so it must not choose which code is imported or called, or which
files are read. Lightning's ``load_from_checkpoint`` passes all hyperparameters to the constructor,
lets ``_instantiator`` load classes, and reads URLs with pickles enabled. We accept only the zoo's
names and plain values.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from revzoo.models.registry import MODELS, WEIGHTS_ARGUMENTS
from revzoo.training.checkpoint.files import CheckpointError

HYPERPARAMETERS = ("model", "optim", "channels_last")
SCALARS = (str, int, float, bool, type(None))  # by exact type; no subclasses


def check_hyperparameters(values: Any, *, replaced: Container[str] = ()) -> dict[str, Any]:
    """Return ``values`` if they are hyperparameters of :class:`~revzoo.training.Classifier`.

    The zoo checks the values of options later. This function checks that the model is the zoo's,
    that all keys are known, and that values are plain: no nested mapping, no reference.

    Args:
        values: ``hyper_parameters`` of a checkpoint.
        replaced: keys that the caller overrides: they may be missing, or unknown to a classifier.

    Raises:
        CheckpointError: naming the key.
    """
    if not isinstance(values, dict) or ("model" not in values and "model" not in replaced):
        raise CheckpointError(
            "the checkpoint has no hyperparameters of a model: it was trained on a module passed "
            "as an instance; create that module again and pass it as model=..."
        )
    for key in values:
        if str(key) not in HYPERPARAMETERS and key not in replaced:
            raise _refused(
                str(key),
                f"expected only {', '.join(HYPERPARAMETERS)}; pass the parameters of a subclass "
                f"to load_from_checkpoint: {key}=...",
            )
    if "model" in values:
        check_model_options(values["model"])
    _check_options(values.get("optim", {}), "optim", nested=("schedule",))
    if not isinstance(values.get("channels_last", False), bool):
        raise _refused("channels_last", "expected true or false")
    return values


def check_model_options(options: Any) -> dict[str, Any]:
    """Return ``options`` if they are a model's name and plain keywords.

    Raises:
        CheckpointError: naming the key.
    """
    _check_options(options, "model")
    name = options.get("name")
    # the table is the exact list of what may be built; a path is not a name in it
    if not isinstance(name, str) or name not in MODELS:
        raise _refused("model.name", f"got {name!r:.80}, expected one of list_models()")
    # keys such as checkpoint_path would read a file of the sender's choice
    for key in WEIGHTS_ARGUMENTS:
        if key in options:
            raise _refused(f"model.{key}", "a checkpoint contains the weights; remove the key")
    return dict(options)


def _check_options(options: Any, where: str, *, nested: tuple[str, ...] = ()) -> None:
    if not isinstance(options, dict):
        raise _refused(where, "expected a mapping")
    for key, value in options.items():
        name = f"{where}.{key}"
        # _target_ and similar keys select code in some libraries
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_"):
            raise _refused(name, "expected the name of an option")
        # only optim.schedule may hold a mapping
        if key in nested:
            _check_options(value, name)
        else:
            _check_value(value, name)


def _check_value(value: Any, name: str) -> None:
    items = value if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if type(item) not in SCALARS:
            raise _refused(name, f"expected a number, word or list of them, got {item!r:.80}")
        # neither a reference that a library resolves, nor an import path, nor a file
        if isinstance(item, str) and ("${" in item or "." in item or "/" in item):
            raise _refused(name, f"expected a plain word, got {item!r:.80}")


def _refused(key: str, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's hyperparameter {key} is refused: {why}")
