"""``revzoo audit``, ``revzoo plan`` and ``revzoo bench``."""

import csv
import functools
import json
import re
from argparse import Namespace

import pytest

import revzoo
from revzoo.cli.commands import plan
from revzoo.cli.main import main
from revzoo.core.modes import DEVICE_MODES, MODES
from revzoo.profiling.audit import audit
from revzoo.profiling.bench import bench
from revzoo.profiling.units import bytes_from, peak_note

SMALL = ["revnet38", "--batch-size", "8"]


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_audit_lists_every_mode(capsys, tmp_path):
    main(["audit", *SMALL, "--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png")])
    printed = capsys.readouterr().out
    model = revzoo.create_model("revnet38", memory="store")
    peak = audit(model, (8, 3, 32, 32), modes=[]).peak_bytes
    (line,) = [line for line in printed.splitlines() if line.startswith("store")]
    assert line.endswith(f"{peak / 2**20:.2f} MiB")
    assert [line.split()[0] for line in printed.splitlines()[5:10]] == [*MODES]
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert {row["mode"] for row in rows_of(tmp_path / "a.csv")} >= {"exact"}


@pytest.mark.parametrize(("name", "values"), [("sgd", 1), ("adamw", 2), ("muon", 1)])
def test_an_audit_can_count_the_state_of_an_optimiser(name, values, capsys):
    main(["audit", *SMALL, "--memory", "exact", "--optim", name])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "state of" in line]
    weights = sum(p.nbytes for p in revzoo.create_model("revnet38").parameters())
    assert float(line.split()[0]) == pytest.approx(values * weights / 2**20, rel=0.01)


def test_bench_chooses_modes_that_the_network_takes(capsys):
    """A reversible network of a library was benched in "invert", which it refuses."""
    options = ["--batch-size", "2", "--image-size", "32", "--rounds", "2"]
    main(["bench", "torchvision:resnet18", "--bits", "4", *options])
    included, header, name, *rows, legend = capsys.readouterr().out.splitlines()
    assert legend.endswith("; ratio: median of the ratios to store, round by round")
    assert len(legend) <= 80
    assert included == peak_note()
    assert name == "torchvision:resnet18"  # longer than its column
    assert [row.split()[0] for row in rows] == ["store", "exact", "balanced"]
    assert {len(row) for row in rows} == {len(header)} == {79}
    with pytest.raises(SystemExit, match=r"holds no step .*make_reversible\(model\), .* --bits 4"):
        main(["bench", "torchvision:resnet18", "--memory", "exact", *options])
    assert capsys.readouterr().out == ""  # no header of a table without rows


def test_the_channels_of_the_images_can_be_chosen(capsys):
    """A model of grey images was audited with three channels."""
    main(["audit", "irevnet13", "--image-size", "8", "--channels", "2", "--batch-size", "1"])
    assert capsys.readouterr().out.startswith("irevnet13, one training step on 1x2x8x8\n")


def test_audit_of_one_mode_with_real_steps(capsys):
    main(["audit", *SMALL, "--memory", "recompute", "--real"])
    printed = capsys.readouterr().out
    assert "recompute" in printed
    assert "store" not in printed


def test_plan_is_printed_and_saved(capsys, tmp_path):
    file = tmp_path / "plan.json"
    main(["plan", *SMALL, "--budget", "12MiB", "--save", str(file)])
    printed, told = capsys.readouterr()
    assert told.endswith(f"wrote {file}\n")
    assert "of 12.00 MiB" in printed
    assert "stages.1" in printed
    assert "inverting mode: exact\n" in printed
    assert "s  (to plan with it: --memory invert)\n" in printed
    assert max(map(len, printed.replace(str(file), "").splitlines())) < 80
    compared = printed.split("every step in one mode\n")[1].split("\n\n")[0]
    assert {line.split()[0] for line in compared.splitlines()} == {*DEVICE_MODES}
    assert 'revzoo.plan_memory(model, (8, 3, 32, 32), "12MiB")\n' in printed
    assert f'revzoo.set_memory(model, json.load(open("{file}")))\n' in printed
    assert "revzoo train ... memory=budget memory.bytes=12MiB\n" in printed
    model = revzoo.create_model("revnet38")
    revzoo.set_memory(model, json.loads(file.read_text()))
    assert audit(model, (8, 3, 32, 32), modes=[]).peak_bytes <= bytes_from("12MiB")


