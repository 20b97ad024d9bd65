from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_weights import write_entry

from revzoo.cli.config import OF_SAMPLES, check, check_machine, device_kind
from revzoo.cli.run.build import check_parts
from revzoo.cli.terminal import ConfigError
from revzoo.data import DATA, ImageData
from revzoo.models import pretrained
from revzoo.training.callbacks.registry import CALLBACKS
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.table import WeightsTable

CUDA, MPS = "torch.cuda.is_available", "torch.backends.mps.is_available"


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CUDA, MPS):
        monkeypatch.setattr(name, lambda: False)


def check_config(config: dict[str, Any]) -> None:
    """What several runs are checked for before the first one starts."""
    check(config)
    check_machine(config)
    check_parts(config)


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if it reads data."""

    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError("data were touched")

    for name in ("prepare_data", "setup"):
        monkeypatch.setattr(ImageData, name, touched)


def test_pretrained_weights_must_be_known(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "SHIPPED", WeightsTable(tmp_path))
    with pytest.raises(UnknownWeightsError, match="no weights for revnet38: use pretr") as caught:
        check_config(compose("model.pretrained=true"))
    # as on the command line, too
    for words in ("model.pretrained=false", "+model.checkpoint_path=FILE", "revzoo list --pretr"):
        assert words in str(caught.value)
    write_entry(tmp_path)
    monkeypatch.setattr(pretrained, "SHIPPED", WeightsTable(tmp_path))
    (tmp_path / "revnet38.small.safetensors").unlink()  # the check does not download them
    check_config(compose("model.pretrained=true"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=tf32"], "NVIDIA"),
        (["memory=invert", "model=resnet32"], "no invertible step"),
        (
            ["+memory.x=1"],
            r"no option 'memory\.x' \(there is mode, bytes, fraction,",
        ),
        (["memory.inverting=inver"], r"memory\.inverting=inver: .*did you mean 'invert'"),
        (["memory=exact", "+memory.inverting=invert"], "is for a plan: add memory=auto"),
        (["memory=budget", "memory.bytes=lots"], r"memory\.bytes='lots': expected a positive"),
        (["memory=exact", "+memory.bytes=4GiB"], r"add memory=budget"),
        (["memory=invert", "memory.fraction=0.5"], r"free memory: add memory=auto"),
        (["memory.fraction=2"], r"memory\.fraction=2: expected .*\(0, 1\]"),
        (["+memory.plan=store"], r"memory\.plan=store: expected a mapping"),
        (["model.drop_rate=2"], "drop_rate"),
        (["trainer=gpu"], "trainer.accelerator=gpu: .*use trainer.accelerator=cpu"),
        (["trainer.max_epochs=-5"], "trainer.max_epochs=-5"),
        (["trainer.max_steps=-2"], "trainer.max_steps=-2"),
        (["trainer.max_epochs=-1"], "never end"),
        (["trainer.accumulate_grad_batches=0"], "accumulate_grad_batches=0"),
        (["+trainer.precision=16"], r"trainer\.precision"),
        (["optim.lr=-1"], "optim.lr=-1"),
        (["seed=-1"], "seed=-1"),
        (["~model"], "model is missing"),
        (["callbacks.best_checkpoint.monitor=val_acc"], "did you mean 'val/acc'"),
        (["optim.class_weights=balance"], "did you mean 'balanced'"),
        (["callbacks.private={}", "optim.class_weights=balanced"], "weights of all others"),
        (["optim.class_weights=[1,-1]"], r"class_weights=\[1, -1\]: expected numbers > 0"),
        (["callbacks.early_stopping={monitor: val/auc}"], r"early_stopping\.monitor=val/auc"),
        (
            ["callbacks.early_stopping={monitor: val/loss, mode: max}"],
            "set .*early_stopping.mode=min",
        ),
        (["callbacks.best_checkpoint.mode=maximum"], "mode=maximum: expected one of max, min"),
        (
            ["trainer.limit_val_batches=0", "callbacks.early_stopping={}"],
            "the run does not validate",
        ),
        (["callbacks.ema=true"], r"callbacks\.ema=true: expected options in braces and quotes"),
        (["callbacks.ema={decay: 2}"], r"callbacks\.ema\.decay=2"),
        (
            ["callbacks.side_bits={epochs: 2}"],
            r"^callbacks\.side_bits: the network has no blocks",
        ),
        (["callbacks.gradient_noise_scale={}"], r"^callbacks\.gradient_noise_scale: .*norm=group"),
        (["callbacks.early_stopping={patience: -1}"], r"early_stopping\.patience=-1"),
        (["trainer.check_val_every_n_epoch=0"], "check_val_every_n_epoch=0: expected a whole"),
        (["trainer.limit_train_batches=0"], "limit_train_batches=0: expected a number > 0"),
        (["trainer.limit_test_batches=0"], "test=false skips the test"),
        (["trainer.gradient_clip_val=-1"], "gradient_clip_val=-1: expected a number"),
        (["trainer.gradient_clip_val=abc"], "gradient_clip_val=abc: expected a number"),
        (["trainer.profiler={_target_: os.system}"], "trainer.profiler=.*: expected one of simple"),
        (["model.name=[a]"], r"model\.name=\['a'\]: expected the name"),
        (["+model.memory=store"], "the mode of memory=MODE"),
        (["+model.num_classes=7"], "the number of classes of the data"),
        (["+model.in_chans=3"], "data.in_chans=N"),
        (["data.augment.chunk=0"], r"^data\.augment.chunk=0: expected a whole number"),
        (
            ["trainer.accumulate_grad_batches=true"],
            "accumulate_grad_batches=true: expected",
        ),
        (["seed=true"], "seed=true: expected a whole number"),
        (["test=1"], "test=1: expected true or false"),
        (["trainer.limit_val_batches=[1]"], "limit_val_batches=.*: expected a whole number or a"),
        (["+trainer.val_check_interval=0"], "trainer.val_check_interval=0: expected a number > 0"),
        (["+trainer.max_time=[1]"], "trainer.max_time=.*: expected a string or a mapping or null"),
        (["trainer.gradient_clip_algorithm=1"], "gradient_clip_algorithm=1: expected a string"),
        (
            ["trainer=cpu", "trainer.devices=100000"],
            r"trainer\.devices=100000 processes for .*: expected at most",
        ),
        # these were tracebacks of Lightning
        (
            ["trainer=cpu", "trainer.devices=x"],
            "devices=x: expected a number of processes, or auto",
        ),
        (["trainer=cpu", "trainer.devices=[0]"], r"devices=\[0\]: expected a number of processes"),
        (["trainer=cpu", "trainer.devices=-1"], "devices=-1: expected a number of processes"),
        (
            ["trainer.devices=1e30"],
            r"trainer\.devices=1e\+30: expected a whole number or a string or a list",
        ),
        (["optim.nesterov=1"], "optim.nesterov=1: expected true or false"),
        (["optim.schedule.name={a: 1}"], r"schedule\.name=\{'a': 1\}: expected one of"),
        (["data.augment=''"], "data.augment='': expected options in braces"),
        (["data.num_workers=0.0"], r"data\.num_workers=0\.0: expected a whole number or null"),
        (["~precision.trainer"], "precision.trainer is missing from the configuration"),
        (["callbacks.early_stopping={monitor: [a]}"], "monitor=.*: expected one of val/loss"),
        (["data._target_=[a]"], r"data._target_=\['a'\]: expected one of"),
        (["+model.activation={a: 1}"], "activation={'a': 1}: expected one of relu"),
        (["+model.checkpoint_path=1.5"], "model.checkpoint_path=1.5: expected a string"),
        (["data._target_=os.system"], r"data\._target_=os\.system: expected one of revzoo\.data"),
    ],
)
def test_wrong_configurations_are_refused(overrides: list[str], message: str, compose: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_config(compose(*overrides))
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(("word", "options"), [("compile=true", {}), ("compile=False", None)])
def test_compile_is_short_for_a_callback(word: str, options: object, compose: Any) -> None:
    assert compose(word)["callbacks"]["compiled_branches"] == options


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_gradients_of_samples_and_compiled_branches_exclude_each_other(
    name: str, compose: Any
) -> None:
    compiled, samples = "callbacks.compiled_branches={}", f"callbacks.{name}={{}}"
    compose(compiled)
    compose(samples)
    with pytest.raises(ConfigError, match=f"compiled_branches with callbacks.{name}"):
        compose(compiled, samples)


def test_good_configurations_pass(compose: Any) -> None:
    check_config(compose())
    check_config(compose("precision=bf16", "trainer=cpu", "model=resnet32", "memory=recompute"))
    check_config(compose("data=cifar10", "data.root=nowhere"))
    check_config(compose("callbacks.best_checkpoint=null", "callbacks.early_stopping={}"))
    check_config(compose("callbacks.early_stopping={monitor: train/loss, mode: min}"))


def test_an_unknown_section_is_refused(compose: Any) -> None:
    with pytest.raises(ValueError, match="did you mean 'model'"):
        check_config({**compose(), "modle": {}})


def test_auto_selects_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_kind("auto") == "cpu"
    monkeypatch.setattr(MPS, lambda: True)
    assert (device_kind("auto"), device_kind("gpu"), device_kind("cpu")) == ("mps", "mps", "cpu")
    monkeypatch.setattr(CUDA, lambda: True)
    assert (device_kind("auto"), device_kind("gpu")) == ("cuda", "cuda")


def test_precision_depends_on_the_device(compose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    half, tf32 = compose("precision=fp16"), compose("precision=tf32")
    monkeypatch.setattr(CUDA, lambda: True)
    check_machine(half)
    check_machine(tf32)
    with pytest.raises(ValueError, match=r"precision\.tf32=true changes float32 only"):
        compose("precision=tf32", "precision.trainer=64-true")
    monkeypatch.setattr(CUDA, lambda: False)
    monkeypatch.setattr(MPS, lambda: True)
    with pytest.raises(ValueError, match="precision=fp64 is not supported on mps"):
        check_machine(compose("precision=fp64"))


def test_options_of_plugins_are_their_parameters(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flowers(ImageData):
        def __init__(self, root: str, *, petals: int = 5, **options: Any) -> None: ...

    def confetti(run_dir: Path, *, colour: str, every: int = 1) -> None: ...

    monkeypatch.setitem(DATA, "flowers", Flowers)
    monkeypatch.setitem(CALLBACKS, "confetti", confetti)  # type: ignore[arg-type]
    good = compose("+callbacks.confetti.colour=red")
    good["data"] = {"_target_": "flowers", "root": "x", "petals": 4, "batch_size": 8}
    check(good)
    for section, options, message in (
        ("data", {"_target_": "flowers"}, r"data\.root is missing"),
        ("data", {"_target_": "flowers", "root": "x", "petal": 4}, "did you mean 'data.petals'"),
        ("data", {"_target_": "flowrs"}, "did you mean 'flowers'"),
        ("callbacks", {"confetti": {}}, r"callbacks\.confetti\.colour is missing"),
        ("callbacks", {"confetti": {"color": 1}}, "did you mean 'callbacks.confetti.colour'"),
    ):
        with pytest.raises(ValueError, match=message):
            check({**good, section: options})
