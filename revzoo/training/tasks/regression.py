"""Regression as a Lightning module: one or several numbers for each image.

The network learns standardised targets: less their mean over the training images, divided by their
deviation. So a loss, a rate and an initialisation fit ages and micrometres alike. The data module
measures both, and a checkpoint keeps them with the state of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from revzoo.data import ImageData
from revzoo.training.classifier import Classifier, class_count
from revzoo.training.metrics import MAE, R2, RMSE
from revzoo.training.tasks.losses import REGRESSION, Loss


class Regressor(Classifier):
    """Train, validate, test and predict with a network that estimates numbers.

    As :class:`Classifier`, but labels are float ``(B, num_classes)``, a target in each column.
    Logs ``mae`` (mean absolute error), and of validation and test ``rmse`` and ``r2``: means over
    the targets, in their units. The loss is that of standardised targets. With a data module that
    is no ``ImageData``, targets are not standardised.

    Raises:
        ValueError: as :class:`Classifier`, or ``optim.class_weights`` is given.

    Example:
        >>> from revzoo.training import Regressor
        >>> module = Regressor({"name": "revnet38", "num_classes": 1}, optim={"loss": "huber"})
    """

    task = "regression"
    losses: ClassVar[Mapping[str, Loss]] = REGRESSION
    monitor = "val/mae"
    console = ("loss", "mae", "rmse", "r2")
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        count = class_count(self.model)
        # not persistent: the state of the data has them
        self.register_buffer("target_mean", torch.zeros(count), persistent=False)
        self.register_buffer("target_std", torch.ones(count), persistent=False)

    def figures(self, evaluated: bool) -> dict[str, Metric]:
        count = class_count(self.model)
        by_name: dict[str, Metric] = {"mae": MAE(count)}
        return by_name | ({"rmse": RMSE(count), "r2": R2(count)} if evaluated else {})

    def measured(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"preds": logits * self.target_std, "target": labels - self.target_mean}

    def predicted(self, logits: Tensor) -> Tensor:
        """The targets (B, num_classes) in their units."""
        return logits * self.target_std + self.target_mean

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss () of a batch.

        Args:
            logits: (B, num_classes), the estimates of standardised targets.
            labels: (B, num_classes), in their units.
        """
        function = self.losses[self.optim.loss or next(iter(self.losses))]
        return function(logits, (labels - self.target_mean) / self.target_std)

    def balance(self, data: Any) -> None:
        """Take the mean and the deviation of the training targets."""
        if isinstance(data, ImageData):
            self.standardise(data.targets)

    def learn_from(self, data_state: Mapping[str, Any] | None) -> None:
        super().learn_from(data_state)
        self.standardise((data_state or {}).get("targets"))

    def standardise(self, targets: Mapping[str, list[float]] | None) -> None:
        """Take ``mean`` and ``std`` of each target; None changes nothing."""
        if targets:
            # in place: a captured step reads this memory
            self.target_mean.copy_(torch.tensor(targets["mean"]))
            self.target_std.copy_(torch.tensor(targets["std"]))

    def _listed_weights(self) -> None:
        if (weights := self.optim.class_weights) is not None:
            raise ValueError(
                f"optim.class_weights={weights} with task={self.task}: there are no classes; "
                "leave it out"
            )
