"""Validates the hyperparameters of a checkpoint against an exact list before they are used.

A checkpoint may come from anyone and must not choose what is imported, called or read. Lightning's
``load_from_checkpoint`` passes all hyperparameters to the constructor, lets ``_instantiator`` load
classes, and reads addresses with pickles enabled. Here they are names of the zoo and plain values,
or refused.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from revzoo.models.registry import MODELS
from revzoo.training.checkpoint.files import CheckpointError

HYPERPARAMETERS = ("model", "optim", "channels_last")
SCALARS = (str, int, float, bool, type(None))
# keywords of create_model that choose the initial weights
WEIGHTS = ("pretrained", "checkpoint_path", "cache_dir", "table", "allow_nonfinite")


def check_hyperparameters(given: Any, *, replaced: Container[str] = ()) -> dict[str, Any]:
    """``given``, if a classifier of the zoo takes it.

    The zoo checks names and values of options. This function checks the rest: a model of the zoo,
    no other key, no mapping where a value belongs, no reference.

    Args:
        given: ``hyper_parameters`` of a checkpoint.
        replaced: keys that the caller gives: they may be missing, or unknown to a classifier.

    Raises:
        CheckpointError: naming the key.
    """
    if not isinstance(given, dict) or ("model" not in given and "model" not in replaced):
        raise CheckpointError(
            "the checkpoint has no hyperparameters of a model: it was trained on a module passed "
            "as an instance; make that module again and give it as model=..."
        )
    for key in given:
        if str(key) not in HYPERPARAMETERS and key not in replaced:
            raise _refused(
                str(key),
                f"expected only {', '.join(HYPERPARAMETERS)}; give a subclass's own to "
                f"load_from_checkpoint: {key}=...",
            )
    if "model" in given:
        check_model_options(given["model"])
    _check_options(given.get("optim", {}), "optim", nested=("schedule",))
    if not isinstance(given.get("channels_last", False), bool):
        raise _refused("channels_last", "expected true or false")
    return given


def check_model_options(options: Any) -> dict[str, Any]:
    """``options``, if they are a model's name and plain keywords.

    Raises:
        CheckpointError: naming the key.
    """
    _check_options(options, "model")
    name = options.get("name")
    if not isinstance(name, str) or name not in MODELS:
        raise _refused("model.name", f"got {name!r:.80}, expected one of list_models()")
    for key in WEIGHTS:
        if key in options:
            raise _refused(f"model.{key}", "a checkpoint brings its own weights")
    return dict(options)


def _check_options(options: Any, where: str, *, nested: tuple[str, ...] = ()) -> None:
    if not isinstance(options, dict):
        raise _refused(where, "expected a mapping")
    for key, value in options.items():
        name = f"{where}.{key}"
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_"):
            raise _refused(name, "expected the name of an option")
        if key in nested:
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
