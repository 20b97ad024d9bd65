"""Folds long lines at spaces, to the width of the terminal.

A terminal breaks them inside words. Without a terminal, as in a pipe or a file, lines stay whole
for programs that read them; COLUMNS=80 in the environment folds them there, too.
"""

from __future__ import annotations

import logging
import re
import shutil
import textwrap


def columns() -> int:
    """The width of the terminal; 0 without one."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns


# control characters, except the ends of lines and tabs, and those that reverse the order of letters
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""``text`` with control characters as ``\x1b``: names of files may hold any.

    They could change the terminal, or hide a part of a line.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_record(text: str) -> str:
    """The printable text of a log record. Its further lines begin with spaces, unlike records."""
    return re.sub(r"\n(?=\S)", "\n  ", printable(text))


def folded(text: str, *, indent: int, end: str = "") -> str:
    """``text``, whose further lines begin with spaces.

    Args:
        text: one or more lines.
        indent: the number of spaces.
        end: ends all lines except the last: a backslash continues a shell command.
    """
    width = columns()
    if not width:
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