def test_a_fit_is_folded_and_its_command_can_be_copied(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    main(["plan", "irevnet13", "--batch-size", "400", "--budget", "16MiB", "--fit", "batch"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    (start,) = (i for i, line in enumerate(lines) if line.startswith("its plan: revzoo plan"))
    assert start > 1
    assert all(line.endswith(" \\") for line in lines[start:-1])


def test_the_largest_batch_that_fits(capsys, monkeypatch):
    """--batch-size seemed to be ignored, and the status did not name the number that it counted."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(["plan", "irevnet13", "--batch-size", "400", "--budget", "16.1MiB", "--fit", "batch"])
    printed = capsys.readouterr()
    start = "looking for the largest batch, beginning with 400 (--batch-size)\n"
    assert f"\r\033[K{start}" in printed.err
    assert "\r\033[Kirevnet13, batch 400 ..." in printed.err
    assert re.search(r"irevnet13, batch 400, \d+ s: counting a training step in", printed.err)
    found, plan_of_it = printed.out.splitlines()
    assert "without the optimiser's state; " in found
    batch = int(found.split(": ")[1].split(",")[0])
    assert plan_of_it.endswith(
        f"revzoo plan irevnet13 --budget 16.1MiB --batch-size {batch} --image-size 8"
    )
    model = revzoo.create_model("irevnet13")
    assert batch % 8 == 0  # kernels like it
    most = int(re.search(r"; (\d+), if it need not be a multiple of 8$", found)[1])
    assert batch < most < batch + 8
    peaks = [audit(model, (n, 3, 8, 8), modes=[]).peak_bytes for n in (most, most + 1)]
    # a plan leaves some kilobytes of each step to random states and the guard
    assert peaks[0] <= 16.1 * 2**20 < 1.03 * peaks[1]


@pytest.mark.parametrize(
    ("arguments", "statuses"),
    [
        (["plan", *SMALL, "--budget", "1GiB"], ["loading torch", "revnet38"]),
        (["audit", *SMALL, "--memory", "store"], ["loading torch", "revnet38"]),
        (["export", "irevnet13", "--format", "safetensors"], ["loading torch", "exporting irev"]),
    ],
)
def test_commands_show_that_they_work(arguments, statuses, capsys, monkeypatch, tmp_path):
    """Exports and plans were silent for minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(arguments)
    told = [line for line in capsys.readouterr().err.split("\r\033[K") if line]
    for status, line in zip(statuses, told[: len(statuses)], strict=True):
        assert line.startswith(status)
    if arguments[0] == "audit":
        assert f"{statuses[1]}, 0 s: counting a training step in mode store ..." in told
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    main(arguments)
    assert not capsys.readouterr().err


def test_a_plan_has_one_unit_and_one_order_of_modes(capsys):
    """Budgets were in GiB beside peaks in MiB, and an audit had another order of modes."""
    main(["plan", *SMALL, "--budget", "2GiB"])
    title, included, *lines = capsys.readouterr().out.splitlines()
    assert title == "revnet38, one training step on 8x3x32x32"
    assert included == peak_note()
    table = lines[lines.index("for comparison, every step in one mode") + 1 :][:4]
    assert [line.split()[0] for line in table] == [*DEVICE_MODES]
    (peak,) = (line for line in lines if line.startswith("peak "))
    assert "of 2,048 MiB" in peak
    assert all(line.count(" MiB") == 1 for line in table)


def test_a_budget_below_every_batch_is_an_error(capsys):
    """It ended with status 0 and did not say what a batch needs."""
    with pytest.raises(SystemExit) as end:
        main(["plan", *SMALL, "--budget", "1MiB", "--fit", "batch"])
    told = f"{end.value.code}{capsys.readouterr().err}"
    assert "no batch of revnet38 fits --budget=1MiB: the smallest tried, 1, needs" in told


def test_the_search_for_a_depth_ends(capsys, monkeypatch):
    """It went on for hours: inverted, thousands of units fit."""
    monkeypatch.setattr(plan, "DEEPEST", 1)
    main(["plan", *SMALL, "--budget", "1GiB", "--fit", "depth"])
    assert (
        "units=(3, 3, 3), the largest depth of revnet38 that was tried, needs"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("revnet38", 5, "units=(5, 5, 5)"),
        ("revnet104", 22, "units=(4, 4, 22, 4)"),
        ("irevnet43.cifar10", 10, "units=(10, 10, 8)"),
        ("revvit_small", 24, "24"),
    ],
)
def test_a_depth_is_shown_as_a_model_takes_it(name, value, shown):
    """It was the number of units of the longest stage, smaller than the depth in the name."""
    assert plan.fit_of(Namespace(name=name, fit="depth"), (8, 3, 32, 32)).shown(value) == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "revnet38", "--batch-size", "0"], "expected a whole number >= 1"),
        (
            ["audit", "revnet38", "--image-size", "33"],
            "--image-size=33: images of 33 x 33 pixels: .*of 4, .*: use --image-size 32$",
        ),
        (["info", "revnet38", "--image-size", "30"], "multiples of 4, .*: use --image-size 32$"),
        (["info", "revnet38", "--image-size", "0"], "--image-size=0: expected a whole number >= 1"),
        (["info", "revnet38", "--batch-size", "0"], "--batch-size=0: expected"),
        (["export", "revnet38", "--image-size", "30"], "multiples of 4, .*: use --image-size 32$"),
        (["export", "revnet38", "--image-size", "0"], "--image-size=0: expected a whole number"),
        (
            ["bench", "vit_cifar", "--image-size", "30"],
            "expected 32 x 32, .*: use --image-size 32$",
        ),
        (
            ["audit", "revnet38", "--image-size", "0"],
            "--image-size=0: expected a whole number >= 1",
        ),
        (["audit", "revnet38", "--memory", "stor"], "unknown memory mode 'stor'"),
        (["audit", "revnet38", "--optim", "adam"], "adam: expected one of .*'adamw'"),
        (["plan", "revnet38", "--budget", "0"], "expected a positive number of bytes"),
        (["plan", *SMALL, "--budget", "3MiB"], "less than any plan needs: at least"),
        (["plan", *SMALL, "--budget", "1GiB", "--memory", "store"], "expected one of invert"),
        (["bench", "revnet", "--depths", "deep"], "expected whole numbers"),
        (["bench", "revnet", "--depths", "39"], "there is no model 'revnet39'"),
        (["audit", "mine/mymodels.py"], "is a Python file, .* --import mymodels NAME$"),
        (["plan", "revnet38.py", "--budget", "1GiB"], r"Call revzoo.register_model\(NAME, "),
        (
            ["info", "revnet38.cifar"],
            r"mean 'revnet38\.cifar10'\? Known for revnet38: .*; or give the path of a \.safet",
        ),
        (
            ["export", "revnet29.cifar", "--format", "pt2"],
            r"no weights.*\? revzoo list --pretrained lists all weights; or give the path",
        ),
        (["audit", "resnet38"], "among the [0-9]+ of revzoo list --all; did you mean"),
        (["audit", "mynet"], "no model 'mynet' .* Register your own .* --import MODULE"),
        (["bench", *SMALL, "--memory", "store,budget"], "--memory=budget: expected one of store"),
        (["bench", *SMALL, "--memory", ","], "--memory=: expected one of store"),
        (
            ["plan", "torchvision:resnet18", "--budget", "1GiB", "--image-size", "32"],
            "resnet18 has no step to plan: make its blocks reversible",
        ),
        (["bench", *SMALL, "--rounds", "1"], "expected 2 or more"),
        (["bench", *SMALL, "--memory", "store", "invert"], "separate modes by commas"),
        (
            ["plan", "resnet32", "--budget", "1GiB", "--memory", "exact"],
            "no step .* has an inverse",
        ),
    ],
)
def test_wrong_arguments_end_with_a_message(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "revnet38", "--csv"],
        ["audit", "revnet38", "--plot"],
        ["bench", "revnet38", "--csv"],
        ["bench", "revnet38", "--plot"],
        ["plan", "revnet38", "--budget", "1GiB", "--plot"],
        ["plan", "revnet38", "--budget", "1GiB", "--save"],
    ],
)
def test_an_unwritable_path_is_refused_before_the_work(arguments, capsys, tmp_path):
    (tmp_path / "file").touch()
    paths = {tmp_path: "is a folder", tmp_path / "file" / "x.png": "cannot be written"}
    for path, message in paths.items():
        with pytest.raises(SystemExit, match=f"{path} {message}"):
            main([*arguments, str(path)])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["x.bmp3", "x"])
