"""Options of other programs, answered with ours."""

from __future__ import annotations

import re

import pytest

from revzoo.cli.config import SPELLINGS, compose, our_spelling
from revzoo.cli.main import main
from revzoo.cli.terminal import ConfigError

# a value of ours for the keys that name an option or need a number
VALUES = {
    "optim.schedule.name=@": "step",
    "model=@": "revnet38",
    "data=@": "cifar10",
    "optim=@": "adamw",
    "precision=@": "fp32",
}


def test_what_the_table_suggests_is_accepted_and_what_it_replaces_is_not() -> None:
    for theirs, ours in SPELLINGS.items():
        key, _, value = theirs.partition("=")
        typed = theirs if value else f"{key}={VALUES.get(ours, 3)}"
        with pytest.raises(ConfigError, match="; use "):
            compose([typed])
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
        compose(words, complete=False)


# a command line, and a part of its answer
ANSWERS = {
    "train trainer.precision=bf16-mixed": "use precision=bf16",
    "train +trainer.precision=16": "use precision=fp16",
    "train precision=bf16-mixed": "use precision=bf16",
    "train optim=sgd": "use optim=onecycle, cosine or step",
    "train --lr 0.1": "did you mean 'optim.lr'",
    "train --weight-decay=0.1 seed=1": "did you mean 'optim.weight_decay'",
    "train ckpt_path=a.ckpt": "use model.checkpoint_path=a.ckpt for its weights; train --resume",
    "train --amp model=revnet56": "amp=true: there is no option 'amp'; use precision=bf16",
    "train model = revnet38": "model: expected KEY=VALUE without spaces",
    "train revnet56": "did you mean model=revnet56?",
    "train .": "did you mean data=imagefolder data.root='.'?",
    "train -m seed=1,2 --cfg job": "leave out -m",
    "train +experiment=finetune": "write experiment=NAME without +",
    "train data=..": "use data=imagefolder data.root='..'",
    "train --scheduler step": "use optim=step",
    "eval ckpt_path=a.ckpt": "did you mean 'ckpt'",
}


@pytest.mark.parametrize("line", ANSWERS)
def test_the_answer_has_the_option_that_works(line: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert ANSWERS[line] in str(end.value)


def test_only_options_that_the_command_has_are_suggested() -> None:
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
def test_options_with_dashes_are_overrides(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", *words, "--cfg", "job", "--package", "optim.lr"])
    assert capsys.readouterr().out == "0.05\n"
    assert compose(["optim=cosine"]).config["optim"]["lr"] != 0.05
