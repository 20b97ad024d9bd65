"""Lines of the program fit into a terminal of 80 columns."""

from __future__ import annotations

import logging

import pytest

from revzoo.cli.main import main
from revzoo.cli.run.console import LogFormat
from revzoo.cli.run.predict import as_table
from revzoo.cli.terminal import FoldedFormat, folded

LONG = "memory=auto: steps: 6 store, 2 exact; peak 143.51 MiB (exact 140.89 MiB); in 0:13"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("revzoo", logging.INFO, "f.py", 1, message, (), None)
    vars(made).update(extra)
    return made


def test_lines_are_folded_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert folded("short", indent=4) == "short"
    assert folded(f"{LONG}\nshort", indent=4) == f"{LONG[:-5]}\n    0:13\nshort"
    lines = LogFormat(date=False).format(record(LONG)).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith(18 * " ")
    assert len(LogFormat(date=True).format(record(LONG)).splitlines()) == 1  # a file
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda fd: (_ for _ in ()).throw(OSError()))
    assert folded(LONG, indent=4) == LONG


def test_lines_of_an_evaluation_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert FoldedFormat().format(record(LONG)).splitlines()[1].startswith("  ")


def test_a_folded_command_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    command = "evaluate python -m revzoo eval ckpt=outputs/run/checkpoints/best.ckpt"
    first, second = LogFormat(date=False).format(record(command, command=True)).splitlines()
    assert first.endswith(" revzoo eval \\")
    assert second.strip() == "ckpt=outputs/run/checkpoints/best.ckpt"
    quoted = "evaluate python -m revzoo eval 'ckpt=my outputs/run/checkpoints/best.ckpt'"
    assert len(LogFormat(date=False).format(record(quoted, command=True)).splitlines()) == 1


def test_errors_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as raised:
        main(["info", "revnet3"])
    first, second, *_ = lines = str(raised.value).splitlines()
    assert first.startswith("revzoo: ")
    assert second.startswith(8 * " ")
    assert max(map(len, lines)) <= 80


def test_tables_are_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prediction = ("a/long/path/of/an/image.jpg", {"automobile": 0.5, "airplane": 0.25})
    assert as_table([prediction], 2).count("\n") == 1
    monkeypatch.setenv("COLUMNS", "50")
    path, figures = as_table([prediction], 2).splitlines()
    assert (path, figures) == (prediction[0], "  automobile 0.5000  airplane 0.2500")
    monkeypatch.setenv("COLUMNS", "90")
    main(["info", "irevnet13.digits", "--batch-size", "2"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 90


def test_a_terminal_shows_that_libraries_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing happened for ten seconds. The line is gone before an error is printed."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        main(["train", "memory.mode=invrt"])
    shown = capsys.readouterr().err
    assert "loading torch and Lightning ..." in shown
    assert shown.endswith("\r\033[K")
