"""The recipes of ``configs/experiment/`` match their comments and the guide."""

from __future__ import annotations

import math
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_run import NO_EXTRAS
from torchvision import datasets
from torchvision.transforms import v2

from revzoo.cli.main import main
from revzoo.cli.run.build import build_data, check_parts
from revzoo.cli.run.train import train
from revzoo.models import create_model
from revzoo.training import Segmenter
from revzoo.training.checkpoint.restore import restore
from revzoo.training.optim.optimizers import OptimSpec, build_optimizer, build_schedule
from revzoo.weights.table import SHIPPED

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
NAMES = [path.stem for path in RECIPES]
SHORT = ("debug=smoke", "trainer=cpu", *NO_EXTRAS)
COMMAND = re.compile(r"python train\.py (experiment=.*)")


def header(path: Path) -> list[str]:
    """The comment lines at the top of a file."""
    lines = path.read_text().splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def commands(text: str) -> list[list[str]]:
    """The overrides of each command line in ``text``, without comments."""
    return [shlex.split(line, comments=True) for line in COMMAND.findall(text)]


def stated_commands() -> list[Any]:
    return [
        pytest.param(path.stem, overrides, id=" ".join(overrides))
        for path in RECIPES
        for overrides in commands("\n".join(header(path)))
    ]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_commands_and_results(path: Path) -> None:
    lines = header(path)
    assert lines[0] == "# @package _global_"
    assert len(commands("\n".join(lines))) >= 2, "one to train, one in seconds"
    assert any("debug=smoke" in line for line in lines)
    text = " ".join(lines)
    assert re.search(r"not yet (trained|measured) here|measured: \d", text, re.I)
    for line in lines:
        if "published" in line and "%" in line:
            assert re.search(r"\[\d\]", line), f"without its source: {line}"


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(("name", "overrides"), stated_commands())
def test_a_stated_command_belongs_to_its_recipe_and_is_valid(
    name: str, overrides: list[str], compose: Any
) -> None:
    config = compose(*overrides)
    given = dict(override.split("=", 1) for override in overrides)
    assert given["experiment"] == name
    check_parts(config)
    if "model" in given:
        assert config["model"]["name"] == given["model"]
    kinds = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "digits": "Digits", "shapes": "Shapes"}
    kinds["blobs3d"] = "Blobs3d"
    generated = {"segmentation": "shapes", "volumes": "blobs3d"}
    own = generated.get(name, "cifar10" if "cifar" in name else "")
    kind = kinds.get(given.get("data", own), "ImageFolder")
    assert config["data"]["_target_"] == f"revzoo.data.{kind}"


# of the papers and their releases: images a step, weight decay, steps, the rate from a step on (it
# is 0.1 at first), pixels that images are padded by before they are cropped
FACTS: dict[str, dict[str, Any]] = {
    "cifar_revnet": {  # Gomez et al. 2017, section 5, and the release's cifar_configs.py
        "batch": 100,
        "decay": 2e-4,
        "decay_all": False,
        "steps": 80_000,
        "drops": {40_000: 0.01, 60_000: 0.001},
        "padding": 2,
    },
    "cifar_irevnet": {  # CIFAR_main.py and utils_cifar.py of the release; 386 steps an epoch
        "batch": 128,
        "decay": 5e-4,
        "decay_all": True,
        "steps": 200 * 386,
        "drops": {60 * 386: 0.02, 120 * 386: 0.004, 160 * 386: 0.0008},
        "padding": 4,
    },
    "imagenet": {  # Gomez et al. 2017, section 5, and the release's imagenet_configs.py
        "batch": 256,
        "decay": 1e-4,
        "decay_all": False,
        "steps": 600_000,
        "drops": {160_000: 0.01, 320_000: 0.001, 480_000: 0.0001},
        "padding": 28,
    },
}
FACTS["cifar10_revnet38"] = FACTS["cifar_revnet"]


@pytest.mark.parametrize("name", FACTS)
def test_the_papers_recipes_have_the_papers_values(name: str, compose: Any) -> None:
    config, facts = compose(f"experiment={name}", "data.root=DIR"), FACTS[name]
    assert config["data"]["batch_size"] == facts["batch"]
    data, trainer = build_data(config["data"]), config["trainer"]
    side = 224 if name == "imagenet" else 32
    assert data.augment.padding((side, side)) == facts["padding"]
    assert data.augment.flip
    assert not data.augment.mixup + data.augment.cutmix + config["optim"]["label_smoothing"]
    epoch = round(50_000 * 0.99) // 128
    steps = trainer["max_steps"] if trainer["max_steps"] > 0 else trainer["max_epochs"] * epoch
    assert steps == facts["steps"]
    assert trainer["accumulate_grad_batches"] == 1
    spec = OptimSpec.of(config["optim"])
    model = create_model(config["model"]["name"], units=(1,) * (4 if name == "imagenet" else 3))
    optimizer = build_optimizer(model, spec)
    assert type(optimizer) is torch.optim.SGD
    decayed, others = optimizer.param_groups
    assert (decayed["momentum"], decayed["nesterov"], decayed["lr"]) == (0.9, False, 0.1)
    assert decayed["weight_decay"] == facts["decay"]
    assert others["weight_decay"] == (facts["decay"] if facts["decay_all"] else 0)
    schedule = build_schedule(optimizer, spec, total_steps=steps)
    assert rates_after(schedule) == pytest.approx(facts["drops"])


