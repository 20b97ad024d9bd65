"""Composes a configuration with Hydra, and checks a command line against it.

Hydra also refuses an unknown key, but does not suggest the nearest one. We parse overrides with
Hydra's parser and compare them with the composed configuration: ``model=revnet39`` with the group's
options, ``optim.lrr=1`` with the keys, ``trainer.max_epochs=many`` with the type of the default.
This imports neither torch nor Lightning, so a typo gets a quick answer.

Known limit: a key added with ``+`` must be in an existing section; the section's builder checks
its name.

NOTE [ Hydra's section ]
``hydra.*`` of a configuration holds import paths (callbacks, launcher, sweeper, log handlers),
environment variables and files to write. Hydra merges that section from every file it reads, so
``experiment=x`` of a downloaded folder can set them. Therefore:
1. Hydra only composes. No class of its section is instantiated before rule 3 holds; callbacks,
   launchers and sweepers never are (:mod:`revzoo.cli.commands.train`).
2. A primary file with ``hydra.searchpath`` is refused before Hydra composes: ``pkg://x`` imports x.
3. The composed section must equal the default of Hydra's package, except for :data:`FREE`, which
   are folders and switches, and :data:`SET_BY_HYDRA`.
4. ``--experimental-rerun`` reads a pickle and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from revzoo._checks import expected_type, nearest
from revzoo._libraries import LIBRARIES, check_library_name, library_hint
from revzoo.cli.config.errors import ConfigError, one_line
from revzoo.cli.config.yaml_files import check_growth

HYDRA_VERSION = "1.3"
MOST_FILES = 10_000  # in a folder of configurations
MOST_VALUES = 10_000  # of one key in a multirun
CONFIGS = Path(str(files("revzoo.configs")))
# a number in some options of the group, a word in others
WORD_OR_NUMBER = ("trainer.devices",)
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
SET_BY_HYDRA = (
    "hydra.runtime",
    "hydra.overrides",
    "hydra.job.override_dirname",
    "hydra.job.config_name",
    "hydra.job.num",
    "hydra.job.id",
)
# Options of these groups are compared by value with Hydra's package.
HYDRA_GROUPS = ("hydra/job_logging", "hydra/hydra_logging")


@dataclass(frozen=True)
class Source:
    """The files of a configuration.

    Attributes:
        name: the primary file, which lists the groups.
        folder: the folder of the primary file and its groups.
        extra: a further folder, searched after it (``--config-dir``).
    """

    name: str = "train"
    folder: Path = CONFIGS
    extra: Path | None = None


TRAIN = Source()

# torchvision:resnet50 -> torchvision-resnet50: Windows allows no colon, scp takes it for a host
OmegaConf.register_new_resolver("folder_name", lambda name: str(name).replace(":", "-"))


@contextmanager
def hydra_of(source: Source) -> Iterator[Hydra]:
    """Initialise Hydra with this source, inside the context.

    Raises:
        ConfigError: a folder does not exist, or a user's file is refused.
    """
    theirs = [folder for folder in (source.folder, source.extra) if folder not in (CONFIGS, None)]
    for folder in theirs:
        if folder is None or not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: expected a folder of configurations")
        for path in _config_files(folder):
            check_growth(path)
    version.setbase(HYDRA_VERSION)
    search_path = create_config_search_path(f"file://{source.folder.resolve()}")
    if source.extra is not None:
        search_path.prepend(
            provider="command-line",
            path=f"file://{source.extra.resolve()}",
            anchor=SearchPathQuery(provider="schema"),
        )
    GlobalHydra.instance().clear()  # Hydra refuses a second initialisation in a process
    try:
        hydra = Hydra.create_main_hydra2("train", search_path)
        _check_search_path(hydra, source)
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def _config_files(folder: Path) -> list[Path]:
    paths: list[Path] = []
    for number, path in enumerate(folder.rglob("*")):
        if number == MOST_FILES:
            raise ConfigError(
                f"{folder} has more than {MOST_FILES:,} files: expected a folder of configurations"
            )
        if path.suffix in (".yaml", ".yml"):
            paths.append(path)
    return sorted(paths)


def _check_search_path(hydra: Hydra, source: Source) -> None:
    # see NOTE [ Hydra's section ], 2
    repository = hydra.config_loader.repository  # type: ignore[attr-defined]
    try:
        loaded = repository.load_config(source.name)
        paths = None if loaded is None else OmegaConf.select(loaded.config, "hydra.searchpath")
    except Exception as error:  # the errors of the libraries have no common base class
        raise ConfigError(f"{source.name}: {one_line(error)}") from None
    if paths is not None:
        raise ConfigError(
            f"hydra.searchpath={paths} in {source.name}: a file cannot add places to read or "
            "import; use --config-dir DIR"
        )


def compose_checked(overrides: Sequence[str], source: Source = TRAIN) -> DictConfig:
    """Compose a configuration with ``overrides`` after checking every key.

    Args:
        overrides: as on the command line, without sweeps.
        source: the files.

    Raises:
        ConfigError: naming the nearest valid key or option.
    """
    return compose_whole(overrides, source)[0]


def compose_whole(
    overrides: Sequence[str], source: Source = TRAIN, *, trusted: Sequence[str] = ()
) -> tuple[DictConfig, DictConfig]:
    """As :func:`compose_checked`, and the same with Hydra's section, which is checked too.

    Args:
        overrides: as on the command line, without sweeps.
        source: the files.
        trusted: overrides that the program adds; they are not checked.
    """
    overrides = with_libraries(overrides)
    with hydra_of(source):
        base = _check(overrides, source.name)
        whole = _composed(source.name, [*overrides, *trusted])
    _check_hydra_section(whole)
    cfg = whole.copy()
    with flag_override(cfg, ["struct", "readonly"], [False, False]):
        del cfg["hydra"]
    try:
        for key in _keys(base):
            _check_type(key, OmegaConf.select(base, key), OmegaConf.select(cfg, key))
    except OmegaConfBaseException as error:  # a reference to a missing key
        raise ConfigError(one_line(error)) from None
    return cfg, whole


def with_libraries(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them: ``model=torchvision model.name=torchvision:resnet50``.

    Raises:
        ValueError: the library is not installed, or has no such network.
    """
    found = []
    for override in overrides:
        library = re.match(r"model=(\w+):[^,]+$", override)
        named = override.replace("model=", "model.name=", 1)
        if library is not None and library[1] in LIBRARIES:
            check_library_name(override.removeprefix("model="))
        found += [override] if library is None else [f"model={library[1]}", named]
    return found


