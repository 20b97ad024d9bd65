"""Composes a configuration with Hydra from files and the overrides of a command line; checks it.

Hydra would refuse an unknown key without naming the nearest. So every override may add its key
(``++``), and the schema refuses what does not exist, on the command line as in a file. This imports
neither torch nor Lightning, so a typo gets a quick answer. What depends on the machine, the model
or the data is checked where these are built (:mod:`revzoo.cli.run.build`).

NOTE [ Hydra's section ]
``hydra.*`` of a configuration holds import paths (callbacks, launcher, sweeper, log handlers),
environment variables and files to write. Hydra merges that section from every file it reads, so
``experiment=x`` in a downloaded folder can set them. Therefore:
1. Hydra only composes. Of its section we use :data:`FREE`, the folders of runs, and nothing else.
2. A user's file that sets other keys is refused before Hydra reads it: ``hydra.searchpath:
   [pkg://x]`` imports x.
3. References (``${...}``) in a user's files may name other values, the time and variables
   ``REVZOO_*`` only: ``${oc.env:AWS_SECRET_ACCESS_KEY}`` would end in names of folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra import compose as hydra_compose
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
)
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from revzoo._checks import did_you_mean
from revzoo._files import file_name
from revzoo._libraries import library_hint
from revzoo.cli.check import check, our_spelling, unknown
from revzoo.cli.schema import CONFIGS, EVALUATION, RUN, SCHEDULES
from revzoo.cli.terminal import ConfigError, one_line

SCHEDULE = "optim.schedule"
# The keys of Hydra that users may set, on the command line or in files.
FREE = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_REFERENCE = re.compile(
    r"\$\{(?:\w+(?:\.\w+)*|now:[^${}]*|folder_name:[^${}:]*|oc\.env:REVZOO_\w+(?:,[^${}]*)?)\}"
)

OmegaConf.register_new_resolver("folder_name", lambda name: file_name(str(name)))


@dataclass(frozen=True)
class ConfigFiles:
    """The files of a configuration."""

    name: str = "train"  # the primary file, which lists the groups
    folder: Path = CONFIGS  # of the primary file and the groups
    extra: Path | None = None  # searched after it (--config-dir)


TRAIN, EVAL = ConfigFiles(), ConfigFiles("eval")


class Composed(NamedTuple):
    """A configuration."""

    config: dict[str, Any]  # plain containers, with references resolved
    whole: DictConfig  # the same as Hydra's containers, with Hydra's section


def compose(
    overrides: Sequence[str],
    source: ConfigFiles = TRAIN,
    *,
    trusted: Sequence[str] = (),
    complete: bool = True,
) -> Composed:
    """Compose and check a configuration.

    Args:
        overrides: as on the command line, without sweeps.
        source: the files.
        trusted: overrides that the program adds; they are not checked.
        complete: whether every option that must be given is needed.
    """
    with hydra_of(source) as hydra:
        parsed = parse(with_libraries(overrides), hydra.config_loader)
        words = [_checked(override, hydra.config_loader) for override in parsed]
        whole = _composed(source.name, [*words, *trusted])
    # Hydra locks the configuration: no key can be added or removed
    with flag_override(whole, ["struct", "readonly"], [False, False]):
        _drop_options_of_other_schedules(whole, parsed)
        # as typed, for names of folders
        job: Any = OmegaConf.to_container(whole.hydra.job)  # references unresolved
        whole.hydra.job.override_dirname = job["override_dirname"].replace("++", "")
    try:
        plain: Any = OmegaConf.to_container(without_hydra(whole), resolve=True)
    except OmegaConfBaseException as error:  # a reference names a missing key
        raise ConfigError(one_line(error)) from None
    config = {str(key): value for key, value in plain.items()}
    check(config, EVALUATION if source == EVAL else RUN, complete=complete)
    return Composed(config, whole)


def without_hydra(whole: DictConfig) -> DictConfig:
    """A copy without Hydra's section."""
    cfg = whole.copy()
    with flag_override(cfg, ["struct", "readonly"], [False, False]):
        del cfg["hydra"]
    return cfg


