"""Volumes from the command line: check, train, evaluate, predict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from small_run import NO_EXTRAS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from revzoo.cli.main import main
from revzoo.cli.run.train import train

SMALL = ("trainer=cpu", "trainer.max_steps=2", "callbacks.progress_bar=null")
MODEL = ("model=revunet3d", "model.channels=[4,8]", "model.units=[1,1]", "model.groups=1")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    for split, i in (("train", 0), ("train", 1), ("val", 0), ("test", 0)):
        mask = (random.random((11, 8, 9)) > 0.8).astype(np.uint8)
        for folder, array in (("images", mask * 100.0 + 3), ("labels", mask)):
            path = tmp_path / "set" / split / folder / f"{i}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = nibabel.Nifti1Image(array.astype(np.float32), np.diag([1, 2, 3, 1]))
            nibabel.save(image, path)
    return tmp_path / "set"


def test_volumes_are_checked_trained_evaluated_and_predicted(
    root: Path, tmp_path: Path, compose: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", str(root)])
    assert capsys.readouterr().out == "all 4 volumes can be read\n"
    data = ("data=volumes", f"data.root={root}", "data.patch=[8,8,8]", "data.num_workers=0")
    shown = ("callbacks.samples.every_n_epochs=1", "callbacks.best_checkpoint.monitor=val/dice")
    run = tmp_path / "run"
    figures = train(compose(*MODEL, *data, *SMALL, *shown), run_dir=run)
    assert {"val/dice", "test/dice"} <= set(figures)
    folder = next(run.rglob("events*")).parent  # a test after training has a file of its own
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    assert "watch/samples" in events.Reload().Tags()["images"]
    capsys.readouterr()
    main(["eval", str(run), "trainer=cpu"])
    assert f"test/dice {figures['test/dice']:.4f}" in capsys.readouterr().out
    assert "test/assd" not in figures
    main(["eval", str(run), "trainer=cpu", "surface_distances=true"])
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert (
        0 < float(lines["test/assd"]) <= float(lines["test/hd95"]) <= math.hypot(11, 2 * 8, 3 * 9)
    )

    masks, images = tmp_path / "masks", root / "test" / "images"
    main(["predict", str(run), str(images), "--masks", str(masks), "--probabilities"])
    assert capsys.readouterr().out == f"1 mask in {masks}: 0 0, 1 1\n"
    mask, shares = (nibabel.load(masks / f"0{name}.nii.gz") for name in ("", "_probabilities"))
    assert mask.get_data_dtype() == np.uint8
    assert np.array_equal(mask.affine, np.diag([1, 2, 3, 1]))
    assert np.allclose(shares.get_fdata().sum(-1), 1, atol=1e-5)
    assert np.array_equal(shares.get_fdata().argmax(-1), mask.get_fdata())

    volume = nibabel.load(images / "0.nii.gz")
    mirror = tmp_path / "mirror.nii.gz"
    nibabel.save(nibabel.Nifti1Image(volume.get_fdata()[..., ::-1], volume.affine), mirror)
    both = [str(images), str(mirror), "--masks", str(tmp_path / "flipped")]
    main(["predict", str(run), *both, "--probabilities", "--tta", "flip"])
    names = (tmp_path / "flipped" / f"{name}_probabilities.nii.gz" for name in ("0", "mirror"))
    plain, mirrored = (nibabel.load(name).get_fdata() for name in names)
    assert np.allclose(plain, mirrored[:, :, ::-1], atol=1e-5)
    assert not np.allclose(plain, shares.get_fdata(), atol=1e-5)

    (root / "train" / "labels" / "1.nii.gz").unlink()
    with pytest.raises(SystemExit, match="1 of 4 volumes cannot be used"):
        main(["check", str(root)])
    assert "has no label: expected" in capsys.readouterr().out


def test_generated_volumes_are_predicted_from_arrays(
    tmp_path: Path, compose: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(compose("experiment=volumes", *MODEL, *SMALL, *NO_EXTRAS, "debug=smoke"), run_dir=run)
    np.save(tmp_path / "a.npy", np.zeros((20, 40, 32), np.uint8))
    capsys.readouterr()
    main(["predict", str(run), str(tmp_path / "a.npy"), "--masks", str(tmp_path / "masks")])
    assert "0 background, 1 ball, 2 box" in capsys.readouterr().out
    assert np.load(tmp_path / "masks" / "a.npy").shape == (20, 40, 32)


def test_images_and_volumes_need_their_networks(tmp_path: Path, compose: Any) -> None:
    for model, data, message in (
        ("iunet2d", "blobs3d", "takes images of 2 dimensions, the data have 3"),
        ("iunet3d", "shapes", "takes images of 3 dimensions, the data have 2"),
    ):
        with pytest.raises(SystemExit, match=message):
            train(compose(f"model={model}", f"data={data}", *SMALL), run_dir=tmp_path)
