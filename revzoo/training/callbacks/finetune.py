"""Fine-tuning: a frozen backbone under a new head, unfrozen from the last stage to the stem.

Why not Lightning's ``BackboneFinetuning``: it adds parameter groups to the optimiser during
training, which the schedule does not know, and with ``train_bn=False`` the statistics of frozen
BatchNorms still move. Here the optimiser holds every parameter from the first step on. A frozen
parameter has no gradient, so optimisers skip it: no decay, no momentum. Groups, rates and schedule
are the same in every epoch, and the epoch alone decides which part is frozen: a resumed run needs
no other state.

The frozen part is always the beginning of the network. It is in evaluation mode, so its running
statistics stay and it drops nothing. As no tensor in it requires a gradient, it saves no activation
and replays nothing.

Known limits: a stage is the smallest part, so a ViT of one stage is unfrozen at once. With
Lightning's strategy ``ddp`` frozen parameters are unused ones: choose
``ddp_find_unused_parameters_true``, as ``revzoo train`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
from torch import nn

from revzoo._checks import did_you_mean
from revzoo.models.parts import parts
from revzoo.training.callbacks.base import RestoresAfterFit
from revzoo.training.callbacks.progress import epoch_of

Unfreeze = Mapping[int, str] | Sequence[int] | Sequence[tuple[int, str]] | None

log = logging.getLogger(__name__)


class Finetuning(RestoresAfterFit):
    """Trains the classifier alone at first, then more and more of the network before it.

    It freezes and unfreezes all of ``pl_module.model``, which is unfrozen after ``fit``.

    Args:
        unfreeze: which part is the first to be trained from which epoch (counted from 0) on, such
            as ``{5: "stages.2", 8: "stages.0"}``: up to epoch 4 the classifier alone, then the
            last stage too, then all but the stem; or as pairs ``[[5, "stages.2"], ...]``, which
            Hydra replaces where it would merge a mapping. Or a list of epochs: one part more at
            each, from the last stage to the stem. None: the classifier alone, a *linear probe*.

    Raises:
        ValueError: epochs are no rising whole numbers from 0 on.

    Example:
        >>> from revzoo.training.callbacks.finetune import Finetuning
        >>> callback = Finetuning(unfreeze=[2, 4])
        >>> callback.first_trained(revzoo.create_model("revnet38"), epoch=3)
        'stages.2'
    """

    def __init__(self, *, unfreeze: Unfreeze = None) -> None:
        self.unfreeze: dict[int, str] | list[int] = _checked(unfreeze)
        self._applies = False

    def first_trained(self, network: nn.Module, *, epoch: int) -> str:
        """The name of the first part that is trained in ``epoch``; all after it are, too.

        Raises:
            ValueError: the network lacks a part, or parts are not named from the last to the first.
        """
        names = [part.name for part in parts(network)]
        reached = [first for start, first in self._plan(names).items() if start <= epoch]
        return names[min(reached, default=len(names) - 1)]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hand the optimiser, which is built next, every parameter.

        Raises:
            ValueError: see :meth:`first_trained`.
        """
        if stage != "fit":
            return
        network = _network(pl_module)
        self.first_trained(network, epoch=0)
        late = [epoch for epoch in self.unfreeze if 0 < (trainer.max_epochs or -1) <= epoch]
        if late:
            log.warning(
                "the run ends after %d epochs, before unfreeze=%s", trainer.max_epochs, late
            )
        network.requires_grad_(True)
        self._applies = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._apply(trainer, pl_module)  # an epoch resumed in its middle has no start

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._apply(trainer, pl_module)
        begins = trainer.current_epoch in self.unfreeze or trainer.current_epoch == 0
        if begins and trainer.is_global_zero:
            first = self.first_trained(_network(pl_module), epoch=trainer.current_epoch)
            log.info("trains %s and what follows it, from epoch %s on", first, epoch_of(trainer))

    def undo(self, pl_module: pl.LightningModule) -> None:
        if self._applies:
            self._applies = False
            _freeze_before("stem", _network(pl_module))

    def freeze(self, network: nn.Module, *, epoch: int) -> None:
        """Freeze the parts that are not trained in ``epoch``, unfreeze the rest."""
        _freeze_before(self.first_trained(network, epoch=epoch), network)

    def _apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.freeze(_network(pl_module), epoch=trainer.current_epoch)

    def _plan(self, names: list[str]) -> dict[int, int]:
        """The place in ``names`` of the first part that is trained, by epoch."""
        *backbone, head = names
        if isinstance(self.unfreeze, list):
            if len(self.unfreeze) > len(backbone):
                raise ValueError(
                    f"unfreeze={self.unfreeze}: got {len(self.unfreeze)} epochs, the network has "
                    f"{len(backbone)} parts to unfreeze ({', '.join(reversed(backbone))}); give at "
                    "most one epoch for each"
                )
            plan = {epoch: len(backbone) - 1 - i for i, epoch in enumerate(self.unfreeze)}
        else:
            for name in self.unfreeze.values():
                if name not in backbone:
                    always = " (the classifier is always trained)" if name == head else ""
                    raise ValueError(
                        f"unfreeze={self.unfreeze}: no part {name!r} to unfreeze{always}; expected "
                        f"some of {', '.join(backbone)}" + did_you_mean(str(name), backbone)
                    )
            plan = {epoch: names.index(name) for epoch, name in self.unfreeze.items()}
        if any(earlier <= later for earlier, later in pairwise(plan.values())):
            raise ValueError(
                f"unfreeze={self.unfreeze}: each part takes in those after it; expected, as epochs "
                f"rise, parts from {backbone[-1]} to {backbone[0]}, each once"
            )
        if plan.get(0) == 0:
            raise ValueError(
                f"unfreeze={self.unfreeze} trains the whole network from epoch 0 on: leave the "
                "callback out, or name a later epoch or part"
            )
        return plan


def _freeze_before(first: str, network: nn.Module) -> None:
    """Freeze the parts before ``first``, train it and those after it."""
    trained = False
    for part in parts(network):
        trained = trained or part.name == first
        part.train(trained)


def _network(pl_module: pl.LightningModule) -> nn.Module:
    network = pl_module.model
    assert isinstance(network, nn.Module)
    return network


def _checked(unfreeze: Any) -> dict[int, str] | list[int]:
    given = unfreeze.items() if isinstance(unfreeze, Mapping) else unfreeze or ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(
            f"unfreeze={unfreeze!r}: expected epochs, such as [5, 8], or the first part to train "
            'by epoch, such as {5: "stages.2", 8: "stages.0"}'
        )
    entries: list[Any] = list(given)
    paired = bool(entries) and all(isinstance(e, list | tuple) and len(e) == 2 for e in entries)
    epochs = [entry[0] for entry in entries] if paired else entries
    if not all(isinstance(e, int) and not isinstance(e, bool) and e >= 0 for e in epochs):
        raise ValueError(
            f"unfreeze={unfreeze!r}: expected epochs to be whole numbers from 0 on, and either all "
            'or none with a part, such as [[5, "stages.2"], [8, "stages.0"]]'
        )
    if any(earlier >= later for earlier, later in pairwise(epochs)):
        raise ValueError(f"unfreeze={unfreeze!r}: expected epochs in rising order, each once")
    return dict(entries) if paired else epochs
