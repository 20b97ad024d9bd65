"""Reads YAML files, with limits for aliases and references, and writes them atomically."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from revzoo._files import check_regular, write_atomically
from revzoo.cli.config.errors import ConfigError, one_line

CONFIG_FILE = "config.yaml"  # in a run's folder
MAX_BYTES = 1 << 20
MAX_NODES = 100_000  # of a document with all aliases expanded
MAX_DEPTH = 50
MAX_REFERENCES = 1000  # OmegaConf takes a millisecond for each, and keeps no result

# ${model.name}, and what a file may compute: a time, a name of a folder, where the data are
_REFERENCE = re.compile(
    r"\$\{(?:(?P<key>\w+(?:\.\w+)*)|now:[^${}]*|folder_name:[^${}:]*|oc\.env:REVZOO_\w+(?:,[^${}]*)?)\}"
)


def run_of(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint's run, if it is in one: ``RUN_DIR/checkpoints/best.ckpt``."""
    return Path(checkpoint).absolute().parent.parent


def write_yaml(values: Mapping[str, Any], path: Path) -> None:
    """Write plain containers as YAML, atomically."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(dict(values))).encode())


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping as plain containers; references (``${...}``) are not resolved.

    Raises:
        ConfigError: the file is not YAML, not a mapping, too deep or too large.
    """
    # before OmegaConf reads it
    check_growth(path)
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read ({one_line(error)}): restore it from a copy"
        ) from None
    except Exception as error:  # the errors of the libraries have no common base class
        raise ConfigError(
            f"{path} is not YAML ({one_line(error)}): restore it from a copy"
        ) from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no configuration: restore it from a copy")
    # YAML has keys such as 1 and true; the checks expect names
    return {str(key): value for key, value in plain.items()}


def check_growth(path: Path) -> None:
    """Refuse a file of a kilobyte that would take gigabytes in memory.

    OmegaConf copies the node of an alias at each use, so aliases of aliases grow exponentially. The
    parser's events show the size in advance, without recursion.

    Raises:
        ConfigError: the file is not YAML, or too large.
        ValueError: it is not a regular file.
    """
    check_regular(path)
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and the nodes counted before it
    count = 0
    try:
        # the parser would hold a file of gigabytes
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes: expected a configuration")
        with path.open("rb") as stream:
            # the C parser is much faster, and missing where PyYAML was built without libyaml
            for event in yaml.parse(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
                if isinstance(event, yaml.AliasEvent):
                    if event.anchor not in sizes:
                        raise ConfigError(f"{path}: the alias *{event.anchor} has no value yet")
                    # OmegaConf copies the node, so an alias counts as much as its anchor
                    count += sizes[event.anchor]
                elif isinstance(event, yaml.NodeEvent):
                    # on a stack: the size of a node is known at its end
                    open_nodes.append((event.anchor, count))
                    count += 1
                if isinstance(event, yaml.ScalarEvent | yaml.CollectionEndEvent):
                    anchor, before = open_nodes.pop()
                    if anchor is not None:
                        sizes[anchor] = count - before
                if count > MAX_NODES or len(open_nodes) > MAX_DEPTH:
                    raise ConfigError(
                        f"{path} has more than {MAX_NODES} values or {MAX_DEPTH} levels, with "
                        "aliases expanded: expected a configuration"
                    )
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{path} is not YAML ({_fault(path, error)})") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None


def check_resolvers(value: Any, path: Path) -> None:
    """Refuse a file whose references take more than values of the configuration and the time.

    ``${oc.env:AWS_SECRET_ACCESS_KEY}`` in somebody else's file would end in names of folders.

    Raises:
        ConfigError: naming the value.
    """
    for text in _texts(value):
        rest, count = text, 1
        while count:  # from the inside out
            rest, count = _REFERENCE.subn("_", rest)
        if "${" in rest:
            raise ConfigError(
                f"{path} holds {text!r:.80}: a file may refer only to other values, as "
                "${model.name}, and use ${now:FORMAT}; give other references, such as "
                "${oc.env:NAME}, on the command line"
            )


def check_references(values: Mapping[str, Any]) -> None:
    """Refuse references that would take minutes, as eight in each of eight texts.

    Args:
        values: of a configuration, unresolved.

    Raises:
        ConfigError: naming the text that leads to too many.
    """
    sizes: dict[str, int] = {}

    def size(value: Any) -> int:
        """The number of references and characters, once all are resolved."""
        total = 0
        for text in _texts(value):
            total += len(text)
            for found in _REFERENCE.finditer(text):
                total += MAX_BYTES // MAX_REFERENCES
                if key := found["key"]:
                    if key not in sizes:
                        sizes[key] = 0  # OmegaConf finds a reference to itself at once
                        sizes[key] = size(_at(values, key))
                    total += sizes[key]
                if total >= MAX_BYTES:
                    raise ConfigError(
                        f"{text:.80} leads to more than {MAX_REFERENCES:,} references or "
                        f"{MAX_BYTES:,} characters: write the value instead"
                    )
        return total

    size(values)


def _at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if there is none, which OmegaConf reports."""
    found: Any = values
    for name in key.split("."):
        if isinstance(found, str) and "${" in found:
            raise ConfigError(
                f"${{{key}}} leads through the reference {found:.80}: name its target"
            )
        if isinstance(found, list):
            found = dict(zip(map(str, range(len(found))), found, strict=True))
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _texts(value: Any) -> Iterator[str]:
    """The texts with references in plain containers."""
    if isinstance(value, str):
        if "${" in value:
            yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _fault(path: Path, error: yaml.YAMLError | UnicodeError) -> str:
    """The fault in a file, with its line and column, counted from 1."""
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return one_line(error)
    # libyaml does not name the character
    line = "".join(path.read_text(errors="replace").splitlines()[mark.line : mark.line + 1])
    is_tab = "\t" in line.removesuffix(line.lstrip())
    hint = ": a tab; YAML indents with spaces" if is_tab else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{hint}"


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """Read ``config.yaml``.

    Raises:
        ConfigError: there is no such file, or it is not a YAML mapping.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        for folder in run_dir.parents[:2]:  # of RUN_DIR/checkpoints/last.ckpt
            if (folder / CONFIG_FILE).is_file():
                raise ConfigError(f"{run_dir}: expected the folder of the run, --resume {folder}")
        raise ConfigError(
            f"there is no {path}: give the folder of a run, such as outputs/MODEL-DATA/TIME"
        )
    return read_yaml(path)
