"""Training on Lightning: the classifier module, its optimiser and schedules, its callbacks."""

from revzoo.training.batch_norm import BatchNormMomentum
from revzoo.training.callbacks import build_callbacks
from revzoo.training.classifier import Classifier
from revzoo.training.compiling import CompiledBranches
from revzoo.training.confusion import ConfusionMatrix
from revzoo.training.drift import DriftLogger
from revzoo.training.epoch_log import EpochLog
from revzoo.training.finetune import Finetuning
from revzoo.training.footprint import Footprint, peak_bytes, peak_host_bytes
from revzoo.training.lr_finder import LRCurve, find_lr
from revzoo.training.optim import OptimSpec, build_optimizer, build_schedule
from revzoo.training.schedules import make_schedule
from revzoo.training.showing import Reconstructions, Samples

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
    "OptimSpec",
    "Reconstructions",
    "Samples",
    "build_callbacks",
    "build_optimizer",
    "build_schedule",
    "find_lr",
    "make_schedule",
    "peak_bytes",
    "peak_host_bytes",
]
