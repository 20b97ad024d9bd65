"""Composes a configuration with Hydra from files and overrides; checks it against the schema.

Hydra would refuse an unknown key without naming the nearest. So every override may add its key
(``++``), and the schema refuses what does not exist, on the command line as in a file. Composing
imports neither torch nor Lightning, so a typo gets a quick answer; the checks of the machine import
torch. What depends on the model or the data is checked where these are built
(:mod:`revzoo.cli.run.build`).

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
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
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
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from revzoo._checks import (
    check_choice,
    cores,
    did_you_mean,
    expected_type,
    is_number,
    nearest,
    number_of,
    package_needed,
    shortened,
)
from revzoo._files import TABLES, file_name
from revzoo._libraries import library_hint
from revzoo.cli.schema import (
    CALLBACKS,
    CONFIGS,
    DATA,
    EVALUATION,
    FITTED,
    MISSING,
    MONITORED,
    OPTIMIZERS,
    PLANS,
    RUN,
    SCHEDULES,
    SPELLINGS,
    Chosen,
    Config,
    Option,
    Section,
    chosen,
    having,
    names_in,
    registered,
)
from revzoo.cli.terminal import ConfigError, one_line
from revzoo.profiling.units import bytes_from

SCHEDULE = "optim.schedule"
# The keys of Hydra that users may set, on the command line or in files.
FREE = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_REFERENCE = re.compile(
    r"\$\{(?:\w+(?:\.\w+)*|now:[^${}]*|folder_name:[^${}:]*|oc\.env:REVZOO_\w+(?:,[^${}]*)?)\}"
)
FROM_FILES = [f"revzoo.data.{n}" for n in ("ImageFolder", "Masks", "Shards", "Table", "Volumes")]
OF_SAMPLES = ("private", "gradient_noise_scale", "hard_samples")  # callbacks
_SHORT = {
    "compile=true": "callbacks.compiled_branches={}",
    "compile=false": "callbacks.compiled_branches=null",
}
REASONS = {
    "reversible_bits": ": it makes plain networks reversible; the others of the zoo are "
    "reversible without it",
}

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
        parsed = parse(spelled_out(overrides), hydra.config_loader)
        groups = hydra.config_loader.list_groups("")  # slow, so once for all
        words = [_checked(override, groups, hydra.config_loader) for override in parsed]
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
    return OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])


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
        if group := re.match(r"Multiple values for ([\w/]+)\.", str(error)):
            text = f"{group[1]} has two values: write {group[1]}=NAME without +"
            raise ConfigError(text) from None
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
        fault = one_line(error)
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
            hint = ": a tab; YAML indents with spaces" if r"'\t'" in str(error.problem) else ""
            fault = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{hint}"
        raise ConfigError(f"{path} is not YAML ({fault})") from None


# --- overrides ---


def spelled_out(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them.

    ``model=timm:vit_tiny`` becomes ``model=timm model.name=timm:vit_tiny``, and
    ``model=revnet38.cifar10`` ``model=revnet38 model.name=revnet38.cifar10 model.pretrained=true``;
    ``compile=true`` adds a callback.
    """
    expanded = []
    for override in overrides:
        # no comma: a list of models is a multirun
        named = override.replace("model=", "model.name=", 1)
        if library := re.match(r"model=(\w+):[^,]+$", override):
            expanded += [f"model={library[1]}", named]
        elif tagged := re.match(r"model=(\w+)\.[\w.]+$", override):
            expanded += [f"model={tagged[1]}", named, "model.pretrained=true"]
        else:
            expanded.append(_SHORT.get(override.lower(), override))
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
        raise ConfigError(_parse_error(text, error)) from None
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


def _parse_error(text: str, error: HydraException) -> str:
    """The message for ``text``, which Hydra's parser refuses, with a remedy."""
    first, _, rest = str(error).partition("\n")
    # for choice(), interval() and so on, the first line only repeats the override
    reason = rest.partition("\n")[0] if first.startswith("Error parsing override") else first
    if reason.startswith("Lexer"):
        reason = "a character has no meaning here"
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


