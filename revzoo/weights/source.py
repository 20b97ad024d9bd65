"""The trained weights that commands take: a name, a file, a folder, or a run."""

from __future__ import annotations

from pathlib import Path

from revzoo._checks import did_you_mean, either, shortened
from revzoo.weights.entry import CONFIG_FILE, HUB, WeightsEntry, entry_of_file, read_entry
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.files import TENSORS_FILE, fetch
from revzoo.weights.table import SHIPPED

SUFFIX = ".safetensors"
CHECKPOINTS = "checkpoints"  # the folder in that of a run
BEST, LAST, PREVIOUS = "best.ckpt", "last.ckpt", "previous.ckpt"
PLAIN_PART = "meta.pt"  # of a distributed checkpoint, which is a folder
SAVED = "saved"
"""As ``bits``: keep the bits that the weights were saved with."""


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
    if (checkpoints / BEST).exists():
        return checkpoints / BEST
    others = sorted(str(path) for path in checkpoints.glob("*.ckpt"))
    remedy = f"give another checkpoint, {either(others)}" if others else "it has none at all"
    raise UnknownWeightsError(f"the run in {run} has no {CHECKPOINTS}/{BEST}: {remedy}")


def is_distributed(path: Path) -> bool:
    """Whether ``path`` is a distributed checkpoint, as ``trainer=fsdp2`` writes it."""
    return (path / PLAIN_PART).is_file() or (path.suffix == ".ckpt" and path.is_dir())


def checkpoint_of(path: Path) -> Path | None:
    """``path`` if it is distributed or ends in ``.ckpt``; a run's best checkpoint; else None."""
    return path if path.suffix == ".ckpt" or is_distributed(path) else best_of_run(path)


def resolve_source(source: str | Path) -> str:
    """Check, without torch, that ``source`` is a file or folder, on the hub, or names weights.

    Returns:
        ``source``; for the folder of a run, the path of its best checkpoint; for a folder of
        ``revzoo pack``, the path of its safetensors file.

    Raises:
        UnknownWeightsError: it is none of these; the message lists the known names. Or it is the
            folder of a run without a best checkpoint, or of several safetensors files.
    """
    text, path, names = str(source), Path(source), SHIPPED.names()
    if best := best_of_run(path):
        return str(best)
    if text.startswith(HUB) or text in {*names, *(name.partition(".")[0] for name in names)}:
        return text
    if path.is_dir() and not ((path / CONFIG_FILE).is_file() or is_distributed(path)):
        if packed := only_file_in(path):
            return str(packed)
        raise UnknownWeightsError(
            f"{text} holds no run and no weights: expected the folder of a run, with "
            f"{CHECKPOINTS}/{BEST}, of save_pretrained, with {CONFIG_FILE}, or of revzoo pack, "
            f"with one NAME{SUFFIX}"
        )
    if path.exists():
        return text
    raise UnknownWeightsError(
        f"there are no weights, file or folder {text!r}{did_you_mean(text, names) or '.'} Expected "
        f"a .ckpt or {SUFFIX} file, the folder of a run or of weights, or one of {', '.join(names)}"
    )


def find_entry(
    source: str | Path, *, cache_dir: str | Path | None = None, tensors: bool = False
) -> WeightsEntry | None:
    """The entry of a safetensors file, of a folder of weights, or of the hub; None for other names.

    Args:
        source: ``FILE.safetensors``, a folder of ``save_pretrained`` or ``revzoo pack``, or
            ``hf-hub:owner/name``.
        cache_dir: for files from the hub.
        tensors: whether to fetch the hub's weights, too.

    Raises:
        WeightsError: the entry is not valid, the hub refuses, or a folder has several files.
    """
    text, path = str(source), Path(source)
    if text.startswith(HUB):
        path = fetch(text, CONFIG_FILE, cache_dir=cache_dir).parent
        if tensors:  # the library puts all files of one revision into one folder
            fetch(text, TENSORS_FILE, cache_dir=cache_dir)
    if (path / CONFIG_FILE).is_file():
        return read_entry(path / CONFIG_FILE)
    file = path if path.suffix == SUFFIX and path.is_file() else only_file_in(path)
    return None if file is None else entry_of_file(file)


def only_file_in(folder: Path) -> Path | None:
    """The safetensors file in a folder, as ``revzoo pack`` writes it; None if there is none."""
    packed = folder.is_dir() and not is_distributed(folder)
    files = sorted(folder.glob(f"*{SUFFIX}")) if packed else []
    if len(files) > 1:
        raise UnknownWeightsError(
            f"{folder} holds {len(files)} files of weights: give one of them, "
            f"{shortened(map(str, files))}"
        )
    return files[0] if files else None
