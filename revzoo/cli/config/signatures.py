"""The options of functions, classes and configuration files, read from the files.

Python's ``inspect`` needs an import: two seconds for torch, six for Lightning, too long just to
report a wrong name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

# how a file of configs/ inherits from another: defaults: [base/residual@_here_, _self_]
_BASE = re.compile(r"([\w/]+)@_here_")
MODEL_SOURCES = Path(__file__).parents[2] / "models"


def table_options(module: str, table: str, *, positional: bool = False) -> dict[str, list[str]]:
    """The options of each row of ``table: ... = {"name": function_or_class}``.

    Args:
        module: the dotted name of a module, which defines its rows or imports them by name from
            another module of the package. Other rows have no options.
        table: the name of the dictionary.
        positional: whether positional parameters are options too.

    Returns:
        The names of the options, by the name of the row; empty if the module comes without a source
        file.
    """
    rows = table_rows(module, table)
    return {name: options(module, row, positional=positional) for name, row in rows.items()}


def table_rows(module: str, table: str) -> dict[str, str]:
    """The rows of ``table: ... = {"name": row}`` as source text; empty without a source file."""
    for node in _statements(module):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table:
            assert isinstance(node.value, ast.Dict)
            return dict(zip(_keys(node.value), map(ast.unparse, node.value.values), strict=True))
    return {}


def options(module: str, name: str, *, positional: bool = False) -> list[str]:
    """The keyword-only parameters of a function, or of a class's constructor.

    With ``positional``, the positional ones, too. A class without a constructor inherits the one of
    its first base. Empty for a name that is neither, and without a source file.
    """
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
    parameters = [*(node.args.args if positional else ()), *node.args.kwonlyargs]
    return [parameter.arg for parameter in parameters if parameter.arg != "self"]


def fields(module: str, name: str) -> list[str]:
    """The fields of a dataclass, in order; empty without source."""
    _, node = _definition(module, name)
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [ast.unparse(item.target) for item in body if isinstance(item, ast.AnnAssign)]


def model_keywords(name: str) -> list[str]:
    """The keywords of a model: of ``create_model``, of its network class and of its row's class.

    If several network classes share a file, the keywords of all of them. Empty for a name that is
    not a key of a table ``...: dict[str, Row]`` in ``revzoo.models``, and without source files.
    """
    for module in [f"revzoo.models.{path.stem}" for path in sorted(MODEL_SOURCES.glob("*.py"))]:
        statements = _statements(module)
        for node in statements:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
                continue
            if name in _keys(node.value):
                row_class = (
                    ast.unparse(node.annotation).removeprefix("dict[str, ").removesuffix("]")
                )
                classes = [item.name for item in statements if isinstance(item, ast.ClassDef)]
                # networks are the classes in the file that take a number of classes
                networks = [keys for c in classes if "num_classes" in (keys := options(module, c))]
                return [
                    *options("revzoo.models.registry", "create_model", positional=True),
                    *(key for keys in networks for key in keys),
                    *fields(module, row_class),
                ]
    return []


def with_bases(path: Path) -> list[Path]:
    """The configuration file ``path``, after all files that it inherits from."""
    bases = [path.parent / f"{name}.yaml" for name in _BASE.findall(path.read_text())]
    return [*(file for base in bases for file in with_bases(base)), path]


def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """The module that defines a class or function, and its definition; None if there is none."""
    # the last definition counts: the first ones may be overloads
    for node in reversed(_statements(module)):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _definition(str(node.module), name)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
    return module, None


def _keys(table: ast.Dict) -> list[str]:
    # a key is None for **other
    return [ast.literal_eval(key) for key in table.keys if isinstance(key, ast.Constant)]


@functools.cache
def _statements(module: str) -> Sequence[ast.stmt]:
    """The statements of a module's source file; empty without one."""
    package, *parts = module.split(".")
    # find_spec of the whole name would import the packages above the module
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ()
    path = Path(spec.origin).parent.joinpath(*parts).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ()
