"""The options of functions and classes, read from source files.

Python's ``inspect`` needs an import: two seconds for torch, six for Lightning. A wrong name should
not cost that.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"


def table_options(module: str, table: str, *, positional: bool = False) -> dict[str, list[str]]:
    """The options of each row of ``table: ... = {"name": function_or_class}``.

    Args:
        module: the dotted name of a module; its rows are defined in it, or imported by name from
            another module of the package. A row that is neither has no options.
        table: the name of the dictionary.
        positional: whether positional parameters are options too.

    Returns:
        Empty if the module comes without a source file.
    """
    for node in _statements(module):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table:
            assert isinstance(node.value, ast.Dict)
            return {
                name: options(module, ast.unparse(row), positional=positional)
                for name, row in zip(_keys(node.value), node.value.values, strict=True)
            }
    return {}


def options(module: str, name: str, *, positional: bool = False) -> list[str]:
    """The keyword-only parameters of a function or a class's constructor; empty without source."""
    where, node = _definition(module, name)
    if isinstance(node, ast.ClassDef):
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        constructor = [method for method in methods if method.name == "__init__"]
        if not constructor:  # inherited
            base = ast.unparse(node.bases[0]) if node.bases else ""
            return options(where, base, positional=positional)
        node = constructor[0]
    if not isinstance(node, ast.FunctionDef):
        return []
    ordinary = [a.arg for a in node.args.args if a.arg != "self"] if positional else []
    return [*ordinary, *(a.arg for a in node.args.kwonlyargs)]


def model_keywords(name: str) -> list[str]:
    """The keywords of a model: of ``create_model``, of its network class and of its row.

    Of all network classes, where several share a file. Empty for a name that is no key of a table
    in ``revzoo.models``, and without source files.
    """
    for module in [f"revzoo.models.{path.stem}" for path in sorted(MODELS.glob("*.py"))]:
        statements = _statements(module)
        for node in statements:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
                continue
            if name in _keys(node.value):
                row = ast.unparse(node.annotation).removeprefix("dict[str, ").removesuffix("]")
                _, fields = _definition(module, row)
                assert isinstance(fields, ast.ClassDef)
                classes = [item.name for item in statements if isinstance(item, ast.ClassDef)]
                networks = [options(module, each) for each in classes]
                return [
                    *options("revzoo.models.registry", "create_model", positional=True),
                    *(key for network in networks if "num_classes" in network for key in network),
                    *(ast.unparse(x.target) for x in fields.body if isinstance(x, ast.AnnAssign)),
                ]
    return []


def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """The class or function of this name, and the module that defines it."""
    # the last definition counts: the first ones may be overloads
    for node in reversed(_statements(module)):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _definition(str(node.module), name)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
    return module, None


def _keys(table: ast.Dict) -> list[str]:
    # None for **other
    return [ast.literal_eval(key) for key in table.keys if isinstance(key, ast.Constant)]


@functools.cache
def _statements(module: str) -> Sequence[ast.stmt]:
    """The statements of a module's source file; empty without one."""
    package, *parts = module.split(".")
    # of the whole name, it would import the packages above the module
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ()
    path = Path(spec.origin).parent.joinpath(*parts).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ()
