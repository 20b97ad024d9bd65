from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import pytorch_lightning as pl

from revzoo._checks import keyword_names
from revzoo.cli.config import build, signatures
from revzoo.cli.config.signatures import fields, model_keywords, options, table_options
from revzoo.data import registry as data
from revzoo.data.module import ImageData
from revzoo.models.registry import MODELS, create_model
from revzoo.training import loggers
from revzoo.training.callbacks import registry
from revzoo.training.optim import optimizers


def test_the_sources_have_the_options_of_every_callback() -> None:
    packaged = {n: f for n, f in registry.CALLBACKS.items() if f.__module__.startswith("revzoo.")}
    read = table_options(registry.__name__, "CALLBACKS")
    assert read == {name: keyword_names(factory) for name, factory in packaged.items()}


def test_the_sources_have_the_options_of_every_data_set() -> None:
    packaged = {n: f for n, f in data.DATA.items() if f.__module__.startswith("revzoo.")}
    read = table_options(data.__name__, "DATA", positional=True)
    for name, kind in packaged.items():
        parameters = inspect.signature(kind).parameters.values()
        assert read.pop(name) == [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    assert not read
    assert options(ImageData.__module__, "ImageData") == keyword_names(ImageData)


def test_the_sources_have_the_other_tables() -> None:
    expected = {name: keyword_names(logger) for name, logger in loggers.LOGGERS.items()}
    assert table_options(loggers.__name__, "LOGGERS") == expected
    packaged = [n for n in optimizers.OPTIMIZERS if n in ("sgd", "adamw", "muon")]
    assert list(table_options(optimizers.__name__, "OPTIMIZERS")) == packaged
    assert fields(optimizers.__name__, "OptimSpec") == [
        field.name for field in dataclasses.fields(optimizers.OptimSpec)
    ]
    assert list(table_options(build.__name__, "PROFILERS")) == list(build.PROFILERS)


def test_the_source_of_lightning_has_the_trainers_arguments() -> None:
    read = options("pytorch_lightning.trainer.trainer", "Trainer")
    assert read == keyword_names(pl.Trainer)
    assert "max_epochs" in read


def test_a_model_takes_the_keywords_in_the_sources() -> None:
    tables = ("revnet38", "resnet32", "irevnet163", "revvit_base", "vit_cifar", "revnet104")
    for name in tables:
        entry = MODELS[name]
        parameters = inspect.signature(create_model).parameters.values()
        own = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        expected = {*own, *entry.network_keywords, *entry.variant_keywords}
        assert set(model_keywords(name)) == expected, name
    assert model_keywords("torchvision:resnet18") == []


def test_without_source_files_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signatures, "find_spec", lambda name: None)
    signatures._statements.cache_clear()
    try:
        assert table_options(registry.__name__, "CALLBACKS") == {}
        assert options(ImageData.__module__, "ImageData") == []
        assert model_keywords("revnet38") == []
    finally:
        signatures._statements.cache_clear()
