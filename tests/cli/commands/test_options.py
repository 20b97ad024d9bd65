"""``revzoo options``: the options of each group, from the schema, and its files."""

import re
from pathlib import Path

import pytest
import yaml

from revzoo.cli.main import main
from revzoo.training.callbacks.registry import CALLBACKS

CONFIGS = Path(__file__).parents[3] / "configs"


def output_of(capsys, *arguments):
    main(["options", *arguments])
    return capsys.readouterr().out


def test_all_groups_are_listed(capsys):
    lines = output_of(capsys).splitlines()
    for group in (path.name for path in CONFIGS.iterdir() if list(path.glob("*.yaml"))):
        assert any(line.startswith(f"{group} ") for line in lines), group


def test_every_callback_and_option_is_shown_with_a_comment(capsys):
    text = output_of(capsys, "callbacks/default")
    assert set(CALLBACKS) <= set(re.findall(r"^(\w+):", text, re.MULTILINE))
    bare = [line for line in text.splitlines() if re.match(r" *\w+:", line) and "#" not in line]
    assert bare == []
    assert "ema: null  # validate, test and save" in text
    assert "options: decay, warmup" in re.sub(r"\s+#?\s*", " ", text)
    assert "\n  patience: 10  # validations; >= 1\n" in output_of(capsys, "callbacks")


def test_a_choice_shows_all_options_with_its_values(capsys):
    shown = yaml.safe_load(output_of(capsys, "optim=muon").replace("==", "#"))
    file = yaml.safe_load((CONFIGS / "optim" / "muon.yaml").read_text())
    assert {name: shown[name] for name in file} == file
    assert shown["decay_all"] is False, "the default of an option that the file leaves out"
    text = output_of(capsys, "model=resnet32")  # its file inherits from two others
    assert "drop_path_rate: 0.0  # stochastic depth" in text
    assert "reversible_bits: null" in text
    assert "@package" not in output_of(capsys, "debug/smoke", "experiment")


@pytest.mark.parametrize("group", [(), ("callbacks",), ("optim",), ("memory",)])
def test_lines_fit_into_80_columns(group, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of(capsys, *group)
    assert max(map(len, text.splitlines())) <= 80


def test_long_comments_are_wrapped_and_stay_comments(capsys, monkeypatch):
    """Lines of one or two words stood between full ones, and some had no #."""
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of(capsys, "experiment")
    # a command is whole
    command = "#   python train.py experiment=cifar_revnet model=revnet110 data=cifar100   #"
    assert command in text
    # no narrow column beside a long value
    assert re.search(r"\n    # 160,000, .* of 600,000 steps\n    milestones: \[.*\]\n", text)
    for part in text.split("== ")[1:]:
        heading, _, shown = part.partition("\n")
        file = (CONFIGS / f"{heading}.yaml").read_text()
        assert yaml.safe_load(shown) == yaml.safe_load(file)
        # the same words in the same order, whatever the lines
        assert words_of(shown) == words_of(file)


def words_of(text):
    return sorted(text.replace("# @package _global_", "").replace("#", " ").split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calbacks", "group=calbacks: expected one of .*did you mean 'callbacks'"),
        ("data/cifar", "data=cifar: expected one of .*did you mean 'cifar1"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, message):
    with pytest.raises(SystemExit, match=message):
        main(["options", name])
