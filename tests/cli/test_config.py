import pytest

from revzoo.cli.config import EVAL, ConfigFiles, compose
from revzoo.cli.main import parse
from revzoo.cli.terminal import ConfigError


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model=resnet32", "resnet32"),
        ("model.name=revnet110", "revnet110"),
    ],
)
def test_good_overrides_are_applied(override, value):
    assert compose([override]).whole.model.name == value


def test_a_group_choice_adds_its_keys():
    overrides = ["optim.schedule.milestones=[0.9]", "optim=step"]
    cfg = compose(overrides).whole
    assert list(cfg.optim.schedule.milestones) == [0.9]
    message = r"no option 'optim\.schedule\.milestones'; optim\.schedule\.name=step has it"
    with pytest.raises(ConfigError, match=message):
        compose(overrides[:1])


@pytest.mark.parametrize(
    ("overrides", "schedule"),
    [
        (["optim.schedule.name=constant"], {"name": "constant"}),
        (["optim.schedule={name: constant}"], {"name": "constant"}),
        (
            ["optim.schedule.name=step", "optim.schedule.gamma=0.2"],
            {"name": "step", "gamma": 0.2},
        ),
        (
            ["optim.schedule.name=cosine"],
            {"name": "cosine", "warmup": 0.25, "end": 1e-5},
        ),
    ],
)
def test_a_schedule_that_is_named_drops_the_options_of_the_default(overrides, schedule):
    assert compose(overrides).config["optim"]["schedule"] == schedule


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim=step", "optim.schedule.gama=0.2"], r"did you mean 'optim\.schedule\.gamma'"),
        (["optim.schedule.name=onecycel"], "did you mean 'onecycle'"),
        # the command line's own mistake
        (
            ["optim.schedule.name=constant", "optim.schedule.warmup=0.1"],
            "name=onecycle, optim.schedule.name=cosine have it",
        ),
    ],
)
def test_options_of_no_schedule_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        compose(overrides)


@pytest.mark.parametrize(
    "text", ["optim: {lr: 0.05}\n", "defaults: [override /model: revnet110]\n"]
)
def test_an_experiment_without_its_first_line_names_the_line(text, tmp_path):
    """``config.experiment: no such option``, or an error of Hydra: neither named the cause."""
    source, file = ConfigFiles(extra=tmp_path), tmp_path / "experiment" / "plain.yaml"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(
        ConfigError, match=r"experiment.*he first line of its file must be '# @package _global_'"
    ):
        compose(["experiment=plain"], source)
    file.write_text(f"# @package _global_\n{text}")
    cfg = compose(["experiment=plain"], source).whole
    assert (cfg.optim.lr, cfg.model.name) in [(0.05, "revnet38"), (0.2, "revnet110")]


