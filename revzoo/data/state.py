"""The state of a data module in a checkpoint or beside weights: validates and converts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from revzoo._checks import is_count, is_number, shortened
from revzoo.data.errors import DataError

_COUNTS = {"train": "to train", "val": "to validate"}
BYTE_MAX = 255  # of pixels in image files, the default


def check_state(state: Any, *, num_classes: int | None = None, in_chans: int | None = None) -> None:
    """Validate the state of a data module, from an untrusted file, before use.

    Args:
        state: the state; that of published weights lacks some fields.
        num_classes: of the model; None if unknown.
        in_chans: channels of the model's images; None accepts the channels in ``state``.

    Raises:
        DataError: lists all invalid fields with their values and the expected values.
    """
    if isinstance(state, Mapping):
        faults = [
            f"{name} is {state.get(name)!r:.80}, expected {expected}"
            for name, valid, expected in _rules(state, num_classes, in_chans)
            if not valid
        ]
    else:
        faults = [f"it is {state!r:.80}, expected a mapping"]
    if faults:
        raise DataError(
            f"the checkpoint's state of its data is not valid: {'; '.join(faults)}. Use a "
            "checkpoint that a run has saved"
        )


def _rules(
    state: Mapping[str, Any], num_classes: int | None, in_chans: int | None
) -> Iterator[tuple[str, bool, str]]:
    """Name, whether its value is valid, expected value."""
    classes: Any = state.get("classes")
    is_list = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    complete = is_list and 0 < len(classes) == (num_classes or len(classes))
    count = f", not {len(classes)}" if is_list else ""
    yield "classes", complete, f"a list of {num_classes or 'some'} names, by label{count}"
    yield "pixel_max", _is_above(state.get("pixel_max", BYTE_MAX)), "a pixel's largest value"
    stored = state.get("in_chans")
    channels = in_chans or (stored if is_count(stored) else None)
    valid = _is_normalisation(state.get("normalisation"), channels)
    each = channels or "the"
    yield "normalisation", valid, f"mean and std, finite and std above 0, of {each} channels"
    optional: dict[str, tuple[Callable[[Any], bool], str]] = {
        "in_chans": (lambda v: is_count(v) and v == channels, f"{in_chans or 'a number >= 1'}"),
        "image_size": (is_count, "a side in pixels"),
        "crop_pct": (lambda v: _is_above(v) and v <= 1, "a share above 0, up to 1"),
    }
    for name, (is_valid, expected) in optional.items():
        value = state.get(name)
        yield name, value is None or is_valid(value), expected


def _is_normalisation(value: Any, channels: int | None) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"mean", "std"}:
        return False
    mean, std = value["mean"], value["std"]
    if not (isinstance(mean, list) and isinstance(std, list)):
        return False
    fits = 0 < len(mean) == len(std) == (channels or len(mean))
    return fits and all(_is_above(v, -inf) for v in mean) and all(map(_is_above, std))


def _is_above(value: Any, low: float = 0) -> bool:
    """Whether ``value`` is a finite number above ``low``."""
    return is_number(value) and low < value < inf


def normalisation_for(state: Mapping[str, Any], pixel_max: int) -> dict[str, list[float]]:
    """``mean`` and ``std`` per channel, for pixels from 0 to ``pixel_max``.

    The state holds them in units of its pixels, whose largest value is 16 for the digits, 255 for
    image files and 1 for published weights.
    """
    scale = pixel_max / state.get("pixel_max", BYTE_MAX)
    values = state["normalisation"]
    return {name: [value * scale for value in values[name]] for name in ("mean", "std")}


def check_same_classes(trained: Sequence[str], found: Sequence[str]) -> None:
    """Refuse data whose class names, by label, differ from training's.

    Raises:
        DataError: shows both lists and their differences.
    """
    if list(trained) == list(found):
        return
    lacking, new = sorted({*trained} - {*found}), sorted({*found} - {*trained})
    differ = (
        f"only trained on: {shortened(lacking, 20)}; only in the data: {shortened(new, 20)}"
        if lacking or new
        else "the same names in another order"
    )
    raise DataError(
        f"the model was trained on {len(trained)} classes {shortened(trained, 20)}; "
        f"this data has {len(found)}: {shortened(found, 20)}; {differ}. Use data with the same "
        "class names"
    )


def check_same_images(
    trained: Mapping[str, Any],
    found: Mapping[str, Any],
    remedy: str = "start a new training from the weights of this one",
) -> None:
    """Refuse to resume a training with other images.

    Args:
        trained: the state of training's data; that of published weights lacks the key "images".
        found: ``ImageData.identity`` of this data.
        remedy: what to do if the change is wanted.

    Raises:
        DataError: says what has changed.
    """
    before = trained.get("images")
    if before is None or before == found:
        return
    changes = [
        f"{before[split]:,} {purpose}, now {found[split]:,}"
        for split, purpose in _COUNTS.items()
        if before[split] != found[split]
    ]
    raise DataError(
        "the images have changed since this training began: "
        f"{'; '.join(changes) or 'as many as before, with other names, sizes or labels'}. It "
        f"would not end as one that was not stopped. Put the former images back, or {remedy}"
    )
