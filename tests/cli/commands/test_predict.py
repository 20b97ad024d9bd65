from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_images import image_folder
from small_run import QUICK

from revzoo.cli.commands.predict import as_csv, image_files, predict
from revzoo.cli.main import main
from revzoo.cli.run.train import train
from revzoo.data import ImageFolder
from revzoo.data.decode import IMAGENET_CROP_PCT
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.checkpoint.restore import restore

DESCRIPTION = ["--license", "MIT", "--recipe", "python train.py", "--measured-on", "40 images"]


@pytest.mark.parametrize(
    ("cache_bytes", "given_pct", "crop_pct"),
    [(0, "null", IMAGENET_CROP_PCT), (2**30, "null", 1.0), (2**30, "0.7", 0.7)],
)
def test_images_are_cropped_as_in_training(
    cache_bytes: int, given_pct: str, crop_pct: float, compose: Any, tmp_path: Path
) -> None:
    root = image_folder(tmp_path / "images", side=12)
    images = ("data.num_workers=0", "data.image_size=8", f"data.cache_bytes={cache_bytes}")
    given = (
        "test=false",
        "data=imagefolder",
        f"data.root={root}",
        "data.batch_size=8",
        *images,
        f"data.crop_pct={given_pct}",
    )
    train(compose(*QUICK, *given), run_dir=tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "best.ckpt"
    main(["pack", str(checkpoint), "revnet38.dark", "--output", str(tmp_path), *DESCRIPTION])
    weights = restore(tmp_path / "revnet38.dark.safetensors")
    assert weights.data_state["crop_pct"] == crop_pct
    expected = dict(predict(restore(checkpoint), [root / "test"]))
    found = dict(predict(weights, [root / "test"]))
    assert found.keys() == expected.keys()
    data = ImageFolder(root, num_workers=0)
    data.load_state_dict(weights.data_state)
    data.setup("test")
    pixels = torch.cat([images for images, _ in data.test_dataloader()])
    with torch.no_grad():
        rows = weights.module(data.transform(pixels, training=False)).softmax(1)
    for (path, classes), row in zip(found.items(), rows, strict=True):
        assert classes == pytest.approx(expected[path], rel=1e-4)
        assert classes["dark"] == pytest.approx(float(row[0]), rel=1e-4)


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    image = str(image_folder(tmp_path))
    with pytest.raises(SystemExit, match="--device foo: Expected one of cpu"):
        main(["predict", "ckpt=irevnet13.digits", image, "--device", "foo"])


def test_a_wrong_size_names_the_option(tmp_path: Path) -> None:
    """It named ``data.image_size``, an option of ``train``."""
    image = str(image_folder(tmp_path))
    with pytest.raises(
        SystemExit, match=r"--image-size=7: images of 7 x 7 pixels: .*: use --image-size 8$"
    ):
        main(["predict", "irevnet13.digits", image, "--device", "cpu", "--image-size", "7"])


def test_the_checkpoint_may_be_written_as_ckpt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(image_folder(tmp_path, side=8) / "test")
    outputs = []
    for source in ("irevnet13.digits", "ckpt=irevnet13.digits"):
        main(["predict", source, image, "--device", "cpu"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "dark" in outputs[0]


def test_csv_and_json_may_name_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = str(image_folder(tmp_path, side=8) / "test")
    main(["predict", "irevnet13.digits", image, "--csv"])
    table = capsys.readouterr().out
    file = tmp_path / "out.csv"
    for words in ([image, "--csv", str(file)], ["--csv", str(file), image]):
        main(["predict", "irevnet13.digits", *words])
        assert capsys.readouterr().out == ""
        assert file.read_text() == table
        file.unlink()
    with pytest.raises(SystemExit, match="no image or folder"):
        main(["predict", "irevnet13.digits", image, "--json", str(file)])
    with pytest.raises(SystemExit, match="images are needed"):
        main(["predict", "irevnet13.digits", "--csv", str(file)])


def test_the_other_images_are_classified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One unreadable image ended the command before the first row."""
    folder = image_folder(tmp_path, side=8) / "test"
    good = sorted(map(str, folder.rglob("*.png")))
    bad = [folder / "light" / name for name in ("0.png", "zz.png")]
    for path in bad:
        path.write_bytes(b"no image")
    good = [path for path in good if Path(path) not in bad]
    command = ["predict", "irevnet13.digits", str(folder), "--device", "cpu", "--batch-size", "3"]
    message = "2 of 41 images could not be read: .* revzoo check DIR"
    with pytest.raises(SystemExit, match=message) as end:
        main([*command, "--json"])
    assert isinstance(end.value.code, str)  # Python exits with 1
    printed = capsys.readouterr()
    rows = {row["path"]: row["probabilities"] for row in json.loads(printed.out)}
    assert sorted(rows) == good
    for path, line in zip(bad, printed.err.splitlines(), strict=True):
        assert line.startswith(f"revzoo: cannot decode image {path} (")
    # each row belongs to its path
    expected = dict(predict(restore("irevnet13.digits"), good))
    assert all(rows[path] == pytest.approx(expected[path], abs=1e-5) for path in good)


@pytest.mark.parametrize(
    ("form", "printed"), [([], ""), (["--json"], "[]\n"), (["--csv"], "path,class\n")]
)
def test_no_readable_image(
    form: list[str], printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"no image")
    with pytest.raises(SystemExit, match="1 of 1 image could not be read"):
        main(["predict", "irevnet13.digits", str(image), "--device", "cpu", *form])
    assert capsys.readouterr().out == printed


def test_an_output_of_nan_is_refused(tmp_path: Path) -> None:
    root = image_folder(tmp_path, side=8)
    restored = restore("irevnet13.digits")
    with torch.no_grad():
        restored.module.model.fc.weight.fill_(torch.finfo(torch.float32).max)
    with pytest.raises(CheckpointError, match=r"output is NaN or Inf: .* earlier checkpoint"):
        list(predict(restored, [root / "test"]))


def test_a_folder_is_read_as_its_files_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``predict FILE.gif`` worked, and ``predict FOLDER`` left the file out."""
    names = ("a.gif", "b.jfif", "c.png")
    for name in (*names, "d.heic"):
        Image.new("RGB", (8, 8)).save(tmp_path / name, "PNG")
    assert [path.name for path in image_files([tmp_path])] == list(names)
    assert "1 .heic" in caplog.text


def test_hidden_files_of_a_folder_are_not_images(tmp_path: Path) -> None:
    """An archive of macOS adds ``._NAME.png``, which ended the prediction."""
    root = image_folder(tmp_path)
    first = next(iter(sorted((root / "test").rglob("*.png"))))
    (first.parent / f"._{first.name}").write_bytes(b"no image")
    assert not [path for path in image_files([root / "test"]) if path.name.startswith(".")]


def test_the_csv_of_a_regression_gives_each_float32_back() -> None:
    """Six digits changed 1234.5678 by 0.0022."""
    value = float(np.float32(1234.5678))
    *_, row = as_csv([("a.png", {"age": value})], 1, "regression").splitlines()
    assert np.float32(row.split(",")[1]) == np.float32(value)
