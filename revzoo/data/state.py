"""What the state of a data module, as a checkpoint or weights keep it, says to other data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from revzoo.data.decode import IMAGENET_CROP_PCT

BYTE_MAX = 255  # of the pixels of image files, and of a state that does not say


def normalisation_for(state: Mapping[str, Any], pixel_max: int) -> dict[str, list[float]]:
    """``mean`` and ``std`` per channel, for pixels that end at ``pixel_max``.

    A state's numbers are in units of the pixels as its data stored them: the digits' end at 16,
    those of image files at 255, and those of published weights at 1.
    """
    stored, kept = state.get("pixel_max", BYTE_MAX), state["normalisation"]
    return {name: [value * pixel_max / stored for value in kept[name]] for name in ("mean", "std")}


def crop_of(state: Mapping[str, Any]) -> float | None:
    """The ``crop_pct`` (see ``decode.to_square``) of the evaluation; None where it is not said."""
    if "in_memory" in state:  # checkpoints from before crop_pct
        return 1.0 if state["in_memory"] else IMAGENET_CROP_PCT
    return state.get("crop_pct")
