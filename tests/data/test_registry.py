"""Data modules by name, from the package and registered by users."""

import pytest

import revzoo
from revzoo.cli.run.build import build_data
from revzoo.data import CIFAR10, CIFAR100, DATA, Digits, ImageFolder, Masks, Shapes, Table


class Sevens(Digits):
    """A user's set."""


@pytest.fixture
def table(monkeypatch):
    table = dict(DATA)
    for module in ("revzoo.data.registry", "revzoo.cli.run.build"):
        monkeypatch.setattr(f"{module}.DATA", table)
    return table


def test_the_package_registers_its_own():
    kinds = (CIFAR10, CIFAR100, Digits, ImageFolder, Masks, Shapes, Table)
    assert {f"revzoo.data.{kind.__name__}": kind for kind in kinds} == DATA


def test_a_registered_set_is_built_from_a_configuration(table):
    revzoo.register_data("sevens", Sevens)
    assert type(build_data({"_target_": "sevens", "batch_size": 7})) is Sevens


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("revzoo.data.Digits", Sevens, "'revzoo.data.Digits' is already registered"),
        ("digits", type("Digits", (Digits,), {}), "class Digits is already registered"),
        ("digits", Sevens(), "expected a subclass of ImageData"),
        ("digits", dict, "expected a subclass of ImageData"),
    ],
)
def test_what_cannot_be_registered_is_refused(name, kind, message, table):
    with pytest.raises((ValueError, TypeError), match=message):
        revzoo.register_data(name, kind)
    assert table == DATA
