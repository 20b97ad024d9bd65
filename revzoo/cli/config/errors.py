"""The errors that end a program with their message, without a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from revzoo._checks import UserError
from revzoo.cli.terminal import folded, printable

# our checks raise ValueErrors, and the system OSErrors that name a file
USER_ERRORS = (ValueError, OSError, UserError)


class ConfigError(ValueError):
    """A command line or configuration is wrong; the message says what to change."""


def one_line(error: BaseException) -> str:
    """The first two lines of an error's message, joined; of YAML's, which are its context, none."""
    if problem := getattr(error, "problem", None):
        return " ".join(f"{problem} {getattr(error, 'problem_mark', '')}".split())
    texts = [line.strip() for line in str(error).splitlines() if line.strip()]
    # some errors have no message
    return " ".join(texts[:2]) or type(error).__name__


@contextmanager
def user_errors(kinds: tuple[type[Exception], ...] = USER_ERRORS) -> Iterator[None]:
    """End the program with the message of an error of these ``kinds``.

    With ``HYDRA_FULL_ERROR=1`` in the environment the error passes, with its traceback.
    """
    try:
        yield
    except kinds as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(message_line(error))


def message_line(error: Exception) -> str:
    """An error as programs print it, folded to the terminal, without the end of the line."""
    return folded(printable(f"revzoo: {_text_of(error)}"), indent=8)


def _text_of(error: Exception) -> str:
    """The message for programs; of an error of the system, without its number."""
    if isinstance(error, UserError) and error.in_programs:
        return error.in_programs
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
