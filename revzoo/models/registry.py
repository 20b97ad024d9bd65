"""Models by name: ``create_model("revnet38")`` and ``list_models("revnet*")``.

The names come from the variant tables. Keywords change the fields of a row, so a wider or shallower
network needs no new name.
"""

import fnmatch
import inspect
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import nn

from revzoo._checks import Size, check_choice, check_new_name, did_you_mean, keyword_names
from revzoo._libraries import check_library_name, matching_names, unknown_model
from revzoo.core.modes import set_memory
from revzoo.layers.make_reversible import (
    make_reversible,
    make_runs,
    reversible_blocks,
    set_bits,
)
from revzoo.models.iresnet import IRESNETS, IResNet
from revzoo.models.irevnet import IREVNETS, IRevNet
from revzoo.models.iunet import IUNETS, IUNet
from revzoo.models.momentumnet import MOMENTUMNETS, MomentumNet
from revzoo.models.network import FeatureNet, ImageNetwork
from revzoo.models.pretrained import (
    NamedModel,
    find_model,
    load_weights,
    read_weights,
    shape_of_weights,
)
from revzoo.models.revbifpn import REVBIFPNS, RevBiFPN
from revzoo.models.revcol import REVCOLS, RevCol
from revzoo.models.revmvit import REVMVITS, RevMViT
from revzoo.models.revnet import RESNETS, REVNETS, ResNet, RevNet
from revzoo.models.revunet import REVUNETS, RevUNet
from revzoo.models.revvit import REVVITS, VITS, RevViT, ViT
from revzoo.models.save import Spec
from revzoo.models.weights_file import TensorFile, read_weights_file
from revzoo.models.wrapped import (
    LIBRARY_CLASSES,
    LibraryNetwork,
    LibraryVariant,
    OwnNetwork,
    is_library_name,
    keywords_of,
)
from revzoo.weights.errors import EntryError
from revzoo.weights.source import SAVED
from revzoo.weights.table import SHIPPED, WeightsTable

# arguments of create_model that make the blocks of plain networks reversible
CONVERSION = ("reversible_bits", "reversible_runs", "reversible_size")
RUNS = ("paying", "checkpoint", "all")


class Architecture(NamedTuple):
    """A network class and a row of its table."""

    network: type[ImageNetwork]
    variant: Any

    @property
    def variant_keywords(self) -> tuple[str, ...]:
        """The fields of the row."""
        return tuple(field.name for field in fields(self.variant))

    @property
    def network_keywords(self) -> tuple[str, ...]:
        """The keyword arguments of the class."""
        return (*keyword_names(self.network), *(CONVERSION if self.network.convertible else ()))

    @property
    def keywords(self) -> tuple[str, ...]:
        """What ``create_model`` takes for it."""
        return (*self.network_keywords, *self.variant_keywords)


class _Models(dict[str, Architecture]):
    """The zoo's networks, and networks of libraries by name (``torchvision:resnet50``)."""

    # by form alone: asking the library would import it, which takes seconds
    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or is_library_name(name)

    def __missing__(self, name: str) -> Architecture:
        if not is_library_name(name):
            raise KeyError(name)
        check_library_name(name)  # raises for a name that the library does not list
        return Architecture(LibraryNetwork, LibraryVariant(name))


TABLES: Mapping[type[ImageNetwork], Mapping[str, Any]] = {
    RevNet: REVNETS,
    ResNet: RESNETS,
    IRevNet: IREVNETS,
    RevBiFPN: REVBIFPNS,
    RevViT: REVVITS,
    RevMViT: REVMVITS,
    RevCol: REVCOLS,
    MomentumNet: MOMENTUMNETS,
    IResNet: IRESNETS,
    ViT: VITS,
    IUNet: IUNETS,
    RevUNet: REVUNETS,
}
MODELS: dict[str, Architecture] = _Models(
    (name, Architecture(network, row))
    for network, rows in TABLES.items()
    for name, row in rows.items()
)


