"""Networks from outside the zoo: classifiers of torchvision, of timm, and your own networks.

In the interface of the zoo's networks, training, saving, exports and audits work as for these, and
``reversible_bits`` makes the blocks reversible (:func:`revzoo.make_reversible`). ``net`` is the
network as it was, so its weights fit its own class. Feature maps come from timm's
``forward_intermediates``. Known limit: other networks have none; torchvision's
``IntermediateLayerGetter`` works on ``net``.

We accept only names that a library lists. Both libraries also accept hubs, folders and entry
points ("hf-hub:...", "local-dir:..."), so a name could choose files to read or code to run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from http.client import HTTPException
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from revzoo._checks import Size, check_count, short_size, sides_of, size_word
from revzoo._libraries import LIBRARIES, check_library_name
from revzoo.core.invertible import NotInvertibleError, label_steps, steps_in
from revzoo.core.modes import mode_of, set_memory
from revzoo.models.components import adapt_channels
from revzoo.models.network import FeatureInfo, ImageNetwork, ImageSizeError, Part, taken_indices
from revzoo.weights.errors import DownloadError, UnknownWeightsError
from revzoo.weights.files import socket_timeout

_SIZE = {"torchvision": "image_size", "timm": "img_size"}  # the libraries' names of the keyword
# ImageNet's, for which both libraries publish weights
LIBRARY_CLASSES, LIBRARY_CHANNELS = 1000, 3
# Classifiers used only in training, which we leave out: a network returns one tensor.
_AUXILIARY = ("aux1", "aux2", "AuxLogits")


class WrappedNetwork(ImageNetwork):
    """A network from outside the zoo, ``(B, in_chans, H, W) -> (B, num_classes)`` unless dense.

    Subclasses set ``net``, then call :meth:`_find_layers`.
    """

    default_memory: ClassVar[str] = "store"
    streams: ClassVar[int] = 1
    convertible: ClassVar[bool] = True

    net: nn.Module
    _heads: list[str]

    def _find_layers(self, classes: int, channels: int, *, heads: slice, missing: str) -> None:
        """Find the layers that depend on the numbers of classes and image channels.

        ``heads`` are the classifiers among the layers of so many outputs: linear ones, or, of a
        network of the user without any, convolutions.
        """
        named = [(f"net.{name}", m) for name, m in self.net.named_modules()]
        found: dict[str, Any] = {
            n: m for n, m in named if isinstance(m, nn.Linear) and m.out_features == classes
        }
        convolutions = [(n, m) for n, m in named if isinstance(m, _ConvNd)]
        if not found and isinstance(self, OwnNetwork):
            found = {n: m for n, m in convolutions if m.out_channels == classes}
            self.dense = bool(found)
        self._heads = list(found)[heads]
        if not found:
            raise ValueError(missing)
        self.classifier = self._heads[0]  # type: ignore[misc]
        head = found[self.classifier]
        self.num_features = head.in_channels if self.dense else head.in_features
        if self.dense:
            self.dims = len(head.kernel_size)
            self.size_multiples = [getattr(self.net, "size_multiple", 1)] * self.dims
        # modules are registered in the order of use
        path, first = convolutions[0] if convolutions else ("", None)
        # another number: the convolution does not read the image itself
        if first is not None and first.in_channels == channels:
            self.input_layer = path  # type: ignore[misc]

    def _get_name(self) -> str:  # in repr and errors
        return type(self.net).__name__

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The paths of all classifiers; distilled networks have two."""
        return tuple(self._heads)

    @property
    def image_size(self) -> Size:
        """Size in pixels of the only images that the network takes.

        If it takes any: 224, the side of volumes 64.
        """
        return self._fixed_size or (224 if self.dims < 3 else 64)

    @property
    def _fixed_size(self) -> Size | None:
        """Size in pixels of the only images that the network takes; None if it takes any."""
        size = getattr(self.net, "image_size", None)  # torchvision's ViT, and own modules
        embed = getattr(self.net, "patch_embed", None)  # timm's
        if size is None and getattr(embed, "strict_img_size", False):
            size = getattr(embed, "img_size", None)
        return None if size is None else short_size(sides_of("image_size", size, self.dims))

    def check_size(self, *sizes: int) -> None:
        """Raise an ImageSizeError unless the network takes images of these sizes."""
        fixed = sides_of("image_size", self._fixed_size or sizes, self.dims)
        if sizes == fixed:
            return
        got, expected = (" x ".join(map(str, sides)) for sides in (sizes, fixed))
        raise ImageSizeError(
            f"images of {got} pixels: expected {expected}",
            f"; {self._other_size(*sizes)}"
            f"resize the images (a folder of images: data.image_size={size_word(fixed)})",
            sizes=fixed,
        )

    def _other_size(self, *sizes: int) -> str:
        """A remedy, if the network can be created for other sizes; for an error message."""
        return ""

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_chans, H, W)``, or a map of them."""
        self._check_images(x)
        y = self.net(x)
        if not isinstance(y, Tensor):
            raise ValueError(
                f"{type(self.net).__name__} returned a {type(y).__name__}, expected logits"
            )
        return y

    def forward_features(self, x: Tensor) -> Tensor:
        """Pooled features ``(B, num_features)``, or a map of them: the classifier's input."""
        # a hook: torchvision's networks have no method for these features
        inputs: list[Tensor] = []
        hook = self.get_classifier().register_forward_pre_hook(
            lambda _, args: inputs.append(args[0])
        )
        try:
            self(x)
        finally:
            hook.remove()
        return inputs[-1]

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of the features of :meth:`forward_features`."""
        return features if pre_logits else self.get_classifier()(features)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a fresh layer; ``global_pool`` cannot be changed."""
        check_count("num_classes", num_classes, least=0)
        if global_pool is not None:
            raise ValueError(
                f"global_pool={global_pool!r}: expected None, since {self._get_name()} is not the "
                "zoo's own and its pooling cannot change"
            )
        like = next(self.net.parameters())  # device and precision may have changed since creation
        for path in self._heads:
            old: Any = self.get_submodule(path)
            new: nn.Module = nn.Identity()
            bias = getattr(old, "bias", True) is not None
            if num_classes and self.dense:
                shape = (old.kernel_size, old.stride, old.padding)
                new = type(old)(self.num_features, num_classes, *shape, bias=bias)
            elif num_classes:
                new = nn.Linear(self.num_features, num_classes, bias)
            new.to(like.device, like.dtype).train(old.training)
            parent, _, name = path.rpartition(".")
            setattr(self.get_submodule(parent), name, new)
        self.num_classes, self.fresh_head = num_classes, True

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The feature maps that a network of timm lists.

        Raises:
            ValueError: the network has no ``forward_intermediates``.
        """
        if not hasattr(self.net, "forward_intermediates"):
            raise ValueError(
                f"the feature maps of {type(self.net).__name__} are unknown: use torchvision's "
                "IntermediateLayerGetter(model.net, ...), hooks, a network of timm, or the pooled "
                "features of model.forward_features"
            )
        rows: Any = self.net.feature_info
        return tuple(FeatureInfo(r["num_chs"], r["reduction"], f"net.{r['module']}") for r in rows)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The last features, not pooled, and intermediate feature maps, from one pass.

        Arguments and results are timm's.

        Raises:
            ValueError: the network gives no feature maps, or not in this format.
        """
        self._check_images(x)
        taken = taken_indices(indices, len(self.feature_info))
        options: dict[str, Any] = {"norm": norm, "stop_early": stop_early}
        options |= {"output_fmt": output_fmt, "intermediates_only": intermediates_only}
        net: Any = self.net
        try:
            return net.forward_intermediates(x, indices=taken, **options)
        except AssertionError as error:  # timm's check of formats
            raise ValueError(f"output_fmt={output_fmt!r}: {error}") from error

    def keep_stages(self, count: int) -> None:
        """Remove the head and all layers after the first ``count`` feature maps."""
        net: Any = self.net  # a network of timm: feature_info has refused others
        net.prune_intermediate_layers(list(range(count)), prune_norm=True, prune_head=True)

    @property
    def invertible(self) -> bool:
        """False: the networks lose information."""
        return False

    def _check_invertible(self) -> None:
        raise NotInvertibleError(f"{type(self.net).__name__} loses information and has no inverse")

    def parts(self) -> tuple[Part, ...]:
        """The children of ``net`` with parameters, or the layers of its only list; the classifier.

        Each parameter is in one part.
        """
        children = dict(self.net.named_children())
        ends = {path.split(".")[1] for path in self._heads}  # the children that hold classifiers
        body = {n: m for n, m in children.items() if n not in ends and list(m.parameters())}
        lists = [name for name, module in body.items() if isinstance(module, nn.Sequential)]
        named: dict[str, nn.Module] = {}
        for name, module in body.items():
            # torchvision's VGG and others hold all layers in one list "features": take its items
            items = module.named_children() if lists == [name] else []
            named |= {f"net.{name}.{n}": m for n, m in items} or {f"net.{name}": module}
        tokens = tuple(self.net.parameters(recurse=False))  # and positions, of the first part
        return (
            *(Part(n, (m,), () if i else tokens) for i, (n, m) in enumerate(named.items())),
            # the classifier's child may be the only one
            Part(
                self.classifier,
                tuple(m for n, m in children.items() if n in ends),
                () if named else tokens,
            ),
        )

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Also takes a file of ``net`` alone: adds our prefix."""
        if tensors.keys() & self.state_dict().keys():
            return tensors
        return {f"net.{key}": t for key, t in tensors.items()}


class OwnNetwork(WrappedNetwork):
    """A user's network, see :func:`revzoo.register_model`.

    ``keywords`` are those of the user's function, see :func:`keywords_of`. A ``memory`` of None
    keeps the modes of the steps in it.

    Raises:
        TypeError: the function returned something else than a module.
        ValueError: the module has no linear layer or convolution with ``num_classes`` outputs.
    """

    def __init__(
        self,
        keywords: Any,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
    ) -> None:
        super().__init__(in_chans=in_chans)
        check_count("num_classes", num_classes, least=0)
        outputs = num_classes or 10  # without classes we remove the classifier
        numbers = {"num_classes": outputs, "in_chans": in_chans}
        defaults = vars(type(keywords)())
        # files and configurations hold lists only
        values = {
            key: tuple(value) if isinstance(defaults[key], tuple) and value is not None else value
            for key, value in vars(keywords).items()
        }
        net = on_any_device(lambda: keywords.build(**numbers, **values))
        if not isinstance(net, nn.Module):
            raise TypeError(f"{keywords.called} returned {net!r:.80}: expected an nn.Module")
        self.net = net
        missing = (
            f"{keywords.called}(num_classes={outputs}) returned a {type(net).__name__} without an "
            f"nn.Linear of {outputs} outputs: expected one as its classifier, or a convolution"
        )
        # the last: others may have as many outputs by chance
        self._find_layers(outputs, in_chans, heads=slice(-1, None), missing=missing)
        self.num_classes = num_classes
        if not num_classes:
            self.reset_classifier(0)
        label_steps(self)
        if memory is not None:
            set_memory(self, memory)
        modes = [step.memory for step in steps_in(self).values()]
        # on the instance: other networks of the class do not change
        self.default_memory = next((m for m in modes if mode_of(m).inverts), "store")  # type: ignore[misc]


def keywords_of(build: Callable[..., nn.Module]) -> Any:
    """The row of a user's function: a dataclass of its keywords and their defaults.

    Raises:
        TypeError: ``build`` does not take ``num_classes`` and ``in_chans``, or needs other
            arguments.
    """
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = {n: p for n, p in inspect.signature(build).parameters.items() if p.kind in kinds}
    called = getattr(build, "__name__", str(build))
    numbers = [taken.pop(name, None) for name in ("num_classes", "in_chans")]
    needed = [name for name, p in taken.items() if p.default is p.empty]
    if None in numbers or needed:
        raise TypeError(
            f"{called}{inspect.signature(build)}: expected the keywords num_classes and in_chans, "
            "and defaults for all others"
        )
    # a factory for each: dataclasses refuse lists as defaults
    rows = [
        (n, Any, field(default_factory=partial(getattr, p, "default"))) for n, p in taken.items()
    ]
    functions = {"build": staticmethod(build), "called": called}
    return make_dataclass("Keywords", rows, frozen=True, namespace=functions)()


def on_any_device(build: Callable[[], nn.Module]) -> nn.Module:
    """``build()``; on the meta device also if its constructor reads values of tensors."""
    try:
        return build()
    except (NotImplementedError, RuntimeError):
        if torch.get_default_device().type != "meta":  # which holds no values
            raise
        with torch.device("cpu"):
            net = build()
        return net.to(torch.get_default_device())


def is_library_name(name: object) -> bool:
    """Whether ``name`` has the form ``LIBRARY:NAME``; the library may not know it."""
    return isinstance(name, str) and name.partition(":")[0] in LIBRARIES and ":" in name


def weights_address(name: str) -> str:
    """The web address of the default weights of ``LIBRARY:NAME``.

    Raises:
        UnknownWeightsError: the library publishes none.
        ValueError: the library does not list it, or is not installed.
    """
    library, network = check_library_name(name)
    if library == "timm":
        import timm

        config = timm.get_pretrained_cfg(network)
        hub = config and config.hf_hub_id  # timm prefers it to the address
        address = f"https://huggingface.co/{hub}" if hub else config and config.url
    else:
        from torchvision import models

        address = models.get_model_weights(network).DEFAULT.url
    if not address:
        raise UnknownWeightsError(
            f"{library} publishes no weights of {network}: give pretrained=False "
            "(model.pretrained=false), or your own file as checkpoint_path "
            "(+model.checkpoint_path=FILE)"
        )
    return str(address)


@dataclass(frozen=True)
class LibraryVariant:
    """The row of a library's network: its full name."""

    network: str


