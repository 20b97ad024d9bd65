from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_run import QUICK

import revzoo
from revzoo.cli.commands.evaluate import evaluate
from revzoo.cli.commands.predict import predict
from revzoo.cli.config import ConfigFiles, compose
from revzoo.cli.main import main
from revzoo.cli.run.train import train
from revzoo.cli.terminal import ConfigError
from revzoo.data import Digits
from revzoo.data.state import normalisation_for
from revzoo.interop.export import FORMATS
from revzoo.models import create_model
from revzoo.models.registry import change_bits
from revzoo.training.checkpoint.files import read_checkpoint, write_checkpoint
from revzoo.training.checkpoint.restore import restore
from revzoo.weights.table import SHIPPED

CONFIGS = Path(__file__).parents[3] / "configs"
FULL = ("trainer.limit_test_batches=null", "trainer.limit_val_batches=null")
SMALL = (*QUICK, *FULL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The best checkpoint of a run on digits, and the run's figures."""
    run_dir = tmp_path_factory.mktemp("run")
    with torch.random.fork_rng():
        figures = train(compose(SMALL).config, run_dir=run_dir)
    return run_dir / "checkpoints" / "best.ckpt", figures


def config(*overrides: str) -> dict[str, Any]:
    return compose(["trainer=cpu", *overrides], ConfigFiles("eval")).config


def folder_of_digits(root: Path, classes: list[str], *, count: int = 4) -> Path:
    """Test digits as 8-bit files in class folders of these names; train/ equals test/."""
    data = Digits()
    data.setup("test")
    images = data.test_dataloader().dataset
    for split in ("train", "test"):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            chosen = (images.labels == label).nonzero().flatten()[:count].tolist()
            for index in chosen:
                pixels = images.__getitems__([index])[0][0, 0].numpy() * (255 / data.pixel_max)
                image = Image.fromarray(pixels.round().astype(np.uint8))
                image.save(root / split / name / f"{index:03d}.png")
    return root


def test_the_precision_determines_the_memory_format(
    run: tuple[Path, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another format rounds differently under bfloat16: one image in 10,000 changed its class."""
    restored = restore(run[0])
    monkeypatch.setattr("revzoo.training.checkpoint.restore.restore", lambda _, **options: restored)
    weight = next(p for p in restored.module.model.parameters() if p.dim() == 4 and p.shape[1] > 1)
    for precision, layout in (("bf16", torch.channels_last), ("fp32", torch.contiguous_format)):
        evaluate(config(f"ckpt={run[0]}", f"precision={precision}"))
        assert weight.is_contiguous(memory_format=layout)
        assert restored.module.memory_format == layout


@pytest.mark.parametrize("split", ["test", "val"])
def test_the_figures_equal_the_runs(split: str, run: Any) -> None:
    path, expected = run
    figures = evaluate(config(f"ckpt={path}", f"split={split}"))
    shown = {"loss", "acc", "balanced_acc", "acc5", "auroc", "ap", "f1", "ece"}
    shown |= {"sensitivity", "specificity"}
    assert set(figures) == {f"{split}/{name}" for name in shown}
    for name, value in figures.items():
        assert value == pytest.approx(expected[name], rel=1e-6)
    batched = evaluate(config(f"ckpt={path}", f"split={split}", "batch_size=100"))
    assert batched == pytest.approx(figures, rel=1e-5)


def test_the_mean_over_mirror_images_is_an_option(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, mean = (evaluate(config(f"ckpt={run[0]}", f"tta={tta}")) for tta in ("null", "flip"))
    assert mean["test/loss"] != pytest.approx(plain["test/loss"], rel=1e-6)
    image = folder_of_digits(tmp_path, [*"0123456789"], count=1) / "test" / "3"
    shown = []
    for options in ([], ["--tta", "flip"]):
        main(["predict", str(run[0]), str(image), "--device", "cpu", "--csv", *options])
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1]


def test_the_program_prints_them(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([f"ckpt={run[0]}"], [str(run[0])], ["--ckpt", str(run[0])]):
        main(["eval", *words, "trainer=cpu"])
        lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
        assert float(lines["test/acc"]) == pytest.approx(run[1]["test/acc"], abs=1e-4)


def test_the_figures_are_written_as_a_table(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--csv", str(tmp_path / "a.csv")], [f"csv={tmp_path / 'a.csv'}"]):
        main(["eval", str(run[0]), "trainer=cpu", *words])
        assert f"wrote {tmp_path / 'a.csv'}" in capsys.readouterr().err
        first, *classes = csv.DictReader((tmp_path / "a.csv").read_text().splitlines())
        assert first["class"] == "all"
        for name in ("loss", "acc", "auroc"):
            assert float(first[name]) == pytest.approx(run[1][f"test/{name}"], rel=1e-6)
        assert [row["class"] for row in classes] == [*"0123456789"]
        mean = np.mean([float(row["auroc"]) for row in classes])
        assert mean == pytest.approx(run[1]["test/auroc"], rel=1e-6)
        assert classes[0]["loss"] == ""
        (tmp_path / "a.csv").unlink()
    with pytest.raises(SystemExit, match="cannot be written"):
        main(["eval", str(run[0]), "trainer=cpu", f"csv={tmp_path / 'none' / 'a.csv'}"])


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_the_folder_of_a_run_stands_for_its_best_checkpoint(
    inner: str, run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The message asked for the path of the checkpoint, although it was known."""
    folder, root = run[0].parents[1] / inner, folder_of_digits(tmp_path, ["0", "1"], count=1)
    main(["eval", f"ckpt={folder}", "trainer=cpu"])
    assert f"test/acc {run[1]['test/acc']:.4f}" in capsys.readouterr().out
    main(["predict", str(folder), str(root / "test"), "--csv", "--device", "cpu"])
    by_folder = capsys.readouterr().out
    main(["predict", str(run[0]), str(root / "test"), "--csv", "--device", "cpu"])
    assert capsys.readouterr().out == by_folder
    assert len(revzoo.predict(next(root.glob("test/0/*.png")), folder)) == 10


def test_a_folder_without_a_best_checkpoint_says_what_there_is(run: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"{tmp_path} holds no run and no weights: expected"):
        main(["eval", f"ckpt={tmp_path}"])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SystemExit, match=r"best\.ckpt: it has none at all"):
        main(["predict", str(tmp_path), str(run[0])])
    shutil.copy(run[0], last := tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(SystemExit, match=f"best.ckpt: give another checkpoint, {last}$"):
        main(["eval", f"ckpt={tmp_path}"])


def test_the_first_of_several_processes_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("revzoo.cli.commands.evaluate.evaluate", lambda _, paths: {"test/acc": 0.5})
    for rank, expected in (("0", "test/acc 0.5000\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        main(["eval", "ckpt=revnet38.cifar10"])
        assert capsys.readouterr().out == expected


def test_other_data_are_normalised_as_in_training(run: Any, tmp_path: Path) -> None:
    root = folder_of_digits(tmp_path, [str(n) for n in range(10)])
    figures = evaluate(
        config(f"ckpt={run[0]}", "data=imagefolder", f"data.root={root}", "data.in_chans=1")
    )
    predictions = predict(restore(run[0]), [root / "test"])
    found = [Path(path).parent.name == next(iter(classes)) for path, classes in predictions]
    assert len(found) == 40
    assert figures["test/acc"] == pytest.approx(np.mean(found))
    shutil.rmtree(root / "train")  # the evaluation does not need it
    arguments = [f"ckpt={run[0]}", "data=imagefolder", f"data.root={root}", "data.in_chans=1"]
    assert evaluate(config(*arguments)) == figures
    data = Digits()
    data.setup("test")
    module = restore(run[0]).module
    for path, classes in predict(restore(run[0]), [root / "test"]):
        stored = torch.from_numpy(np.array(Image.open(path))) * (data.pixel_max / 255)
        with torch.no_grad():
            expected = module(data.transform(stored[None, None], training=False)).softmax(1)[0]
        for name, probability in classes.items():
            assert probability == pytest.approx(float(expected[int(name)]), rel=1e-4)


@pytest.mark.parametrize(("option", "own"), [("val_fraction=0.2", "0.1"), ("folds=5", "1")])
def test_a_validation_split_with_training_images_is_refused(
    option: str, own: str, run: Any
) -> None:
    expected = f"data.{option.partition('=')[0]}={own}"
    with pytest.raises(ConfigError, match=f"has {expected}; give {expected}"):
        evaluate(config(f"ckpt={run[0]}", "split=val", "data=digits", f"data.{option}"))


def test_any_validation_split_of_other_data_is_allowed(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder_of_digits(tmp_path, [str(n) for n in range(10)], count=10)
    options = ["data=imagefolder", f"data.root={root}", "data.in_chans=1", "split=val"]
    evaluate(config(f"ckpt={run[0]}", *options, "data.val_fraction=0.3"))
    (root / "train").rename(root / "val")  # a separate split: no training image can be in it
    evaluate(config("ckpt=irevnet13.digits", *options))
    assert "validation split" not in caplog.text


def test_weights_without_a_record_of_their_split_cause_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for split, warned in (("test", False), ("val", True)):
        caplog.clear()
        evaluate(config("ckpt=irevnet13.digits", "data=digits", f"split={split}"))
        assert ("has no record of its validation split" in caplog.text) == warned


def test_other_classes_are_refused(run: Any, tmp_path: Path) -> None:
    root = folder_of_digits(tmp_path, ["one", "two"])
    arguments = [f"ckpt={run[0]}", "trainer=cpu", "data=imagefolder", f"data.root={root}"]
    with pytest.raises(SystemExit, match=r"trained on 10 classes .* this data has 2: one, two"):
        main(["eval", *arguments, "data.in_chans=1"])


def test_other_channels_are_refused(run: Any, tmp_path: Path) -> None:
    root = folder_of_digits(tmp_path, [str(n) for n in range(10)])
    arguments = [f"ckpt={run[0]}", "trainer=cpu", "data=imagefolder", f"data.root={root}"]
    with pytest.raises(SystemExit, match="1 channels, the data have 3"):
        main(["eval", *arguments])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch_size=0"], "whole number >= 1"),
        (["optim=adam"], "optim=adam: expected one of the keys of an evaluation, ckpt, "),
        (["memory=store"], "expected one of the keys of an evaluation"),
        (["ckpt.ckpt"], "no weights, file or folder 'ckpt.ckpt'"),
        (["a.ckpt", "b.ckpt"], "b.ckpt: expected KEY=VALUE"),
    ],
)
def test_wrong_arguments_are_refused(overrides: list[str], message: str, run: Any) -> None:
    is_given = any("ckpt" in override for override in overrides)
    arguments = overrides if is_given else [f"ckpt={run[0]}", *overrides]
    with pytest.raises(SystemExit) as end:
        main(["eval", *arguments])
    assert str(end.value).startswith("revzoo: ")
    assert message in str(end.value)


def test_surface_distances_need_masks_and_monai(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["eval", str(run[0]), "trainer=cpu", "surface_distances=true"]
    with pytest.raises(SystemExit, match="task=classification: there are no masks; leave it out"):
        main(arguments)
    monkeypatch.setattr("revzoo.cli.config.find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="needs monai, scipy: pip install monai scipy"):
        main(arguments)


def test_a_lone_checkpoint_needs_data(run: Any, tmp_path: Path) -> None:
    lone = Path(shutil.copy(run[0], tmp_path / "a.ckpt"))
    with pytest.raises(SystemExit, match="is not in the folder of a run"):
        main(["eval", f"ckpt={lone}", "trainer=cpu"])
    assert "test/acc" in evaluate(config(f"ckpt={lone}", "data=digits"))


def test_predictions_as_table_json_and_csv(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = folder_of_digits(tmp_path, [str(n) for n in range(10)], count=1)
    arguments = [f"ckpt={run[0]}", str(root / "test"), "--device", "cpu"]

    def printed(*options: str) -> str:
        main(["predict", *arguments, *options])
        return capsys.readouterr().out

    rows = json.loads(printed("--json"))
    assert len(rows) == 10
    for row in rows:
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["class"] == max(row["probabilities"], key=row["probabilities"].get)
    table = printed("--top", "2").splitlines()
    assert table[0].split()[:2] == [rows[0]["path"], rows[0]["class"]]
    assert len(table[0].split()) == 5
    lines = list(csv.DictReader(printed("--csv", "--batch-size", "3").splitlines()))
    assert [line["class"] for line in lines] == [row["class"] for row in rows]
    assert float(lines[3]["7"]) == pytest.approx(rows[3]["probabilities"]["7"], abs=1e-6)


def test_a_text_is_not_an_image(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_text("hello")
    with pytest.raises(SystemExit, match="1 of 1 image could not be read"):
        main(["predict", f"ckpt={run[0]}", str(tmp_path / "a.png")])
    assert re.search("cannot decode image .*: replace or remove it\n$", capsys.readouterr().err)


def test_averaged_weights_are_saved_and_tested(tmp_path: Path) -> None:
    averaged = (*SMALL, "callbacks.ema={decay: 0.9}", "trainer.max_epochs=2")
    figures = train(compose(averaged).config, run_dir=tmp_path)
    path = tmp_path / "checkpoints" / "best.ckpt"
    found = evaluate(config(f"ckpt={path}"))
    for name, value in found.items():
        assert value == pytest.approx(figures[name], rel=1e-6)
    state = read_checkpoint(path)
    name = next(name for name, value in state["state_dict"].items() if value.dim() == 4)
    assert not torch.equal(state["state_dict"][name], state["current_model_state"][name])
    assert all(
        v.dtype == state["state_dict"][n].dtype for n, v in state["current_model_state"].items()
    )


ENTRY = SHIPPED.find("irevnet13.digits")


@pytest.mark.parametrize("kind", ["name", "file", "lone file", "folder"])
def test_shipped_weights_reproduce_their_figures(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ENTRY.folder is not None
    assert ENTRY.file is not None
    if kind in ("lone file", "folder"):
        create_model(ENTRY.name, pretrained=True).save_pretrained(tmp_path / "net")
        if kind == "lone file":
            (tmp_path / "net" / "config.json").unlink()
    places = {
        "name": ENTRY.name,
        "file": ENTRY.folder / ENTRY.file,
        "lone file": tmp_path / "net" / "model.safetensors",
        "folder": tmp_path / "net",
    }
    main(["eval", f"ckpt={places[kind]}", "data=digits", "trainer=cpu"])
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    for name, value in ENTRY.metrics.items():
        assert float(found[name]) == pytest.approx(value, abs=1e-4)


def test_weights_get_pixels_as_in_training(tmp_path: Path) -> None:
    """Files hold 0 to 255, the digits 0 to 16, and mean and std of an entry refer to 0 to 1."""
    root = folder_of_digits(tmp_path, [str(n) for n in range(10)], count=3)
    data = ["data=imagefolder", f"data.root={root}", "data.in_chans=1"]
    figures = evaluate(config(f"ckpt={ENTRY.name}", *data))
    assert figures["test/acc"] > 0.9
    predictions = list(predict(restore(ENTRY.name), [root / "test"]))
    found = [Path(path).parent.name == next(iter(classes)) for path, classes in predictions]
    assert figures["test/acc"] == pytest.approx(np.mean(found))


def test_weights_refuse_other_classes(tmp_path: Path) -> None:
    names = [*map(str, range(9)), "nine"]
    root = folder_of_digits(tmp_path, names, count=2)
    data = ["data=imagefolder", f"data.root={root}", "data.in_chans=1", "trainer=cpu"]
    with pytest.raises(SystemExit) as end:
        main(["eval", f"ckpt={ENTRY.name}", *data])
    assert "10 classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; this data has 10: 0, 1" in str(end.value)
    assert "only trained on: 9; only in the data: nine" in str(end.value)


@pytest.mark.parametrize(
    ("ckpt", "message"),
    [
        (ENTRY.name, "give data=NAME"),
        ("irevnet13.digit", "did you mean 'irevnet13.digits'"),
        ("resnet164", "there are no weights, file or folder 'resnet164'"),
        ("nothing.safetensors", "there are no weights, file"),
    ],
)
def test_missing_weights_end_with_a_message(ckpt: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["eval", f"ckpt={ckpt}", "trainer=cpu"])


def test_weights_without_classes_are_refused(tmp_path: Path) -> None:
    create_model("irevnet13", in_chans=1).save_pretrained(tmp_path, mean=(0.3,), std=(0.4,))
    with pytest.raises(SystemExit, match="lacks classes: add them"):
        main(["eval", f"ckpt={tmp_path}", "data=digits", "trainer=cpu"])


def test_a_checkpoint_that_is_not_finite_is_refused(run: Any, tmp_path: Path) -> None:
    state = read_checkpoint(run[0])
    state["state_dict"]["model.fc.bias"][3] = float("nan")
    write_checkpoint(state, tmp_path / "a.ckpt")
    message = r"NaN or Inf in model.fc.bias \(1 of 10 values\)"
    with pytest.raises(SystemExit, match=message):
        main(["eval", f"ckpt={tmp_path / 'a.ckpt'}", "data=digits", "trainer=cpu"])


@pytest.fixture(scope="module")
def reversible(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two saved models of the same weights: one with one side bit, and the plain one."""
    folder = tmp_path_factory.mktemp("reversible")
    options = {"units": (5, 1, 1), "in_chans": 1}  # a run of 5 blocks pays
    model = create_model("resnet32", **options, reversible_bits=1, reversible_size=8)
    data = Digits()
    data.setup("test")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
    facts = {"classes": data.classes, "mean": [0.3], "std": [0.4]}
    for name, bits in {"one": 1, "plain": None}.items():
        change_bits(model, bits)
        model.save_pretrained(folder / name, input_size=(1, 8, 8), **facts)
    return folder / "one", folder / "plain"


def test_bits_are_chosen_for_an_evaluation(reversible: tuple[Path, Path]) -> None:
    one, plain = reversible
    found = {
        (path, bits): evaluate(config(f"ckpt={path}", "data=digits", f"bits={bits}", *FULL[:1]))
        for path in reversible
        for bits in ("saved", "null", 1)
    }
    assert found[one, "saved"] == found[one, 1] == found[plain, 1]
    assert found[one, "null"] == found[plain, "saved"] == found[plain, "null"]
    assert found[one, "null"]["test/loss"] != found[one, "saved"]["test/loss"]
    for bits in (0, 9, "x"):
        with pytest.raises(ConfigError, match=f"bits={bits}: expected one of saved, 1, .*8, null"):
            evaluate(config(f"ckpt={one}", f"bits={bits}"))
    with pytest.raises(SystemExit, match="bits=null makes its blocks plain"):
        main(["eval", f"ckpt={one}", "model.reversible_bits=null"])
    with pytest.raises(SystemExit, match="revnet38 takes no reversible_bits"):
        main(["eval", "ckpt=revnet38.cifar10", "bits=null", "data=digits"])


def test_bits_are_chosen_for_predictions_and_exports(
    reversible: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of_digits(tmp_path / "digits", ["0"], count=2)
    images = str(tmp_path / "digits" / "test")

    def output(*arguments: object) -> str:
        main([*map(str, arguments)])
        return capsys.readouterr().out

    one, plain = (output("predict", path, images, "--json") for path in reversible)
    assert output("predict", reversible[0], images, "--json", "--bits", "null") == plain != one
    assert output("predict", reversible[1], images, "--json", "--bits", 1) == one
    for bits, expected in {"null": [], "3": [3] * 5, "saved": [1] * 5}.items():
        path = tmp_path / f"{bits}.safetensors"
        output("export", reversible[0], "--format=safetensors", "--bits", bits, "--output", path)
        exported = revzoo.from_pretrained(path)
        assert [row.bits for row in revzoo.reversible_blocks(exported)] == expected
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(reversible[0]), "--format=pt2", "--bits", "x"])
    assert "x: expected 1 to 8, or null" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pt2", "safetensors"])
def test_a_run_is_exported_with_its_classes(
    kind: str, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"net.{kind}"
    main(["export", str(run[0]), "--output", str(path)])
    assert f"{path}  " in capsys.readouterr().out
    data = Digits()
    data.setup("test")
    images, _ = next(iter(data.test_dataloader()))
    images = data.transform(images, training=False)
    module = restore(run[0]).module
    with torch.no_grad():
        found, expected = FORMATS[kind].load(path)(images), module(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if kind == "safetensors":
        again = restore(path)
        assert again.data_state["classes"] == data.classes
        numbers = normalisation_for(again.data_state, data.pixel_max)
        assert numbers["mean"] == pytest.approx(data.normalisation.state_dict()["mean"])


def test_a_name_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["export", "irevnet13", "--pretrained", "--format", "safetensors"])
    (file,) = tmp_path.iterdir()
    assert file.name == "irevnet13.safetensors"
    model = create_model(file, pretrained=True)
    assert model.entry is not None
    for fact in ("name", "license", "recipe", "metrics", "classes", "mean", "input_size"):
        assert getattr(model.entry, fact) == getattr(ENTRY, fact)
    main(["export", "torchvision:resnet18", "--format", "safetensors"])
    assert (tmp_path / "torchvision-resnet18.safetensors").is_file()  # no colon
    with pytest.raises(SystemExit, match=r"no weights, file or folder 'nowhere\.ckpt'"):
        main(["export", "nowhere.ckpt", "--format", "pt2"])
    with pytest.raises(SystemExit, match="there are no weights, file or folder 'revnet83'"):
        main(["export", "revnet83", "--format", "pt2"])
