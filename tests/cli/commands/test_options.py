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


def test_the_groups_fit_into_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, output_of(capsys).splitlines())) <= 80


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
