"""Models by name: ``create_model("revnet38")`` and ``list_models("revnet*")``.

The names are those of the variant tables; a table's rows can be changed by keyword, so a wider or
shallower network needs no new name.
"""

import difflib
import fnmatch
import inspect
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, NamedTuple

from revzoo.models.resnet import RESNETS, ResNet
from revzoo.models.revnet import REVNETS, RevNet
from revzoo.models.staged import StagedNetwork
from revzoo.models.variant import Variant


class Entry(NamedTuple):
    """A network class and the row of its table."""

    network: type[StagedNetwork]
    variant: Variant


MODELS: dict[str, Entry] = {
    **{name: Entry(RevNet, variant) for name, variant in REVNETS.items()},
    **{name: Entry(ResNet, variant) for name, variant in RESNETS.items()},
}

_VARIANT_KEYWORDS = tuple(field.name for field in fields(Variant))
_NETWORK_KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(StagedNetwork).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match ``pattern`` (``*``, ``?``, ``[...]``), sorted.

    Example:
        >>> list_models("revnet1*")
        ['revnet104', 'revnet110', 'revnet164']
    """
    return sorted(name for name in MODELS if fnmatch.fnmatchcase(name, pattern))


def create_model(
    name: str,
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    memory: str | None = None,
    drop_rate: float = 0.0,
    **overrides: Any,
) -> StagedNetwork:
    """Create a model, randomly initialised, in training mode.

    Args:
        name: one of :func:`list_models`.
        num_classes: number of logits.
        in_chans: channels of the images.
        memory: memory mode (see :func:`revzoo.set_memory`); None for the model's own default:
            ``"invert"`` for reversible models, ``"store"`` for others.
        drop_rate: probability of dropping a pooled feature before the classifier.
        overrides: ``dropout`` (probability inside the residual functions), or fields of
            :class:`~revzoo.models.variant.Variant`, such as ``units=(1, 1, 1)``.

    Returns:
        A module that maps images ``(B, in_chans, H, W)`` to logits ``(B, num_classes)``.

    Raises:
        ValueError: unknown name or keyword, or a value out of range.

    Example:
        >>> create_model("revnet38", num_classes=100).num_classes
        100
    """
    if name not in MODELS:
        raise ValueError(
            f"There is no model {name!r}; "
            f"{_nearest(name, MODELS)}list_models() gives all {len(MODELS)} names."
        )
    network, variant = MODELS[name]
    known = (*_NETWORK_KEYWORDS, *_VARIANT_KEYWORDS)
    for keyword in overrides:
        if keyword not in known:
            raise ValueError(
                f"{name} takes no keyword {keyword!r}; {_nearest(keyword, known)}"
                f"valid keywords are {', '.join(known)}."
            )
    changes = {key: overrides.pop(key) for key in _VARIANT_KEYWORDS if key in overrides}
    return network(
        replace(variant, **changes),
        num_classes=num_classes,
        in_chans=in_chans,
        memory=memory,
        drop_rate=drop_rate,
        **overrides,
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, matches))}? " if matches else ""