def _checked(override: Override, groups: Sequence[str], loader: ConfigLoader) -> str:
    """An override as Hydra takes it: a key may be new, which the schema checks later."""
    text, group = str(override.input_line), override.key_or_group
    if override.is_sweep_override():  # Hydra's own message leaves the remedy out
        if isinstance(override.value(), IntervalSweep):
            raise ConfigError(f"{text}: expected one value; revzoo sweep searches intervals")
        remedy = "for a run of each add -m to revzoo train"
        if group not in groups and getattr(override.value(), "simple_form", False):
            key, _, value = text.partition("=")
            remedy += f"; for one list write {key}=[{value}]"
        raise ConfigError(f"{text}: several values; {remedy}")
    if override.is_hydra_override() or override.is_delete():
        return text
    if group not in groups:
        return f"++{text.lstrip('+')}"
    _check_option(override, loader)
    return text


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
    hint = hint or our_spelling(group, name, [*loader.list_groups(""), *RUN.options])
    hint = hint or did_you_mean(name, options, cutoff=0.6)
    # a long list would hide the hint
    listed = f" (there is {', '.join(options)})" if not hint or len(options) <= 12 else ""
    plugin = "; --import MODULE adds yours" if group in ("model", "data") else ""
    raise ConfigError(f"{group}={option}: no such option{listed}{hint or plugin}")


# --- the schema ---


def check(config: Config, root: Section = RUN, *, complete: bool = True) -> None:
    """Check the names and values of all options; those that must be given only if ``complete``."""

    def check_section(path: str, values: Config, known: Section) -> None:
        for key in values:
            if key not in known.options:
                raise unknown(f"{path}{key}", values[key], config, root)
        for key, option in known.options.items():
            name, value = f"{path}{key}", values.get(key, option.default)
            if value == MISSING and complete:
                missing = "is needed" if key in values else "is missing from the configuration"
                raise ConfigError(f"{name} {missing}{': ' * bool(option.remedy)}{option.remedy}")
            if key not in values or value == MISSING:
                continue
            part = known.parts.get(key)
            if part is not None and not isinstance(value, Mapping | None):
                form = f"options in braces and quotes, '{name}={{OPTION: VALUE}}'; {{}} uses the "
                form += "defaults, null leaves it out"
                if isinstance(part, Chosen):
                    form = f"options; the name is {name}.{part.by}={value}"
                raise ConfigError(f"{name}={typed(value)}: expected {form}")
            check_value(name, value, option)
            if part is not None and value is not None:
                check_section(f"{name}.", value, chosen(name, part, value))

    check_section("", config, root)
    if root is RUN:
        _check_rules(config)


def check_value(name: str, value: Any, option: Option) -> None:
    """Check the type and the range of a value."""
    remedy = f"; {option.remedy}" if option.remedy else ""
    more = registered(option.registry) if option.registry else ()
    choices = [*dict.fromkeys([*option.choices, *more])]
    matches = option.pattern and isinstance(value, str) and re.fullmatch(option.pattern, value)
    if choices and value is not None and value not in choices and not matches:
        null = "" if expected_type(None, option.type) else ", null"
        listed = ", ".join(map(typed, choices)) + null
        hint = did_you_mean(value, choices)
        raise ConfigError(f"{name}={typed(value)}: expected one of {listed}{hint}")
    if expected := expected_type(value, option.type):
        raise ConfigError(f"{name}={typed(value)}: expected {expected}{remedy}")
    if not option.range or not is_number(value) or value in option.also:
        return
    low, high = map(float, option.range[1:-1].split(","))
    above = low < value if option.range[0] == "(" else low <= value
    below = value < high if option.range[-1] == ")" else value <= high
    if not (above and below):
        kind = "a number" if "float" in str(option.type) else "a whole number"
        others = "".join(f", or {other}" for other in option.also)
        raise ConfigError(f"{name}={value}: expected {kind} {option.within}{others}{remedy}")


