"""The table of tasks: the Lightning module of each."""

from __future__ import annotations

from typing import Any

from revzoo.training.classifier import Classifier
from revzoo.training.tasks.multilabel import MultilabelClassifier
from revzoo.training.tasks.regression import Regressor
from revzoo.training.tasks.segmentation import Segmenter

TASKS: dict[str, type[Classifier]] = {
    kind.task: kind for kind in (Classifier, MultilabelClassifier, Regressor, Segmenter)
}
"""By ``ImageData.task``."""


def task_class(task: Any) -> type[Classifier]:
    """The Lightning module of a task; that of classifiers for states without one."""
    return TASKS.get(task, Classifier) if isinstance(task, str) else Classifier
