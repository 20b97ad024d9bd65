from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_images import image_folder

from revzoo.cli.main import main
from revzoo.cli.run.predict import image_files, predict
from revzoo.cli.run.train import train
from revzoo.data import ImageFolder
from revzoo.data.decode import IMAGENET_CROP_PCT
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.checkpoint.restore import restore

DESCRIPTION = ["--license", "MIT", "--recipe", "python train.py", "--measured-on", "40 images"]


@pytest.mark.parametrize(("cache_bytes", "crop_pct"), [(0, IMAGENET_CROP_PCT), (2**30, 1.0)])
def test_images_are_cropped_as_in_training(
    cache_bytes: int, crop_pct: float, compose: Any, tmp_path: Path
) -> None:
    root = image_folder(tmp_path / "images", side=12)
    images = ("data.num_workers=0", "data.image_size=8", f"data.cache_bytes={cache_bytes}")
    small = ("test=false", "debug=smoke", "trainer=cpu", "+model.units=[1,1,1]", "logger=none")
    given = (
        "data=imagefolder",
        f"data.root={root}",
        "data.batch_size=8",
        *images,
        *small,
        "memory=store",
        "callbacks.footprint=null",  # it counts a step, which takes longer than the run
    )
    train(compose(*given), run_dir=tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "best.ckpt"
    main(["pack", str(checkpoint), "revnet38.dark", "--out", str(tmp_path), *DESCRIPTION])
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
    with pytest.raises(SystemExit, match=r"--device foo \("):
        main(["predict", "ckpt=irevnet13.digits", image, "--device", "foo"])


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


def test_an_output_of_nan_is_refused(tmp_path: Path) -> None:
    root = image_folder(tmp_path, side=8)
    restored = restore("irevnet13.digits")
    with torch.no_grad():
        restored.module.model.fc.weight.fill_(torch.finfo(torch.float32).max)
    with pytest.raises(CheckpointError, match=r"output is NaN or Inf: .* earlier checkpoint"):
        list(predict(restored, [root / "test"]))


def test_hidden_files_of_a_folder_are_not_images(tmp_path: Path) -> None:
    """An archive of macOS adds ``._NAME.png``, which ended the prediction."""
    root = image_folder(tmp_path)
    first = next(iter(sorted((root / "test").rglob("*.png"))))
    (first.parent / f"._{first.name}").write_bytes(b"no image")
    assert not [path for path in image_files([root / "test"]) if path.name.startswith(".")]
