"""The public names; :mod:`revzoo` loads them on first use."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from revzoo.core.check import check_inverse as check_inverse
from revzoo.core.check import is_invertible as is_invertible
from revzoo.core.checkpoint import ReplayMismatchError as ReplayMismatchError
from revzoo.core.checkpoint import checkpoint as checkpoint
from revzoo.core.checkpoint import invertible_checkpoint as invertible_checkpoint
from revzoo.core.conditions import is_replaying as is_replaying
from revzoo.core.guard import DriftError as DriftError
from revzoo.core.guard import RangeError as RangeError
from revzoo.core.guard import drift as drift
from revzoo.core.guard import set_drift_limit as set_drift_limit
from revzoo.core.invertible import Invertible as Invertible
from revzoo.core.invertible import NotInvertibleError as NotInvertibleError
from revzoo.core.invertible import Step as Step
from revzoo.core.modes import memory as memory
from revzoo.core.modes import set_memory as set_memory
from revzoo.interop.published import ConversionError as ConversionError
from revzoo.interop.published import load_published as load_published
from revzoo.layers.contractive import ContractiveBlock as ContractiveBlock
from revzoo.layers.contractive import ContractiveConv2d as ContractiveConv2d
from revzoo.layers.contractive import ContractiveLinear as ContractiveLinear
from revzoo.layers.coupling import AdditiveCoupling as AdditiveCoupling
from revzoo.layers.coupling import AffineAdapterNaive as AffineAdapterNaive
from revzoo.layers.coupling import AffineAdapterSigmoid as AffineAdapterSigmoid
from revzoo.layers.coupling import AffineCoupling as AffineCoupling
from revzoo.layers.coupling import Coupling as Coupling
from revzoo.layers.coupling import ScaledCoupling as ScaledCoupling
from revzoo.layers.linear import InjectiveLinear as InjectiveLinear
from revzoo.layers.linear import InvertibleConv1x1 as InvertibleConv1x1
from revzoo.layers.linear import InvertibleLinear as InvertibleLinear
from revzoo.layers.linear import PatchConv as PatchConv
from revzoo.layers.make_reversible import Residual as Residual
from revzoo.layers.make_reversible import make_reversible as make_reversible
from revzoo.layers.make_reversible import recalibrate_batch_norm as recalibrate_batch_norm
from revzoo.layers.make_reversible import reversible_blocks as reversible_blocks
from revzoo.layers.momentum import MomentumBlock as MomentumBlock
from revzoo.layers.norm_act import ActNorm as ActNorm
from revzoo.layers.norm_act import InvertibleBatchNorm as InvertibleBatchNorm
from revzoo.layers.norm_act import InvertibleLeakyReLU as InvertibleLeakyReLU
from revzoo.layers.padding import ChannelPadding as ChannelPadding
from revzoo.layers.padding import SpatialPadding as SpatialPadding
from revzoo.layers.rearrange import ChannelPermutation as ChannelPermutation
from revzoo.layers.rearrange import HaarSqueeze as HaarSqueeze
from revzoo.layers.rearrange import InvertibleFlatten as InvertibleFlatten
from revzoo.layers.rearrange import Squeeze as Squeeze
from revzoo.layers.reversed import Reversed as Reversed
from revzoo.layers.sequence import ReversibleBlock as ReversibleBlock
from revzoo.layers.sequence import ReversibleSequence as ReversibleSequence
from revzoo.layers.streams import Merge as Merge
from revzoo.layers.streams import Split as Split
from revzoo.models.registry import create_model as create_model
from revzoo.models.registry import from_pretrained as from_pretrained
from revzoo.models.registry import list_models as list_models
from revzoo.models.registry import register_model as register_model
from revzoo.profiling.audit import audit as audit
from revzoo.profiling.conversion import conversion as conversion
from revzoo.profiling.plan import BudgetError as BudgetError
from revzoo.profiling.plan import plan_memory as plan_memory
from revzoo.weights.errors import WeightsError as WeightsError
from revzoo.weights.table import WeightsTable as WeightsTable

if TYPE_CHECKING:  # the names of _LATER, for type checkers and editors
    from revzoo.data.registry import register_data as register_data
    from revzoo.data.registry import register_transform as register_transform
    from revzoo.training.callbacks.registry import register_callback as register_callback
    from revzoo.training.graphed_step import graphed_step as graphed_step
    from revzoo.training.optim.optimizers import register_optimizer as register_optimizer
    from revzoo.training.predict import predict as predict

# Imported on first use: they import Lightning, which is slow and which models do not need.
_LATER = {
    "graphed_step": "revzoo.training.graphed_step",
    "predict": "revzoo.training.predict",
    "register_callback": "revzoo.training.callbacks.registry",
    "register_data": "revzoo.data.registry",
    "register_optimizer": "revzoo.training.optim.optimizers",
    "register_transform": "revzoo.data.registry",
}

# classes and functions: not TYPE_CHECKING
_eager = {k for k, v in globals().items() if not k.startswith("_") and hasattr(v, "__module__")}
__all__ = sorted({*_eager, *_LATER})


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'revzoo.api' has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(_LATER[name]), name)
    return value
