"""Training on Lightning: the classifier module, its optimiser and schedules, its callbacks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revzoo.training.api import *  # noqa: F403  # its __all__ is the list


def __getattr__(name: str) -> Any:
    """Load a name of :mod:`revzoo.training.api` on first use: Lightning's import takes seconds.

    Raises:
        AttributeError: unknown name.
    """
    if name == "__all__" or not name.startswith("_"):
        api = import_module("revzoo.training.api")
        if name == "__all__" or name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'revzoo.training' has no attribute {name!r}")
