"""The options of a table's functions and classes, read from source files.

Python's ``inspect`` needs an import, which takes seconds where the table needs Lightning.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]  # the folder that holds revzoo/


def table_options(module: str, table: str) -> dict[str, list[str]]:
    """The keyword-only parameters of each row of ``table: ... = {"name": function_or_class}``.

    Args:
        module: the dotted name of a module of this package; its rows are defined in it or imported
            from another one of the package.
        table: the name of the dictionary.

    Returns:
        Empty if the package comes without source files.
    """
    tree = _parsed(module)
    if tree is None:
        return {}
    rows = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table
    )
    assert isinstance(rows, ast.Dict)
    return {
        ast.literal_eval(key): _keyword_only(ast.unparse(value), tree)
        for key, value in zip(rows.keys, rows.values, strict=True)
        if key is not None
    }


def _keyword_only(name: str, tree: ast.Module | None) -> list[str]:
    """The keyword-only parameters of a function, or of a class's own ``__init__``."""
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _keyword_only(name, _parsed(str(node.module)))
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _keyword_only("__init__", ast.Module(node.body, []))
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [argument.arg for argument in node.args.kwonlyargs]
    return []


def _parsed(module: str) -> ast.Module | None:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None