def unknown(name: str, value: Any, config: Config, root: Section = RUN) -> ConfigError:
    """The error for an option that does not exist, with the one that the user probably means."""
    while isinstance(value, Mapping) and len(value) == 1:  # logger.wandb.project=mine
        ((key, value),) = value.items()
        name = f"{name}.{key}"
    path, _, leaf = name.rpartition(".")
    if path == "model" and leaf in FITTED:
        return ConfigError(f"{name} cannot be set: it is {FITTED[leaf]}")
    hint = f"; to continue a run: --resume {typed(value)}" if name == "resume" else ""
    # Hydra puts the keys of such a file below its group
    if name.partition(".")[0] in ("experiment", "debug"):
        hint = "; the first line of its file must be '# @package _global_'"
    sections = ["hydra", "debug", *root.options, *(["compile"] if root is RUN else [])]
    # the other options of the trainer are Lightning's
    for spelling in (name, leaf) if path != "trainer" else (name,):
        hint = hint or our_spelling(spelling, typed(value), sections)
    part: Any = root
    for key in path.split("."):
        part = part.parts.get(key) if isinstance(part, Section) else None
    if isinstance(part, Chosen) and (choices := having(path, part, leaf)):
        has = "have" if "," in choices else "has"
        hint = hint or f"; {choices} {has} it{REASONS.get(leaf, '')}"
    hint = hint or _meant(path, leaf, list(names_in(root, config)))
    return ConfigError(f"{name}={typed(value)}: there is no option {name!r}{hint}")


def _meant(path: str, leaf: str, known: Sequence[str]) -> str:
    """The nearest option of the section; a bare last part (``lr``) finds its place."""
    by_leaf: dict[str, str] = {}  # the first of each
    for other in known:
        by_leaf.setdefault(other.rpartition(".")[2], other)
    siblings = [other for other in known if path and other.rpartition(".")[0] == path]
    longer = [other for other in siblings if other.endswith(f"_{leaf}")]
    near = longer or nearest(f"{path}.{leaf}", siblings, cutoff=0.8)
    near = near or ([by_leaf[leaf]] if leaf in by_leaf else [])
    if siblings and not near:
        return f" (there is {shortened((o.rpartition('.')[2] for o in siblings), 12)})"
    near = near or nearest(f"{path}.{leaf}".lstrip("."), known, cutoff=0.6)
    # a bare, misspelt last part: `lrr`
    near = near or [by_leaf[found] for found in nearest(leaf, by_leaf, cutoff=0.6)]
    return f"; did you mean {near[0]!r}?" if near else ""


def typed(value: Any) -> str:
    """A value as users type it."""
    words = {"None": "null", "True": "true", "False": "false", "": "''"}
    return words.get(str(value), f"{value!s:.80}")


def our_spelling(key: str, value: str, sections: Container[str]) -> str:
    """``"; use optim.lr=0.1"`` for ``learning_rate=0.1``; empty if the table has no row.

    The ``sections`` are those of the command: an evaluation has no ``optim``.
    """
    text = SPELLINGS.get(f"{key}={value}", SPELLINGS.get(key))
    if text is None:
        return ""
    text = text.replace("@", value)
    text = SPELLINGS.get(text, text)  # trainer.precision=16: precision=16 is foreign, too
    section = re.split("[.=]", text.lstrip("'+"))[0]
    return f"; use {text}" if section in sections or " " in section else ""


# --- rules of several options ---


def _check_rules(config: Config) -> None:
    trainer, precision, memory = config["trainer"], config["precision"], config["memory"]
    # without max_epochs, Lightning's default of 1000 ends the run
    ends = trainer.get("max_epochs") != -1 or trainer.get("max_steps", -1) != -1
    if not ends and trainer.get("max_time") is None:
        raise ConfigError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1: the run would never end; set one"
        )
    name = config["optim"].get("name")
    check_choice("optim.name", name, dict.fromkeys([*OPTIMIZERS, *registered("optim")]))
    if precision.get("tf32") and precision.get("trainer") != "32-true":
        raise ConfigError(
            f"precision.tf32=true changes float32 only, but precision.trainer="
            f"{precision.get('trainer')}: use precision=tf32 only"
        )
    mode, budget, inverting = (memory.get(key) for key in ("mode", "bytes", "inverting"))
    if mode == "budget" and budget is None:
        raise ConfigError("memory.bytes is needed: give memory.bytes=4GiB, say")
    if budget is not None and mode not in ("auto", "budget"):
        raise ConfigError(f"memory.bytes={budget} is a budget: add memory=budget")
    if budget not in (None, MISSING):
        bytes_from(budget, name="memory.bytes")
    if (part := memory.get("fraction")) is not None and mode != "auto":
        raise ConfigError(f"memory.fraction={part} is of the free memory: add memory=auto")
    if inverting is not None and mode not in PLANS:
        raise ConfigError(f"memory.inverting={inverting} is for a plan: add memory=auto")
    fold, folds = (config["data"].get(key, least) for key, least in (("fold", 0), ("folds", 1)))
    if fold >= folds > 1:
        raise ConfigError(f"data.fold={fold}: expected 0 to {folds - 1}, one of data.folds={folds}")
    if fold >= folds:
        raise ConfigError(f"data.fold={fold}, but the images have no folds: add data.folds=5, say")
    tuner = config.get("tuner") or {}
    if tuner and (trainer.get("devices", 1), trainer.get("strategy", "auto")) != (1, "auto"):
        raise ConfigError(
            f"tuner={tuner.get('kind')} searches on one device: give trainer.devices=1 "
            "trainer.strategy=auto, then train on several with its suggestion (batch sizes are per "
            "process)"
        )
    if tuner.get("kind") == "lr" and not tuner["min_lr"] <= tuner["max_lr"]:
        raise ConfigError(f"tuner.max_lr={tuner['max_lr']}: expected at least tuner.min_lr")
    if trainer.get("strategy") == "fsdp2":
        _check_sharded(config)
    _check_callbacks(config)