def rates_after(schedule: Any) -> dict[int, float]:
    """The rate after each milestone of a MultiStepLR."""
    gamma, first = schedule.gamma, schedule.base_lrs[0]
    return {step: first * gamma ** (i + 1) for i, step in enumerate(sorted(schedule.milestones))}


@pytest.mark.parametrize("model", ["revnet38", "resnet32", "revnet110", "resnet110"])
def test_the_shipped_weights_recipe_is_recorded(compose: Any, model: str) -> None:
    entry = SHIPPED.find(f"{model}.cifar10")
    run = entry.recipe.removeprefix("python train.py ").split()
    lines = header(ROOT / "configs/experiment/cifar_short.yaml")
    (measured,) = (line for line in lines if f"model={model} " in line and "measured" in line)
    assert f"{entry.metrics['test/acc']:.2%}".replace("%", " %") in measured
    assert compose(*commands(measured)[0]) == compose(*run)


def tiny_imagenet(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("n01440764", "n01443537"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(8):
                pixels = rng.integers(0, 255, (70, 90, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.JPEG")
    return root


def test_imagenet_is_cropped_as_in_the_literature(compose: Any, tmp_path: Path) -> None:
    root = tiny_imagenet(tmp_path)
    config = compose("data=imagenet", f"data.root={root}", "data.num_workers=0")
    data = build_data({**config["data"], "batch_size": 2})
    data.setup("fit")
    train_set, val_set = data.train_dataloader().dataset, data.val_dataloader().dataset
    steps = [v2.Resize(256), v2.CenterCrop(224), v2.PILToTensor()]
    reference = datasets.ImageFolder(root / "val", v2.Compose(steps))
    assert torch.equal(val_set[0][0], reference[0][0])
    assert train_set[0][0].shape == (3, 224, 224)
    assert not torch.equal(train_set[0][0], train_set[0][0])
    assert (data.num_classes, data.sizes, data.has("test")) == (2, (224, 224), False)


NARROW = ("+model.stem_width=8", "+model.widths=[8,8,8,8]", "+model.units=[2,1,1,1]")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the smoke commands of ImageNet's recipes read, with fewer photos."""
    root = tmp_path_factory.mktemp("photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import_module("bench_decoding").write_photos(root, 6)
    return root


@pytest.mark.parametrize("name", ["imagenet", "imagenet_short", "imagenet_a3"])
def test_imagenet_recipes_run_on_generated_photos(
    name: str, compose: Any, photos: Path, tmp_path: Path
) -> None:
    data = (f"data.root={photos}", "data.batch_size=4", "data.num_workers=0")
    figures = train(compose(f"experiment={name}", *data, *NARROW, *SHORT), run_dir=tmp_path)
    assert 0 < figures["val/loss"] < 10
    assert "test/acc" not in figures, "there is no test/"


@pytest.mark.parametrize(
    ("name", "epochs", "ramp"), [("imagenet_short", 16, (11, 13)), ("imagenet_long", 88, (65, 76))]
)
def test_ffcvs_recipes_have_ffcvs_values(
    name: str, epochs: int, ramp: tuple[int, int], compose: Any
) -> None:
    """rn50_configs/rn50_*_epochs.yaml, and ``get_cyclic_lr`` of train_imagenet.py."""
    config = compose(f"experiment={name}", "data.root=DIR")
    assert config["trainer"]["max_epochs"] == epochs
    assert config["data"]["progressive"] == [[ramp[0], 160], [ramp[1], 192]]
    assert (config["data"]["batch_size"], config["data"]["image_size"]) == (512, 256)
    spec = OptimSpec.of(config["optim"])
    assert (spec.weight_decay, spec.label_smoothing) == (1e-4, 0.1)
    optimizer = build_optimizer(torch.nn.Linear(1, 1), spec)
    assert [optimizer.param_groups[0][key] for key in ("momentum", "nesterov")] == [0.9, False]
    schedule = build_schedule(optimizer, spec, total_steps=100 * epochs)
    rates = []
    for _ in range(100 * epochs - 1):
        rates += schedule.get_last_lr()[:1]
        optimizer.step()
        schedule.step()
    published = np.interp(np.arange(len(rates)), [0, 200, 100 * epochs], [1.7e-4, 1.7, 0])
    assert np.abs(rates - published).max() < 0.01


def test_a3_has_the_papers_values(compose: Any) -> None:
    """Table 2 of arXiv 2110.00476, and the arguments of timm's release."""
    config = compose("experiment=imagenet_a3", "data.root=DIR")
    data, spec = config["data"], OptimSpec.of(config["optim"])
    assert (data["batch_size"], data["image_size"], data["progressive"]) == (256, 224, [[0, 160]])
    assert (spec.name, spec.lr, spec.weight_decay) == ("lamb", 8e-3, 0.02)
    assert data["crop_pct"] == 0.95
    assert (spec.loss, spec.label_smoothing, spec.decay_all) == ("bce", 0.0, False)
    assert spec.label_threshold == 0.2
    assert spec.schedule == {"name": "cosine", "warmup": 0.05, "end": 0.0}
    augment = build_data(data).augment
    assert augment.policy == "rand-m6-mstd0.5-inc1"
    assert (augment.mixup, augment.cutmix, augment.erasing) == (0.1, 1.0, 0)
    assert config["trainer"]["max_epochs"] == 100


@pytest.mark.parametrize("name", ["cifar_revnet", "cifar_irevnet", "cifar_short", "cifar_long"])
def test_cifar_recipes_run(name: str, compose: Any, tmp_path: Path) -> None:
    shallow = ("data=digits", "memory=exact", "+model.units=[1,1,1]", "data.batch_size=32")
    figures = train(compose(f"experiment={name}", *shallow, *SHORT), run_dir=tmp_path)
    assert 0 < figures["test/loss"] < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"), [case for case in stated_commands() if "debug=smoke" in case.values[1]]
)
def test_the_smoke_command_runs(
    name: str, overrides: list[str], compose: Any, photos: Path, tmp_path: Path
) -> None:
    overrides = [option.replace("data.root=DIR", f"data.root={photos}") for option in overrides]
    figures = train(compose(*overrides, "trainer=cpu"), run_dir=tmp_path)
    # large after three steps, more so in evaluation than in training
    assert 0 < figures["train/loss"] < math.inf
    assert 0 < figures.get("test/loss", figures["val/loss"]) < math.inf


def rows() -> list[Any]:
    """The guide's table of recipes: model, data, the paper's command and the short one."""
    page = (ROOT / "docs" / "guide" / "training.md").read_text()
    table = page.split("## Recipes")[1].split("\n#")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if "| `exp" in line]
    chosen = [(row[0], row[1], row[2].strip("`"), row[4].strip("`")) for row in cells]
    return [pytest.param(*row, id=f"{row[0]} on {row[1]}") for row in chosen]


def test_the_guide_has_all_published_models() -> None:
    cifar = {f"{m} on CIFAR-{n}" for m in WITH_CIFAR for n in (10, 100)}
    assert {row.id for row in rows()} == cifar | {f"{m} on ImageNet" for m in WITH_IMAGENET}


WITH_CIFAR = ("revnet38", "revnet110", "revnet164", "irevnet163")
WITH_IMAGENET = ("revnet56", "revnet104", "irevnet301")


@pytest.mark.parametrize(("model", "data", "paper", "short"), rows())
def test_the_rows_of_the_guide_are_valid(
    model: str, data: str, paper: str, short: str, compose: Any
) -> None:
    kinds = {"CIFAR-10": "CIFAR10", "CIFAR-100": "CIFAR100", "ImageNet": "ImageFolder"}
    for command in (paper, short):
        config = compose(*command.split())
        assert config["model"]["name"] == model
        assert config["data"]["_target_"] == f"revzoo.data.{kinds[data]}"
        assert command.split() in [case.values[1] for case in stated_commands()], (
            "no recipe says so"
        )


def test_segmentation_trains_evaluates_and_predicts(
    compose: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = tmp_path / "run", tmp_path / "images"
    narrow = ("model.channels=[8,16]", "model.units=[1,1]")
    figures = train(compose("experiment=segmentation", *narrow, *SHORT), run_dir=run)
    assert {"val/dice", "val/iou", "test/dice"} <= set(figures)
    assert isinstance(restore(run).module, Segmenter)
    images.mkdir()
    Image.new("RGB", (13, 21)).save(images / "a.png")
    (images / "b.png").write_bytes(b"")
    with pytest.raises(SystemExit, match="classifies pixels: add --masks DIR"):
        main(["predict", str(run), str(images)])
    command = ["predict", str(run), str(images), "--masks", str(tmp_path / "masks")]
    with pytest.raises(SystemExit, match="1 of 2 images could not be read"):
        main(command)
    assert "1 mask in" in capsys.readouterr().out
    with Image.open(tmp_path / "masks" / "a.png") as mask:
        assert (mask.size, mask.mode) == ((13, 21), "L")
    with pytest.raises(SystemExit, match="is not empty: give a new folder"):
        main(command)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=revnet38", "data=shapes"], "gives a class for each image: expected data with one"),
        (["model=iunet2d", "data=digits"], "gives a class for each pixel: expected data with mask"),
    ],
)
def test_a_network_and_its_data_have_one_task(
    overrides: list[str], message: str, compose: Any, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=message):
        train(compose(*overrides, *SHORT), run_dir=tmp_path)
