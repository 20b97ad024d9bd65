"""The options that all data modules have, and what is accepted of them."""

from collections.abc import Mapping
from typing import Any, TypedDict

from revzoo.data.augment import Augment


class LoadingOptions(TypedDict, total=False):
    """The options of ``ImageData``, which its subclasses pass on."""

    batch_size: int
    eval_batch_size: int
    num_workers: int | None
    val_fraction: float
    split_seed: int
    augment: Augment | Mapping[str, Any] | None


def check_at_least(name: str, value: int, least: int) -> None:
    """Refuse anything but a whole number from ``least`` on.

    Raises:
        ValueError: naming the option, what was given, and what is expected.
    """
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value}: expected a whole number >= {least}")


def check_share(name: str, value: float) -> None:
    """Refuse anything but a number between 0 and 1, these excluded.

    Raises:
        ValueError: naming the option, what was given, and what is expected.
    """
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value}: expected a share, 0 < {name} < 1")
