"""The parts of a model for which reports add up bytes: ``stem``, ``stages.1``, ``net.layer1``.

They are the model's own parts. But a part that holds nearly everything tells the reader nothing:
the stages of a ResNet are in a list ``stages``, a network from a library in a wrapper ``net``. So
we open such a part, and each module in it is a stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

OUTSIDE = "(outside)"
"""The stage of operators outside the model's parts: in its own ``forward`` or in the loss."""

# of the layers; the longest of a network's four stages has up to three quarters
_MAX_SHARE = 0.8
_LONGEST = 10  # colours in a picture: a longer list of blocks is one stage


def stages_of(paths: Collection[str]) -> dict[str, str]:
    """The stage of each module, by path; ``paths`` are of the modules or steps of one model."""
    parents = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
    layers = [path for path in paths if path not in parents]
    opened = ""
    while parts := _parts(layers, opened):
        name, count = parts.most_common(1)[0]
        inside = _parts(layers, f"{opened}{name}.")
        is_long = len(inside) > _LONGEST and len({n.rstrip("0123456789") for n in inside}) == 1
        if not inside or is_long or count <= _MAX_SHARE * len(layers):
            break
        opened = f"{opened}{name}."
    return {path: _stage(path, opened) for path in paths}


def _parts(layers: Collection[str], prefix: str) -> Counter[str]:
    """The modules directly below a prefix, and their numbers of layers."""
    inside = (layer.removeprefix(prefix) for layer in layers if layer.startswith(prefix))
    return Counter(path.partition(".")[0] for path in inside)


def _stage(path: str, opened: str) -> str:
    """The first module on a path that is not opened."""
    ends = [i for i, letter in enumerate(path) if letter == "."]
    stages = (path[:i] for i in (*ends, len(path)))
    return next((stage for stage in stages if not opened.startswith(f"{stage}.")), OUTSIDE)
