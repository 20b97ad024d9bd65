"""Networks of torchvision and timm by name: ``torchvision:resnet50``, ``timm:...``.

Training, saving, exports and audits work as for the zoo's networks. ``reversible_bits`` makes them
reversible (:func:`revzoo.make_reversible`). ``net`` is the library's network, so its weights fit
the library's class.

We accept only names that the library lists. Both libraries also accept hubs, folders and entry
points, so a name could choose files to read or code to run.

Feature maps come from timm's own ``forward_intermediates``. Known limit: there are none for
torchvision's networks; torchvision's ``IntermediateLayerGetter`` works on ``net``.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from revzoo._checks import check_count
from revzoo._libraries import LIBRARIES, check_library_name, unknown_name
from revzoo.core.invertible import NotInvertibleError
from revzoo.core.set_memory import set_memory
from revzoo.models.adapt import adapt_channels
from revzoo.models.network import FeatureInfo, ImageNetwork, ImageSizeError, taken_indices
from revzoo.models.parts import Part
from revzoo.weights.errors import DownloadError, UnknownWeightsError
from revzoo.weights.files import socket_timeout

# no slashes or dots: timm's create_model would fetch "hf-hub:..." and read "local-dir:..."
_NAME = re.compile(rf"({'|'.join(LIBRARIES)}):(\w+)", re.ASCII)
LIBRARY_CLASSES = 1000  # ImageNet, for which both libraries publish weights
_HUB = "https://huggingface.co/"


@functools.cache
def library_models(library: str) -> tuple[str, ...]:
    """The classification networks that an installed library lists."""
    if library == "timm":
        import timm

        return tuple(timm.list_models())
    from torchvision import models

    return tuple(models.list_models(module=models))


def is_library_name(name: object) -> bool:
    """Whether ``name`` has the form ``LIBRARY:NAME``; the library may not know it."""
    return isinstance(name, str) and name.partition(":")[0] in LIBRARIES and ":" in name


def find_library_model(name: str) -> tuple[str, str]:
    """Split ``LIBRARY:NAME`` into library and name.

    Raises:
        ValueError: the library does not list it, or is not installed.
    """
    check_library_name(name)  # first: it finds most wrong names without importing the library
    library, _, network = name.partition(":")
    if not _NAME.fullmatch(name) or network not in library_models(library):
        raise ValueError(unknown_name(name))
    return library, network


def weights_address(name: str) -> str:
    """The web address of the default weights of ``LIBRARY:NAME``.

    Raises:
        UnknownWeightsError: the library publishes none.
        ValueError: as :func:`find_library_model`.
    """
    library, network = find_library_model(name)
    if library == "timm":
        import timm

        config = timm.get_pretrained_cfg(network)
        hub = config and config.hf_hub_id  # timm prefers it to the address
        address = f"{_HUB}{hub}" if hub else config and config.url
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


def weights_name(name: str) -> str:
    """The published name of the default weights of ``LIBRARY:NAME``: ``resnet50-11ad3fa6.pth``."""
    return weights_address(name).rpartition("/")[2]


def _cache_of(address: str) -> Path:
    """The folder in which the libraries keep their downloads."""
    if address.startswith(_HUB):
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE)
    return Path(torch.hub.get_dir()) / "checkpoints"


# Classifiers used only in training, which we leave out: a network returns one tensor.
_AUXILIARY = ("aux1", "aux2", "AuxLogits")


@dataclass(frozen=True)
class LibraryVariant:
    """The row of a library's network: its full name."""

    network: str