class LibraryNetwork(WrappedNetwork):
    """A classifier of torchvision or timm, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Args:
        variant: the name of the network; see :func:`revzoo.create_model` for the other arguments.
        img_size: side of the images in pixels, for networks whose weights depend on it.
        pretrained: let the library download and load its default weights.

    Raises:
        ValueError: the library does not list the network; it has no linear classifier; it cannot be
            adapted to ``in_chans``.

    Example:
        >>> model = revzoo.create_model("torchvision:resnet18", reversible_bits=4)
        >>> model(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        variant: LibraryVariant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        img_size: int | None = None,
        pretrained: bool = False,
    ) -> None:
        super().__init__(in_chans=in_chans)
        library, name = check_library_name(variant.network)
        self._name = variant.network
        self.net = on_any_device(lambda: _built(library, name, img_size, pretrained))
        missing = f"{self._name} has no linear classifier to replace: choose another network"
        # all: distilled networks have two classifiers
        self._find_layers(LIBRARY_CLASSES, LIBRARY_CHANNELS, heads=slice(None), missing=missing)
        if in_chans != LIBRARY_CHANNELS:
            if self.input_layer is None:
                raise ValueError(
                    f"in_chans={in_chans}: {variant.network} takes images of {LIBRARY_CHANNELS} "
                    "channels only, since no convolution reads them: convert the images"
                )
            first = self.get_submodule(self.input_layer)
            assert isinstance(first, nn.Conv2d)
            first.in_channels = in_chans
            first.weight = nn.Parameter(adapt_channels(first.weight.detach(), in_chans))
        if not pretrained or num_classes != LIBRARY_CLASSES:
            self.reset_classifier(num_classes)
        self.num_classes = num_classes
        if memory is not None:
            set_memory(self, memory)  # raises for all modes but store: the network has no steps

    def _get_name(self) -> str:  # in repr and errors
        return self._name

    @property
    def image_size(self) -> Size:
        """Size in pixels that the weights need, or that the library used in training."""
        config = getattr(self.net, "pretrained_cfg", {})  # timm's; torchvision trains with 224
        return self._fixed_size or int(config.get("input_size", (224,))[-1])

    def _other_size(self, *sizes: int) -> str:
        height, width = sizes
        embed = getattr(self.net, "patch_embed", None)
        size: Any = getattr(self.net, "patch_size", None) or getattr(embed, "patch_size", 1)
        patch = int(size[0] if isinstance(size, (tuple, list)) else size)
        fits = height == width and height % patch == 0
        return f"create it with img_size={height} (model.img_size={height}), or " if fits else ""

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Also takes the library's own file: adds our prefix, drops auxiliary classifiers."""
        expected = self.state_dict()
        left_out = tuple(f"net.{head}." for head in _AUXILIARY)
        tensors = super().adapt_state_dict(tensors)
        return {k: t for k, t in tensors.items() if k in expected or not k.startswith(left_out)}


