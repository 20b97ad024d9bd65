"""The program revzoo: its overview, its subcommands, its error messages."""

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from programs import program
from small_weights import change, small, write_entry

import revzoo
from revzoo.cli import terminal
from revzoo.cli.main import COMMANDS, COUNTERPARTS, _interrupt, closed_output, main

ROOT = Path(__file__).parents[2]


def test_every_row_is_a_command():
    for name, row in COMMANDS.items():
        module = import_module(f"revzoo.cli.{row.module}")
        assert callable(module.run), name
        assert callable(module.add_arguments), name
        assert f"revzoo {name}" in (module.__doc__ or "")


def test_the_overview_lists_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert all(name in output and row.help in output for name, row in COMMANDS.items())


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lits"])
    assert ended.value.code == 2
    assert "invalid choice: 'lits' (choose from" in capsys.readouterr().err


def test_a_command_of_another_program_is_answered_with_ours(capsys):
    with pytest.raises(SystemExit):
        main(["resume", "runs/a"])
    assert capsys.readouterr().err.endswith("; use revzoo train --resume RUN_DIR\n")
    assert {ours.partition(" ")[0] for ours in COUNTERPARTS.values()} <= COMMANDS.keys()
    assert not COUNTERPARTS.keys() & COMMANDS.keys()


def test_list_prints_names_that_match(capsys):
    main(["list", "revnet1?0"])
    assert capsys.readouterr().out == "revnet110\n"


@pytest.mark.parametrize("arguments", [["*"], ["*", "--all"], ["*_memcnn"]])
def test_memcnns_variants_are_listed_where_asked_for(arguments, capsys):
    main(["list", *arguments])
    assert ("revnet38_memcnn" in capsys.readouterr().out) == (arguments != ["*"])


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_list_prints_networks_of_libraries(library, capsys):
    pytest.importorskip(library)
    main(["list", f"{library}:resnet1?"])
    assert f"{library}:resnet18" in capsys.readouterr().out.split()
    main(["list"])
    assert library not in capsys.readouterr().out.split()  # not a model
    for pattern, message in {
        library: rf"; networks of {library} are '{library}:NAME', see .*\(revzoo list",
        f"{library}:vgg*x": f"expected {library}:NAME",
    }.items():
        with pytest.raises(SystemExit, match=message):
            main(["list", pattern])
    with pytest.raises(SystemExit, match=rf"model\.pretrained=true .* loads {library}'s own"):
        main(["list", f"{library}:*", "--pretrained"])


def test_list_prints_weights(tmp_path, capsys):
    write_entry(tmp_path)
    main(["list", "revnet*", "--pretrained", "--weights", str(tmp_path)])
    header, row, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["weights", "params", "side", "top-1", "licence", "store", "exact"]
    assert row.split() == ["revnet38.small", "8", "50.0%", "MIT"]