class LibraryNetwork(ImageNetwork):
    """A classifier of torchvision or timm, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Args:
        variant: the name of the network.
        num_classes: number of logits; 0 for pooled features instead. For other numbers than the
            library's 1,000 the classifier is new.
        in_chans: channels of the images.
        memory: ``store`` or None; :func:`revzoo.create_model` makes the blocks reversible.
        img_size: side of the images in pixels, for networks whose weights depend on it.
        pretrained: let the library download and load its default weights.

    Raises:
        ValueError: the library does not list the network.

    Example:
        >>> model = revzoo.create_model("torchvision:resnet18", reversible_bits=4)
        >>> model(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "store"
    streams: ClassVar[int] = 1
    convertible: ClassVar[bool] = True

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
        library, name = find_library_model(variant.network)
        self._name = variant.network
        try:
            self.net = _built(library, name, img_size, pretrained)
        except NotImplementedError:
            # some constructors read values of tensors, which the meta device does not hold
            with torch.device("cpu"):
                net = _built(library, name, img_size, pretrained)
            self.net = net.to(torch.get_default_device())
        self._heads = [
            f"net.{path}"
            for path, m in self.net.named_modules()
            if isinstance(m, nn.Linear) and m.out_features == LIBRARY_CLASSES
        ]
        if not self._heads:
            raise ValueError(
                f"{variant.network} has no linear classifier to replace: choose another network"
            )
        self.classifier = self._heads[0]  # type: ignore[misc]
        named = self.net.named_modules()
        # both libraries register the layer that reads the image first
        path, first = next(((n, m) for n, m in named if isinstance(m, nn.Conv2d)), ("", None))
        if first is not None:
            self.input_layer = f"net.{path}"  # type: ignore[misc]
            if first.in_channels != in_chans:
                self._replace(self.input_layer, _with_channels(first, in_chans))
        linear = self.get_classifier()
        assert isinstance(linear, nn.Linear)
        self.num_features = linear.in_features
        if not pretrained or num_classes != LIBRARY_CLASSES:
            self.reset_classifier(num_classes)
        self.num_classes = num_classes
        if memory not in (None, "store"):
            set_memory(self, memory)  # raises: the network has no steps

    def _get_name(self) -> str:  # in repr and errors
        return self._name

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The paths of all classifiers: distilled networks have two."""
        return tuple(self._heads)

    @property
    def image_size(self) -> int:
        """Side in pixels that the weights need, or that the library used in training."""
        config = getattr(self.net, "pretrained_cfg", {})  # timm's; torchvision trains with 224
        return self._fixed_size or int(config.get("input_size", (224,))[-1])

    @property
    def _fixed_size(self) -> int | None:
        """Side in pixels of the only images that the network takes; None if it takes any."""
        size = getattr(self.net, "image_size", None)  # torchvision's ViT
        embed = getattr(self.net, "patch_embed", None)  # timm's
        if size is None and getattr(embed, "strict_img_size", False):
            size = getattr(embed, "img_size", None)
        return size[0] if isinstance(size, (tuple, list)) else size

    def check_size(self, height: int, width: int) -> None:
        """Raise an ImageSizeError unless the network takes images of ``height`` x ``width``."""
        fixed = self._fixed_size
        if fixed is None or (height, width) == (fixed, fixed):
            return
        remedy = f"resize the images (a folder of images: data.image_size={fixed})"
        if height == width and height % self._patch_size == 0:
            remedy = f"create it with img_size={height} (model.img_size={height}), or {remedy}"
        raise ImageSizeError(
            f"images of {height} x {width} pixels: expected {fixed} x {fixed}",
            f"; {remedy}",
            side=fixed,
        )

    @property
    def _patch_size(self) -> int:
        """Side in pixels of a transformer's patches; 1 for other networks."""
        embed = getattr(self.net, "patch_embed", None)
        size: Any = getattr(self.net, "patch_size", None) or getattr(embed, "patch_size", 1)
        return int(size[0] if isinstance(size, (tuple, list)) else size)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_chans, H, W)``."""
        self._check_images(x)
        y = self.net(x)
        if not isinstance(y, Tensor):
            raise ValueError(
                f"{type(self.net).__name__} returned a {type(y).__name__}, expected logits"
            )
        return y

    def forward_features(self, x: Tensor) -> Tensor:
        """Pooled features ``(B, num_features)``: the classifier's input."""
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
        """Replace the classifier by a fresh one; ``global_pool`` cannot be changed."""
        check_count("num_classes", num_classes, least=0)
        if global_pool is not None:
            raise ValueError(
                f"global_pool={global_pool!r}: expected None, since the pooling of a library's "
                "network cannot change"
            )
        like = next(self.net.parameters())  # device and precision may have changed since creation
        for path in self._heads:
            old = self.get_submodule(path)
            new: nn.Module = nn.Identity()
            if num_classes:
                new = nn.Linear(
                    self.num_features, num_classes, device=like.device, dtype=like.dtype
                )
            self._replace(path, new.train(old.training))
        self.num_classes, self.fresh_head = num_classes, True

    def _replace(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.get_submodule(parent), name, module)

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The feature maps that timm lists for the network.

        Raises:
            ValueError: the library has no feature maps of this network.
        """
        if not hasattr(self.net, "forward_intermediates"):
            raise ValueError(
                f"the feature maps of {type(self.net).__name__} are unknown: use torchvision's "
                "IntermediateLayerGetter(model.net, ...), hooks, a network of timm, or the pooled "
                "features of model.forward_features"
            )
        rows: Any = self.net.feature_info
        return tuple(FeatureInfo(r["num_chs"], r["reduction"], f"net.{r['module']}") for r in rows)

    def forward_intermediates(  # type: ignore[override]  # timm's own
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
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
            Part(self.classifier, tuple(m for n, m in children.items() if n in ends)),
        )

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Also takes the library's own file: adds our prefix, drops auxiliary classifiers."""
        expected = self.state_dict()
        if not tensors.keys() & expected.keys():
            tensors = {f"net.{key}": t for key, t in tensors.items()}
        left_out = tuple(f"net.{head}." for head in _AUXILIARY)
        return {k: t for k, t in tensors.items() if k in expected or not k.startswith(left_out)}


def _built(library: str, name: str, img_size: int | None, pretrained: bool) -> nn.Module:
    """The library's network with its 1,000 classes.

    Raises:
        DownloadError: the weights cannot be downloaded.
        ValueError: the network does not take ``img_size``.
    """
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
    """Explain a failed download of the default weights of ``name``.

    Raises:
        DownloadError: names the address and the remedies.
    """
    retries = logging.getLogger("huggingface_hub")
    level = retries.level
    retries.setLevel(logging.ERROR)  # otherwise four lines for each of twelve attempts
    try:
        with socket_timeout(30):  # torch.hub waits forever
            yield
    except NotImplementedError:  # of the meta device; a RuntimeError, too
        raise
    except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: the file's hash
        address = weights_address(name)
        raise DownloadError(
            f"the pretrained weights of {name} cannot be loaded from {address} "
            f"({str(error).rstrip('.')}). Check the network; or download their file on another "
            "machine and give its path as checkpoint_path (+model.checkpoint_path=FILE); or start "
            "from random weights, pretrained=False (model.pretrained=false). Cache of earlier "
            f"downloads: {_cache_of(address)}"
        ) from None  # a socket's traceback would not help
    finally:
        retries.setLevel(level)


_SIZE = {"torchvision": "image_size", "timm": "img_size"}  # the libraries' names of the keyword


def _with_channels(conv: nn.Conv2d, channels: int) -> nn.Conv2d:
    """A copy of the first convolution, adapted to a new number of image channels."""
    # a copy keeps a subclass, such as timm's StdConv2d; its own dict leaves `conv` unchanged
    adapted = copy.copy(conv)
    adapted._parameters = dict(conv._parameters)
    adapted.in_channels = channels
    adapted.weight = nn.Parameter(adapt_channels(conv.weight.detach(), channels))
    return adapted
