"""The error for a wrong command line or configuration."""

from __future__ import annotations


class ConfigError(ValueError):
    """A command line or configuration is wrong; the message says what to change."""


def one_line(error: BaseException, *, lines: int = 2) -> str:
    """The first lines of an error's message, joined."""
    texts = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(texts[:lines]) or type(error).__name__
