"""``revzoo check DIR``: all bad images at once."""

import csv
import os
import sys
from pathlib import Path

import pytest
from PIL import Image
from programs import program
from small_images import image_folder

from revzoo.cli.main import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a/0", "a/1", "b/0", "b/1"):
        path = tmp_path / "train" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return tmp_path


def test_a_good_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([str(root)], ["data", str(root)]):
        main(["check", *words, "--workers", "1"])
        assert capsys.readouterr().out == "all 4 images can be read\n"


def test_other_files_are_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``all 4 images can be read``, of 6."""
    Image.new("RGB", (8, 8)).save(root / "train/a/2.gif")
    (root / "train/a/3.heic").touch()
    main(["check", "data", str(root), "--workers", "1"])
    left_out, read = " ".join(capsys.readouterr().out.split()).split(": 1 .heic ")
    assert left_out.startswith("1 file below ")
    assert read == "all 5 images can be read"


def test_all_bad_images_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [root / "train" / name for name in ("a/1.png", "b/0.png")]
    for path in bad:
        path.write_bytes(b"no image")
    with pytest.raises(SystemExit, match="2 of 4 images cannot be read: replace or"):
        main(["check", "data", str(root), "--workers", "1"])
    assert capsys.readouterr().out.splitlines() == [
        "2 images: UnidentifiedImageError: cannot identify image file",
        *(f"  {path}" for path in bad),
    ]


def test_a_terminal_shows_a_few_paths_of_many(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        (root / "train" / "a" / f"bad{number}.png").write_bytes(b"no image")
    shown = {}
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)  # noqa: B023
        with pytest.raises(SystemExit, match="30 of 34 images"):
            main(["check", str(root), "--workers", "1"])
        shown[is_terminal] = capsys.readouterr().out.splitlines()
    assert len(shown[False]) == 31
    assert shown[True][:11] == shown[False][:11]
    assert shown[True][11:] == ["  and 20 more; > FILE writes all"]


def test_images_are_not_to_be_skipped_if_none_can_be_read(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in root.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(SystemExit, match=r"4 of 4 images cannot be read: .* or remove them$"):
        main(["check", "data", str(root), "--workers", "1"])
    first, *paths = capsys.readouterr().out.splitlines()
    assert first.startswith("4 images: UnidentifiedImageError: cannot identify")
    assert len(paths) == 4


def test_long_lines_are_folded(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setenv("COLUMNS", "80")
    (root / "train/a/1.png").write_bytes(b"no image")
    with pytest.raises(SystemExit):
        main(["check", "data", ".", "--workers", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80


def test_faults_of_the_folders_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "test" / "a").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"all 4 images can be read, but .* has 1 fault"):
        main(["check", "data", str(root), "--workers", "1"])
    assert "different classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small"], r"check small: expected revzoo check DIR, .* a model: revzoo info NAME\."),
        (["model", "revnet38"], "check model revnet38: expected revzoo check DIR"),
        (["data"], "check data: expected revzoo check DIR, where DIR is a folder of images"),
        (["s3://a/b"], "no folder s3://a/b: expected a folder of images on this machine"),
    ],
)
def test_other_words_are_told_what_to_write(
    arguments: list[str], message: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said ``invalid choice: 'small' (choose from 'data')``."""
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit, match=message):
        main(["check", *arguments])


@pytest.mark.parametrize("workers", ["0", "-1"])
def test_wrong_arguments_are_one_line(workers: str, root: Path) -> None:
    with pytest.raises(SystemExit, match="--workers="):
        main(["check", "data", str(root), "--workers", workers])


def check_strictly(words: list[str]) -> None:
    sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    main(words)


def test_names_that_are_not_utf8_are_shown(root: Path) -> None:
    """A UnicodeEncodeError of Python's strict output ended the list at the first such name."""
    (root / os.fsdecode(b"train/a/\xff.png")).write_bytes(b"no image")
    words, output = ["check", str(root), "--workers", "1"], root.with_suffix(".txt")
    with program(check_strictly, words, cwd=root, output=output) as process:
        process.join(100)
    shown = output.read_text()
    assert r"train/a/\udcff.png" in shown
    assert "Traceback" not in shown


