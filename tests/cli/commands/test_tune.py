import pytest
import torch
import yaml
from small_run import QUICK

from revzoo.cli.run.build import check_parts
from revzoo.cli.run.train import train
from revzoo.cli.run.tune import KINDS, tune

SMALL = (*QUICK, "test=false")
SWEEP = ("tuner=lr", "tuner.steps=15")


def assert_same_run(one, other, *, extra):
    first, second = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        for folder in (one, other)
    )
    for run in (first, second):
        for group in run["optimizer_states"][0]["param_groups"]:
            del group["name"]  # assert_close() knows no strings
    for name in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
    assert first["lr_schedulers"] == second["lr_schedulers"]
    assert (one / "config.yaml").read_text() == (other / "config.yaml").read_text()
    names = [{path.name for path in folder.iterdir()} for folder in (one, other)]
    assert names[1] - names[0] == extra


def test_a_run_after_a_search_equals_one_without(compose, tmp_path):
    figures = train(compose(*SMALL), run_dir=tmp_path / "without")
    config = compose(*SMALL, *SWEEP, "tuner.then=train")
    assert train(config, run_dir=tmp_path / "with") == figures
    extra = {"lr_finder.csv", "lr_finder.png"}
    assert_same_run(tmp_path / "without", tmp_path / "with", extra=extra)


def test_then_use_trains_with_the_suggested_rate(compose, tmp_path):
    config = compose(*SMALL, *SWEEP, "tuner.then=use", "tuner.min_lr=1.0e-3", "tuner.steps=25")
    figures = train(config, run_dir=tmp_path / "found")
    lr = yaml.safe_load((tmp_path / "found" / "config.yaml").read_text())["optim"]["lr"]
    assert lr != config["optim"]["lr"]
    assert train(compose(*SMALL, f"optim.lr={lr}"), run_dir=tmp_path / "given") == figures
    extra = {"lr_finder.csv", "lr_finder.png"}
    assert_same_run(tmp_path / "given", tmp_path / "found", extra=extra)


def test_then_stop_does_not_train(compose, tmp_path, caplog):
    with caplog.at_level("INFO", logger="revzoo"):
        config = compose(*SMALL, "tuner=batch_size", "tuner.max_size=20")
        assert train(config, run_dir=tmp_path) == {}
    assert {path.name for path in tmp_path.iterdir()} == {
        "batch_size_finder.json",
        "config.yaml",
        "sessions.jsonl",
    }
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "data.batch_size: 20 fit in memory=exact, limited by max_size" in logged
    assert "to train with it: data.batch_size=20, or tuner.then=use" in logged


def test_the_run_uses_the_suggested_batch_size(compose, tmp_path):
    config = compose(*SMALL, "tuner=batch_size", "tuner.max_size=20", "tuner.then=use")
    figures = train(config, run_dir=tmp_path / "found")
    assert figures == train(compose(*SMALL, "data.batch_size=20"), run_dir=tmp_path / "given")
    extra = {"batch_size_finder.json"}
    assert_same_run(tmp_path / "given", tmp_path / "found", extra=extra)


@pytest.mark.parametrize(
    ("kind", "unfreeze", "first"),
    [
        ("lr", "[[1,stages.2],[3,stages.0]]", "fc"),  # the rate for the first epoch
        ("lr", "[0,3]", "stages.2"),
        (
            "batch_size",
            "[[1,stages.2],[3,stages.0]]",
            "stages.0",
        ),  # the batch must fit in every epoch
        ("batch_size", "null", "fc"),
    ],
)
def test_a_search_trains_the_parts_that_the_run_trains(
    kind, unfreeze, first, compose, tmp_path, monkeypatch
):
    """A batch size was searched with the classifier only, although the rest trains later."""
    trained = set()

    def search(module, *args, **options):
        named = module.model.named_parameters()
        trained.update(name for name, value in named if value.requires_grad)
        return None, []

    monkeypatch.setitem(KINDS, kind, (*KINDS[kind][:2], search))
    finetuning = f"callbacks.finetuning={{unfreeze: {unfreeze}}}"
    config = compose(*SMALL, f"tuner={kind}", finetuning, "model.pretrained=true")
    config["model"]["pretrained"] = False
    tune(config, tmp_path)
    parts = ("stem.", "stages.0.", "stages.1.", "stages.2.", "norm.", "fc.")
    wanted = parts[[part.startswith(first) for part in parts].index(True) :]
    assert {part for part in parts if any(name.startswith(part) for name in trained)} == {*wanted}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("tuner=lr", "tuner.kind=rl"), r"tuner\.kind=rl: expected one of lr, batch_size"),
        (("tuner=lr", "tuner.then=us"), "did you mean 'use'"),
        (("tuner=lr", "tuner.steps=3"), "steps=3: expected"),
        (("tuner=lr", "tuner.max_lr=1e-6"), r"max_lr=1e-06: expected"),
        (
            ("tuner=lr", "+tuner.max_size=3"),
            r"no option 'tuner\.max_size'; tuner\.kind=batch_size has it",
        ),
        (("tuner=batch_size", "tuner.max_size=1"), r"tuner\.max_size=1"),
        (("tuner=batch_size", "tuner.max_bytes=0"), r"tuner\.max_bytes=0"),
        (("tuner=lr", "trainer.devices=2"), "searches on one device"),
    ],
)
def test_wrong_searches_are_refused(compose, overrides, message):
    with pytest.raises(ValueError, match=message):
        check_parts(compose("trainer=cpu", *overrides))
