"""Image classifiers from outside the zoo, in the interface of its networks.

Training, saving, exports and audits then work as for the zoo's networks, and ``reversible_bits``
makes the blocks reversible (:func:`revzoo.make_reversible`). ``net`` is the network as it was, so
its weights fit its own class.

:class:`OwnNetwork` takes a user's module, :mod:`revzoo.models.library` the networks of libraries.

Feature maps come from timm's ``forward_intermediates``. Known limit: other networks have none;
torchvision's ``IntermediateLayerGetter`` works on ``net``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from revzoo._checks import check_count
from revzoo.core.invertible import NotInvertibleError, label_steps, steps_in
from revzoo.core.modes import mode_of
from revzoo.core.set_memory import set_memory
from revzoo.models.network import FeatureInfo, ImageNetwork, ImageSizeError, Part, taken_indices


class WrappedNetwork(ImageNetwork):
    """A classifier from outside the zoo, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Subclasses set ``net``, then call :meth:`_find_layers`.
    """

    default_memory: ClassVar[str] = "store"
    streams: ClassVar[int] = 1
    convertible: ClassVar[bool] = True

    net: nn.Module
    _heads: list[str]

    def _find_layers(self, heads: Sequence[str], *, channels: int) -> None:
        """Find the layers that depend on the numbers of classes and image channels.

        Args:
            heads: paths of the classifiers in ``net``, linear layers.
            channels: image channels that ``net`` was built for.
        """
        self._heads = [f"net.{path}" for path in heads]
        self.classifier = self._heads[0]  # type: ignore[misc]
        linear = self.get_classifier()
        assert isinstance(linear, nn.Linear)
        self.num_features = linear.in_features
        # modules are registered in the order of use
        named = self.net.named_modules()
        path, first = next(((n, m) for n, m in named if isinstance(m, nn.Conv2d)), ("", None))
        # another number: the convolution does not read the image itself
        if first is not None and first.in_channels == channels:
            self.input_layer = f"net.{path}"  # type: ignore[misc]

    def _get_name(self) -> str:  # in repr and errors
        return type(self.net).__name__

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The paths of all classifiers; distilled networks have two."""
        return tuple(self._heads)

    @property
    def image_size(self) -> int:
        """Side in pixels of the only images that the network takes; 224 if it takes any."""
        return self._fixed_size or 224

    @property
    def _fixed_size(self) -> int | None:
        """Side in pixels of the only images that the network takes; None if it takes any."""
        size = getattr(self.net, "image_size", None)  # torchvision's ViT, and own modules
        embed = getattr(self.net, "patch_embed", None)  # timm's
        if size is None and getattr(embed, "strict_img_size", False):
            size = getattr(embed, "img_size", None)
        return size[0] if isinstance(size, (tuple, list)) else size

    def check_size(self, height: int, width: int) -> None:
        """Raise an ImageSizeError unless the network takes images of ``height`` x ``width``."""
        fixed = self._fixed_size
        if fixed is None or (height, width) == (fixed, fixed):
            return
        raise ImageSizeError(
            f"images of {height} x {width} pixels: expected {fixed} x {fixed}",
            f"; {self._other_size(height, width)}"
            f"resize the images (a folder of images: data.image_size={fixed})",
            side=fixed,
        )

    def _other_size(self, height: int, width: int) -> str:
        """A remedy, if the network can be created for other sizes; for an error message."""
        return ""

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
        """Replace the classifier by a fresh linear layer; ``global_pool`` cannot be changed."""
        check_count("num_classes", num_classes, least=0)
        if global_pool is not None:
            raise ValueError(
                f"global_pool={global_pool!r}: expected None, since {self._get_name()} is not the "
                "zoo's own and its pooling cannot change"
            )
        like = next(self.net.parameters())  # device and precision may have changed since creation
        for path in self._heads:
            old = self.get_submodule(path)
            new: nn.Module = nn.Identity()
            if num_classes:
                bias = getattr(old, "bias", True) is not None
                new = nn.Linear(self.num_features, num_classes, bias)
            self._replace(path, new.to(like.device, like.dtype).train(old.training))
        self.num_classes, self.fresh_head = num_classes, True

    def _replace(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.get_submodule(parent), name, module)

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
    """A user's classifier, see :func:`revzoo.register_model`.

    Args:
        keywords: of the user's function, see :func:`keywords_of`.
        num_classes: number of logits; 0 for the classifier's input instead.
        in_chans: channels of the images.
        memory: memory mode of the steps in it; None keeps theirs.

    Raises:
        TypeError: the function returned something else than a module.
        ValueError: the module has no linear layer with ``num_classes`` outputs.
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
        linear = [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear)]
        heads = [path for path, layer in linear if layer.out_features == outputs]
        if not heads:
            raise ValueError(
                f"{keywords.called}(num_classes={outputs}) returned a {type(net).__name__} without "
                f"an nn.Linear of {outputs} outputs: expected one as its classifier"
            )
        # the last: others may have as many outputs by chance
        self._find_layers(heads[-1:], channels=in_chans)
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
    rows = [(n, Any, field(default_factory=partial(_same, p.default))) for n, p in taken.items()]
    functions = {"build": staticmethod(build), "called": called}
    return make_dataclass("Keywords", rows, frozen=True, namespace=functions)()


def _same(value: Any) -> Any:
    return value


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
