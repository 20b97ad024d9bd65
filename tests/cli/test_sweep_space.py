import pytest

from revzoo.cli.sweep import check_space, split_space
from revzoo.cli.terminal import ConfigError

pytest.importorskip("optuna")
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)


@pytest.mark.parametrize(
    ("override", "distribution"),
    [
        ("optim=onecycle,muon", CategoricalDistribution(("onecycle", "muon"))),
        ("optim=choice(onecycle,muon)", CategoricalDistribution(("onecycle", "muon"))),
        ("+model.units=[1,1],[2,2]", CategoricalDistribution(("[1,1]", "[2,2]"))),
        ("optim.lr=interval(0.01,1)", FloatDistribution(0.01, 1.0)),
        ("optim.lr=tag(log, interval(1e-3,1))", FloatDistribution(1e-3, 1.0, log=True)),
        ("seed=int(interval(0,9))", IntDistribution(0, 9)),
        ("a.b=range(5,30,5)", IntDistribution(5, 25, step=5)),
        ("a.b=range(30,5,-5)", IntDistribution(10, 30, step=5)),
        ("a.b=range(0.5,3,0.5)", FloatDistribution(0.5, 2.5, step=0.5)),
    ],
)
def test_hydras_grammar_gives_distributions(override, distribution):
    key = override.partition("=")[0]
    assert split_space(["model=revnet38", override]) == (["model=revnet38"], {key: distribution})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=interval(1,0.1)", r"^optim\.lr=interval\(1,0\.1\): .*low"),
        ("optim.lr=tag(log,interval(0,1))", "low > 0|larger than 0"),
        ("optim.lr=range(1,1)", "optim.lr"),
        ("optim.lr=tag(log,range(1,9))", "expected .*interval"),
        ("optim=tag(log,choice(a,b))", "expected .*interval"),
        ("optim.lr=tag(big,interval(0,1))", "the only tag is log"),
        ("model=glob(*)", "expected choice"),
        ("optim.lr=interval(1", "optim.lr=interval"),
    ],
)
def test_wrong_ranges_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        split_space([override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim=onecycle,mu", "optim=mu: no such option"),
        ("trainer.max_epochs=interval(1,5)", "expected a whole number"),
        ("optim.momentum=interval(0,1.5)", "momentum"),  # its upper end
        ("tuner=lr,batch_size", r"remove the tuner, or give tuner\.then=use"),
    ],
)
def test_a_space_that_no_trial_can_run_is_refused(override, message):
    fixed, space = split_space(["trainer=cpu", override])
    with pytest.raises(ValueError, match=message):
        check_space(fixed, space)


def test_a_good_space_passes():
    fixed, space = split_space(["trainer=cpu", "optim.lr=interval(0.1,1)", "optim=step,onecycle"])
    check_space(fixed, space)
