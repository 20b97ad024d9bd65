"""``revzoo convert``: published weights of other programs, as safetensors beside a description.

    revzoo convert irevnet model_best.pth.tar irevnet301.safetensors

writes the tensors under the names of our model to ``irevnet301.safetensors``, and the arguments of
``create_model`` that make it to ``irevnet301.json``. Each file appears whole or not at all.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from revzoo.models.published import SOURCES, Published, convert_published

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one file; the exit status is 2 where it cannot be, with the reason on stderr."""
    options = _parser().parse_args(argv)
    try:
        published = convert_published(
            options.path, options.source, name=options.name, **dict(options.overrides)
        )
        write_published(published, options.output)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"revzoo convert: {error}\n")
        return 2
    return 0


def write_published(published: Published, output: Path) -> None:
    """Write ``output`` (safetensors) and its description, ``.json`` in the place of the suffix.

    Raises:
        ValueError: ``output`` is not named ``.safetensors``.
        OSError: its folder cannot be written.
    """
    if output.suffix != ".safetensors":
        raise ValueError(f"{output}: expected a file name that ends in .safetensors")
    tensors = {key: value.contiguous() for key, value in published.model.state_dict().items()}
    text = json.dumps(published.spec, indent=2) + "\n"
    _write(output, lambda path: save_file(tensors, path))
    _write(output.with_suffix(".json"), lambda path: path.write_text(text))
    log.info("wrote %s: %s", output, published.spec["name"])


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` make a file beside ``path`` and move it there when it is on the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="revzoo convert", description="Convert published weights to safetensors and JSON."
    )
    parser.add_argument("source", choices=list(SOURCES), help="the program that wrote the file")
    parser.add_argument("path", type=Path, help="its checkpoint")
    parser.add_argument("output", type=Path, help="the file to write, *.safetensors")
    parser.add_argument("--name", help="the network, where its shapes do not tell")
    parser.add_argument(
        "overrides",
        nargs="*",
        type=_override,
        metavar="KEY=VALUE",
        help="arguments of create_model, such as strides=1,1,2",
    )
    return parser


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


if __name__ == "__main__":
    sys.exit(main())
