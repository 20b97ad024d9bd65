"""The state of the data, which comes from an untrusted file, is validated before use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from revzoo.data import DataError, Digits
from revzoo.data.state import check_state

NUMBERS = {"mean": [4.9], "std": [6.0]}
STATE = {
    "classes": ["a", "b"],
    "pixel_max": 16,
    "normalisation": NUMBERS,
    "image_size": 8,
    "in_chans": 1,
    "crop_pct": 0.875,
    "order_seed": 0,
    "images": {"train": 9, "val": 1, "digest": "0a"},
}


def test_states_may_lack_fields() -> None:
    digits = Digits()
    digits.setup("fit")
    check_state(digits.state_dict(), num_classes=10, in_chans=1)
    check_state(STATE, num_classes=2, in_chans=1)
    check_state({**STATE, "image_size": None, "crop_pct": None, "order_seed": None})
    check_state({"classes": ["a"], "normalisation": NUMBERS}, in_chans=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("classes", v) for v in (None, [], ["a"], [1, 2], {"a": "b"})],
        *[("pixel_max", v) for v in (None, 0, "255")],
        *[("normalisation", v) for v in (None, {}, {"mean": [1.0]})],
        *[("normalisation", {**NUMBERS, **v}) for v in ({"x": 1}, {"mean": 5.0})],
        *[("normalisation", {**NUMBERS, "std": v}) for v in ([0.0], [float("nan")], [1.0, 1.0])],
        ("normalisation", {"mean": [1.0] * 3, "std": [1.0] * 3}),
        *[("image_size", v) for v in ("big", 0)],
        *[("in_chans", v) for v in ("1", 3, torch.ones(2))],
        *[("crop_pct", v) for v in ("x", 0, 1.5)],
    ],
)
def test_anything_else_is_refused_by_its_name(name: str, value: Any) -> None:
    state = {**STATE, name: value}
    with pytest.raises(DataError, match=rf"not valid for 2 .*{name} is .*a run has saved"):
        check_state(state, num_classes=2, in_chans=1)


def test_without_a_model_a_state_must_agree_with_itself() -> None:
    for name, value in (("in_chans", 3), ("in_chans", torch.ones(2)), ("classes", [])):
        with pytest.raises(DataError, match="not valid"):
            check_state({**STATE, name: value})


def test_data_refuse_it_before_they_take_it() -> None:
    data = Digits()
    for state in ({**STATE, "normalisation": 5}, 5, {}):
        with pytest.raises(DataError, match="not valid"):
            data.load_state_dict(state)  # type: ignore[arg-type]
    data.setup("test")
    assert data.normalisation.state_dict() != NUMBERS