def test_an_unknown_model_without_a_near_name_points_at_import():
    with pytest.raises(ConfigError, match=r"there is iresnet64, .*; --import MODULE adds yours"):
        compose(["model=mine"])


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_an_option_that_no_file_sets_may_be_set(sign):
    values = [f"{sign}trainer.benchmark=true", f"{sign}model.units=[1,1,1]"]
    cfg = compose([*values, f"{sign}callbacks.ema.decay=0.9"]).whole
    assert cfg.trainer.benchmark is True
    assert list(cfg.model.units) == [1, 1, 1]
    assert cfg.callbacks.ema == {"decay": 0.9}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data=cifra10", "did you mean 'cifar10'"),
        ("debug=smok", "did you mean 'smoke'"),
        ("memory=inverse", "there is auto, .*did you mean 'invert'"),
        ("optim.lrr=1", r"did you mean 'optim\.lr'"),
        ("optm.lr=1", r"did you mean 'optim\.lr'"),
        ("lr=1", r"did you mean 'optim\.lr'"),
        ("max_epoch=1", r"did you mean 'trainer\.max_epochs'"),
        ("optim.schedule.warmpu=0.1", r"did you mean 'optim\.schedule\.warmup'"),
        ("+foo=1", r"^foo=1: there is no option 'foo'"),
        ("++sede=1", "did you mean 'seed'"),
        ("resume=outputs/run", "to continue a run: --resume outputs/run$"),
        ("+optm.lr=1", r"did you mean 'optim\.lr'"),
        ("optim.learning_rate=1", "use optim.lr=1"),
        ("optim.wibble=1", r"there is no option 'optim\.wibble' \(there is name, lr, "),
        ("trainer.lr=1", r"did you mean 'optim\.lr'"),
        ("callbacks.early_stopping={patience:", r"a \{ is not closed\. .*quote the whole argument"),
        ("optim.lr=tag(log,", r"a \( is not closed"),
        ("optim.lr=choic(1,2)", "Unknown function 'choic'"),
        ("optim.lr=interval(a,2)", "'interval\\(a,2\\)': .* start: str is incompatible"),
        ("callbacks.ema=choice(null,{decay: 0.9})", "does not take null: .* 'KEY=null,VALUE'$"),
        ("+model.checkpoint_path=epoch=1-step=2.ckpt", r"KEY='\"a=b \(c\)\"'$"),
        ("data.root=/home/a(b)", "quotes around a value with special characters"),
        ("data.root='a", "a character has no meaning here; put quotes"),
        ("~optim.lrr", r"did you mean 'optim\.lr'"),
        ("hydra.job_logging.handlers.console.class=evil.f", "expected one of Hydra's keys"),
        ("hydra.searchpath=[file://evil]", "expected one of Hydra's keys"),
        ("+hydra.launcher={_target_: evil.f}", "expected one of Hydra's keys"),
        ("hydra.rn.dir=x", r"did you mean 'hydra\.run\.dir'"),
        ("trainer.max_epochs=many", "trainer.max_epochs=many: expected a whole number"),
        ("optim.lr=fast", "optim.lr=fast: expected a number"),
        ("seed", "^seed: expected KEY=VALUE without spaces"),
        ("model=[1", r"^model=\[1: a \[ is not closed"),
        ("optim.lr=0.1,0.2,", "expected another value after the comma"),
        ("seed=0,1", r"^seed=0,1: several values; .* add -m to .* list write seed=\[0,1\]$"),
        ("optim=onecycle,muon", "several values; for a run of each add -m to revzoo train$"),
        (
            "callbacks.ema=null,{decay: 0.99}",
            r"add -m .* write callbacks\.ema=\[null,\{decay: 0\.99\}\]$",
        ),
        ("seed=range(3)", r"^seed=range\(3\): several values; .* add -m to revzoo train$"),
        ("optim.lr=interval(0.1,1)", "expected one value; revzoo sweep searches intervals$"),
    ],
)
def test_bad_overrides_are_refused(override, message):
    with pytest.raises(ConfigError, match=message) as error:
        compose([override])
    assert len(str(error.value).splitlines()) == 1


def test_an_option_of_a_group_without_a_choice_names_the_choices():
    message = "data.root=DIR, but data is null: add data=cifar10, .*data=imagefolder, .* more$"
    with pytest.raises(ConfigError, match=message):
        compose(["ckpt=RUN", "data.root=DIR"], EVAL)


def test_numbers_and_words_that_fit_pass():
    cfg = compose(["callbacks.last_checkpoint.minutes=0.5"]).whole
    assert cfg.callbacks.last_checkpoint.minutes == 0.5, "it was refused as not whole"
    cfg = compose(["optim.lr=1", "trainer.devices=auto"]).whole
    assert (cfg.optim.lr, cfg.trainer.devices) == (1, "auto")


def test_hydras_keys_pass():
    compose(["hydra.run.dir=/tmp/x"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.root=x",
            r"no option 'data\.root'; data=cifar10, .*litdata and \d more have it",
        ),
        (
            "model.reversible_bits=4",  # revnet38
            r"model=resnet\.\.\., model=vit.* have it: .* the others .* are reversible without",
        ),
        ("logger.project=x", r"no option 'logger\.project'; logger\.kind=wandb has it"),
    ],
)
def test_a_key_of_another_option_names_that_option(override, message):
    """For ``data.root`` of the digits, the message suggested adding the key, which cannot work."""
    with pytest.raises(ConfigError, match=message):
        compose([override])


def test_the_last_word_of_an_option_finds_it():
    """The message advised ``+model.bits=VALUE``, which no model takes."""
    message = r"no option 'model\.bits'; did you mean 'model\.reversible_bits'\?$"
    with pytest.raises(ConfigError, match=message):
        compose(["model=resnet32", "model.bits=4"])


