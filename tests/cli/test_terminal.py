"""Lines of the program fit into a terminal of 80 columns."""

import logging

import pytest

from revzoo.cli import terminal
from revzoo.cli.commands.predict import as_table
from revzoo.cli.main import main
from revzoo.cli.run.console import LogFormat
from revzoo.cli.terminal import FoldedFormat, folded, message_line

LONG = "memory=auto: steps: 6 store, 2 exact; peak 143.51 MiB (exact 140.89 MiB); in 0:13"


def record(message, **extra):
    made = logging.LogRecord("revzoo", logging.INFO, "f.py", 1, message, (), None)
    vars(made).update(extra)
    return made


def test_lines_are_folded_on_a_terminal_only(monkeypatch):
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


def test_lines_of_an_evaluation_are_folded(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert FoldedFormat().format(record(LONG)).splitlines()[1].startswith("  ")


def test_a_folded_command_can_be_copied(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    command = "evaluate python -m revzoo eval ckpt=outputs/run/checkpoints/best.ckpt"
    first, second = LogFormat(date=False).format(record(command, command=True)).splitlines()
    assert first.endswith(" revzoo eval \\")
    assert second.strip() == "ckpt=outputs/run/checkpoints/best.ckpt"
    quoted = "evaluate python -m revzoo eval 'ckpt=my outputs/run/checkpoints/best.ckpt'"
    assert len(LogFormat(date=False).format(record(quoted, command=True)).splitlines()) == 1


def test_errors_are_folded(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as raised:
        main(["info", "revnet3"])
    first, second, *_ = lines = str(raised.value).splitlines()
    assert first.startswith("revzoo: ")
    assert second.startswith(8 * " ")
    assert max(map(len, lines)) <= 80


def test_tables_are_folded(monkeypatch, capsys):
    prediction = ("a/long/path/of/an/image.jpg", {"automobile": 0.5, "airplane": 0.25})
    assert as_table([prediction], 2).count("\n") == 1
    monkeypatch.setenv("COLUMNS", "50")
    path, figures = as_table([prediction], 2).splitlines()
    assert (path, figures) == (prediction[0], "  automobile 0.5000  airplane 0.2500")
    monkeypatch.setenv("COLUMNS", "90")
    main(["info", "irevnet13.digits", "--batch-size", "2"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 90


@pytest.mark.parametrize(
    "arguments",
    [
        "train trainer.accelerator=mps",
        "train --import json modle=x",
        "predict {run}/x.ckpt {run}",
        "eval ckpt={run}/x.ckpt",
        "check {run}",
        "info revnet38 --image-size 1",
        "info {run}/x.ckpt",
        "pack {run}/x.ckpt revnet38.x --license MIT --recipe x",
        "convert irevnet {run}/x.ckpt {run}",
        "sweep trainer.accelerator=mps,gpu",
    ],
)
def test_a_terminal_shows_that_libraries_load(arguments, tmp_path, monkeypatch, capsys):
    """Nothing happened for ten seconds. The line is gone before an error is printed."""
    monkeypatch.chdir(tmp_path)
    # handlers of other tests write into their captured output, which is closed
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (tmp_path / "config.yaml").write_text("a: 1")
    (tmp_path / "x.ckpt").touch()
    command = arguments.format(run=tmp_path).split()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        main(command)
    shown = capsys.readouterr().err
    assert "loading torch" in shown
    assert "loading" not in shown.rpartition("\r\033[K")[2]  # the line is cleared
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with pytest.raises(SystemExit):
        main(command)
    assert "\033" not in capsys.readouterr().err


def test_a_plugin_prints_on_its_own_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "printing_plugin.py").write_text("import sys; sys.stderr.write('hello')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    main(["train", "--import", "printing_plugin", "--cfg", "job", "-p", "seed"])
    assert "loading torch and Lightning ...\r\033[Khello" in capsys.readouterr().err
    assert not terminal.imported  # a later command or run in this process has no plugins


def test_errors_of_arguments_are_folded(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    with pytest.raises(SystemExit):
        main(["export", "revnet38", "--format", "onxx"])
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 70
    assert " ".join(line.strip() for line in lines).endswith("; did you mean 'onnx'?")


def test_control_characters_are_shown_as_text():
    """Names of files cleared the screen, and a line in a name looked like a line of the log."""
    hostile = record("\x1b[2J\n12:00:00 saved\r\u202eb")
    for form in (FoldedFormat(), LogFormat(date=True)):
        first, *others = form.format(hostile).split("\n")
        assert first.endswith(r"\x1b[2J")
        assert others == [r"  12:00:00 saved\r\u202eb"]
    assert message_line(ValueError("a\x1bb")) == r"revzoo: a\x1bb"
    expected = "a\\nb\\x1b.png  c\\nd\\x1b 1.0000\n"
    assert as_table([("a\nb\x1b.png", {"c\nd\x1b": 1.0})], 1) == expected