def _built(library: str, name: str, img_size: int | None, pretrained: bool) -> nn.Module:
    """The library's network with its 1,000 classes."""
    sizes: dict[str, Any] = {} if img_size is None else {_SIZE[library]: img_size}
    try:
        with _downloading(f"{library}:{name}") if pretrained else nullcontext():
            if library == "timm":
                import timm

                net = timm.create_model(name, pretrained=pretrained, **sizes)
            else:
                from torchvision import models

                weights = "DEFAULT" if pretrained else None
                net = models.get_model(name, weights=weights, **sizes)
    except TypeError as error:  # an unexpected keyword: convolutional networks take any size
        raise ValueError(f"{library}:{name} refuses img_size={img_size}: {error}") from error
    for head in _AUXILIARY:
        if getattr(net, head, None) is not None:
            setattr(net, head, None)
    if hasattr(net, "aux_logits"):
        net.aux_logits = False  # type: ignore[assignment]
    return net


@contextmanager
def _downloading(name: str) -> Iterator[None]:
    """Raise a DownloadError with address and remedies if the weights of ``name`` cannot be had."""
    try:
        with socket_timeout(30):  # torch.hub waits forever
            yield
    except NotImplementedError:  # of the meta device; a RuntimeError, too
        raise
    except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: the file's hash
        raise DownloadError(
            f"the pretrained weights of {name} cannot be loaded from {weights_address(name)} "
            f"({str(error).rstrip('.')}). Check the network; or download their file on another "
            "machine and give its path as checkpoint_path (+model.checkpoint_path=FILE); or start "
            "from random weights, pretrained=False (model.pretrained=false)"
        ) from None  # a socket's traceback would not help
