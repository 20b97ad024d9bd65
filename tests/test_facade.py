"""``import revzoo`` offers the public names and no others, and loads torch on first use."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import revzoo

API = import_module("revzoo.api")


@pytest.mark.parametrize("name", API.__all__)
def test_every_name_is_the_same_object_as_in_the_api(name):
    assert getattr(revzoo, name) is getattr(API, name)
    assert name in dir(revzoo)


def test_the_list_of_names_is_sorted_and_whole():
    assert API.__all__ == sorted(API.__all__)
    public = {n for n in vars(API) if not n.startswith("_") and hasattr(vars(API)[n], "__module__")}
    assert public | set(API._LATER) == set(API.__all__)


def test_a_star_imports_every_name():
    """It imported none: without ``__all__``, the star imports only names that are loaded."""
    assert revzoo.__all__ == API.__all__
    names = {}
    exec("from revzoo import *", names)
    assert set(API.__all__) <= names.keys()


@pytest.mark.parametrize("package", ["revzoo", "revzoo.training"])
def test_no_module_has_the_name_of_a_public_name(package):
    """Its import replaces the function: ``revzoo.training.quiet`` was temporarily a module."""
    folder = Path(import_module(package).__file__).parent
    modules = {path.stem for path in folder.iterdir()}
    assert not modules & set(import_module(f"{package}.api").__all__)


@pytest.mark.parametrize("name", ["nothing", "_private", "__nothing__"])
def test_other_names_are_not_attributes(name):
    with pytest.raises(AttributeError, match=f"'revzoo' has no attribute '{name}'"):
        getattr(revzoo, name)


def test_the_package_alone_does_not_load_torch():
    script = "import sys, revzoo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_models_do_not_load_the_compiler_torchvision_or_lightning():
    """Each takes seconds to import, and a model does not need them."""
    script = (
        "import sys, revzoo; revzoo.create_model('revnet38'); revzoo.create_model('revvit_cifar')\n"
        "heavy = {'torchvision', 'torch._dynamo', 'pytorch_lightning'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