def _check_sharded(config: Config) -> None:
    """Refuse options with which each process needs whole weights."""
    if config["memory"].get("mode") == "offload":
        raise ConfigError(
            "memory=offload with trainer=fsdp2 would copy gathered weights to the host: use "
            "memory=recompute, invert or exact, or trainer=ddp"
        )
    if config["precision"].get("trainer") == "16-mixed":
        raise ConfigError("precision=fp16 with trainer=fsdp2: use precision=bf16, or trainer=ddp")
    used = [f"callbacks.{n}" for n in OF_SAMPLES if config["callbacks"].get(n) is not None]
    used += ["trainer.sync_batchnorm"] * bool(config["trainer"].get("sync_batchnorm"))
    used += ["optim.name=muon"] * (config["optim"].get("name") == "muon")
    if used:
        raise ConfigError(
            f"{used[0]} needs whole weights, and trainer=fsdp2 divides them among the processes: "
            "leave it out, or use trainer=ddp"
        )


def _check_callbacks(config: Config) -> None:
    used = {name: options for name, options in config["callbacks"].items() if options is not None}
    model, trainer = config["model"], config["trainer"]
    if "finetuning" in used and not (model.get("pretrained") or model.get("checkpoint_path")):
        raise ConfigError(
            "callbacks.finetuning would freeze random weights: add model.pretrained=true or "
            "+model.checkpoint_path=FILE, or set callbacks.finetuning=null"
        )
    if "compiled_branches" in used and (others := [name for name in OF_SAMPLES if name in used]):
        raise ConfigError(
            f"callbacks.compiled_branches with callbacks.{others[0]}, which computes per-sample "
            "gradients at each layer: a compiled part does not call its layers. Set one of the two "
            "to null"
        )
    if "private" in used and config["optim"].get("class_weights") == "balanced":
        raise ConfigError(
            "callbacks.private with optim.class_weights=balanced: one image would change the "
            "weights of all others. Give a list of numbers, which do not come from the data"
        )
    for name, options in used.items():
        if name not in CALLBACKS or "monitor" not in CALLBACKS[name].options:
            continue
        figure, mode = options.get("monitor") or config.get("monitor"), options.get("mode")
        no_validation = trainer.get("limit_val_batches") == 0
        of_validation = figure is None or figure.startswith("val/")
        if name == "early_stopping" and of_validation and no_validation:
            raise ConfigError(
                f"callbacks.{name}.monitor={figure or 'val/...'}, but with "
                "trainer.limit_val_batches=0 the run does not validate: set "
                f"callbacks.{name}.monitor=train/loss, or callbacks.{name}=null"
            )
        if figure is not None:  # else the task decides, see for_task in run/build.py
            check_mode(name, figure, mode)


def check_mode(callback: str, figure: str, mode: str | None) -> None:
    """Check that a callback compares a figure in the right direction."""
    if mode not in (None, better := MONITORED[figure]):
        raise ConfigError(
            f"callbacks.{callback}.mode={mode}: the best {figure} is the {better}imum, so set "
            f"callbacks.{callback}.mode={better}"
        )


# --- this machine ---


