"""Any wrong edit of ``config.yaml`` is refused in one line that names the file."""

import copy

import pytest
import yaml
from resumed import resume
from small_run import QUICK

from revzoo.cli.commands.evaluate import evaluate
from revzoo.cli.run.folder import write_config
from revzoo.cli.run.train import train
from revzoo.data import DataError
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.weights.errors import WeightsError

# ...: the value is removed
OTHERS = (..., None, {}, [], 1.5, -1, "", "x", True, {"a": [1]}, [None], "???", "${a}")


def places(node, at=()):
    """The keys of every value below ``node``."""
    if at:
        yield at
    if isinstance(node, dict):
        for key, value in node.items():
            yield from places(value, (*at, key))


def edits(config):
    """Remove each value, or replace it by values of other types in turn."""
    for index, at in enumerate(places(config)):
        # sections and names of classes get every type, single values one of them
        for other in OTHERS if len(at) == 1 else [OTHERS[index % len(OTHERS)]]:
            edited = copy.deepcopy(config)
            node = edited
            for key in at[:-1]:
                node = node[key]
            if other is ...:
                del node[at[-1]]
            else:
                node[at[-1]] = copy.deepcopy(other)
            yield at[0], edited


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    from revzoo.cli.config import compose

    folder = tmp_path_factory.mktemp("run")
    train(compose((*QUICK, "test=false")).config, run_dir=folder)
    return folder


@pytest.mark.timeout(300)
def test_every_edit_raises_a_user_error(run_dir, monkeypatch):
    """``memory: {}``, ``model: 1.5``, missing sections and lists for maps showed tracebacks."""
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text())

    class Passed(Exception):
        pass

    def stop(*args, **more):
        raise Passed

    monkeypatch.setattr("revzoo.cli.run.train.train", stop)
    monkeypatch.setattr("revzoo.cli.run.build.build_data", stop)
    last = run_dir / "checkpoints" / "last.ckpt"
    state = read_checkpoint(last)  # read once: edits do not change it

    def read(_, check):
        check(state, last)
        return last, state

    monkeypatch.setattr("revzoo.cli.run.train.read_last", read)
    ckpt = str(run_dir / "checkpoints" / "best.ckpt")
    base = {"ckpt": ckpt, "split": "val", "batch_size": None, "data": None, "bits": "saved"}
    base |= {key: config[key] for key in ("precision", "trainer")}
    tried, refused = 0, 0
    for section, edited in edits(config):
        tried += 1
        write_config(edited, run_dir)
        try:
            resume(run_dir)
        except Passed:
            pass
        except SystemExit as end:
            refused += 1
            message = str(end.code)
            assert message.startswith("revzoo: "), edited
            assert len(message.splitlines()) == 1, message
            assert str(path) in message or str(last) in message, message
        if section == "data":  # an evaluation reads no other section
            with pytest.raises((Passed, ValueError, DataError, WeightsError)) as raised:
                evaluate(base)
            assert raised.type is Passed or str(path) in str(raised.value)
    assert tried > 250
    assert refused > 150