def test_the_table_of_weights_fits_in_80_columns(capsys):
    main(["list", "--pretrained"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if line.startswith("revvit_small.in1k"))
    assert row[1:6] == ["22.4", "M", "224", "79.9%", "Apache-2.0"]
    store, exact = map(float, row[6:])
    assert 0 < exact < store / 10


@pytest.mark.parametrize("options", [[], ["--pretrained"]])
def test_a_list_without_names_ends_with_a_message(options):
    with pytest.raises(SystemExit, match=r"revzoo: no .* 'vgg\*'"):
        main(["list", "vgg*", *options])
    with pytest.raises(SystemExit, match=r"; did you mean 'revnet38"):
        main(["list", "revnt38.cifar10" if options else "revnt38", *options])


def test_names_and_help_do_not_wait_for_torch(tmp_path):
    entry = {"name": "revnet38.small", "architecture": "revnet38", "num_classes": 10}
    entry |= {"input_size": [3, 32, 32], "sha256": "0" * 64, "file": "a.safetensors"}
    (tmp_path / "revnet38.small.json").write_text(json.dumps(entry))
    script = (
        "import contextlib, io, sys; from revzoo.cli.main import COMMANDS, main\n"
        "for arguments in [['--help'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    output = io.StringIO()\n"
        "    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):\n"
        "        main(arguments)\n"
        "    assert 'usage: revzoo' in output.getvalue(), arguments\n"
        "main(['list']); main(['list', '*', '--pretrained', '--weights', sys.argv[1]])\n"
        "assert len(sys.modules) < 250, len(sys.modules)\n"
        "heavy = {'torch', 'hydra', 'pytorch_lightning', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("iresnet64\n")
    assert done.stdout.splitlines()[-2].split() == ["revnet38.small", "32"]


@pytest.mark.parametrize("command", ["list", "info revnet38"])
def test_a_reader_may_leave(command):
    program = f"{sys.executable} -m revzoo {command}"
    shell = ["bash", "-c", f"{program} | true; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_broken_pipe_of_something_else_is_an_error():
    with pytest.raises(BrokenPipeError), closed_output():
        raise BrokenPipeError


def test_info_of_weights_shows_entry_and_costs(tmp_path, capsys):
    entry = write_entry(tmp_path)
    main(["info", "revnet38", "--weights", str(tmp_path), "--batch-size", "2"])
    output = {line[:24].strip(): line[24:] for line in capsys.readouterr().out.strip().splitlines()}
    assert output["name"] == "revnet38.small"
    assert output["sha256"] == entry.sha256
    assert output["recipe"] == entry.recipe
    assert output["input_size"] == "3, 8, 8"
    assert output["parameters"] == f"{sum(p.numel() for p in small().parameters()):,}"
    assert output["forward, 3x8x8"].endswith("MFLOP per image")
    kib = {mode: float(output[f"training, {mode}"].split()[0]) for mode in ("store", "invert")}
    assert kib["invert"] < kib["store"]


@pytest.mark.parametrize("name", ["", "revnet38.small.safetensors"])
def test_info_of_a_file_or_folder_of_weights_shows_the_entry(name, tmp_path, capsys, monkeypatch):
    """It showed "weights none", although the file holds an entry."""
    entry = write_entry(tmp_path)
    main(["info", str(tmp_path / name), "--batch-size", "1"])
    output = capsys.readouterr().out
    assert f"sha256                  {entry.sha256}" in output
    monkeypatch.setenv("COLUMNS", "80")  # a hash on two lines cannot be copied
    main(["info", str(tmp_path / name), "--batch-size", "1"])
    assert f"sha256  {entry.sha256}\n" in capsys.readouterr().out
    assert f"parameters              {sum(p.numel() for p in small().parameters()):,}" in output
    assert "forward, 3x8x8" in output


def test_a_folder_does_not_hide_a_model_of_its_name(tmp_path, monkeypatch, capsys):
    small().save_pretrained(tmp_path / "resnet164", input_size=(3, 8, 8))
    monkeypatch.chdir(tmp_path)
    main(["info", "resnet164", "--batch-size", "1", "--image-size", "8"])
    output = capsys.readouterr().out
    assert "weights                 none" in output
    assert "training, recompute" in output
    assert "training, invert" not in output


@pytest.mark.timeout(60)
def test_info_runs_no_step(capsys):
    """Steps of eight volumes took minutes, and more memory than most machines have."""
    main(["info", "revunet3d"])
    assert "forward, 3x128x128x128  784,481.6 MFLOP per image" in capsys.readouterr().out


def test_a_wrong_entry_ends_without_a_traceback(tmp_path):
    write_entry(tmp_path)
    change(tmp_path, "revnet38.small", sha256="0")
    with pytest.raises(SystemExit, match="expected 64 hexadecimal digits"):
        main(["info", "revnet38.small", "--weights", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["train", "-b", "3"], "-b; set values as KEY=VALUE, such as"),
        (["train", "--resum", "run"], "--resum; did you mean '--resume'?"),
        (["audit", "revnet38", "--xyz"], "--xyz\n"),
        # only the required --budget was asked for
        (["plan", "revnet38", "--budgt", "1GiB"], "--budgt; did you mean '--budget'?"),
        # all KEY=VALUE were blamed, too
        (["train", "seed=1", "--resum", "run", "test=false"], "--resum; did you mean '--resume'?"),
    ],
)
def test_an_unknown_option_is_answered_with_what_to_do(arguments, end, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"error: unrecognized arguments: {end}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [["info", ""], ["predict", "revnet38", ""], ["train", "--resume", ""]]
)
def test_an_empty_argument_is_not_the_working_directory(line, capsys):
    with pytest.raises(SystemExit):
        main(line)
    assert "one of the arguments is empty" in capsys.readouterr().err


def interrupted():
    # a shell's background jobs ignore SIGINT, and so do their children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(["train", "--import", "slow", "model=none"])


def test_ctrl_c_during_imports_ends_the_program(tmp_path):
    """It showed the traceback of an import. If a library caught it, the program went on."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(20)\n"
        "except BaseException:\n    pass\n"
    )
    output = tmp_path / "output"
    with program(interrupted, cwd=tmp_path, output=output) as process:
        process.join(100)
    assert (process.exitcode, output.read_text()) == (130, "revzoo: interrupted\n")


def test_ctrl_c_after_imports_is_an_exception():
    handler = signal.signal(signal.SIGINT, _interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_messages_name_a_command_that_exists(monkeypatch, tmp_path):
    """Messages named revzoo-train, although only train.py existed."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert terminal.command_line("eval") == "revzoo eval"
    program = tmp_path / "revzoo"
    program.touch(0o755)
    assert terminal.command_line("eval") == "revzoo eval"
    monkeypatch.setenv("PATH", "/usr/bin")  # the environment is not activated
    assert terminal.command_line("eval") == f"{program} eval"
    monkeypatch.chdir(tmp_path.parent)
    assert terminal.command_line("eval", "a b") == f"{tmp_path.name}/revzoo eval 'a b'"


def test_train_py_without_the_environment_names_the_remedy(tmp_path):
    """``python3 train.py`` after ``make train`` ended with a traceback: no module named hydra."""
    command = [sys.executable, "-I", "-S", str(ROOT / "train.py"), "--resume", "outputs/x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "lacks revzoo's packages: run '. .venv/bin/activate'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_in_80_columns(command, capsys, monkeypatch):
    """Lines of 85 to 103 characters wrapped in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    output = capsys.readouterr().out
    assert "``" not in output
    lines = output.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    # a line that is not indented is wrapped with its neighbours
    assert [line for line in lines if line.startswith("revzoo ") and " revzoo " in line] == []


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{revzoo.__version__}\n" == f"{version('revzoo')}\n"


def test_a_closed_output_is_no_error():
    """It ended in an AttributeError of None."""
    command = [sys.executable, "-m", "revzoo", "list", "revnet38"]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
