"""The parts of a model for which reports add up bytes: ``stem``, ``stages.1``, ``layer1``.

They are the model's own parts. But a part that holds nearly everything tells the reader nothing:
the stages of a ResNet are in a list ``stages``, a network from a library in a wrapper ``net``. So
we open such a part, and each module in it is a stage.
"""

from __future__ import annotations

from collections.abc import Collection

OUTSIDE = "(outside)"
"""The stage of operators outside the model's parts: in its own ``forward`` or in the loss."""

# of the layers; the longest of a network's four stages has up to three quarters
_MAX_SHARE = 0.8
_LONGEST = 10  # colours in a picture: a longer list of blocks is one stage


def stages_of(paths: Collection[str]) -> dict[str, str]:
    """The stage of each module.

    Args:
        paths: of the modules of a model, or of its steps, without the model's own empty path.

    Returns:
        Path to stage. The name of a wrapper that holds the whole model is left out.
    """
    parents = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
    layers = [path for path in paths if path not in parents]
    opened = wrapper = ""
    while parts := _parts(layers, opened):
        name = max(parts, key=parts.__getitem__)
        inside = _parts(layers, f"{opened}{name}.")
        # "layer_0" and "layer_1" are items of a list; bare numbers mean nothing without its name
        kinds = {item.rstrip("0123456789") for item in inside}
        wraps = not opened and len(parts) == 1 and kinds != {""}
        is_long = len(kinds) == 1 and len(inside) > _LONGEST
        if not inside or (not wraps and (parts[name] <= _MAX_SHARE * len(layers) or is_long)):
            break
        opened = f"{opened}{name}."
        wrapper = opened if wraps else wrapper
    return {path: _stage(path, opened).removeprefix(wrapper) for path in paths}


def _parts(layers: Collection[str], prefix: str) -> dict[str, int]:
    """The modules directly below a prefix, and their numbers of layers."""
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.startswith(prefix):
            name = layer.removeprefix(prefix).partition(".")[0]
            counts[name] = counts.get(name, 0) + 1
    return counts


def _stage(path: str, opened: str) -> str:
    """The first module on a path that is not opened."""
    stage = ""
    for name in path.split("."):
        stage += name
        if not opened.startswith(f"{stage}."):
            return stage
        stage += "."
    return OUTSIDE