def register_model(name: str, network: Callable[..., nn.Module], variant: Any = None) -> None:
    """Add a model to the zoo: ``create_model(name)``, commands and configurations then take it.

    Args:
        name: letters, digits and underscores; a dot separates the tag of weights.
        network: your own class or function that returns a classifier: a module that maps images
            ``(B, in_chans, H, W)`` to logits ``(B, num_classes)`` and ends with an ``nn.Linear``;
            or images or volumes to ``(B, num_classes, *sizes)``, which ends with a convolution. It
            takes ``num_classes`` and ``in_chans``; the model's other keywords are its other
            parameters, which need defaults. A module for one image size only has an attribute
            ``image_size``, in pixels, or (height, width).

            Or a subclass of :class:`~revzoo.models.network.ImageNetwork` whose constructor takes a
            row and keywords: ``num_classes``, ``in_chans``, ``memory`` and others.
        variant: the row of an ``ImageNetwork``, a dataclass, such as
            :class:`~revzoo.models.revnet.Variant`.

    Raises:
        ValueError: the name is taken, or has invalid characters; a parameter has the name of a
            keyword of :func:`create_model`.
        TypeError: ``network`` or ``variant`` has the wrong type, or ``network`` needs other
            arguments.

    Example:
        >>> def mynet(num_classes, in_chans, width=16):
        ...     layers = [nn.Conv2d(in_chans, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        ...     return nn.Sequential(*layers, nn.Linear(width, num_classes))
        >>> revzoo.register_model("mynet", mynet)
        >>> revzoo.create_model("mynet", width=32)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])

        A row of the zoo's RevNet:

        >>> from revzoo.models import RevNet, Variant
        >>> row = Variant(stem_width=32, widths=(32, 64, 112), units=(5, 5, 5))
        >>> revzoo.register_model("revnet62", RevNet, row)
        >>> revzoo.create_model("revnet62")(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    check_new_name("model", name, MODELS)
    if not re.fullmatch(r"\w+", name, re.ASCII):
        raise ValueError(f"model {name!r}: expected a name of letters, digits and underscores")
    kind: Any = network
    if isinstance(kind, type) and issubclass(kind, ImageNetwork):
        if not is_dataclass(variant) or isinstance(variant, type):
            raise TypeError(
                f"model {name!r}: expected a dataclass instance as variant, got {variant!r}"
            )
        MODELS[name] = Architecture(kind, variant)
        return
    if not callable(network) or isinstance(network, nn.Module):
        raise TypeError(
            f"model {name!r}: expected a class, or a function that returns a new module, got "
            f"{network!r:.80}"
        )
    if variant is not None:
        raise TypeError(
            f"model {name!r}: a variant is for subclasses of ImageNetwork; the keywords of "
            f"{network!r:.80} are its parameters"
        )
    row = keywords_of(network)
    reserved = {*inspect.signature(create_model).parameters, "memory", "build", "called"}
    if taken := reserved & vars(row).keys():
        raise ValueError(
            f"model {name!r}: {', '.join(sorted(taken))} is a keyword of create_model itself: give "
            "the parameter another name"
        )
    MODELS[name] = Architecture(OwnNetwork, row)


# arguments of create_model that choose the weights to load
WEIGHTS_ARGUMENTS = ("pretrained", "checkpoint_path", "cache_dir", "table", "allow_nonfinite")
# keywords that do not change the shapes of weights
_SHAPELESS = ("memory", "drop_rate", "drop_path_rate", "dropout", "pretrained")


def list_models(
    filter: str | Sequence[str] = "",
    *,
    pretrained: bool = False,
    exclude_filters: str | Sequence[str] = "",
    table: WeightsTable | None = None,
) -> list[str]:
    """Names of the models, sorted.

    Args:
        filter: one pattern with ``*``, ``?``, ``[...]``, or several; a name must match one. Empty
            for all names of the zoo; ``"torchvision:*"`` and ``"timm:*"`` for these libraries'.
        pretrained: list weights, ``architecture.tag``, instead.
        exclude_filters: patterns of names to leave out.
        table: the weights to list; None for the package's.

    Example:
        >>> revzoo.list_models(["revnet*", "irevnet*"], exclude_filters=["*memcnn", "*1??"])
        ['irevnet13', 'irevnet301', 'irevnet43', 'revnet38', 'revnet56']
    """

    def matching(pattern: str) -> set[str]:
        if pretrained:
            return set((SHIPPED if table is None else table).names(pattern))
        own = {name for name in MODELS if fnmatch.fnmatchcase(name, pattern)}
        return own.union(matching_names(pattern))

    included = set[str]().union(*map(matching, _patterns(filter) or ["*"]))
    return sorted(included.difference(*map(matching, _patterns(exclude_filters))))


def _patterns(patterns: str | Sequence[str]) -> list[str]:
    several = [patterns] if isinstance(patterns, str) else list(patterns or ())
    return [pattern for pattern in several if pattern]


@overload
def create_model(
    name: str | Path, *, features_only: Literal[True], **keywords: Any
) -> FeatureNet: ...


@overload
def create_model(
    name: str | Path, *, features_only: Literal[False] = ..., **keywords: Any
) -> ImageNetwork: ...


def create_model(
    name: str | Path,
    *,
    pretrained: bool = False,
    num_classes: int | None = None,
    in_chans: int | None = None,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    checkpoint_path: str | Path | None = None,
    cache_dir: str | Path | None = None,
    table: WeightsTable | None = None,
    allow_nonfinite: bool = False,
    reversible_bits: int | Literal["auto"] | None = None,
    reversible_runs: str | Sequence[str] | None = None,
    reversible_size: Size | None = None,
    **keywords: Any,
) -> ImageNetwork | FeatureNet:
    """Create a model in training mode, randomly initialised or with trained weights.

    Args:
        name: one of :func:`list_models`, alone or with the tag of weights (``revnet38.cifar10``);
            ``torchvision:NAME`` or ``timm:NAME`` of these libraries' own lists;
            ``hf-hub:owner/name``; a folder made by ``save_pretrained``; or its safetensors file.
        pretrained: load weights: the tag's, or the architecture's default. They come from the
            package or the cache, or are downloaded into the cache, and are verified.
        num_classes: number of logits; None for the number in the weights, or 10. If it differs from
            the weights, the classifier is randomly initialised. 0 for no classifier: the model
            returns pooled features ``(B, num_features)``.
        in_chans: channels of the images; None for the number in the weights, or 3. If it differs
            from the weights, the first convolution is adapted.
        features_only: return a list of feature maps instead, see :class:`FeatureNet`.
        out_indices: the stages whose maps to return, negative ones from the last; a number n for
            the last n; None for all.
        checkpoint_path: a local file of weights to use instead: safetensors, a ``state_dict``
            (.pt, .pth), a training checkpoint (.ckpt) or a publisher's file; or the folder of a
            run, for its best checkpoint, or of ``save_pretrained``. With the tag of the
            publisher's weights in ``name``, the network has their options.
        cache_dir: folder of downloads; None for ``$REVZOO_CACHE``, or the user's cache.
        table: the weights to search for ``name``; None for the package's.
        allow_nonfinite: also load weights with NaN or Inf.
        reversible_bits: make the runs of blocks of a ResNet, ViT or library network reversible, see
            :func:`revzoo.make_reversible`, with 1 to 8 bits or ``"auto"``; ``memory=None`` is then
            ``"exact"``. With None, a saved model keeps its bits, and other networks are plain.
        reversible_runs: ``"paying"`` for the runs that save memory, so the others stay plain;
            ``"checkpoint"`` recomputes the others; ``"all"`` converts all. None for the runs of a
            saved model, or those that pay. A saved model lists its runs here.
        reversible_size: size in pixels of the images for which runs must pay; None for the model's
            ``image_size``.
        keywords: arguments of the network's class, or fields of its row:

            * ``memory``: memory mode, see :func:`revzoo.set_memory`; None for ``"exact"`` in
              reversible models and ``"store"`` in others.
            * ``drop_rate``: probability of dropping a pooled feature before the classifier.
            * ``drop_path_rate``: probability of dropping the last branch; lower for earlier ones.
            * ``dropout``: probability of dropping a value inside the residual functions.
            * ``global_pool``: ``"avg"``, ``"max"``, ``"avgmax"``, ``"catavgmax"``, or ``""`` for
              none, with ``num_classes=0``.
            * fields of the row, such as ``units=(1, 1, 1)``; its class is beside the network's,
              such as :class:`~revzoo.models.revnet.Variant`.

    Returns:
        A module that maps images ``(B, in_chans, H, W)`` to logits ``(B, num_classes)``; a U-Net
        maps signals, images or volumes ``(B, in_chans, *sizes)`` to ``(B, num_classes, *sizes)``.

    Raises:
        ValueError: unknown name or keyword, or a value out of range.
        WeightsError: the weights are unknown, damaged, or do not fit.

    Example:
        >>> revzoo.create_model("revnet38", num_classes=100).num_classes
        100
        >>> model = revzoo.create_model("resnet32.cifar10", pretrained=True, reversible_bits=4)
    """
    if out_indices is not None and not features_only:
        raise ValueError(f"out_indices={out_indices} selects feature maps: add features_only=True")
    if not isinstance(pretrained, bool):
        raise ValueError(
            f"pretrained={pretrained!r}: expected True or False; the name selects the weights, "
            'create_model("ARCHITECTURE.TAG", pretrained=True), see list_models(pretrained=True)'
        )
    numbers = _given(num_classes=num_classes, in_chans=in_chans)
    # options, as in the entry of a saved model
    values = (reversible_bits, reversible_runs, reversible_size)
    keywords |= _given(**dict(zip(CONVERSION, values, strict=True)))
    pretrained = pretrained and checkpoint_path is None  # the file replaces the listed weights
    named = find_model(name, known=MODELS, pretrained=pretrained, cache_dir=cache_dir, table=table)
    file = None
    if checkpoint_path is not None:
        file = read_weights_file(Path(checkpoint_path))
    elif pretrained and named.entry is not None:
        file = read_weights(named.entry, cache_dir=cache_dir)
    # without arguments of the caller, only the entry's options can be wrong
    described = file is not None and named.options and not (numbers or keywords)
    with _blaming_entry(name) if described else nullcontext():
        model = _build(named, file, numbers, keywords)
    entry = named.entry.with_classes() if pretrained and named.entry else None
    if file is not None:
        load_weights(model, file, architecture=named.architecture, allow_nonfinite=allow_nonfinite)
    # after loading, since the weights may choose the bits
    with _blaming_entry(name) if described else nullcontext():
        _convert(model, named, keywords)
    model.entry = entry
    return FeatureNet(model, out_indices) if features_only else model


@contextmanager
def _blaming_entry(name: str | Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise EntryError(f"{name}: its entry describes no network: {error}") from error


def from_pretrained(source: str | Path, **keywords: Any) -> ImageNetwork | FeatureNet:
    """Load a model with weights from a folder of ``save_pretrained`` or ``hf-hub:owner/name``.

    Args:
        source: folder or repository, a folder or file of ``revzoo pack``, or a name of
            :func:`list_models`.
        keywords: as for :func:`create_model`.

    Raises:
        WeightsError: as :func:`create_model`.

    Example:
        >>> entry = revzoo.create_model("revnet38").save_pretrained("my_folder")
        >>> model = revzoo.from_pretrained("my_folder")
    """
    return create_model(source, pretrained=True, **keywords)


def _build(
    named: NamedModel, file: TensorFile | None, numbers: dict[str, Any], keywords: dict[str, Any]
) -> ImageNetwork:
    """The network, with initial values; ``numbers`` and ``keywords`` are the caller's."""
    name, entry = named.architecture, named.entry
    architecture = _architecture_of(name)
    network: Any = architecture.network
    options = {**named.options, **keywords}
    known = architecture.keywords
    for keyword in options:
        if keyword not in known:
            if keyword == "reversible_bits":
                raise ValueError(_refused_bits(name))
            raise ValueError(
                f"{name} takes no keyword {keyword!r}: expected one of {', '.join(known)}"
                + did_you_mean(keyword, known, n=3)
            )
    # fields of the row change the row; the others are arguments of the class
    of_row = options.keys() & architecture.variant_keywords
    row = replace(architecture.variant, **{key: options[key] for key in of_row})
    others = {key: value for key, value in options.items() if key not in of_row}
    layout = network
    renames = network.adapt_state_dict is not ImageNetwork.adapt_state_dict
    renames = renames or network.published_keys is not ImageNetwork.published_keys
    if file is not None and renames and not issubclass(network, LibraryNetwork):
        # A network without values tells what names its first and last layer. A constructor that
        # reads values of tensors runs on the CPU, where it draws.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            layout = network(row, **_given(in_chans=file.in_chans))
    # the first source that knows a number decides
    shape = ChainMap(
        numbers,
        {} if file is None else shape_of_weights(layout, file),
        {} if entry is None else {"num_classes": entry.num_classes, "in_chans": entry.in_chans},
        {"num_classes": LIBRARY_CLASSES} if options.get("pretrained") else {},
        {"num_classes": 10, "in_chans": 3},
    )
    bits, *_ = (others.pop(key, None) for key in CONVERSION)
    if bits is not None:
        others.pop("memory", None)  # the mode may fit only the converted network
    model: ImageNetwork = network(row, **shape, **{"memory": None, **others})
    # a user's own dropout, say, may change shapes
    shapeless = {*_SHAPELESS, *CONVERSION} - {*architecture.variant_keywords}
    shaping = {key: value for key, value in options.items() if key not in shapeless}
    model.spec = Spec(name, shaping, create_model)
    return model


