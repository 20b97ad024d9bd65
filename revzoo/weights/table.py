"""The available weights: entries of the package, or of other folders."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from revzoo._checks import did_you_mean
from revzoo.weights.entry import WeightsEntry, read_entry
from revzoo.weights.errors import EntryError, UnknownWeightsError
from revzoo.weights.run_files import CHECKPOINTS


class WeightsTable:
    """The entries ``*.json`` of folders, read on first use.

    Args:
        *folders: no name may occur twice.

    Example:
        >>> from pathlib import Path
        >>> table = revzoo.WeightsTable(Path(revzoo.__file__).parent / "weights" / "entries")
        >>> table.names("irevnet13.digits")
        ['irevnet13.digits']
        >>> model = revzoo.create_model("irevnet13.digits", pretrained=True, table=table)
    """

    def __init__(self, *folders: str | Path) -> None:
        self.folders = tuple(map(Path, folders))

    @cached_property
    def entries(self) -> dict[str, WeightsEntry]:
        """Entries by name.

        Raises:
            EntryError: a folder is missing; a file is not valid, is not named like its entry, or
                repeats a name; an architecture has two defaults.
        """
        entries: dict[str, WeightsEntry] = {}
        for path in self._files():
            entry = read_entry(path)
            # names() reads file names only, so they must be right
            if path.stem != entry.name or entry.name in entries:
                raise EntryError(
                    f"{path} describes {entry.name!r}: expected one file, named like its entry"
                )
            entries[entry.name] = entry
        for architecture in {entry.architecture for entry in entries.values()}:
            defaults = [e.name for e in _of(architecture, entries.values()) if e.default]
            if len(defaults) > 1:
                raise EntryError(f"{' and '.join(defaults)} are both the default: keep one")
        return entries

    def names(self, pattern: str = "*") -> list[str]:
        """Sorted names that match ``pattern`` as a whole or in their architecture.

        Reads no entries: the file names are enough.
        """
        return sorted(path.stem for path in self._files() if matches(path.stem, pattern))

    def find(self, name: str) -> WeightsEntry:
        """The entry of ``architecture.tag``, or the default one of ``architecture``.

        Raises:
            UnknownWeightsError: there is none; the message lists similar and known names.
        """
        if name in self.entries:
            return self.entries[name]
        architecture = name.partition(".")[0]
        candidates = _of(architecture, self.entries.values())
        if name == architecture and candidates:
            # an architecture's only weights need no mark
            default = [e for e in candidates if e.default] or candidates
            if len(default) == 1:
                return default[0]
        # no weights have this name: guess the name that the user meant
        if name.endswith(".ckpt") or Path(name, CHECKPOINTS).is_dir():
            raise UnknownWeightsError(
                f"{name} is a run or its checkpoint, not weights: "
                "revzoo.training.Classifier.load_from_checkpoint(RUN).model is its network; "
                "revzoo export RUN --format safetensors writes its weights"
            )
        known = [e.name for e in candidates]
        nearest = did_you_mean(name, known or self.entries) or "."
        start = f"there are no weights, file or folder {name!r}{nearest}"
        listed = f"Known for {architecture}: {', '.join(known)}" if known else ""
        raise UnknownWeightsError(
            f"{start} {listed or 'list_models(pretrained=True) lists all weights'}. Use "
            "pretrained=False, or checkpoint_path for your own file",
            in_programs=f"{start} {listed or 'revzoo list --pretrained lists all weights'}; or "
            "give the path of a .safetensors file",
        )

    def _files(self) -> Iterable[Path]:
        for folder in self.folders:
            if not folder.is_dir():
                raise EntryError(f"{folder} is not a folder: expected one with entries of weights")
            yield from sorted(folder.glob("*.json"))


def matches(name: str, pattern: str) -> bool:
    """Whether ``name``, or its part before the tag, matches (``*``, ``?``, ``[...]``)."""
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, name.partition(".")[0]))


def _of(architecture: str, entries: Iterable[WeightsEntry]) -> list[WeightsEntry]:
    return [entry for entry in entries if entry.architecture == architecture]


SHIPPED = WeightsTable(Path(__file__).parent / "entries")
"""The entries inside the package."""
