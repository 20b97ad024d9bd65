"""Fine-tuning: freezes the backbone below a new head and unfreezes it stage by stage.

Why not Lightning's ``BackboneFinetuning``: it adds parameter groups to the optimiser during
training, which the schedule does not know, and with ``train_bn=False`` the statistics of frozen
BatchNorms still move. Here the optimiser holds every parameter from the first step on, and skips
frozen ones. The frozen part depends only on the epoch, so a resumed run needs no other state.

The frozen part, always the first of the network, is in evaluation mode: its running statistics stay
and dropout is off. It saves no activation and replays no step.

Known limits: a stage is the smallest part, so a ViT with one stage is unfrozen at once. Lightning's
strategy ``ddp`` fails because frozen parameters are unused: choose
``ddp_find_unused_parameters_true``, as ``revzoo train`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pytorch_lightning import Trainer
from torch import nn

from revzoo._checks import did_you_mean, is_count, is_number
from revzoo.models.network import parts
from revzoo.training.callbacks.progress_bar import epoch_of
from revzoo.training.callbacks.registry import ChecksModel, FollowsEpochs, RestoresAfterFit

Unfreeze = Mapping[float, str] | Sequence[float] | Sequence[tuple[float, str]] | None

log = logging.getLogger(__name__)


class Finetuning(FollowsEpochs, RestoresAfterFit, ChecksModel):
    """Trains only the classifier first, then more and more of the network below it.

    It sets ``requires_grad`` of all of ``pl_module.model``, and unfreezes everything after ``fit``.

    Args:
        unfreeze: epochs, counted from 0, and the first part that trains from then on.
            ``{5: "stages.2", 8: "stages.0"}`` trains the classifier only in epochs 0 to 4, then the
            last stage too, then all but the stem. Pairs ``[[5, "stages.2"], ...]`` mean the same;
            Hydra replaces pairs, but merges mappings. A list of epochs unfreezes one more part at
            each, from the last stage to the stem. None trains only the classifier: a *linear
            probe*. A number between 0 and 1 is a fraction of the trainer's ``max_epochs``:
            ``[0.25, 0.5]`` means epochs 3 and 6 of 12.

    Raises:
        ValueError: the epochs are not whole numbers >= 0 in rising order.

    Example:
        >>> from revzoo.training.callbacks.finetuning import Finetuning
        >>> callback = Finetuning(unfreeze=[2, 4])
        >>> callback.first_trained(revzoo.create_model("revnet38"), epoch=3)
        'stages.2'
    """

    def __init__(self, *, unfreeze: Unfreeze = None) -> None:
        self.unfreeze: dict[float, str] | list[float] = _parse(unfreeze)
        self._max_epochs: int | None = None  # of the run
        self._applies = False  # whether there is something to undo

    def first_trained(self, network: nn.Module, *, epoch: float) -> str:
        """The name of the first part that trains in ``epoch``; all parts after it train too.

        Raises:
            ValueError: the network lacks a part, or later epochs do not name earlier parts.
        """
        names = [part.name for part in parts(network)]
        reached = [first for start, first in self._plan(names).items() if self._at(start) <= epoch]
        return names[min(reached, default=len(names) - 1)]

    def check_model(self, network: nn.Module) -> None:
        self.first_trained(network, epoch=0)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Unfreeze every parameter: the optimiser, which is built next, gets all of them."""
        if stage != "fit":
            return
        self.check_model(pl_module.model)
        epochs = trainer.max_epochs or -1  # -1 or None in a run without an end
        if epochs < 1 and any(0 < start < 1 for start in self.unfreeze):
            raise ValueError(
                f"unfreeze={list(self.unfreeze)} are fractions of trainer.max_epochs, and this run "
                "has none: give epochs, such as [2, 4], or set trainer.max_epochs"
            )
        self._max_epochs = epochs if epochs > 0 else None
        pl_module.model.requires_grad_(True)
        self._applies = True

    def begin_epoch(self, trainer: Trainer, pl_module: Any) -> None:
        self.freeze(pl_module.model, epoch=trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        epoch = trainer.current_epoch
        if trainer.is_global_zero and (epoch == 0 or epoch in map(self._at, self.unfreeze)):
            first = self.first_trained(pl_module.model, epoch=epoch)
            log.info("from epoch %s, trains %s and all later parts", epoch_of(trainer), first)

    def undo(self, pl_module: Any) -> None:
        if self._applies:
            self._applies = False
            for part in parts(pl_module.model):
                part.train(True)

    def freeze(self, network: nn.Module, *, epoch: float) -> None:
        """Freeze the parts that are not trained in ``epoch``, unfreeze the rest."""
        first, trained = self.first_trained(network, epoch=epoch), False
        for part in parts(network):
            trained = trained or part.name == first
            part.train(trained)

    def _at(self, start: float) -> float:
        """The epoch of an entry; a fraction stays one while the number of epochs is unknown."""
        return round(start * self._max_epochs) if self._max_epochs and 0 < start < 1 else start

    def _plan(self, names: list[str]) -> dict[float, int]:
        """The index in ``names`` of the first part that trains, by entry of ``unfreeze``."""
        *backbone, head = names
        if isinstance(self.unfreeze, list):
            if len(self.unfreeze) > len(backbone):
                raise ValueError(
                    f"unfreeze={self.unfreeze}: got {len(self.unfreeze)} epochs, expected at most "
                    f"{len(backbone)}, one for each part ({', '.join(reversed(backbone))})"
                )
            plan = {epoch: len(backbone) - 1 - i for i, epoch in enumerate(self.unfreeze)}
        else:
            for name in self.unfreeze.values():
                if name not in backbone:
                    always = " (the classifier always trains)" if name == head else ""
                    raise ValueError(
                        f"unfreeze={self.unfreeze}: no part {name!r} to unfreeze{always}; expected "
                        f"one of {', '.join(backbone)}" + did_you_mean(str(name), backbone)
                    )
            plan = {epoch: names.index(name) for epoch, name in self.unfreeze.items()}
        if any(earlier <= later for earlier, later in pairwise(plan.values())):
            raise ValueError(
                f"unfreeze={self.unfreeze}: a part includes all parts after it, so each later "
                f"epoch must name an earlier part; expected an order from {backbone[-1]} to "
                f"{backbone[0]}"
            )
        if plan.get(0) == 0:
            raise ValueError(
                f"unfreeze={self.unfreeze} trains the whole network from epoch 0 on: remove the "
                "callback, or name a later epoch or part"
            )
        return plan


def _parse(unfreeze: Any) -> dict[float, str] | list[float]:
    """Epochs, or fractions, with parts as a dict; alone as a list."""
    values = unfreeze.items() if isinstance(unfreeze, Mapping) else unfreeze or ()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(
            f"unfreeze={unfreeze!r}: expected epochs, such as [5, 8], or the first part to train "
            'by epoch, such as {5: "stages.2", 8: "stages.0"}'
        )
    entries: list[Any] = list(values)
    paired = bool(entries) and all(isinstance(e, list | tuple) and len(e) == 2 for e in entries)
    epochs = [entry[0] for entry in entries] if paired else entries
    if not all(is_count(epoch, 0) or (is_number(epoch) and 0 < epoch < 1) for epoch in epochs):
        raise ValueError(
            f"unfreeze={unfreeze!r}: expected whole numbers >= 0 as epochs, or fractions of the "
            'run such as 0.5, and a part for all of them or for none, such as [[5, "stages.2"], '
            '[8, "stages.0"]]'
        )
    if any(earlier >= later for earlier, later in pairwise(epochs)):
        raise ValueError(f"unfreeze={unfreeze!r}: expected epochs in rising order, each once")
    return dict(entries) if paired else epochs