def _convert(model: ImageNetwork, named: NamedModel, keywords: Mapping[str, Any]) -> None:
    """Make the blocks of a plain model reversible, as the keywords or the entry say."""
    options: Any = {**named.options, **keywords}
    bits, runs, size = (options.get(key) for key in CONVERSION)
    if bits is None:
        return
    listed = not isinstance(runs, str | None)
    if listed and ("reversible_runs" in keywords or bits != "auto"):
        make_runs(model, runs)
        if "reversible_runs" not in keywords and "reversible_bits" in keywords:
            set_bits(model, bits)  # the caller's
    else:
        # entries without runs are of networks with all of them
        default = "paying" if "reversible_bits" in keywords else "all"
        _make_reversible(model, bits, default if listed or runs is None else runs, size)
    memory = options.get("memory")
    if reversible_blocks(model):
        # on the instance: other networks of the class do not change
        model.default_memory = default_memory(named.architecture, bits)  # type: ignore[misc]
        set_memory(model, memory or model.default_memory)
    elif memory not in (None, "store"):
        raise ValueError(
            f"memory={memory!r}: no run of blocks of {named.architecture} pays, so it stays plain: "
            "leave memory out, or give reversible_runs='checkpoint' (model.reversible_runs="
            "checkpoint)"
        )


