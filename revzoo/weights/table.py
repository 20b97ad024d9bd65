"""The available weights: entries of the package, or of other folders."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from revzoo._checks import did_you_mean
from revzoo._libraries import library_hint
from revzoo.weights.entry import WeightsEntry, read_entry
from revzoo.weights.errors import EntryError, UnknownWeightsError


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
        defaults = [entry for entry in entries.values() if entry.default]
        if len({entry.architecture for entry in defaults}) < len(defaults):
            names = " and ".join(entry.name for entry in defaults)
            raise EntryError(f"of {names}, two are the default of one architecture: keep one")
        return entries

    def names(self, pattern: str = "*") -> list[str]:
        """Sorted names that match ``pattern`` as a whole or in their architecture.

        Reads no entries: the file names are enough.
        """
        stems, match = [path.stem for path in self._files()], fnmatch.fnmatchcase
        return sorted(s for s in stems if match(s, pattern) or match(s.partition(".")[0], pattern))

    def find(self, name: str) -> WeightsEntry:
        """The entry of ``architecture.tag``, or the default one of ``architecture``.

        Raises:
            UnknownWeightsError: there is none; the message lists similar and known names.
        """
        if name in self.entries:
            return self.entries[name]
        architecture = name.partition(".")[0]
        known = [entry for entry in self.entries.values() if entry.architecture == architecture]
        # an architecture's only weights need no mark
        default = [entry for entry in known if entry.default or len(known) == 1]
        if name == architecture and default:
            return default[0]
        names = [entry.name for entry in known]
        start = f"there are no weights, file or folder {name!r}"
        start += did_you_mean(name, names or self.entries) or "."
        listed = f"Known for {architecture}: {', '.join(names)}" if names else ""
        hint = "" if names else library_hint(name)
        raise UnknownWeightsError(
            f"{start} {listed or 'list_models(pretrained=True) lists all weights'}. Use "
            f"pretrained=False, or checkpoint_path for your own file{hint}",
            in_programs=f"{start} {listed or 'revzoo list --pretrained lists all weights'}; or "
            f"give the path of a .safetensors file{hint}",
        )

    def _files(self) -> Iterable[Path]:
        for folder in self.folders:
            if not folder.is_dir():
                raise EntryError(f"{folder} is not a folder: expected one with entries of weights")
            yield from sorted(folder.glob("*.json"))


SHIPPED = WeightsTable(Path(__file__).parent / "entries")
"""The entries inside the package."""
