"""revzoo: reversible networks whose training memory does not grow with depth."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revzoo._version import __version__ as __version__

# A wheel holds revzoo/configs; in a checkout configs/ lies beside the package.
# `revzoo.configs` is importable in both.
_here = Path(__file__).parent
if not (_here / "configs").is_dir():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from revzoo.api import *  # noqa: F403  # its __all__ is the list


def __getattr__(name: str) -> Any:
    """Load a name of :mod:`revzoo.api` on first use, so ``revzoo --help`` does not import torch.

    ``from revzoo import *`` imports all of them: ``__all__`` lists them.

    Raises:
        AttributeError: unknown name.
    """
    if name == "__all__":
        return import_module("revzoo.api").__all__
    if not name.startswith("_"):  # Python and tools ask for __wrapped__, __file__ and others
        api = import_module("revzoo.api")
        if name in api.__all__:
            globals()[name] = value = getattr(api, name)  # later accesses skip this function
            return value
    raise AttributeError(f"module 'revzoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("revzoo.api").__all__})