def _composed(name: str | None, overrides: Sequence[str], *, with_hydra: bool = True) -> DictConfig:
    try:
        return compose(name, list(overrides), return_hydra_config=with_hydra)
    except Exception as error:  # Hydra does not validate files, so any error can occur
        if not isinstance(error, HydraException | OmegaConfBaseException):
            raise ConfigError(f"{name}: {type(error).__name__}: {one_line(error)}") from None
        raise ConfigError(one_line(error)) from None


def _check_hydra_section(cfg: DictConfig) -> None:
    """Check rule 3 of NOTE [ Hydra's section ].

    Raises:
        ConfigError: naming the key.
    """
    choices = cfg.hydra.runtime.choices
    chosen = [f"{group}={choices.get(group)}" for group in HYDRA_GROUPS]
    with hydra_of(TRAIN):
        packaged = OmegaConf.to_container(_composed(None, chosen).hydra, resolve=False)
    composed = OmegaConf.to_container(cfg.hydra, resolve=False)
    for key, value in _differing(packaged, composed, "hydra"):
        if key in FREE or key.startswith(("hydra.help.", "hydra.hydra_help.")):
            continue
        if any(f"{key}.".startswith(f"{name}.") for name in SET_BY_HYDRA):
            continue
        raise ConfigError(
            f"{key}={value!r:.80} is set by a configuration file: files may set only these keys of "
            f"Hydra: {', '.join(FREE)}"
        )
    name, folder, verbose = cfg.hydra.job.name, cfg.hydra.output_subdir, cfg.hydra.verbose
    if not isinstance(verbose, bool | str | ListConfig):
        raise ConfigError(f"hydra.verbose={verbose}: expected true, false, or names of loggers")
    name = str(name)
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise ConfigError(f"hydra.job.name={name}: expected letters, digits, '_', '-' and '.'")
    if folder not in (".hydra", None):
        raise ConfigError(f"hydra.output_subdir={folder}: expected .hydra or null")


