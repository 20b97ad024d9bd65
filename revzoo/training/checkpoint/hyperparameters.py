"""Checks the hyperparameters of a checkpoint against an exact list before they are used.

A checkpoint may come from anyone, so it must not choose which code is imported or called, or which
files are read, as it does with Lightning's ``load_from_checkpoint``. We accept the names of the
zoo; its constructors refuse unknown options and wrong values, as your own networks should.
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
        if key not in HYPERPARAMETERS and key not in replaced:
            raise _refused(
                key,
                f"expected only {', '.join(HYPERPARAMETERS)}; pass the parameters of a subclass "
                f"to load_from_checkpoint: {key}=...",
            )
    if "model" in values:
        check_model_options(values["model"])
    return values


def check_model_options(options: Any) -> dict[str, Any]:
    """Return ``options`` if they are the name of a model and plain keywords."""
    name = options.get("name") if isinstance(options, dict) else options
    # the table is the exact list of what may be built; a path is not a name in it
    if not isinstance(options, dict) or not isinstance(name, str) or name not in MODELS:
        raise _refused("model.name", f"got {name!r:.80}, expected one of list_models()")
    for key, value in options.items():
        if key in WEIGHTS_ARGUMENTS:  # checkpoint_path would read a file of the sender's choice
            raise _refused(f"model.{key}", "a checkpoint contains the weights; remove the key")
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if type(item) not in SCALARS:
                raise _refused(f"model.{key}", f"got {item!r:.80}, expected numbers or words")
    return options


def _refused(key: object, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's hyperparameter {key} is refused: {why}")
