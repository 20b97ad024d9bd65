"""Untrusted configurations run no code, and messages name the wrong file."""

import contextlib
import os

import pytest

from revzoo.cli.main import main

TARGET = "_target_: builtins.open, file: {trap}, mode: w"
# Each would create or truncate the file {trap} where Hydra uses its own section.
HYDRA_SECTIONS = {
    "callbacks": "callbacks: {{x: {{" + TARGET + "}}}}",
    "symlink": "callbacks: {{x: {{_target_: os.symlink, src: /, dst: {trap}}}}}",
    "job_logging": "job_logging: {{handlers: {{x: {{class: logging.FileHandler, filename: {trap}, "
    "mode: w}}}}, root: {{handlers: [x]}}}}",
    "hydra_logging": "hydra_logging: {{handlers: {{x: {{class: logging.FileHandler, "
    "filename: {trap}, mode: w}}}}, root: {{handlers: [x]}}}}",
    "launcher": "launcher: {{_target_: evil.f}}",
    "sweeper": "sweeper: {{_target_: evil.f}}",
    "env_set": "job: {{env_set: {{LD_PRELOAD: {trap}}}}}",
    "output_subdir": "output_subdir: ../../elsewhere",
    "job_name": "job: {{name: ../../elsewhere}}",
}


def refused(cwd, *arguments):
    """The message of a refused command line, which must leave no files in its folder."""
    with contextlib.chdir(cwd), pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    message = str(end.value)
    assert message.startswith("revzoo: ")
    assert len(message.splitlines()) == 1
    assert not (cwd / "trap").exists()
    assert not (cwd / "outputs").exists()
    assert list(cwd.parent.glob("elsewhere*")) == []
    return message


def hostile(tmp_path, section, *, name="experiment/x"):
    """A working folder, and a folder of configurations that set Hydra's section."""
    cwd, folder = tmp_path / "cwd", tmp_path / "configs"
    cwd.mkdir()
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    values = HYDRA_SECTIONS[section].format(trap=cwd / "trap")
    path.write_text(f"# @package _global_\nhydra:\n  {values}\n")
    return cwd, folder


@pytest.mark.parametrize("section", HYDRA_SECTIONS)
def test_an_experiment_cannot_use_hydras_section(section, tmp_path):
    """Code ran from ``hydra.callbacks`` and others of any configuration file on the search path."""
    cwd, folder = hostile(tmp_path, section)
    assert "hydra." in refused(cwd, "--config-dir", str(folder), "experiment=x")


@pytest.mark.parametrize("more", [("-m", "seed=0,1"), ("--cfg", "job")])
def test_no_other_way_of_starting_uses_it(more, tmp_path):
    cwd, folder = hostile(tmp_path, "hydra_logging")
    assert "hydra." in refused(cwd, "--config-dir", str(folder), "experiment=x", *more)


@pytest.mark.parametrize("way", ["-cn", "-cp"])
def test_a_primary_configuration_cannot_use_it(way, tmp_path):
    """Code ran from the configuration that ``-cn`` or ``-cp`` names."""
    name = "own" if way == "-cn" else "train"
    cwd, folder = hostile(tmp_path, "callbacks", name=name)
    given = ["--config-dir", str(folder), "-cn", "own"] if way == "-cn" else ["-cp", str(folder)]
    assert "hydra." in refused(cwd, *given)


def test_a_search_path_imports_nothing(tmp_path, monkeypatch):
    """``hydra.searchpath: [pkg://x]`` imports x while Hydra composes."""
    cwd, folder = tmp_path / "cwd", tmp_path / "configs"
    (cwd / "evil").mkdir(parents=True)
    (cwd / "evil" / "__init__.py").write_text("open('trap', 'w')")
    monkeypatch.syspath_prepend(cwd)
    folder.mkdir()
    (folder / "own.yaml").write_text("hydra: {searchpath: [pkg://evil]}\n")
    assert "searchpath" in refused(cwd, "--config-dir", str(folder), "-cn", "own")


def test_a_pickled_configuration_is_not_read(tmp_path):
    """``--experimental-rerun`` reads a pickle."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    (cwd / "config.pickle").write_bytes(b"cbuiltins\nopen\n(S'trap'\nS'w'\ntR.")
    assert "rerun" in refused(cwd, "--experimental-rerun", "config.pickle")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hydra.run.dir=${hydra.run.dir}"], "Recursive interpolation detected"),
        (["hydra.run.dir=${oc.env:NO_SUCH}"], "Environment variable 'NO_SUCH' not found"),
        (["trainer.accelerator=${nope}"], "Interpolation key 'nope' not found"),
        (["--cfg", "job", "-p", ".."], "--package ..: expected a section"),
    ],
)
def test_odd_arguments_are_refused_in_one_line(arguments, message, tmp_path, monkeypatch):
    """They printed several lines or a traceback."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    assert message in str(end.value)
    assert len(str(end.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_files_that_take_no_part_are_not_read(tmp_path, capsys):
    """A broken file beside the experiment stopped every run; ``--config-dir /`` read the disk."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "good.yaml").write_text("# @package _global_\nseed: 7\n")
    (folder / "broken.yaml").write_text("# @package _global_\noptim:\n\tlr: 0.1\n")
    os.mkfifo(folder / "pipe.yaml")
    start = ["train", "--config-dir", str(tmp_path), "--cfg", "job"]
    main([*start, "experiment=good"])
    assert "seed: 7" in capsys.readouterr().out
    for name, message in {
        "broken": r"broken\.yaml is not YAML \(line 3, column 1: .*: a tab; YAML indents",
        "pipe": "no such option",
    }.items():
        with pytest.raises(SystemExit, match=message):
            main([*start, f"experiment={name}"])
    (folder / "uses.yaml").write_text(
        "# @package _global_\ndefaults: [good, broken]\n"  # found by Hydra
    )
    with pytest.raises(SystemExit, match=r"^revzoo: [^:]*broken\.yaml is not YAML"):
        main([*start, "experiment=uses"])
