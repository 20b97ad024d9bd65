"""What commands print: folded lines, status, written files, errors, and commands to type.

A terminal breaks long lines inside words, so they are folded at spaces. Without a terminal, as in a
pipe or a file, lines stay whole for programs that read them; COLUMNS=80 in the environment folds
them there, too. The status and the names of written files go to standard error, since standard
output may go into a file.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from revzoo._checks import UserError

# our checks raise ValueErrors, and the system OSErrors that name a file
USER_ERRORS = (ValueError, OSError, UserError)
# control characters, except the ends of lines and tabs, and those that reverse the order of letters
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


imported: list[str] = []  # the modules of the command's --import


class ConfigError(ValueError):
    """A command line or configuration is wrong; the message says what to change."""


def columns() -> int:
    """The width of the terminal; 0 without one."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns


def printable(text: str) -> str:
    r"""``text`` with control characters as ``\x1b``: names of files may hold any.

    They could change the terminal, or hide a part of a line.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_record(text: str) -> str:
    """The printable text of a log record. Its further lines begin with spaces, unlike records."""
    return re.sub(r"\n(?=\S)", "\n  ", printable(text))


def folded(text: str, *, indent: int, end: str = "") -> str:
    """``text``, whose further lines begin with ``indent`` spaces; ``end`` ends all but the last."""
    if not (width := columns()):
        return text
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line,
            max(width - len(end), indent + 20),
            subsequent_indent=" " * indent,
            break_long_words=False,  # paths and hashes are copied
            break_on_hyphens=False,
        ) or [line]
    return f"{end}\n".join(lines)


def folded_command(line: str, *, indent: int) -> str:
    """A line that ends with a shell command, folded so that the command can be copied."""
    # inside quotes, a backslash would be part of the word
    return line if "'" in line else folded(line, indent=indent, end=" \\")


class FoldedFormat(logging.Formatter):
    """The message of a record, without its level or place."""

    # Formatter.format appends tracebacks to this
    def formatMessage(self, record: logging.LogRecord) -> str:
        return folded(one_record(record.message), indent=2)


def show_status(text: str) -> None:
    """Show the current computation on a terminal; the next call replaces it, "" clears it."""
    if sys.stderr.isatty():
        # a line that wraps could not be cleared; 4 columns for the dots
        shown = f"{text[: shutil.get_terminal_size().columns - 5]} ..." if text else ""
        # back to the first column, and clear the line
        sys.stderr.write(f"\r\033[K{shown}")
        sys.stderr.flush()


def show_written(*paths: Path | None) -> None:
    """Name the files that a command has written, on standard error; skip None."""
    for path in paths:
        if path is not None:
            sys.stderr.write(f"wrote {path}\n")


@contextmanager
def status_of(subject: str) -> Iterator[None]:
    """Show ``subject``; while :mod:`revzoo.profiling` counts or times, also what, and the seconds.

    Print only after it, or the line would stay before the text.
    """
    log, start = logging.getLogger("revzoo.profiling"), time.perf_counter()
    show_status(subject)  # building a model takes seconds, too

    def show(record: logging.LogRecord) -> bool:
        show_status(f"{subject}, {time.perf_counter() - start:.0f} s: {record.getMessage()}")
        return False  # no other handler shows it

    level = log.level
    handler = logging.Handler()
    handler.addFilter(show)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        show_status("")


def one_line(error: BaseException) -> str:
    """The first two lines of an error's message, joined."""
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
    text = str(error)
    if isinstance(error, UserError) and error.in_programs:
        text = error.in_programs
    elif isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"  # without its number
    return folded(printable(f"revzoo: {text}"), indent=8)


# --- commands ---


def command_line(command: str, *arguments: object) -> str:
    """The text of a command that works in the user's environment: ``revzoo eval ckpt=...``."""
    return shlex.join([_program("revzoo"), command, *_imports(), *map(str, arguments)])


def train_words() -> list[str]:
    """The first words of a command line that trains, for another process."""
    return [sys.executable, "-m", "revzoo", "train", *_imports()]


def tensorboard_line(folder: object) -> str:
    """The text of the command that shows ``folder`` in this environment's TensorBoard."""
    return shlex.join([_program("tensorboard"), "--logdir", str(folder)])


def _program(name: str) -> str:
    """``name``, or its path if the environment, which has it, is not activated."""
    # not resolved: a virtual environment's python is a link
    path = Path(sys.executable).with_name(name)
    return name if shutil.which(name) == str(path) or not path.exists() else str(short_path(path))


def _imports() -> list[str]:
    return [word for module in imported for word in ("--import", module)]


def override_argument(text: str) -> str:
    """An override of the command line, ``KEY=VALUE``; a value with letters outside ASCII in quotes.

    Hydra's grammar knows such letters only in quotes; lists and functions stay as they are.
    """
    key, equals, value = text.partition("=")
    is_plain = value.isascii() or re.search(r"""['"\\$,(){}\[\]]""", value)
    return text if is_plain else f"{key}{equals}'{value}'"


def short_path(path: str | Path) -> Path:
    """The path relative to the working directory if it is below it; otherwise absolute."""
    path, here = Path(path).absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