@pytest.mark.parametrize("command", [["audit"], ["bench"], ["plan", "--budget", "1GiB"]])
def test_a_picture_of_unknown_format_is_refused_before_the_work(command, name, tmp_path):
    with pytest.raises(SystemExit, match=f"--plot=.*{name}: expected a name that ends in .png"):
        main([*command, *SMALL, "--plot", str(tmp_path / name)])
    assert not list(tmp_path.iterdir())


def test_the_inverting_mode_of_a_plan_is_told_to_the_run(capsys):
    main(["plan", *SMALL, "--budget", "12MiB", "--memory", "invert"])
    printed = capsys.readouterr().out
    assert "inverting mode: invert\n" in printed
    assert 'inverting="invert")\n' in printed
    assert "memory.inverting=invert\n" in printed
    assert "exact" in printed
    assert max(map(len, printed.splitlines())) < 80


def test_bench_takes_the_modes_of_a_run():
    """A run keeps the default mode of a model without an inverse; the bench recomputed it."""
    build = functools.partial(revzoo.create_model, "resnet32", units=(1, 1, 1))
    store, balanced = bench(build, "resnet32", ["store", "balanced"], (4, 3, 32, 32), rounds=2)
    assert balanced.peak_bytes == store.peak_bytes


def test_bench_measures_modes_side_by_side(capsys, tmp_path):
    file = tmp_path / "b.csv"
    options = ["--batch-size", "4", "--rounds", "2", "--memory", "store,balanced"]
    main(["bench", "revnet", "--depths", "38", *options, "--csv", str(file)])
    rows = rows_of(file)
    assert [(row["name"], row["memory"]) for row in rows] == [
        ("revnet38", "store"),
        ("revnet38", "balanced"),
    ]
    assert float(rows[0]["ratio"]) == 1
    assert int(rows[1]["peak_bytes"]) < int(rows[0]["peak_bytes"])
    for row in rows:
        rate = float(row["images_per_second"]) * float(row["seconds"])
        assert rate == pytest.approx(4)


@pytest.mark.parametrize("fit", ["image", "depth"])
def test_only_a_batch_can_be_fitted_for_a_folder(fit, tmp_path):
    revzoo.create_model("irevnet13", in_chans=1).save_pretrained(tmp_path, input_size=(1, 8, 8))
    with pytest.raises(SystemExit, match="they need its name, such as revnet38"):
        main(["plan", str(tmp_path), "--budget", "1GiB", "--fit", fit])


def test_a_fit_has_no_plan_to_save(tmp_path):
    """The options were ignored."""
    with pytest.raises(SystemExit, match="--fit makes no plan to save or plot"):
        main(["plan", *SMALL, "--budget", "1GiB", "--fit", "batch", "--save", str(tmp_path / "p")])
