"""A fake revzoo train for tests of sweeps: it writes the same files without training.

The figure is best at optim.lr=0.1. The file ``plot`` in the sweep's folder names a fault to
simulate: ``fail`` above 0.3, ``fail_all``, ``slow`` for bad figures, ``wait`` once for a signal.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path


def stop(*args: object) -> None:
    sys.exit(143)


signal.signal(signal.SIGTERM, stop)
if sys.argv[1] == "--resume":
    run_dir = Path(sys.argv[2])
    overrides = (run_dir / "config.yaml").read_text().splitlines()
else:
    overrides = sys.argv[1:]
    run_dir = Path(overrides[-1].removeprefix("hydra.run.dir=").strip("'"))
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("\n".join(overrides))
with (run_dir.parent / "starts").open("a") as file:
    file.write(f"{run_dir.name} {sys.argv[1]}\n")
lr = next(float(o.removeprefix("optim.lr=")) for o in overrides if o.startswith("optim.lr="))
plot = run_dir.parent / "plot"
fault = plot.read_text() if plot.exists() else ""
if fault == "wait":
    plot.write_text("")
    (run_dir.parent / "waiting").touch()
    time.sleep(60)
if fault == "fail_all" or (fault == "fail" and lr > 0.3):
    sys.exit("revzoo: lower optim.lr")
value = -abs(math.log10(lr) + 1)
if fault == "slow" and value < -0.3:
    (run_dir / "metrics.csv").write_text("step,val/acc\n1,-9\n2,-9")
    time.sleep(60)
(run_dir / "metrics.csv").write_text(f"step,val/acc\n1,{value}\n")
(run_dir / "summary.json").write_text(
    json.dumps({"metrics": {"val/acc": value, "val/loss": math.nan}})
)
