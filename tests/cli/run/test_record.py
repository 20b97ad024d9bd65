from __future__ import annotations

import json
from pathlib import Path

import pytest

from revzoo.cli.config import compose
from revzoo.cli.invocation import command_line
from revzoo.cli.run.folder import check_changes, resumed_config, seconds_before, write_config
from revzoo.cli.terminal import ConfigError


def test_a_change_of_a_run_is_answered_with_the_command_of_a_new_run(tmp_path: Path) -> None:
    """The message named RUN literally, and not the run's own overrides."""
    first = ["model=resnet32", "model.pretrained=true", "trainer.max_epochs=3", "seed=2"]
    sessions = [{"overrides": first}, {"overrides": ["--resume", str(tmp_path)]}]
    (tmp_path / "sessions.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in sessions))

    def answer() -> str:
        with pytest.raises(ConfigError) as refused:
            check_changes(["trainer.max_epochs=4"], tmp_path)
        return str(refused.value).partition("(with its --config-dir, if it had one): ")[2]

    words = ["model=resnet32", "model.pretrained=true", "seed=2", "trainer.max_epochs=4"]
    assert answer() == command_line("train", *words)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    words = ["model=resnet32", "seed=2", "trainer.max_epochs=4", f"+model.checkpoint_path={last}"]
    assert answer() == command_line("train", *words)
    (tmp_path / "sessions.jsonl").write_text("damaged")
    assert answer() == command_line("train", *words[2:])


@pytest.mark.parametrize("text", ["", "5", "[]", '{"train_seconds": null}'])
def test_a_wrong_training_time_is_named(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They ended in tracebacks."""
    (tmp_path / "summary.json").write_text(text)
    assert seconds_before(tmp_path) == 0
    assert f"{tmp_path}/summary.json" in caplog.text


def test_the_limits_of_a_plan_may_change_and_its_mode_stays(tmp_path: Path) -> None:
    """memory.fraction was refused; memory.bytes alone silently changed the mode to auto."""
    config = compose(["memory=budget", "memory.bytes=1GiB", "model=revnet38"]).config
    config["memory"]["plan"] = {"stem": "store"}
    write_config(config, tmp_path)
    changed = resumed_config(tmp_path, ["memory.bytes=2GiB"])["memory"]
    assert changed == {"mode": "budget", "bytes": "2GiB", "inverting": None}
    share = ["memory=auto", "memory.fraction=0.3"]
    assert resumed_config(tmp_path, share)["memory"]["fraction"] == 0.3
    with pytest.raises(ConfigError, match="of the free memory: add memory=auto"):
        resumed_config(tmp_path, ["memory.fraction=0.3"])
