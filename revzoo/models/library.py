"""Networks of torchvision and timm by name: ``torchvision:resnet50``, ``timm:...``.

We accept only names that the library lists. Both libraries also accept hubs, folders and entry
points, so a name could choose files to read or code to run.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from revzoo._libraries import LIBRARIES, check_library_name, unknown_name
from revzoo.core.set_memory import set_memory
from revzoo.models.components import adapt_channels
from revzoo.models.wrapped import WrappedNetwork, on_any_device
from revzoo.weights.errors import DownloadError, UnknownWeightsError
from revzoo.weights.files import socket_timeout

# no slashes or dots: timm's create_model would fetch "hf-hub:..." and read "local-dir:..."
_NAME = re.compile(rf"({'|'.join(LIBRARIES)}):(\w+)", re.ASCII)
# ImageNet's, for which both libraries publish weights
LIBRARY_CLASSES, LIBRARY_CHANNELS = 1000, 3
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


# Classifiers used only in training, which we leave out: a network returns one tensor.
_AUXILIARY = ("aux1", "aux2", "AuxLogits")


@dataclass(frozen=True)
class LibraryVariant:
    """The row of a library's network: its full name."""

    network: str


class LibraryNetwork(WrappedNetwork):
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
        library, name = find_library_model(variant.network)
        self._name = variant.network
        self.net = on_any_device(lambda: _built(library, name, img_size, pretrained))
        linear = [(n, m) for n, m in self.net.named_modules() if isinstance(m, nn.Linear)]
        heads = [path for path, layer in linear if layer.out_features == LIBRARY_CLASSES]
        if not heads:
            raise ValueError(
                f"{variant.network} has no linear classifier to replace: choose another network"
            )
        # distilled networks have two classifiers
        self._find_layers(heads, channels=LIBRARY_CHANNELS)
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
    def image_size(self) -> int:
        """Side in pixels that the weights need, or that the library used in training."""
        config = getattr(self.net, "pretrained_cfg", {})  # timm's; torchvision trains with 224
        return self._fixed_size or int(config.get("input_size", (224,))[-1])

    def _other_size(self, height: int, width: int) -> str:
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
        cache = Path(torch.hub.get_dir()) / "checkpoints"
        if address.startswith(_HUB):
            from huggingface_hub.constants import HF_HUB_CACHE

            cache = Path(HF_HUB_CACHE)
        raise DownloadError(
            f"the pretrained weights of {name} cannot be loaded from {address} "
            f"({str(error).rstrip('.')}). Check the network; or download their file on another "
            "machine and give its path as checkpoint_path (+model.checkpoint_path=FILE); or start "
            "from random weights, pretrained=False (model.pretrained=false). Cache of earlier "
            f"downloads: {cache}"
        ) from None  # a socket's traceback would not help
    finally:
        retries.setLevel(level)


_SIZE = {"torchvision": "image_size", "timm": "img_size"}  # the libraries' names of the keyword
