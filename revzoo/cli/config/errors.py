"""The error of a configuration or command line that cannot be run."""

from __future__ import annotations


class ConfigError(ValueError):
    """A command line or configuration that cannot be run; the message says what to change."""


def one_line(error: BaseException, *, lines: int = 2) -> str:
    """The first lines of an error's message, joined."""
    found = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(found[:lines]) or type(error).__name__
