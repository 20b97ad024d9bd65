"""The state of a data module in a checkpoint or beside weights: validates and converts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from revzoo._checks import counts_of, is_count, is_number, shortened
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
        DataError: lists all invalid fields with their values.
    """
    state = state if isinstance(state, Mapping) else {}
    classes, stored = state.get("classes"), state.get("in_chans")
    scales = state.get("normalisation")
    mean = scales.get("mean") if isinstance(scales, Mapping) else None
    known = stored if is_count(stored) else len(mean) if isinstance(mean, list) else 0
    channels = in_chans or known

    def numbers(scale: Any, count: int) -> bool:
        """Whether it has finite means and deviations above 0, ``count`` each."""
        if not isinstance(scale, Mapping) or set(scale) != {"mean", "std"}:
            return False
        fits = (isinstance(v, list) and 0 < len(v) == count for v in scale.values())
        return all(fits) and all(
            is_number(v) and low < v < inf
            for name, low in (("mean", -inf), ("std", 0))
            for v in scale[name]
        )

    names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    pixel_max, size, crop = (state.get(n) for n in ("pixel_max", "image_size", "crop_pct"))
    valid = {
        "classes": names and 0 < len(classes) == (num_classes or len(classes)),
        "pixel_max": "pixel_max" not in state or (is_number(pixel_max) and 0 < pixel_max < inf),
        "normalisation": numbers(scales, channels),
        "in_chans": stored is None or (is_count(stored) and stored == channels),
        "image_size": size is None or bool(counts_of(size, repeat=1)),
        "targets": "targets" not in state or (names and numbers(state["targets"], len(classes))),
        "crop_pct": crop is None or (is_number(crop) and 0 < crop <= 1),
    }
    faults = [f"{name} is {state.get(name)!r:.80}" for name, fits in valid.items() if not fits]
    if faults:
        raise DataError(
            f"the checkpoint's state of its data is not valid for {num_classes or 'any'} classes "
            f"and {channels or 'any'} channels: {'; '.join(faults)}. Use a checkpoint that a run "
            "has saved"
        )


def normalisation_for(state: Mapping[str, Any], pixel_max: int) -> dict[str, list[float]]:
    """``mean`` and ``std`` per channel, for pixels from 0 to ``pixel_max``.

    The state holds them in units of its pixels, whose largest value is 16 for the digits, 255 for
    image files and 1 for published weights.
    """
    scale = pixel_max / state.get("pixel_max", BYTE_MAX)
    values = state["normalisation"]
    return {name: [value * scale for value in values[name]] for name in ("mean", "std")}


def check_same_task(trained: str, found: str) -> None:
    """Refuse data for another task than training's."""
    if trained != found:
        raise DataError(
            f"the model was trained for task={trained}, the labels of this data are for "
            f"task={found}: give data of the same kind, or a table with task={trained}"
        )


def check_same_classes(trained: Sequence[str], found: Sequence[str]) -> None:
    """Refuse data whose class names, by label, differ from training's."""
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
    """Refuse to resume a training with other images; ``found`` is ``ImageData.identity``.

    The state of published weights lacks the key "images".
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
