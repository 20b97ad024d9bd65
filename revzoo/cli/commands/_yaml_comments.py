"""Wraps the comments of YAML to the width of the terminal, for ``revzoo options``."""

from __future__ import annotations

import re
import textwrap


def wrapped(text: str, width: int) -> str:
    """YAML with its comments wrapped; each line of a comment begins with #.

    Args:
        text: YAML.
        width: columns of a line. Values and commands may be longer.
    """
    lines: list[str] = []
    for line in _joined(text.splitlines(), width):
        lines += [line] if len(line) <= width else _folded(line, width)
    return "\n".join([*lines, ""])


def _joined(lines: list[str], width: int) -> list[str]:
    """Lines of YAML; a comment that is too long takes in the lines that continue it.

    Then it is wrapped as one paragraph, not line by line.
    """
    joined: list[str] = []
    for line in lines:
        words = re.match(r"# (\S.*)", line)
        before = joined[-1] if joined else ""
        # a line continues the line before if it begins with a small letter, a digit or a bracket,
        # or if the line before ends with a comma or a word in small letters
        continues = words and (
            re.match(r"[a-z0-9(]", words[1]) or re.search(r"(,| [a-z]+)$", before)
        )
        if words and continues and re.match(r"# \S", before) and len(before) > width:
            joined[-1] = f"{before} {words[1]}"
        else:
            joined.append(line)
    return joined


def _folded(line: str, width: int) -> list[str]:
    """Break a YAML line that is too long, according to the kind of its comment."""
    if command := re.fullmatch(r"(\s*#\s\s+)(\S.*?)(?:\s+# (.*))?", line):
        # a command stays whole, so that it can be copied
        margin = f"{command[1]}  "
        return [command[1] + command[2], *_filled(margin + (command[3] or ""), width, margin)]
    comment = re.search(r"(^|(?<=\s))# ", line)
    if comment is None:
        return [line]
    start = comment.start()
    if start <= width // 2:
        return _filled(line, width, f"{' ' * start}# ")
    # beside a long value the column would be narrow, so above it
    margin = " " * (len(line) - len(line.lstrip())) + "# "
    return [*_filled(margin + line[comment.end() :], width, margin), line[:start].rstrip()]


def _filled(line: str, width: int, margin: str) -> list[str]:
    """The line, wrapped; further lines begin with ``margin``. Nothing for an empty margin."""
    # no-break spaces keep `quoted words` and numbers with their % together
    glued = re.sub(r"`[^`]*`|\d %", lambda match: match[0].replace(" ", "\xa0"), line)
    lines = textwrap.wrap(
        glued,
        width,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [row.replace("\xa0", " ") for row in lines if row.strip() != margin.strip()]
