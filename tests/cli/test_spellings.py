"""Options of other programs, answered with ours."""

import re

import pytest
import yaml

from revzoo.cli import config as config_module
from revzoo.cli.config import CONFIGS, SPELLINGS, our_spelling
from revzoo.cli.main import main
from revzoo.cli.terminal import ConfigError

# a value of ours for the keys that name an option or need a number
VALUES = {
    "optim.schedule.name=@": "step",
    "data.augment.policy=@": "randaugment",
    "optim.label_threshold=@": "0.2",
    "model=@": "revnet38",
    "data=@": "cifar10",
    "optim=@": "adamw",
    "precision=@": "fp32",
}


def refuse(word, config):
    """Compose ``word`` if Hydra finds its file; add any other to a configuration, and check it."""
    key, _, value = word.partition("=")
    if (CONFIGS / key).is_dir():
        config_module.compose([word])
    *sections, leaf = key.split(".")
    part = config
    for name in sections:
        part[name] = part.get(name) or {}
        part = part[name]
    part[leaf] = yaml.safe_load(value)
    config_module.check(config)


def test_what_the_table_suggests_is_accepted_and_what_it_replaces_is_not(compose):
    for theirs, ours in SPELLINGS.items():
        key, _, value = theirs.partition("=")
        typed = theirs if value else f"{key}={VALUES.get(ours, 3)}"
        with pytest.raises(ConfigError, match="; use "):
            refuse(typed, compose())
    for ours in {*SPELLINGS.values()}:
        if ours.startswith("revzoo "):
            continue
        command = ours.partition(",")[0].partition(" for ")[0].replace("'", "")
        words = [command] if "{" in command else command.split()
        fitting = {"callbacks.ema.decay=@": "0.9", "optim.label_smoothing=@": "0.1"} | VALUES
        parts = (
            "model.drop_rate",
            "model.drop_path_rate",
            "data.augment.color",
            "data.augment.erasing",
        )
        fitting |= dict.fromkeys([f"{part}=@" for part in parts], "0.1")
        words = [word.replace("@", fitting.get(word, "3")) for word in words]
        words = [word.replace("accelerator=3", "accelerator=cpu") for word in words]
        words = [re.sub("(_path|root|project)=3", r"\1=a", word) for word in words]
        if words[0].startswith("data.image_size"):
            words.insert(0, "data=imagefolder")
        config_module.compose(words, complete=False)


def test_only_options_that_the_command_has_are_suggested():
    assert our_spelling("wd", "0.1", ["optim"]) == "; use optim.weight_decay=0.1"
    assert our_spelling("wd", "0.1", ["ckpt"]) == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--optim.lr", "0.05", "optim=cosine"],
        ["--optim.lr=0.05", "--optim=cosine"],
        ["--optim", "cosine", "optim.lr=0.05"],
    ],
)
def test_options_with_dashes_are_overrides(words, compose, capsys):
    main(["train", *words, "--cfg", "job", "--package", "optim.lr"])
    assert capsys.readouterr().out == "0.05\n"
    assert compose("optim=cosine")["optim"]["lr"] != 0.05