def check_machine(config: Config) -> None:
    """Check the device, the precision and the number of processes of a checked configuration."""
    trainer, precision = config["trainer"], config["precision"]
    device, devices = device_kind(trainer["accelerator"]), str(trainer["devices"])
    # Lightning's errors do not name the option
    if device == "cpu" and not re.fullmatch(r"auto|[1-9]\d*", devices):
        raise ConfigError(
            f"trainer.devices={devices}: expected a number of processes, or auto; this run is on "
            "the CPU"
        )
    if not re.fullmatch(r"auto|-1|[1-9]\d*|\d+(,\d*)+|\[\d+(, \d+)*\]", devices):
        raise ConfigError(
            f"trainer.devices={devices}: expected a number of GPUs, a list of their numbers such "
            "as [0,1], or auto"
        )
    # on a CPU, Lightning starts any number of processes
    if device == "cpu" and devices.isdecimal() and int(devices) > 4 * cores():
        raise ConfigError(
            f"trainer.devices={devices} processes for {number_of(cores(), 'core')}: "
            f"expected at most {4 * cores()}"
        )
    if device == "cpu" and precision["trainer"] == "16-mixed":
        raise ConfigError("precision=fp16 needs a GPU, this run is on the CPU: use precision=fp32")
    if device == "mps" and precision["trainer"] == "64-true":
        raise ConfigError("precision=fp64 is not supported on mps: use trainer=cpu")
    if device != "cuda" and trainer.get("cuda_graph") is True:
        raise ConfigError(
            f"trainer.cuda_graph=true needs an NVIDIA GPU, this run is on {device}: use "
            "trainer.cuda_graph=auto, which captures steps where there is one"
        )
    if device == "cpu" and trainer.get("sync_batchnorm"):
        raise ConfigError(
            "trainer.sync_batchnorm=true needs GPUs, this run is on the CPU: leave it out, or use "
            "model.norm=group, which needs no statistics of the batch"
        )
    missing = [name for name in ("monai", "scipy") if find_spec(name) is None]
    if config.get("surface_distances") and missing:
        raise ConfigError(package_needed("surface_distances=true needs", *missing))
    if device != "cuda" and precision["tf32"]:
        raise ConfigError(
            f"precision=tf32 is a format of NVIDIA GPUs, this run is on {device}: use "
            "precision=fp32"
        )


def check_root(data: Config) -> None:
    """Check that the table exists, or the folder, which must not be empty."""
    if data["_target_"] not in FROM_FILES:
        return
    if data.get("table"):
        table = Path(data["table"]).expanduser().absolute()
        if table.suffix.lower() not in TABLES:
            raise ConfigError(f"data.table={data['table']}: expected one of {', '.join(TABLES)}")
        if not table.is_file():
            raise ConfigError(f"table {table} does not exist: set data.table=FILE")
    elif data["root"] is not None and "://" not in data["root"]:
        root = Path(data["root"]).expanduser().absolute()
        if not root.is_dir() or not any(root.iterdir()):
            fault = "is empty" if root.is_dir() else "does not exist"
            about = DATA[data["_target_"]].options["root"].about
            raise ConfigError(f"folder {root} {fault}: set data.root=DIR, {about}")


def device_kind(accelerator: str) -> str:
    """The type of a run's device: ``cpu``, ``cuda`` or ``mps``."""
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    fitting = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}
    for kind in fitting.get(accelerator, (accelerator,)):
        if available[kind]:
            return kind
    raise ConfigError(
        f"trainer.accelerator={accelerator}: torch {torch.__version__} finds no such device; use "
        "trainer.accelerator=cpu or auto"
    )


def check_started_together(overrides: Sequence[str], *, several: bool) -> None:
    """Check that processes of ``torchrun`` or ``srun`` share one run and one folder.

    ``several`` is for a command that starts several runs: ``-m``, ``revzoo sweep``.
    """
    from revzoo.training.lightning_compat import started_together

    count = started_together()
    if count == 1:
        return
    if several:
        raise ConfigError(
            f"torchrun or srun has started {count} processes, and each would start all runs: start "
            "several runs without torchrun and srun"
        )
    if not any(override.startswith("hydra.run.dir=") for override in overrides):
        raise ConfigError(
            f"torchrun or srun has started {count} processes, which need one folder: add "
            "hydra.run.dir=outputs/NAME, with a new name"
        )