def test_a_split_alone_is_not_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``revzoo check DIR/train`` reported train/train as missing."""
    main(["check", "data", str(image_folder(tmp_path) / "train"), "--workers", "1"])
    assert capsys.readouterr().out == "all 40 images can be read\n"


def test_a_folder_without_images_is_a_fault(tmp_path: Path) -> None:
    """It said that all 0 images can be read."""
    (tmp_path / "train").mkdir()
    with pytest.raises(SystemExit, match="no images in"):
        main(["check", "data", str(tmp_path / "train"), "--workers", "1"])


def _table(root: Path, *rows: tuple[object, ...]) -> str:
    path = root / "labels.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def test_all_faults_of_a_table_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training names the first one alone."""
    (root / "train/b/1.png").write_bytes(b"no image")
    table = _table(
        root,
        ("path", "age", "patient", "part"),
        ("train/a/0.png", "30", "p1", "train"),
        ("train/a/1.png", "old", "p1", "test"),
        ("train/b/0.png", "", "p2", "train"),
        ("train/b/1.png", "40", "p3", "nowhere"),
        ("train/b/2.png", "50", "p4", "train"),
    )
    columns = ["data.label_column=age", "data.group_column=patient", "data.split_column=part"]
    with pytest.raises(SystemExit, match="1 of 4 images cannot be read"):
        main(["check", "data", table, *columns, "task=regression", "--workers", "1"])
    found = capsys.readouterr().out.splitlines()
    expected = [
        "1 image: UnidentifiedImageError",
        f"  {root}/train/b/1.png",
        f"line 4 of {table} has nothing in column 'age'",
        f"line 5 of {table} has 'nowhere' in column 'part'",
        f"group 'p1' of {table} is in two splits, train and test (line 3)",
        f"line 3 of {table} has 'old' in column 'age': expected a number",
        f"line 6 of {table}: there is no file {root}/train/b/2.png",
    ]
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)


def test_a_table_without_wrong_rows(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(f"train/{name}/{n}.png", name) for name in "ab" for n in range(2)]
    main(["check", _table(root, ("path", "label"), *rows), "--workers", "1"])
    assert capsys.readouterr().out == "all 4 images can be read\n"
    table = _table(root, ("path", "label"), *rows[:2])
    with pytest.raises(SystemExit, match=r"all 2 images can be read, but .*csv has 1 fault: see"):
        main(["check", table, "--workers", "1"])
    assert "only one class" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="options are for a table"):
        main(["check", str(root), "task=regression"])


def test_masks_of_a_table_are_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mask in colour, and a missing one."""
    rows = [("train/a/0.png", "train/a/1.png"), ("train/b/0.png", "train/b/2.png")]
    table = _table(root, ("path", "truth"), *rows)
    options = ["data=masks", "data.mask_column=truth", "data.classes=[a,b]"]
    with pytest.raises(SystemExit, match="1 of 3 images cannot be read"):
        main(["check", table, *options, "--workers", "1"])
    found = capsys.readouterr().out
    assert f"  {root}/train/a/1.png\n" in found
    assert f"line 3 of {table}: there is no file {root}/train/b/2.png\n" in found


def test_values_of_masks_need_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, folder in ((f"{i}.png", f) for i in range(2) for f in ("images", "masks")):
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("L", (4, 4), int(name[0])).save(tmp_path / folder / name)
    table = _table(
        tmp_path, ("path", "mask"), ("images/0.png", "masks/0.png"), ("images/1.png", "masks/1.png")
    )
    for source in (str(tmp_path), table):
        main(["check", source, "data=masks", "data.classes=[a,b]", "--workers", "1"])
        assert capsys.readouterr().out.endswith("all 4 images can be read\n")
        with pytest.raises(SystemExit, match="1 of 4 images cannot be read"):
            main(["check", source, "data=masks", "data.classes={0: a, 2: b}", "--workers", "1"])
        found = capsys.readouterr().out
        assert f"1 image: the pixel value 1, of no class\n  {tmp_path}/masks/1.png\n" in found


def test_a_folder_of_volumes_names_their_data_set(tmp_path: Path) -> None:
    """Training named it, but the check only listed the formats of images."""
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "a.nii").touch()
    for folder in (tmp_path, tmp_path / "train"):
        with pytest.raises(SystemExit, match=r"but volumes, such as a\.nii: .*data=volumes"):
            main(["check", "data", str(folder), "--workers", "1"])
