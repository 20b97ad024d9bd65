"""The trained weights that commands take: a name, a file, a folder, or a run."""

from __future__ import annotations

from pathlib import Path

from revzoo._checks import did_you_mean
from revzoo.weights.entry import HUB
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.hub import CONFIG_FILE
from revzoo.weights.run_files import BEST, CHECKPOINTS, best_of_run
from revzoo.weights.table import SHIPPED

FILES = (".ckpt", ".safetensors", ".pt", ".pth", ".pt2", ".onnx")


def resolve_source(source: str | Path) -> str:
    """Check, without torch, that ``source`` is a file or folder, on the hub, or names weights.

    Returns:
        ``source``; for the folder of a run, the path of its best checkpoint.

    Raises:
        UnknownWeightsError: it is none of these; the message lists the known names. Or it is the
            folder of a run without a best checkpoint.
    """
    text, path, names = str(source), Path(source), SHIPPED.names()
    if best := best_of_run(path):
        return str(best)
    if text.startswith(HUB) or text in names:
        return text
    if text in {name.partition(".")[0] for name in names}:
        return text
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        raise UnknownWeightsError(
            f"{text} holds no run and no weights: expected the folder of a run, with "
            f"{CHECKPOINTS}/{BEST}, or one of save_pretrained, with {CONFIG_FILE}"
        )
    if path.exists():
        return text
    if "/" in text or path.suffix in FILES:
        raise UnknownWeightsError(f"there is no checkpoint {text}: expected the path of a file")
    raise UnknownWeightsError(
        f"there are no weights, file or folder {text!r}{did_you_mean(text, names) or '.'} "
        f"Known are {', '.join(names)}; or give the path of a .ckpt file"
    )
