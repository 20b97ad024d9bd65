"""A run composes, checks and builds each of its parts once, and nothing traces a step for a log."""

import functools
import subprocess
import sys
from collections import Counter

from revzoo.cli import config
from revzoo.cli.main import main
from revzoo.cli.run import build
from revzoo.data import Digits
from revzoo.models import RevNet
from revzoo.profiling import audit

MODULES = 150  # of ours, loaded at the first batch
SMALL = ("debug=smoke", "trainer=cpu", "model.units=[1,1,1]", "memory=exact", "logger=none")


def test_each_part_is_built_once(tmp_path, monkeypatch):
    """The configuration was checked five times, the model built four times, the data twice."""
    calls = Counter()

    def counted(place, name):
        function = getattr(place, name)

        @functools.wraps(function)
        def call(*args, **options):
            calls[getattr(place, "__name__", "") + "." + name] += 1
            return function(*args, **options)

        monkeypatch.setattr(place, name, call)

    for kind in (Digits, RevNet):
        counted(kind, "__init__")
    counted(build, "build_callbacks")
    counted(config, "check")
    counted(audit, "audit")
    monkeypatch.chdir(tmp_path)
    main(["train", *SMALL, "callbacks.footprint=null", "hydra.run.dir=run"])
    assert calls == {
        "Digits.__init__": 1,
        "RevNet.__init__": 1,
        "revzoo.cli.run.build.build_callbacks": 1,
        "revzoo.cli.config.check": 1,
    }


LOADED = """
import sys
import pytorch_lightning as pl
from revzoo.cli.main import main

def started(self, *args):
    print(*sorted(n for n in sys.modules if n.partition(".")[0] == "revzoo"))
    sys.stdout.flush()

pl.Callback.on_train_batch_start = started
main(["train", *sys.argv[1:]])
"""


def test_a_run_loads_what_it_uses(tmp_path):
    """Each run loaded the planner, and 177 modules of ours before its first batch."""
    options = [*SMALL, "callbacks=none", "test=false", "hydra.run.dir=run"]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = next(line for line in done.stdout.splitlines() if line.startswith("revzoo ")).split()
    assert len(loaded) <= MODULES
    unused = ("audit", "memory_plan", "multirun", "evaluate", "plan", "predict", "sweep", "tune")
    assert [name for name in loaded if name.rpartition(".")[2] in unused] == []
