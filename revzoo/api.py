"""The public names; :mod:`revzoo` loads them on first use."""

import importlib
from typing import TYPE_CHECKING

from revzoo.core.check import check_inverse, is_invertible
from revzoo.core.checkpoint import ReplayMismatchError, checkpoint
from revzoo.core.conditions import is_replaying
from revzoo.core.guard.drift import DriftError, drift, set_drift_limit
from revzoo.core.guard.ranges import RangeError
from revzoo.core.invertible import Invertible, NotInvertibleError, Step
from revzoo.core.invertible_checkpoint import invertible_checkpoint
from revzoo.core.set_memory import memory, set_memory
from revzoo.interop.published import ConversionError, load_published
from revzoo.layers.actnorm import ActNorm
from revzoo.layers.affine import (
    AffineAdapterNaive,
    AffineAdapterSigmoid,
    AffineCoupling,
    ScaledCoupling,
)
from revzoo.layers.batchnorm import InvertibleBatchNorm
from revzoo.layers.coupling import AdditiveCoupling, Coupling
from revzoo.layers.leaky_relu import InvertibleLeakyReLU
from revzoo.layers.linear import InjectiveLinear, InvertibleConv1x1, InvertibleLinear, PatchConv
from revzoo.layers.make_reversible import Residual, make_reversible, reversible_blocks
from revzoo.layers.padding import ChannelPadding, SpatialPadding
from revzoo.layers.rearrange import ChannelPermutation, HaarSqueeze, InvertibleFlatten, Squeeze
from revzoo.layers.recalibrate import recalibrate_batch_norm
from revzoo.layers.reversed import Reversed
from revzoo.layers.sequence import ReversibleBlock, ReversibleSequence
from revzoo.layers.split import Merge, Split
from revzoo.models.registry import (
    create_model,
    from_pretrained,
    list_models,
    register_model,
)
from revzoo.profiling.audit import audit
from revzoo.profiling.plan import BudgetError, plan_memory
from revzoo.weights.errors import WeightsError
from revzoo.weights.table import WeightsTable

if TYPE_CHECKING:  # the names of _LATER, for type checkers and editors
    from revzoo.data.registry import register_data
    from revzoo.training.callbacks.registry import register_callback
    from revzoo.training.graphed_step import graphed_step
    from revzoo.training.optim.optimizers import register_optimizer
    from revzoo.training.predict import predict

# Imported on first use: they import Lightning, which is slow and which models do not need.
_LATER = {
    "graphed_step": "revzoo.training.graphed_step",
    "predict": "revzoo.training.predict",
    "register_callback": "revzoo.training.callbacks.registry",
    "register_data": "revzoo.data.registry",
    "register_optimizer": "revzoo.training.optim.optimizers",
}

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "AffineAdapterNaive",
    "AffineAdapterSigmoid",
    "AffineCoupling",
    "BudgetError",
    "ChannelPadding",
    "ChannelPermutation",
    "ConversionError",
    "Coupling",
    "DriftError",
    "HaarSqueeze",
    "InjectiveLinear",
    "Invertible",
    "InvertibleBatchNorm",
    "InvertibleConv1x1",
    "InvertibleFlatten",
    "InvertibleLeakyReLU",
    "InvertibleLinear",
    "Merge",
    "NotInvertibleError",
    "PatchConv",
    "RangeError",
    "ReplayMismatchError",
    "Residual",
    "Reversed",
    "ReversibleBlock",
    "ReversibleSequence",
    "ScaledCoupling",
    "SpatialPadding",
    "Split",
    "Squeeze",
    "Step",
    "WeightsError",
    "WeightsTable",
    "audit",
    "check_inverse",
    "checkpoint",
    "create_model",
    "drift",
    "from_pretrained",
    "graphed_step",
    "invertible_checkpoint",
    "is_invertible",
    "is_replaying",
    "list_models",
    "load_published",
    "make_reversible",
    "memory",
    "plan_memory",
    "predict",
    "recalibrate_batch_norm",
    "register_callback",
    "register_data",
    "register_model",
    "register_optimizer",
    "reversible_blocks",
    "set_drift_limit",
    "set_memory",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'revzoo.api' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_LATER[name]), name)
    return value
