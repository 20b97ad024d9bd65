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

from revzoo.models.classifier import ImageClassifier
from revzoo.models.irevnet import IREVNETS, IRevNet
from revzoo.models.resnet import RESNETS, ResNet
from revzoo.models.revnet import REVNETS, RevNet
from revzoo.models.revvit import REVVITS, RevViT


class Entry(NamedTuple):
    """A network class and the row of its table."""

    network: type[ImageClassifier]
    variant: Any

    @property
    def variant_keywords(self) -> tuple[str, ...]:
        """The fields of the row."""
        return tuple(field.name for field in fields(self.variant))

    @property
    def network_keywords(self) -> tuple[str, ...]:
        """The keyword arguments of the class."""
        parameters = inspect.signature(self.network).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


MODELS: dict[str, Entry] = {
    **{name: Entry(RevNet, variant) for name, variant in REVNETS.items()},
    **{name: Entry(ResNet, variant) for name, variant in RESNETS.items()},
    **{name: Entry(IRevNet, variant) for name, variant in IREVNETS.items()},
    **{name: Entry(RevViT, variant) for name, variant in REVVITS.items()},
}


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
) -> ImageClassifier:
    """Create a model, randomly initialised, in training mode.

    Args:
        name: one of :func:`list_models`.
        num_classes: number of logits.
        in_chans: channels of the images.
        memory: memory mode (see :func:`revzoo.set_memory`); None for the model's own default:
            ``"invert"`` for reversible models, ``"store"`` for others.
        drop_rate: probability of dropping a pooled feature before the classifier.
        overrides: ``dropout`` (probability inside the residual functions), or fields of the
            network's row (:class:`~revzoo.models.variant.Variant`,
            :class:`~revzoo.models.irevnet.IRevNetVariant`,
            :class:`~revzoo.models.revvit.RevViTVariant`), such as ``units=(1, 1, 1)``.

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
    entry = MODELS[name]
    known = (*entry.network_keywords, *entry.variant_keywords)
    for keyword in overrides:
        if keyword not in known:
            raise ValueError(
                f"{name} takes no keyword {keyword!r}; {_nearest(keyword, known)}"
                f"valid keywords are {', '.join(known)}."
            )
    changes = {key: overrides.pop(key) for key in entry.variant_keywords if key in overrides}
    network: Any = entry.network
    model: ImageClassifier = network(
        replace(entry.variant, **changes),
        num_classes=num_classes,
        in_chans=in_chans,
        memory=memory,
        drop_rate=drop_rate,
        **overrides,
    )
    return model


def arguments_of(variant: Any, names: Iterable[str], **given: Any) -> dict[str, Any]:
    """Arguments of :func:`create_model` for a network like ``variant``.

    Args:
        variant: a row, as in a model's table.
        names: models of the same table. The first whose row is equal is named; if there is none,
            the first of all, with the fields that differ.
        given: further arguments, passed on.
    """
    names = list(names)
    name = next((name for name in names if MODELS[name].variant == variant), names[0])
    row = MODELS[name].variant
    changes = {f.name: getattr(variant, f.name) for f in fields(variant)}
    differing = {key: value for key, value in changes.items() if value != getattr(row, key)}
    return {"name": name, **given, **differing}


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, matches))}? " if matches else ""
