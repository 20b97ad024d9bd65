"""``revzoo pack-data``: from a folder or a table to shards that train."""

import csv
from pathlib import Path

import pytest
from PIL import Image

from revzoo.cli.main import main
from revzoo.data import Shards

pytest.importorskip("webdataset")


def test_a_table_becomes_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(f"{i}.png", "ab"[i % 2], ("train", "test")[i % 5 == 0]) for i in range(20)]
    for number, (name, *_) in enumerate(rows):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name)
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "kind", "part"), *rows])
    out = tmp_path / "shards"
    columns = ("--label-column", "kind", "--split-column", "part")
    words = ["pack-data", str(tmp_path / "labels.csv"), str(out), "--format", "webdataset"]
    main([*words, *columns])
    printed = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    assert f"20 images in 2 shards: {out} to train: " in printed
    assert f"data=webdataset data.root={out} data.image_size=224" in printed
    data = Shards(out)
    assert {split: len(files.paths) for split, files in data.listing().splits.items()} == {
        "train": 16,
        "test": 4,
    }
    main(["check", str(out), "--workers", "1"])
    assert capsys.readouterr().out == "all 20 images can be read\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--label-column", "kind"], "--label-column needs a table as SOURCE: .csv, .tsv, .parq"),
        (["--shard-mb", "5000"], "--shard-mb=5000.0: expected a number in (0, 4000]"),
        ([], "has images and masks: use data=masks"),
    ],
)
def test_what_cannot_be_packed_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (tmp_path / "set" / "train" / kind).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "set" / "train" / kind / "0.png")
    with pytest.raises(SystemExit) as caught:
        main(["pack-data", str(tmp_path / "set"), str(tmp_path / "out"), *words])
    assert message in " ".join(str(caught.value).split())
