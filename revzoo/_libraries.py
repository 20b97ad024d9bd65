"""The names of torchvision's and timm's networks, and the error for a name that no network has.

The names are read from the libraries' files: importing torch or a library takes seconds, too long
just to report a wrong name.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from revzoo._checks import UserError, did_you_mean, either, nearest, package_needed

LIBRARIES = ("torchvision", "timm")
_SEE = "see list_models('{0}:*') (revzoo list '{0}:*')"


class UnknownModelError(UserError, ValueError):
    """No model has this name."""


def unknown_model(name: str, known: Collection[str]) -> UnknownModelError:
    """The error for a name that is not one of the ``known`` models."""
    # an exact name of a library is a better hint than a similar name of the zoo
    hint = library_hint(name)
    hint = f"{hint}." if hint else did_you_mean(name, known, n=3) or "."
    start = f"there is no model {name!r} among the {len(known)} of"
    return UnknownModelError(
        f"{start} list_models(){hint} Register your own with revzoo.register_model "
        "(on the command line: --import MODULE)",
        in_programs=f"{start} revzoo list --all{hint} Register your own with "
        "revzoo.register_model, and add --import MODULE",
    )


@functools.cache
def declared_names(library: str) -> tuple[str, ...]:
    """The networks that a library registers by a decorator, sorted."""
    spec = find_spec(library)
    folder = Path(spec.origin).parent / "models" if spec is not None and spec.origin else Path()
    pattern = re.compile(r"^@register_model\b.*\n(?:@.*\n)*def (\w+)", re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    return tuple(sorted({name for text in texts for name in pattern.findall(text)}))


def matching_names(pattern: str) -> list[str]:
    """The networks that match ``LIBRARY:PATTERN``, as ``LIBRARY:NAME``; none for other patterns.

    Raises:
        ValueError: the library is not installed.
    """
    library, colon, own = pattern.partition(":")
    if library not in LIBRARIES or not colon:
        return []
    check_installed(library)
    names = declared_names(library)
    return [f"{library}:{name}" for name in names if fnmatch.fnmatchcase(name, own)]


def check_installed(library: str) -> None:
    """Raise a ValueError unless the library is installed."""
    if find_spec(library) is None:
        raise ValueError(package_needed(f"networks of {library} need the package", library))


def check_library_name(name: str) -> tuple[str, str]:
    """Split ``LIBRARY:NAME``; checks it without importing the library.

    Raises:
        ValueError: the library is not installed, or has no such network.
    """
    library, _, own = name.partition(":")
    check_installed(library)
    # plugins may have registered networks in timm, once it is imported
    timm = sys.modules.get("timm") if library == "timm" else None
    if own in declared_names(library) or (timm is not None and own in timm.list_models()):
        return library, own
    raise ValueError(unknown_name(name))


def unknown_name(name: str) -> str:
    """The message for a name that its library does not list."""
    library, _, own = name.partition(":")
    names = declared_names(library)
    longer = [n for n in names if own and n.startswith(own)]
    near = nearest(own, longer or names, n=3, cutoff=0 if longer else 0.5)
    meant = either(repr(f"{library}:{n}") for n in near) if near else ""
    return f"there is no model {name!r}: expected {library}:NAME, {_SEE.format(library)}" + (
        f"; did you mean {meant}?" if meant else ""
    )


def library_hint(name: str) -> str:
    """``"; torchvision's is 'torchvision:resnet18'"`` if a library has the name, else empty.

    If the name is a library's own, the hint says how to name a network.
    """
    if name in LIBRARIES:
        return f"; networks of {name} are '{name}:NAME', {_SEE.format(name)}"
    base = name.partition(".")[0]
    having = [library for library in LIBRARIES if base in declared_names(library)]
    listed = ", ".join(f"{library}'s is '{library}:{base}'" for library in having)
    return f"; {listed}" if listed else ""
