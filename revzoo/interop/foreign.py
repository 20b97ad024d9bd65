"""Reads the state dict in other programs' checkpoints.

:mod:`revzoo.models.weights_file` reads the file, and refuses what holds more than tensors and plain
values, such as a whole model or an ``argparse.Namespace``: loading these runs code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from revzoo.models.weights_file import check_dense, read_torch_file
from revzoo.weights.errors import UnreadableWeightsError

Weights = Mapping[str, Tensor]

WRAPPERS = ("state_dict", "model", "model_state_dict", "net")
"""Keys under which training scripts keep the state dict."""


class ConversionError(ValueError):
    """The file is not a checkpoint of the expected kind, or cannot be read safely."""


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint, on the CPU; other values in it are ignored.

    It may be the whole file or an entry of :data:`WRAPPERS`. The prefix ``module.`` of all keys
    (``DataParallel``) is removed.

    Raises:
        OSError: the file cannot be read.
        ConversionError: it is not a checkpoint, or holds more than tensors and plain values.
    """
    path = Path(path)
    path.stat()  # a missing file is an OSError, an unreadable one a ConversionError
    try:
        content = read_torch_file(path)
    except UnreadableWeightsError as error:
        raise ConversionError(str(error)) from None
    while isinstance(content, Mapping):
        inner = next((key for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = content[inner]
    if not (
        isinstance(content, Mapping)
        and any(isinstance(value, Tensor) for value in content.values())
        and all(isinstance(key, str) for key in content)
    ):
        raise ConversionError(
            f"{path} holds no state_dict: expected one, or a dictionary with one under "
            f"{' or '.join(map(repr, WRAPPERS))}"
        )
    tensors = dict(content)
    try:
        check_dense(tensors, str(path))
    except UnreadableWeightsError as error:
        raise ConversionError(str(error)) from None
    # a loop: a model wrapped in DataParallel twice has the prefix twice
    while tensors and all(key.startswith("module.") for key in tensors):
        tensors = {key.removeprefix("module."): value for key, value in tensors.items()}
    return tensors
