from __future__ import annotations

from pathlib import Path

import pytest

from revzoo.cli.config.config import quoted_if_needed
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.sweep.space import Parameter, check_space, split_space
from revzoo.cli.sweep.spec import read_spec

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("override", "parameter"),
    [
        ("optim=onecycle,muon", Parameter("optim", choices=("onecycle", "muon"))),
        ("optim=choice(onecycle,muon)", Parameter("optim", choices=("onecycle", "muon"))),
        ("+model.units=[1,1],[2,2]", Parameter("+model.units", choices=("[1,1]", "[2,2]"))),
        ("optim.lr=interval(0.01,1)", Parameter("optim.lr", low=0.01, high=1.0)),
        (
            "optim.lr=tag(log, interval(1e-3,1))",
            Parameter("optim.lr", low=1e-3, high=1.0, log=True),
        ),
        ("seed=int(interval(0,9))", Parameter("seed", low=0, high=9)),
        ("a.b=range(5,30,5)", Parameter("a.b", low=5, high=25, step=5)),
        ("a.b=range(30,5,-5)", Parameter("a.b", low=10, high=30, step=5)),
    ],
)
def test_hydras_grammar_gives_parameters(override: str, parameter: Parameter) -> None:
    fixed, space = split_space(["model=revnet38", override])
    assert (fixed, space) == (["model=revnet38"], [parameter])
    assert type(space[0].low) is type(parameter.low)


def test_the_end_of_a_range_is_included() -> None:
    _, (parameter,) = split_space(["a.b=range(0.1,0.5,0.1)"])
    assert parameter.outermost == (0.1, pytest.approx(0.4))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=interval(1,0.1)", "first number < last number"),
        ("optim.lr=tag(log,interval(0,1))", "0 < first number"),
        ("optim.lr=tag(log,range(1,9))", "int\\(interval"),
        ("optim=tag(log,choice(a,b))", "goes with interval"),
        ("optim.lr=tag(big,interval(0,1))", "the only tag is log"),
        ("model=glob(*)", "name the options"),
        ("optim.lr=interval(1", "optim.lr=interval"),
    ],
)
def test_wrong_ranges_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_space([override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=interval(0,1)", r"did you mean 'optim\.lr'"),
        ("optim=onecycle,mu", "optim=mu: no such option"),
        ("trainer.max_epochs=interval(1,5)", "expected a whole number"),
        ("optim.momentum=interval(0,1.5)", "momentum"),  # its upper end
        ("tuner=lr,batch_size", r"remove the tuner, or give tuner\.then=use"),
    ],
)
def test_a_space_that_no_trial_can_run_is_refused(override: str, message: str) -> None:
    fixed, space = split_space(["trainer=cpu", override])
    with pytest.raises(ValueError, match=message):
        check_space(fixed, space)


def test_a_good_space_passes() -> None:
    fixed, space = split_space(["trainer=cpu", "optim.lr=interval(0.1,1)", "optim=step,onecycle"])
    check_space(fixed, space)


@pytest.mark.parametrize("folder", ["out/a=1 b", "x,y", "run(1)", "it's", "2026", "plain/é"])
def test_the_printed_folder_of_a_sweep_is_read_again(folder: str, tmp_path: Path) -> None:
    """Hydra reads many signs of a path in its own way."""
    override = f"dir={quoted_if_needed(folder)}"
    assert read_spec([override, "optim.lr=choice(0.1,0.2)"], default=tmp_path)[0] == Path(folder)
