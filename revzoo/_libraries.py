"""The names of torchvision's and timm's networks, read from the libraries' files.

Importing either library takes seconds, which a wrong name should not cost.
"""

from __future__ import annotations

import functools
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from revzoo._checks import did_you_mean

LIBRARIES = ("torchvision", "timm")


@functools.cache
def source_of(library: str) -> str:
    """The text of all files that define a library's networks; empty without the library."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return ""
    files = sorted((Path(spec.origin).parent / "models").glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@functools.cache
def declared_names(library: str) -> tuple[str, ...]:
    """The networks that a library registers by a decorator, sorted."""
    pattern = re.compile(r"^@register_model\b.*\n(?:@.*\n)*def (\w+)", re.MULTILINE)
    return tuple(sorted(set(pattern.findall(source_of(library)))))


def check_library_name(name: str) -> None:
    """Check ``LIBRARY:NAME`` without an import of the library.

    A name in a file of the library passes, and any name once the library is imported: a plugin
    may have registered networks there.

    Raises:
        ValueError: the library is not installed, or has no such network.
    """
    library, _, own = name.partition(":")
    if find_spec(library) is None:
        raise ValueError(f"{library}: networks need the package: pip install {library}")
    text = source_of(library)  # empty if the library comes without sources: let it decide
    # anywhere in the text, not only after `def`: a decorator may give another name
    if text and library not in sys.modules and not re.search(rf"\b{re.escape(own)}\b", text):
        raise ValueError(unknown_name(name))


def unknown_name(name: str) -> str:
    """The message for a name that its library does not list."""
    library, _, own = name.partition(":")
    return (
        f"there is no model {name!r}: expected {library}:NAME with a name of {library}."
        f"{'models.' * (library == 'torchvision')}list_models()"
        + did_you_mean(own, declared_names(library), n=3)
    )


def library_hint(name: str) -> str:
    """``"; torchvision's is 'torchvision:resnet18'"`` for a name of a library, else empty."""
    base = name.partition(".")[0]
    having = [library for library in LIBRARIES if base in declared_names(library)]
    listed = ", ".join(f"{library}'s is '{library}:{base}'" for library in having)
    return f"; {listed}" if listed else ""
