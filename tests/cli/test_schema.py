"""The schema says what the constructors say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from typing import Any

import pytest
import pytorch_lightning as pl
from omegaconf import MISSING

from revzoo.cli import schema
from revzoo.cli.run import build, tune
from revzoo.cli.schema import RUN, Chosen, Section, chosen
from revzoo.core.modes import INVERTING
from revzoo.core.modes import MODES as CORE_MODES
from revzoo.data import registry as data
from revzoo.data.augment import Augment
from revzoo.data.module import ImageData
from revzoo.layers.side_bits import MAX_BITS
from revzoo.models.components import ACTIVATIONS, POOLS
from revzoo.models.registry import MODELS, RUNS, WEIGHTS_ARGUMENTS
from revzoo.models.revnet import CONVENTIONS
from revzoo.profiling.plan import PLANNED
from revzoo.training import loggers, tuning
from revzoo.training.callbacks import registry
from revzoo.training.optim import optimizers


def defaults_of(section: Section, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {n: o.default for n, o in section.options.items() if n not in without}


def keywords(*functions: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters and their defaults."""
    return {
        p.name: MISSING if p.default is p.empty else p.default
        for function in functions
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


def test_callbacks() -> None:
    packaged = {n: f for n, f in registry.CALLBACKS.items() if f.__module__.startswith("revzoo.")}
    assert set(schema.CALLBACKS) == set(packaged)
    for name, factory in packaged.items():
        assert defaults_of(schema.CALLBACKS[name]) == keywords(factory), name


def test_data() -> None:
    packaged = {n: f for n, f in data.DATA.items() if f.__module__.startswith("revzoo.")}
    assert set(schema.DATA) == set(packaged)
    for name, kind in packaged.items():
        bases = [base for base in reversed(kind.__mro__) if issubclass(base, ImageData)]
        own = {
            p.name: MISSING if p.default is p.empty else p.default
            for base in bases  # a subclass passes the options of its base on
            for p in inspect.signature(base).parameters.values()
            if p.kind is not p.VAR_KEYWORD
        }
        expected = keywords(ImageData) | own
        assert defaults_of(schema.DATA[name], without=("_target_",)) == expected, name


@pytest.mark.parametrize(
    ("section", "kind", "needed"),
    [
        (schema.AUGMENT, Augment, ()),
        # a run's description has these
        (schema.OPTIM, optimizers.OptimSpec, ("name", "lr", "weight_decay")),
        *((schema.SCHEDULES[name], kind, ("name",)) for name, kind in optimizers.SCHEDULES.items()),
    ],
)
def test_dataclasses(section: Section, kind: Any, needed: tuple[str, ...]) -> None:
    expected = {
        f.name: f.default if f.default_factory is NO_DEFAULT else f.default_factory()
        for f in fields(kind)
        if f.name not in needed
    }
    assert defaults_of(section, without=needed) == expected
    assert all(section.options[name].default == MISSING for name in needed)


def test_loggers_and_tuners() -> None:
    assert [kind for kind in schema.LOGGERS if kind not in ("csv", None)] == [*loggers.LOGGERS]
    for kind, section in schema.LOGGERS.items():
        own = keywords(loggers.LOGGERS[kind]) if kind in loggers.LOGGERS else {}
        assert defaults_of(section, without=("kind",)) == own
    searches = {"lr": tuning.find_lr, "batch_size": tuning.find_batch_size}
    assert set(schema.TUNERS) == set(tune.KINDS) == set(searches)
    for kind, search in searches.items():
        assert set(schema.TUNERS[kind].options) - {"kind", "then"} <= set(keywords(search))
    steps = schema.TUNERS["lr"].options["steps"]
    assert steps.within == f">= {tuning.SKIPPED + 5}"


def test_the_trainer() -> None:
    arguments = keywords(pl.Trainer)
    for name, default in defaults_of(schema.TRAINER).items():
        if name == "timeout":  # of the process group
            continue
        assert name in arguments
        assert default in (MISSING, arguments[name]), name
    assert set(schema.TRAINER.options["profiler"].choices) == set(build.PROFILERS)


@pytest.mark.parametrize(
    "name",
    [
        *("revnet38", "resnet32", "irevnet163", "revvit_base", "vit_cifar", "revnet104"),
        *("revbifpn_s0", "revcol_tiny", "revmvit_base", "momentumnet18", "iresnet64"),
        *("iunet2d", "revunet3d"),
    ],
)
def test_models(name: str) -> None:
    section = chosen("model", RUN.parts["model"], {"name": name})
    entry = MODELS[name]
    taken = {*entry.network_keywords, *entry.variant_keywords} - {*schema.FITTED}
    own = {*section.options} - {"name", *WEIGHTS_ARGUMENTS}
    assert own == taken
    network = keywords(entry.network)
    for key in own & network.keys():
        assert section.options[key].default == network[key], key


def test_words() -> None:
    assert tuple(CORE_MODES) == schema.MODES
    assert tuple(PLANNED) == schema.PLANS
    assert schema.MEMORY.options["inverting"].choices == INVERTING
    assert {"sgd", "adamw", "muon", "lamb"} == set(schema.OPTIMIZERS) <= set(optimizers.OPTIMIZERS)
    assert tuple(ACTIVATIONS) == schema.ACTIVATIONS
    assert {*schema.NETWORK.options["global_pool"].choices, ""} == {*POOLS, ""}
    assert set(schema.REVNET.options["convention"].choices) == set(CONVENTIONS)
    bits, runs = (schema.CONVERTIBLE.options[f"reversible_{name}"] for name in ("bits", "runs"))
    assert bits.choices == ("auto", *range(1, MAX_BITS + 1))
    assert runs.choices == RUNS


def test_every_option_has_a_comment() -> None:
    def options(part: Section | Chosen) -> Mapping[str, Any]:
        if isinstance(part, Chosen):
            return {f"{k}.{n}": o for k, s in part.sections.items() for n, o in options(s).items()}
        own = {f"{n}": o for n, o in part.options.items()}
        return own | {f"{k}.{n}": o for k, p in part.parts.items() for n, o in options(p).items()}

    found = options(RUN)
    assert len(found) > 300
    assert [name for name, option in found.items() if not option.about] == []