def _differing(expected: Any, got: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key at which two plain values differ, and the value of ``got``."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in {**expected, **got}:
            yield from _differing(expected.get(name), got.get(name), f"{key}.{name}")
    elif expected != got:
        yield key, got


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, with references resolved.

    Missing values stay ``"???"``; the checks report them.

    Raises:
        ConfigError: a reference names a missing key.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def check_changes(overrides: Sequence[str]) -> None:
    """Refuse overrides that would change the results of a resumed run.

    Raises:
        ConfigError: naming the override.
    """
    for override in overrides:
        if override.partition("=")[0] not in ("memory", "precision"):
            raise ConfigError(
                f"{override}: a resumed run keeps its configuration; only memory=MODE may change, "
                "and precision=NAME with --allow-precision-change. Start a new run for the rest"
            )


def check_sweep(overrides: Sequence[str], source: Source = TRAIN) -> list[Override]:
    """Check the keys and options of several runs (``-m``), but not their combinations.

    Raises:
        ConfigError: naming the nearest valid key or option.
    """
    with hydra_of(source) as hydra:
        _check(overrides, source.name)
        return parse(overrides, hydra.config_loader)


def _check(overrides: Sequence[str], name: str) -> DictConfig:
    """Check names; return the configuration with the chosen options, without other overrides."""
    loader = GlobalHydra.instance().config_loader()
    parsed = parse(overrides, loader)
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    parsed = [override for override in parsed if not override.is_hydra_override()]
    choices = [override for override in parsed if override.key_or_group in groups]
    for override in choices:
        _check_choice(override, loader)
    base = _composed(
        name, [str(o.input_line) for o in choices if not o.is_sweep_override()], with_hydra=False
    )
    for override in parsed:
        if override not in choices:
            _check_key(override, base, groups)
    return base


def parse(overrides: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse overrides; of Hydra's section, only :data:`FREE` is allowed.

    Raises:
        ConfigError: another key of Hydra, or no valid override.
    """
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    except HydraException as error:
        text = f"{error.override}" if isinstance(error, OverrideParseException) else ""
        raise ConfigError(_parse_error(text, one_line(error, lines=1))) from None
    for override in parsed:
        if isinstance(values := override.value(), RangeSweep):
            _check_range(override, values)
        key, known = override.key_or_group, [*FREE, *HYDRA_GROUPS]
        places = [re.split("[./]", place)[0] for place in (key, override.package or "")]
        if "hydra" in places and (key not in known or override.package):
            raise ConfigError(
                f"{override.input_line}: expected one of Hydra's keys {', '.join(known)}"
                + _meant(key, known)
            )
    return parsed


def _check_range(override: Override, values: RangeSweep) -> None:
    # Hydra makes a list of all values: range(0,1e9) would fill the memory
    step, stop = (values.step, values.stop)
    count = 0 if not step or stop is None else (stop - (values.start or 0)) / step
    if not step or not 0 <= count <= MOST_VALUES:
        raise ConfigError(
            f"{override.input_line}: expected at most {MOST_VALUES:,} values, in steps from the "
            "first towards the last"
        )


def _parse_error(text: str, reason: str) -> str:
    """The message for ``text``, which is no override, with a remedy; ``reason`` is Hydra's."""
    if text and "=" not in text:
        return f"{text}: expected KEY=VALUE"
    if any(text.count(a) > text.count(b) for a, b in ("{}", "[]", "()")):
        return f"{text} is cut off: quote the whole argument for the shell, 'KEY={{a: 1, b: 2}}'"
    if text.count("=") > 1 and '"' not in text:
        reason += "; put quotes around a value with signs in it: KEY='\"a=b\"'"
    return f"{text}: {reason}" if text else reason


def _check_choice(override: Override, loader: ConfigLoader) -> None:
    """Refuse an option that its group does not have."""
    options = loader.get_group_options(override.key_or_group)
    if override.is_sweep_override():
        chosen: Iterable[Any] = override.sweep_string_iterator()
    else:
        chosen = [override.value()]
    for option in chosen:
        if option is not None and str(option) not in options:
            group = override.key_or_group
            hint = library_hint(str(option)) if group == "model" else ""
            hint = hint or _meant(str(option), options)
            listed = f" (there is {', '.join(options)})" if not hint or len(options) <= 12 else ""
            plugin = "; --import MODULE adds yours" if group in ("model", "data") else ""
            raise ConfigError(f"{group}={option}: no such option{listed}{hint or plugin}")


def _check_key(override: Override, base: DictConfig, groups: Sequence[str]) -> None:
    """Refuse a key that the configuration does not have."""
    key = override.key_or_group
    known = list(_keys(base))
    section, dot, _ = key.partition(".")
    is_new = override.is_add() or override.is_force_add()
    if key in known or (is_new and dot and section in known):
        return
    raise ConfigError(
        f"{override.input_line}: there is no key {key!r}"
        + (
            _off(key, override, base)
            or _of_others(key, groups)
            or _meant_in_section(key, base)
            or _meant(key, [*groups, *known])
        )
    )


def _off(key: str, override: Override, base: DictConfig) -> str:
    """For an option of a key that is null: how to set the key with this option."""
    section, _, leaf = key.rpartition(".")
    if section not in list(_keys(base)) or OmegaConf.select(base, section) is not None:
        return ""
    value = str(override.input_line).partition("=")[2]
    return f", as {section} is null; give '{section}={{{leaf}: {value}}}', in quotes"


def _of_others(key: str, groups: Sequence[str]) -> str:
    """For a key that only other options of its group have: their names."""
    group, _, leaf = key.partition(".")
    if group not in groups or "." in leaf:
        return ""
    having = [
        path.stem
        for path in sorted((CONFIGS / group).glob("*.yaml"))
        if re.search(rf"^{re.escape(leaf)}:", path.read_text(), re.MULTILINE)
    ]
    listed = ", ".join(f"{group}={name}" for name in having)
    return f"; {listed} {'has' if len(having) == 1 else 'have'} it" if having else ""


def _check_type(key: str, before: Any, after: Any) -> None:
    """Refuse a word in place of a number, or a number in place of true or false."""
    if after is None or key in WORD_OR_NUMBER or type(before) not in (bool, int, float):
        return
    if before != after and (expected := expected_type(after, type(before))):
        raise ConfigError(f"{key}={after}: expected {expected}, such as {before}")


def _keys(node: Any, prefix: str = "") -> Iterable[str]:
    """All dotted keys below ``node``, sections included."""
    if not isinstance(node, DictConfig):
        return
    for key in map(str, node):
        name = f"{prefix}{key}"
        yield name
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            yield from _keys(node[key], f"{name}.")


def _meant_in_section(key: str, base: DictConfig) -> str:
    """For a key of an existing section: the nearest key, or all keys and how to add another."""
    section, _, leaf = key.rpartition(".")
    node = OmegaConf.select(base, section) if section else None
    if not isinstance(node, DictConfig):
        return ""
    values = [name for name in _keys(base) if not OmegaConf.is_dict(OmegaConf.select(base, name))]
    near = nearest(leaf, names := list(map(str, node)), cutoff=0.6)
    places = [f"{section}.{near[0]}"] if near else [v for v in values if v.endswith(f".{leaf}")]
    if places:
        return f"; did you mean {places[0]!r}?"
    return f" (there is {', '.join(names)}); +{key}=VALUE adds another option of the section"


def _meant(key: str, known: Sequence[str]) -> str:
    """The nearest known key; a last part alone (``lr``) finds its place (``optim.lr``)."""
    same_leaf = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = same_leaf[:1] or nearest(key, known, cutoff=0.6)
    if not near:
        leaves = {name.rpartition(".")[2]: name for name in known}
        near = [leaves[leaf] for leaf in nearest(key, leaves, cutoff=0.6)]
    return f"; did you mean {near[0]!r}?" if near else ""
