"""Saves networks to folders: weights, entry and model card."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from revzoo._checks import Size, short_size, sides_of
from revzoo._files import json_bytes, write_together
from revzoo.core.invertible import evaluation_mode, steps_in
from revzoo.core.modes import memory
from revzoo.layers.make_reversible import described_runs
from revzoo.layers.side_bits import SideBits
from revzoo.models.weights_file import check_finite, check_fit, safetensors_bytes
from revzoo.weights.card import model_card
from revzoo.weights.entry import CONFIG_FILE, WeightsEntry, metadata_for
from revzoo.weights.errors import EntryError, StateMismatchError
from revzoo.weights.files import TENSORS_FILE

if TYPE_CHECKING:
    from torchvision.transforms import v2

# fields of an entry that describe the data; they hold for a network until its data changes
_DATA_FIELDS = (
    *("classes", "mean", "std", "crop_pct", "input_size"),
    *("task", "target_mean", "target_std"),
)
# the fields among them that everyone needs to use the weights
_NEEDED = ("classes", "mean", "std")
TOLERANCE = 1e-4
"""Largest difference, relative to the largest output. Kernels of compiled layers differ by less."""


class Spec(NamedTuple):
    """The architecture of a network, and the keywords of ``create_model`` that shape it."""

    architecture: str
    options: Mapping[str, Any]
    create: Callable[..., Any]
    """``create_model``; passed in, since its module imports this one."""


class SavableNetwork(nn.Module):
    """A network that can save itself to a folder.

    Attributes:
        num_classes: number of logits.
        in_chans: channels of the images.
        trained_on: fields of an entry that describe its training data, set by training; empty if
            unknown, None if it was not trained since its creation.
        fresh_head: whether the classifier was replaced after ``entry`` or ``trained_on`` was set.
    """

    variant: Any
    """The row of the network's table."""
    num_classes: int
    in_chans: int
    dims: int = 2
    """Axes of an image after the channels: 1 of signals, 3 of volumes."""

    _spec: Spec | None = None
    trained_on: Mapping[str, Any] | None = None
    fresh_head: bool = False
    _entry: WeightsEntry | None = None

    @property
    def spec(self) -> Spec | None:
        """Arguments of ``create_model``; None for a network built from its class."""
        if self._spec is None:
            return None
        options = dict(self._spec.options)
        # from the steps: make_reversible and AnnealedBits change them
        if bits := [m.bits for m in self.modules() if isinstance(m, SideBits)]:
            options |= {"reversible_bits": max(bits), "reversible_runs": described_runs(self)}
        return self._spec._replace(options=options)

    @spec.setter
    def spec(self, spec: Spec | None) -> None:
        self._spec = spec

    @property
    def entry(self) -> WeightsEntry | None:
        """The weights that the network was created with, if any."""
        return self._entry

    @entry.setter
    def entry(self, entry: WeightsEntry | None) -> None:
        # creating a network sets a classifier, too; only later changes count
        self._entry, self.fresh_head = entry, False

    @property
    def image_size(self) -> Size:
        """Size in pixels of the images in the architecture's publication: the side of a square."""
        return self.variant.image_size

    def batch_shape(self, batch: int, size: Size | None = None) -> tuple[int, ...]:
        """The shape of ``batch`` images of ``size`` pixels, or of :attr:`image_size`."""
        sides = sides_of("size", self.image_size if size is None else size, self.dims)
        return (batch, self.in_chans, *sides)

    def transforms(self, size: Size | None = None) -> v2.Compose:
        """The transform from an image to an input, as in the evaluation of the weights.

        Args:
            size: of the result in pixels, the side of a square or (height, width); None for the
                size in the weights.

        Returns:
            A torchvision transform of a Pillow image, or of a tensor (..., C, H, W) of bytes or of
            floats in [0, 1], to float32 (..., C, height, width).

        Raises:
            ValueError: the ``mean`` and ``std`` of the weights are unknown.

        Example:
            >>> model = revzoo.create_model("revnet38.cifar10", pretrained=True)
            >>> model.transforms()(torch.zeros(3, 48, 40)).shape
            torch.Size([3, 32, 32])
        """
        from revzoo.weights.transforms import eval_transforms  # torchvision: slow to import

        facts = self.facts
        if facts.get("mean") is None or facts.get("std") is None:
            raise ValueError(
                f"the mean and std of this {type(self).__name__}'s training images are unknown: "
                'create it with pretrained=True ("revnet38.cifar10"); take a run\'s network, '
                "revzoo.training.Classifier.load_from_checkpoint(RUN).model; or use "
                f"from_pretrained(FOLDER) after {describing_save()}"
            )
        if self.in_chans != len(facts["mean"]):
            raise ValueError(
                f"this network takes {self.in_chans} channels, its weights were trained on "
                f"{len(facts['mean'])}: normalise the images yourself"
            )
        return eval_transforms(
            input_size=self.batch_shape(1, size or self.trained_size)[1:],
            mean=facts["mean"],
            std=facts["std"],
            crop_pct=facts.get("crop_pct"),
        )

    @property
    def trained_size(self) -> Size | None:
        """Size in pixels of the images of the weights; None if it is unknown."""
        return short_size(sizes) if (sizes := self.facts.get("input_size", ())[1:]) else None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The known facts about the data of the weights: fields of an entry."""
        if self.trained_on is not None:
            return self.trained_on
        return {} if self.entry is None else {n: getattr(self.entry, n) for n in _DATA_FIELDS}

    def save_pretrained(self, folder: str | Path, **facts: Any) -> WeightsEntry:
        """Write ``model.safetensors``, ``config.json`` and ``README.md``; returns the entry.

        Args:
            folder: created if missing; files of these names in it are replaced.
            facts: fields of :class:`~revzoo.weights.entry.WeightsEntry`, such as ``license``,
                ``recipe`` and ``metrics``. The defaults of ``classes``, ``mean``, ``std``,
                ``crop_pct`` and ``input_size`` come from its training data or, if it was not
                trained, from the weights that it was created with.

        Raises:
            EntryError: a fact is not a field or not valid; the network was not made by
                ``create_model``; its classifier, image channels or data changed after its weights
                were loaded and ``facts`` do not describe them; or a network created with this
                description has other tensors or computes something else, since layers were
                replaced or changed.
                Nothing is written.
            NotFiniteError: a tensor has NaN or Inf.
        """
        folder = Path(folder)
        data, entry = pack(self, file=TENSORS_FILE, facts=facts)
        inverts = any(step.invertible for step in steps_in(self).values())
        card = model_card(entry, source=folder.name, reversible=inverts).encode()
        contents = {TENSORS_FILE: data, CONFIG_FILE: json_bytes(entry.plain()), "README.md": card}
        # together: an entry beside different weights would fail verification
        write_together({folder / name: content for name, content in contents.items()})
        return entry


def pack(
    network: SavableNetwork, *, file: str, facts: dict[str, Any]
) -> tuple[bytes, WeightsEntry]:
    """The bytes of a safetensors file and the entry that describes it.

    Raises:
        EntryError: as :meth:`SavableNetwork.save_pretrained`.
    """
    if network.spec is None:
        raise EntryError(
            f"the name of this {type(network).__name__}'s architecture is unknown: make it with "
            "create_model"
        )
    _check_description(network, network.spec)
    architecture, options, _ = network.spec
    described = {
        "name": architecture,
        "options": options,
        "num_classes": network.num_classes,
        "input_size": network.batch_shape(1)[1:],
        **_known(network, given=facts),
        **facts,
    }
    # no fact may change these; the header holds the entry, so the hash comes after the file
    fixed = {"architecture": architecture, "sha256": "0" * 64, "file": file}
    try:
        entry = WeightsEntry(**{**described, **fixed})
    except TypeError as error:
        raise EntryError(f"unknown field of an entry: {error}") from error
    data = safetensors_bytes(network.state_dict(), metadata_for(entry))
    return data, replace(entry, sha256=hashlib.sha256(data).hexdigest())


def _check_description(network: SavableNetwork, spec: Spec) -> None:
    """Refuse a network that its description would not restore."""
    where = f"this {type(network).__name__}, compared with create_model({spec.architecture!r}),"
    state = network.state_dict()
    if any(value.is_meta for value in state.values()):
        raise EntryError(f"{where} lies on the meta device: it has no weights to save")
    check_finite(state, where)
    shape = {"num_classes": network.num_classes, "in_chans": network.in_chans}
    with torch.random.fork_rng(devices=[]):  # initial values must not advance the caller's state
        created = spec.create(spec.architecture, **shape, **spec.options)
    try:
        check_fit(created.state_dict(), state, where)
    except StateMismatchError as error:
        lists = str(error).partition("\n")[2]
        raise EntryError(
            f"{where} has other tensors; undo weight_norm, pruning and the like before saving, or "
            f"save model.state_dict()\n{lists}"
        ) from None
    like = next(network.parameters())
    created.to(like.device, like.dtype).load_state_dict(state)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(network.batch_shape(1, network.trained_size), generator=generator).to(like)
    both = zip(_outputs(network, image), _outputs(created, image), strict=True)
    off = [float((a - b).abs().max() / a.abs().max().clamp(1e-6)) for a, b in both]
    if not all(error <= TOLERANCE for error in off):  # also for NaN
        raise EntryError(
            f"{where} computes something else with the same weights (an image differs by "
            f"{max(off):.2g} of the largest output): layers were replaced or changed after it was "
            "created. Save model.state_dict(), or register the network with revzoo.register_model"
        )


def _outputs(network: Any, image: Tensor) -> list[Tensor]:
    """Features and logits; a classifier of zeros would hide the features."""
    # the description has neither a memory mode nor a grid
    with memory(network, "store"), evaluation_mode(network), torch.inference_mode():
        features = network.forward_features(image)
        return [features.float(), network.forward_head(features).float()]


def describing_save(names: Iterable[str] = _NEEDED) -> str:
    """The call that saves a model with these facts about its data, for messages."""
    return f"model.save_pretrained(FOLDER, {', '.join(f'{name}=[...]' for name in names)})"


def _known(network: SavableNetwork, *, given: Mapping[str, Any]) -> dict[str, Any]:
    """The known facts about the data of the weights; those no longer true must be in ``given``."""
    facts, entry, trained_on = dict(network.facts), network.entry, network.trained_on
    stale: tuple[str, ...] = ()
    if network.fresh_head and facts:
        stale = _NEEDED  # the number of classes may be the same, but not the classes
    elif entry is not None and not trained_on:
        # {}: trained, but on unknown data
        if trained_on is not None or entry.num_classes != network.num_classes:
            stale = _NEEDED
        elif entry.in_chans != network.in_chans:
            stale = ("mean", "std")  # one value per channel; the classes are the same
    if missing := [name for name in stale if name not in given]:
        raise EntryError(
            f"the network was changed or trained after its weights were loaded, so their "
            f"{', '.join(missing)} may be wrong: pass "
            f"{', '.join(f'{name}=...' for name in missing)} of its training data (None if "
            "unknown) to save_pretrained"
        )
    if network.in_chans != facts.get("input_size", (network.in_chans,))[0]:
        del facts["input_size"]  # it has the channels of the weights, not of this network
    return facts