@contextmanager
def hydra_of(source: ConfigFiles) -> Iterator[Hydra]:
    """Initialise Hydra with this source, inside the context."""
    for folder in (source.folder, source.extra):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: expected a folder of configurations")
    # otherwise Hydra warns, and behaves as version 1.1
    version.setbase("1.3")
    search_path = create_config_search_path(f"file://{source.folder.resolve()}")
    if source.extra is not None:
        # as Hydra does for its --config-dir: after the primary folder
        search_path.prepend(
            provider="command-line",
            path=f"file://{source.extra.resolve()}",
            anchor=SearchPathQuery(provider="schema"),
        )
    GlobalHydra.instance().clear()  # Hydra refuses a second initialisation in a process
    try:
        # private in Hydra 1.3; the public initialize_config_dir() takes one folder only
        hydra = Hydra.create_main_hydra2("train", search_path)
        # private in Hydra 1.3; other files of a user's folder may be broken
        for place in hydra.config_loader.repository.get_sources():  # type: ignore[attr-defined]
            if place.scheme() == "file" and Path(place.path) != CONFIGS.resolve():
                place.load_config = partial(_load_checked, place)
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def _load_checked(place: ConfigSource, config_path: str) -> ConfigResult:
    """Load a file of a user's folder, after rules 2 and 3 of NOTE [ Hydra's section ]."""
    path = Path(place.path, place._normalize_file_name(config_path)).resolve()
    load_yaml(path)  # for the place of a fault
    for token in yaml.scan(path.read_bytes()):
        text = str(token.value) if isinstance(token, yaml.ScalarToken) else ""
        rest, count = text, 1
        while count:  # references in references, from the inside out
            rest, count = _REFERENCE.subn("_", rest)
        if "${" in rest:
            raise ConfigError(
                f"{path} holds {text!r:.80}: a file may refer only to other values, as "
                "${model.name}, and use ${now:FORMAT}; give other references, such as "
                "${oc.env:NAME}, on the command line"
            )
    loaded = type(place).load_config(place, config_path)
    section = OmegaConf.select(loaded.config, "hydra")
    for key in map(str, section) if isinstance(section, DictConfig) else ():
        if key not in ("run", "sweep"):
            raise ConfigError(
                f"hydra.{key} is set by {path}: files may set only these keys of Hydra: "
                f"{', '.join(FREE)}; use --config-dir DIR to add a folder of options"
            )
    return loaded


def _composed(name: str, overrides: Sequence[str]) -> DictConfig:
    try:
        return hydra_compose(name, list(overrides), return_hydra_config=True)
    except ConfigError:  # from load_yaml
        raise
    except (HydraException, OmegaConfBaseException) as error:
        # +experiment=NAME, which is right where the primary file does not list the group
        if double := re.match(r"Multiple values for ([\w/]+)\.", str(error)):
            group = double[1]
            raise ConfigError(f"{group} has two values: write {group}=NAME without +") from None
        if gone := re.match(r"Could not delete from config\. '(.+)' does not exist", str(error)):
            raise unknown(gone[1], None, {}) from None
        package = re.search("@(experiment|debug)[.]", str(error))  # of a file without this line
        hint = " The first line of its file must be '# @package _global_'" if package else ""
        raise ConfigError(f"{one_line(error)}{hint}") from None
    except Exception as error:  # Hydra does not validate files, so any error can occur
        raise ConfigError(f"{name}: {type(error).__name__}: {one_line(error)}") from None


