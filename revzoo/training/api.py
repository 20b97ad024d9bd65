"""The public names of training; :mod:`revzoo.training` loads them on first use."""

from revzoo.training.callbacks.batch_norm import BatchNormMomentum
from revzoo.training.callbacks.compiled_branches import CompiledBranches
from revzoo.training.callbacks.figures import DriftLogger, Footprint
from revzoo.training.callbacks.finetuning import Finetuning
from revzoo.training.callbacks.pictures import ConfusionMatrix, Reconstructions, Samples
from revzoo.training.callbacks.progress_bar import EpochLog
from revzoo.training.callbacks.registry import build_callbacks
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import quiet
from revzoo.training.memory import peak_bytes, peak_host_bytes
from revzoo.training.optim.optimizers import (
    OptimSpec,
    build_optimizer,
    build_schedule,
    make_schedule,
)
from revzoo.training.tasks.multilabel import MultilabelClassifier
from revzoo.training.tasks.regression import Regressor
from revzoo.training.tasks.segmentation import Segmenter
from revzoo.training.tuning import LRCurve, find_lr

__all__ = [
    "BatchNormMomentum",
    "Classifier",
    "CompiledBranches",
    "ConfusionMatrix",
    "DriftLogger",
    "EpochLog",
    "Finetuning",
    "Footprint",
    "LRCurve",
    "MultilabelClassifier",
    "OptimSpec",
    "Reconstructions",
    "Regressor",
    "Samples",
    "Segmenter",
    "build_callbacks",
    "build_optimizer",
    "build_schedule",
    "find_lr",
    "make_schedule",
    "peak_bytes",
    "peak_host_bytes",
    "quiet",
]