def test_the_name_of_weights_starts_from_them():
    cfg = compose(["model=revnet38.cifar10", "model.norm=batch"]).whole
    assert (cfg.model.name, cfg.model.pretrained) == ("revnet38.cifar10", True)
    assert (
        compose(["model=revnet38.cifar10", "model.pretrained=false"]).whole.model.pretrained
        is False
    )


def test_a_librarys_network_by_its_name():
    cfg = compose(["model=torchvision:resnet50", "model.reversible_bits=2"]).whole
    assert cfg.model.name == "torchvision:resnet50"
    assert cfg.model.reversible_bits == 2
    with pytest.raises(ConfigError, match="model=elsewhere: no such option"):
        compose(["model=elsewhere:resnet50"])


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("data.root=/home/josé/my data", "/home/josé/my data"),
        ("data.root='/home/josé'", "/home/josé"),
        ("data.root=[é]", None),
        ("data.root=é,ü", None),
    ],
)
def test_letters_outside_ascii_need_no_quotes(typed, value):
    """Hydra's grammar knows them only in quotes, which the shell takes away."""
    _, args = parse(["train", "data=cifar10", typed])
    if value is None:
        assert args.overrides[-1] == typed
    else:
        assert compose(args.overrides).whole.data.root == value


def experiment(folder, text):
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "x.yaml").write_text(f"# @package _global_\n{text}\n")
    return ConfigFiles(extra=folder)


@pytest.mark.parametrize(
    "reference",
    [
        "${oc.env:REVZOO_TEST_SECRET_KEY}x${oc.env:SECRET}",
        "${oc.env:SECRET,none}",
        "${oc.${b}:SECRET}",
        "${oc.decode:'${oc.env:SECRET}'}",
        "${oc.create:'a'}",
    ],
)
def test_a_file_reads_no_variables(reference, tmp_path, monkeypatch):
    """Secrets of the environment became names of folders, through somebody else's experiment."""
    monkeypatch.setenv("SECRET", "s3cret")
    source = experiment(tmp_path, f'b: env\nmodel:\n  name: "{reference}"')
    with pytest.raises(ConfigError, match=r"x\.yaml holds .*on the command line") as caught:
        compose(["experiment=x"], source)
    assert "s3cret" not in str(caught.value)
    assert (
        compose(["data=cifar10", "data.root=${oc.env:SECRET}"]).config["data"]["root"] == "s3cret"
    )


def test_no_type_of_yaml_hides_a_reference(tmp_path):
    """YAML's pairs are tuples, which OmegaConf makes lists."""
    source = experiment(tmp_path, 'optim: {class_weights: !!pairs [a: "${oc.env:HOME}"]}')
    with pytest.raises(ConfigError, match=r"x\.yaml holds '\$\{oc\.env:HOME\}'"):
        compose(["experiment=x"], source)


def test_a_file_may_refer_to_values_and_to_the_time(tmp_path, monkeypatch):
    monkeypatch.setenv("REVZOO_DATA", "/images")
    text = (
        "seed: ${threads}\nthreads: 3\ndata:\n  root: ${oc.env:REVZOO_DATA,./data}/x\n"
        "hydra:\n  run:\n    dir: out/${folder_name:${model.name}}/${now:%H:%M}"
    )
    values = compose(["experiment=x", "data=cifar10"], experiment(tmp_path, text)).config
    assert (values["seed"], values["data"]["root"]) == (3, "/images/x")


def test_a_key_that_stands_twice_is_named(tmp_path):
    """The message had the line of the mapping only."""
    with pytest.raises(ConfigError, match=r"line 4, column 3: found duplicate key lr"):
        compose(["experiment=x"], experiment(tmp_path, "optim:\n  lr: 1\n  lr: 2\n"))


def test_a_folder_may_be_named_by_the_overrides_as_typed():
    named = "hydra.run.dir=out/${hydra.job.override_dirname}"
    whole = compose(["optim.lr=0.3", named, "callbacks.ema.decay=0.9"]).whole
    assert whole.hydra.run.dir == "out/callbacks.ema.decay=0.9,optim.lr=0.3"