def _drop_options_of_other_schedules(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """If an override names the schedule, drop the options of files that this one does not have.

    Options on the command line stay, and are refused later.
    """
    typed: dict[str, Any] = {}
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key == SCHEDULE and isinstance(value, dict):
            typed |= {str(name): item for name, item in value.items()}
        elif key.startswith(f"{SCHEDULE}."):
            typed[key.removeprefix(f"{SCHEDULE}.")] = value
    named, schedule = SCHEDULES.get(str(typed.get("name"))), OmegaConf.select(cfg, SCHEDULE)
    if named is not None and isinstance(schedule, DictConfig):
        for name in [n for n in schedule if n not in (*named.options, *typed)]:
            del schedule[name]


# --- files ---


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping as plain containers; references (``${...}``) are not resolved."""
    try:
        plain = OmegaConf.to_container(OmegaConf.create(load_yaml(path)))
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path} cannot be read ({one_line(error)}): restore it from a copy"
        ) from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no configuration: restore it from a copy")
    # YAML has keys such as 1 and true; the checks expect names
    return {str(key): value for key, value in plain.items()}


def load_yaml(path: Path) -> Any:
    """The values of a YAML file."""
    try:
        return yaml.load(path.read_bytes(), get_yaml_loader())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None
    except Exception as error:  # the constructors of YAML's types raise any error
        raise ConfigError(f"{path} is not YAML ({_fault(error)})") from None


def _fault(error: Exception) -> str:
    """The fault in a file, with its line and column, counted from 1."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return one_line(error)
    mark = error.problem_mark
    hint = ": a tab; YAML indents with spaces" if r"'\t'" in str(error.problem) else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{hint}"


# --- overrides ---


def with_libraries(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them: ``model=torchvision model.name=torchvision:resnet50``."""
    expanded = []
    for override in overrides:
        # no comma: a list of models is a multirun
        library = re.match(r"model=(\w+):[^,]+$", override)
        named = override.replace("model=", "model.name=", 1)
        expanded += [override] if library is None else [f"model={library[1]}", named]
    return expanded


def parse(overrides: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse overrides; of Hydra's section, only :data:`FREE` is allowed."""
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    except HydraException as error:
        # other errors do not say which override they mean
        text = f"{error.override}" if isinstance(error, OverrideParseException) else ""
        if text and "=" not in text:
            raise ConfigError(f"{text}: expected KEY=VALUE{_meant_by(text, loader)}") from None
        raise ConfigError(_parse_error(text, _reason(error))) from None
    for override in parsed:
        # dir=$DIR: an empty path would mean the working directory
        if override.value() == "" and str(override.input_line).endswith("="):
            raise ConfigError(
                f"{override.input_line}: expected a value after =, or null (is a variable of the "
                "shell empty?)"
            )
        key = override.key_or_group
        if re.split("[./]", key)[0] == "hydra" and key not in FREE:
            raise ConfigError(
                f"{override.input_line}: expected one of Hydra's keys {', '.join(FREE)}"
                + did_you_mean(key, FREE, cutoff=0.6)
            )
    return parsed


def _meant_by(word: str, loader: ConfigLoader | None) -> str:
    """A hint with an override for a word without ``=``: a folder, or the option of a group."""
    if Path(word).is_dir():
        return f"; did you mean {_folder(word)}?"
    for group in loader.list_groups("") if loader else ():
        if word in loader.get_group_options(group):  # type: ignore[union-attr]
            return f"; did you mean {group}={word}?"
    return " without spaces, such as trainer.max_epochs=3"


def _folder(path: str) -> str:
    return f"data=imagefolder data.root={quoted_if_needed(path)}"


def quoted(value: object) -> str:
    """A value of an override in quotes: Hydra reads it as plain text."""
    text = str(value).replace("${", "\\${")
    return QuotedString(text, Quote.single).with_quotes()


def quoted_if_needed(value: object) -> str:
    """A path as a value of an override; in quotes unless Hydra reads it as text anyway."""
    text = str(value)
    # with a slash, or a letter at its start, it is not a number
    plain = re.fullmatch(r"[\w.-]*/[\w./-]*|[a-z_][\w.-]*", text, re.ASCII | re.IGNORECASE)
    is_word = text.lower() in ("null", "true", "false", "nan", "inf")
    return text if plain and not is_word else quoted(text)


def _reason(error: HydraException) -> str:
    """The reason why Hydra's parser refuses an override."""
    first, _, rest = str(error).partition("\n")
    # for choice(), interval() and so on, the first line only repeats the override
    reason = rest.partition("\n")[0] if first.startswith("Error parsing override") else first
    return "a character has no meaning here" if reason.startswith("Lexer") else reason


def _parse_error(text: str, reason: str) -> str:
    """The message for ``text``, which is not an override, with a remedy; ``reason`` is Hydra's."""
    for opening, closing in ("{}", "[]", "()"):
        if text.count(opening) > text.count(closing):
            return (
                f"{text}: a {opening} is not closed. If a space follows, quote the whole argument "
                "for the shell, 'KEY={a: 1, b: 2}'"
            )
    if text.endswith(","):
        return f"{text}: expected another value after the comma"
    of_grammar = ("mismatched input", "extraneous input", "no viable", "a character")
    if reason.startswith(of_grammar) and '"' not in text:
        reason += "; put quotes around a value with special characters: KEY='\"a=b (c)\"'"
    elif "choice(" in text and "NoneType" in reason:
        return f"{text}: choice() does not take null: leave choice() out, 'KEY=null,VALUE'"
    return f"{text}: {reason}" if text else reason


def _checked(override: Override, loader: ConfigLoader) -> str:
    """An override as Hydra takes it: a key may be new, which the schema checks later."""
    text, group = str(override.input_line), override.key_or_group
    groups = loader.list_groups("")
    if override.is_sweep_override():
        raise ConfigError(_several_values(override, groups))
    if override.is_hydra_override() or override.is_delete():
        return text
    if group not in groups:
        return f"++{text.lstrip('+')}"
    _check_option(override, loader)
    return text


def _several_values(override: Override, groups: Sequence[str]) -> str:
    """Hydra's own message leaves the remedy out."""
    typed, several = str(override.input_line), override.value()
    if isinstance(several, IntervalSweep):
        return f"{typed}: expected one value; revzoo sweep searches intervals"
    remedy = "for a run of each add -m to revzoo train"
    if override.key_or_group not in groups and getattr(several, "simple_form", False):
        key, _, value = typed.partition("=")
        remedy += f"; for one list write {key}=[{value}]"
    return f"{typed}: several values; {remedy}"


def _check_option(override: Override, loader: ConfigLoader) -> None:
    group, option = override.key_or_group, override.value()
    options = loader.get_group_options(group)
    if option is None:
        raise ConfigError(
            f"{group}=null: expected one of its options ({', '.join(options)}), or leave {group} "
            "out"
        )
    if (name := str(option)) in options:
        return
    # model=resnet18 belongs to torchvision or timm
    hint = library_hint(name) if group == "model" else ""
    if group == "data" and Path(name).is_dir():
        hint = f"; use {_folder(name)}"
    hint = hint or our_spelling(group, name, loader.list_groups(""))
    hint = hint or did_you_mean(name, options, cutoff=0.6)
    # a long list would hide the hint
    listed = f" (there is {', '.join(options)})" if not hint or len(options) <= 12 else ""
    plugin = "; --import MODULE adds yours" if group in ("model", "data") else ""
    raise ConfigError(f"{group}={option}: no such option{listed}{hint or plugin}")
