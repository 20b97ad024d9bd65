"""The trained weights that commands take: a name, a file, a folder, or a run."""

from __future__ import annotations

from pathlib import Path

from revzoo._checks import did_you_mean, shortened
from revzoo.weights.entry import HUB, WeightsEntry, read_entry
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.header import entry_of_file
from revzoo.weights.hub import CONFIG_FILE, fetch_folder
from revzoo.weights.run_files import BEST, CHECKPOINTS, best_of_run
from revzoo.weights.table import SHIPPED

SUFFIX = ".safetensors"
SAVED = "saved"
"""As ``bits``: keep the bits that the weights were saved with."""

FILES = (".ckpt", SUFFIX, ".pt", ".pth", ".pt2", ".onnx")


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
    if text.startswith(HUB) or text in names:
        return text
    if text in {name.partition(".")[0] for name in names}:
        return text
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        if packed := only_file_in(path):
            return str(packed)
        raise UnknownWeightsError(
            f"{text} holds no run and no weights: expected the folder of a run, with "
            f"{CHECKPOINTS}/{BEST}, of save_pretrained, with {CONFIG_FILE}, or of revzoo pack, "
            f"with one NAME{SUFFIX}"
        )
    if path.exists():
        return text
    if "/" in text or path.suffix in FILES:
        raise UnknownWeightsError(
            f"there is no checkpoint {text}: expected a file, the folder of a run or of weights, "
            f"or a name of weights, such as {names[0]}"
        )
    raise UnknownWeightsError(
        f"there are no weights, file or folder {text!r}{did_you_mean(text, names) or '.'} "
        f"Known are {', '.join(names)}; or give the path of a .ckpt file"
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
        return read_entry(fetch_folder(text, cache_dir=cache_dir, tensors=tensors) / CONFIG_FILE)
    if path.suffix == SUFFIX and path.is_file():
        return entry_of_file(path)
    if (path / CONFIG_FILE).is_file():
        return read_entry(path / CONFIG_FILE)
    packed = only_file_in(path)
    return None if packed is None else entry_of_file(packed)


def only_file_in(folder: Path) -> Path | None:
    """The safetensors file in a folder, as ``revzoo pack`` writes it; None if there is none.

    Raises:
        UnknownWeightsError: there are several.
    """
    files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if len(files) > 1:
        raise UnknownWeightsError(
            f"{folder} holds {len(files)} files of weights: give one of them, "
            f"{shortened(map(str, files))}"
        )
    return files[0] if files else None