def _make_reversible(model: ImageNetwork, bits: Any, runs: str, size: Size | None) -> None:
    """Make ``runs`` of the blocks reversible; those must pay for images of ``size`` pixels."""
    check_choice("reversible_runs", runs, RUNS)
    if runs == "all":
        make_reversible(model, bits)
        return
    shape = model.batch_shape(2, size)
    model.check_size(*shape[2:])
    make_reversible(model, bits, input_shape=shape, checkpoint=runs == "checkpoint")


def change_bits(model: ImageNetwork, bits: int | str | None) -> None:
    """Make the blocks of a trained model reversible with ``bits`` bits, or plain for None.

    A reversible model keeps its runs. ``"saved"`` changes nothing.

    Raises:
        ValueError: the blocks already have an inverse, ``bits`` is out of range, or the model has
            no runs of blocks.
    """
    if bits == SAVED:
        return
    if not model.convertible:
        raise ValueError(_refused_bits(model.spec.architecture if model.spec else str(model)))
    if bits is not None and reversible_blocks(model):
        set_bits(model, bits)
    elif bits is not None:
        _make_reversible(model, bits, "paying", model.trained_size)
    elif reversible_blocks(model):  # None is right for a plain network, too
        make_reversible(model, None)


def _refused_bits(name: str) -> str:
    return (
        f"{name} takes no reversible_bits: they make plain networks reversible (ResNets, "
        "vit_cifar, torchvision:NAME, timm:NAME); the other networks of the zoo are reversible "
        "without them"
    )


def default_memory(name: str, reversible_bits: int | None = None) -> str:
    """The mode of ``create_model(name, memory=None)``; reversible blocks are made for ``exact``."""
    return "exact" if reversible_bits is not None else _architecture_of(name).network.default_memory


def _given(**values: Any) -> dict[str, Any]:
    """The values that are not None; 0 classes are valid."""
    return {key: value for key, value in values.items() if value is not None}


def _architecture_of(name: str) -> Architecture:
    if name not in MODELS:
        raise unknown_model(name, MODELS)
    return MODELS[name]
