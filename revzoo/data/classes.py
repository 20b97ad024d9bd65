"""Whether data have the classes that a model was trained on."""

from __future__ import annotations

from collections.abc import Sequence

from revzoo.data.errors import DataError

_LISTED = 20  # names of a long list


def check_same_classes(trained: Sequence[str], found: Sequence[str]) -> None:
    """Refuse data whose class names, by label, are not those of training.

    Raises:
        DataError: with both lists, and what is in one alone.
    """
    if list(trained) == list(found):
        return
    lacking, new = sorted({*trained} - {*found}), sorted({*found} - {*trained})
    differ = (
        f"only trained on: {_brief(lacking)}; only in the data: {_brief(new)}"
        if lacking or new
        else "the same names in another order"
    )
    raise DataError(
        f"the model was trained on {len(trained)} classes {_brief(trained)}, "
        f"this data has {len(found)}: {_brief(found)}; {differ}. Give data with the classes, and "
        "the names of class folders, that it was trained on"
    )


def _brief(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "") or "none"
