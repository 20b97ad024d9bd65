"""Checks the overrides of a command line, and suggests the nearest key or option.

Hydra also refuses an unknown key, but does not suggest the nearest one. We parse overrides with
Hydra's parser and compare them with the composed configuration: ``model=revnet39`` with the group's
options, ``optim.lrr=1`` with the keys, ``trainer.max_epochs=many`` with the type of the default.
This imports neither torch nor Lightning, so a typo gets a quick answer.

Known limit: a key added with ``+`` must be in an existing section; the section's builder checks
its name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
)
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from revzoo._checks import either, expected_type, nearest, shortened
from revzoo._libraries import library_hint
from revzoo.cli.config.errors import ConfigError, one_line
from revzoo.cli.config.signatures import options, with_bases
from revzoo.cli.config.spellings import our_spelling

# arguments of create_model that a run fills in, and their sources
FITTED = {
    "memory": "the mode of memory=MODE",
    "num_classes": "the number of classes of the data",
    "in_chans": "the channels of the data; data.in_chans=N for a folder of images",
}
MAX_VALUES = 10_000  # of one key in a multirun
# key -> the reason why some options of its group lack it
REASONS = {
    "model.reversible_bits": "it makes plain networks reversible; RevNets, i-RevNets and RevViTs "
    "are reversible without it",
}
# keys whose values have several types: the default's says nothing
SEVERAL_TYPES = (
    "trainer.devices",  # a number or a word
    # a number of batches or a fraction of them
    *(f"trainer.limit_{split}_batches" for split in ("train", "val", "test")),
)
# The keys of Hydra that users may set, on the command line or in files.
FREE = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.job.name",  # the name of the log file; Lightning sets it in further processes
    "hydra.job.chdir",
    "hydra.output_subdir",  # .hydra or null; Lightning sets null in further processes
    "hydra.mode",
    "hydra.verbose",
)
# Options of these groups are compared by value with Hydra's package.
HYDRA_GROUPS = ("hydra/job_logging", "hydra/hydra_logging")


def parse(overrides: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse overrides; of Hydra's section, only :data:`FREE` is allowed.

    Raises:
        ConfigError: a key of Hydra that is not free, or an override that is not valid.
    """
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    except HydraException as error:
        # other errors do not say which override they mean
        text = f"{error.override}" if isinstance(error, OverrideParseException) else ""
        if text and "=" not in text:
            raise ConfigError(f"{text}: expected KEY=VALUE{_meant_by(text, loader)}") from None
        raise ConfigError(_parse_error(text, _reason(error))) from None
    for override in parsed:
        if isinstance(values := override.value(), RangeSweep):
            _check_range(override, values)
        # dir=$DIR: an empty path would mean the working directory
        if values == "" and str(override.input_line).endswith("="):
            raise ConfigError(
                f"{override.input_line}: expected a value after =, or null (is a variable of the "
                "shell empty?)"
            )
        key, known = override.key_or_group, [*FREE, *HYDRA_GROUPS]
        # group@hydra.job=x would put a group's content into Hydra's section
        places = [re.split("[./]", place)[0] for place in (key, override.package or "")]
        if "hydra" in places and (key not in known or override.package):
            raise ConfigError(
                f"{override.input_line}: expected one of Hydra's keys {', '.join(known)}"
                + _meant(key, known)
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


def _check_range(override: Override, values: RangeSweep) -> None:
    # Hydra makes a list of all values: range(0,1e9) would fill the memory
    step, stop = (values.step, values.stop)
    count = 0 if not step or stop is None else (stop - (values.start or 0)) / step
    if not step or not 0 <= count <= MAX_VALUES:
        raise ConfigError(
            f"{override.input_line}: expected at most {MAX_VALUES:,} values, in steps from the "
            "first towards the last"
        )


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


def check_one_value(override: Override, groups: Sequence[str]) -> None:
    """Refuse several values where only one run starts; Hydra's message leaves the remedy out.

    Args:
        override: any override.
        groups: the names of all groups, whose options cannot be a list.

    Raises:
        ConfigError: naming the ways to give several values.
    """
    if not override.is_sweep_override():
        return
    typed, several = str(override.input_line), override.value()
    if isinstance(several, IntervalSweep):
        raise ConfigError(f"{typed}: expected one value; revzoo sweep searches intervals")
    remedy = "for a run of each add -m to revzoo train"
    if override.key_or_group not in groups and getattr(several, "simple_form", False):
        key, _, value = typed.partition("=")
        remedy += f"; for one list write {key}=[{value}]"
    raise ConfigError(f"{typed}: several values; {remedy}")


def check_option(override: Override, loader: ConfigLoader) -> None:
    """Refuse an option that its group does not have.

    Raises:
        ConfigError: with the nearest option, or all of them.
    """
    options = loader.get_group_options(override.key_or_group)
    if override.is_sweep_override():
        chosen: Iterable[Any] = override.sweep_string_iterator()
    else:
        chosen = [override.value()]
    group = override.key_or_group
    for option in chosen:
        if option is None and not override.is_delete():
            raise ConfigError(
                f"{group}=null: expected one of its options ({', '.join(options)}), or leave "
                f"{group} out"
            )
        if option is not None and str(option) not in options:
            # model=resnet18 belongs to torchvision or timm
            hint = library_hint(str(option)) if group == "model" else ""
            if group == "data" and Path(str(option)).is_dir():
                hint = f"; use {_folder(str(option))}"
            hint = hint or our_spelling(group, str(option), loader.list_groups(""))
            hint = hint or _meant(str(option), options)
            # a long list would hide the hint
            listed = f" (there is {', '.join(options)})" if not hint or len(options) <= 12 else ""
            plugin = "; --import MODULE adds yours" if group in ("model", "data") else ""
            raise ConfigError(f"{group}={option}: no such option{listed}{hint or plugin}")


def check_key(override: Override, base: DictConfig, groups: Sequence[str], folder: Path) -> None:
    """Refuse a key that the configuration does not have.

    Args:
        override: any override except the choice of a group's option.
        base: the configuration with the chosen options.
        groups: the names of all groups.
        folder: of the packaged options, for the message.

    Raises:
        ConfigError: with the key that the user probably means; or the run sets the key itself.
    """
    key, known = override.key_or_group, list(_keys(base))
    check_settable(key)
    section, dot, _ = key.partition(".")
    is_new = override.is_add() or override.is_force_add()
    value = str(override.input_line).partition("=")[2]
    sections = ["hydra", "debug", *base]
    section, _, leaf = key.rpartition(".")
    remedy = our_spelling(key, value, sections)
    if section != "trainer":  # whose other options are Lightning's
        remedy = remedy or our_spelling(leaf, value, sections)
    remedy = "" if key in known else remedy
    if key in known or (is_new and dot and section in known and not remedy):
        return
    remedy = remedy or _remedy(key, value, base, [*groups, *known], folder)
    raise ConfigError(f"{override.input_line}: there is no key {key!r}{remedy}")


def check_settable(key: str) -> None:
    """Refuse an argument of the model that a run fills in.

    Raises:
        ConfigError: with its source.
    """
    section, _, name = key.partition(".")
    if section == "model" and name in FITTED:
        raise ConfigError(f"{key} cannot be set: it is {FITTED[name]}")


def _registered_callbacks() -> Iterable[str]:
    # a plugin that registers one has imported the table; importing it takes seconds
    table = sys.modules.get("revzoo.training.callbacks.registry")
    return table.CALLBACKS if table else ()


def _remedy(key: str, value: str, base: DictConfig, known: Sequence[str], folder: Path) -> str:
    """A hint with the key that the user probably means; the first guess that applies."""
    if key == "resume":
        return f"; to continue a run: --resume {value or 'RUN'}"
    section, _, leaf = key.rpartition(".")
    if section == "callbacks" and leaf in _registered_callbacks():
        return f", but it is registered: add it by '+{key}={value or '{}'}'"
    # trainer.max_time
    if section == "trainer" and leaf in options("pytorch_lightning.trainer.trainer", "Trainer"):
        return f"; use +{key}={value}"
    node = OmegaConf.select(base, section) if section else None
    if section in known and node is None:
        # data.image_size=64 in an evaluation, whose data come from the checkpoint
        if having := _options_with(leaf, folder / section):
            listed = either(f"{section}={name}" for name in having)
            return f", as {section} is null; add {listed}"
        # callbacks.ema.decay=0.9 while callbacks.ema is null
        return f", as {section} is null; give '{section}={{{leaf}: {value}}}', in quotes"
    # data.root=DIR for data=digits, while data=cifar10 has a root
    if section and (having := _options_with(leaf, folder / section)):
        listed = shortened(f"{section}={name}" for name in having)
        why = f": {REASONS[key]}" if key in REASONS else ""
        return f"; {listed} {'has' if len(having) == 1 else 'have'} it{why}"
    # optim.lrr=1: the nearest key of the section; trainer.lr=1: the same word in another section
    if isinstance(node, DictConfig):
        names = list(map(str, node))
        if near := nearest(leaf, names, cutoff=0.6):
            return f"; did you mean '{section}.{near[0]}'?"
        values = [name for name in known if not OmegaConf.is_dict(OmegaConf.select(base, name))]
        if places := [name for name in values if name.endswith(f".{leaf}")]:
            return f"; did you mean {places[0]!r}?"
        # model.bits=4 for model.reversible_bits
        if longer := [name for name in names if name.endswith(f"_{leaf}")]:
            return f"; did you mean '{section}.{longer[0]}'?"
        return f" (there is {', '.join(names)}); +{key}=VALUE adds another option of the section"
    return _meant(key, known)


def _options_with(leaf: str, group: Path) -> list[str]:
    """The options of a group that have a key; options that inherit it come last."""
    pattern = re.compile(rf"^{re.escape(leaf)}:", re.MULTILINE)
    having: dict[str, bool] = {}  # name -> whether the option inherits the key
    for path in sorted(group.glob("*.yaml")):
        *bases, own = [bool(pattern.search(file.read_text())) for file in with_bases(path)]
        if own or any(bases):
            having[path.stem] = not own
    return sorted(having, key=having.__getitem__)


def check_value_types(cfg: DictConfig, base: DictConfig) -> None:
    """Refuse a word in place of a number, or a number in place of true or false.

    Args:
        cfg: the whole configuration.
        base: the same with only the chosen options, whose values have the right types.

    Raises:
        ConfigError: naming the key; or a reference names a missing key.
    """
    try:
        pairs = {
            key: (OmegaConf.select(base, key), OmegaConf.select(cfg, key)) for key in _keys(base)
        }
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    for key, (before, after) in pairs.items():
        # optim.schedule=cosine would replace the mapping
        if isinstance(before, DictConfig) and "name" in before and isinstance(after, str):
            raise ConfigError(f"{key}={after}: expected options; the name is {key}.name={after}")
        if after is None or key in SEVERAL_TYPES or type(before) not in (bool, int, float):
            continue
        # equal values are right even if types differ, such as 1 for 1.0
        if before != after and (expected := expected_type(after, type(before))):
            raise ConfigError(f"{key}={after}: expected {expected}, such as {before}")


def _keys(node: Any, prefix: str = "") -> Iterable[str]:
    """All dotted keys below ``node``, sections included."""
    if not isinstance(node, DictConfig):
        return
    for key in map(str, node):
        name = f"{prefix}{key}"
        yield name
        # reading a missing value or a reference to one would raise
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            yield from _keys(node[key], f"{name}.")


def _meant(key: str, known: Sequence[str]) -> str:
    """The nearest known key; a bare last part (``lr``) finds its place (``optim.lr``)."""
    same_leaf = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = same_leaf[:1] or nearest(key, known, cutoff=0.6)
    if not near:
        # a bare, misspelt last part: `lrr`
        leaves = {name.rpartition(".")[2]: name for name in known}
        near = [leaves[leaf] for leaf in nearest(key, leaves, cutoff=0.6)]
    return f"; did you mean {near[0]!r}?" if near else ""
