"""The checkpoints in the folder of a run."""

from __future__ import annotations

from pathlib import Path

from revzoo._checks import either
from revzoo.weights.errors import UnknownWeightsError

CHECKPOINTS = "checkpoints"  # their folder
BEST, LAST, PREVIOUS = "best.ckpt", "last.ckpt", "previous.ckpt"


def checkpoint_of(path: Path) -> Path | None:
    """``path`` if its name ends in ``.ckpt``; the best checkpoint of a run's folder; else None.

    Raises:
        UnknownWeightsError: the run has none.
    """
    return path if path.suffix == ".ckpt" else best_of_run(path)


def best_of_run(folder: Path) -> Path | None:
    """The best checkpoint in the folder of a run; None for anything else.

    Raises:
        UnknownWeightsError: the run has none.
    """
    # a user may give the folder inside the run's folder, or name a run "checkpoints"
    inside = folder.name == CHECKPOINTS and not (folder / CHECKPOINTS).is_dir()
    run = folder.parent if inside else folder
    checkpoints = run / CHECKPOINTS
    if not checkpoints.is_dir():
        return None
    if (checkpoints / BEST).is_file():
        return checkpoints / BEST
    others = sorted(str(path) for path in checkpoints.glob("*.ckpt"))
    remedy = f"give another checkpoint, {either(others)}" if others else "it has none at all"
    raise UnknownWeightsError(f"the run in {run} has no {CHECKPOINTS}/{BEST}: {remedy}")
