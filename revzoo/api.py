"""The names that users rely on, gathered from the floors; :mod:`revzoo` hands them out."""

from revzoo.core.check import check_inverse
from revzoo.core.function import invertible_checkpoint
from revzoo.core.guard import DriftError, RangeError, drift, set_drift_limit
from revzoo.core.invertible import Invertible, NotInvertibleError, Step
from revzoo.core.memory import set_memory
from revzoo.core.recording import ReplayMismatchError
from revzoo.core.replay import is_replaying
from revzoo.layers.coupling import AdditiveCoupling, AffineCoupling, Coupling
from revzoo.layers.sequence import ReversibleBlock, ReversibleSequence
from revzoo.layers.squeeze import Squeeze
from revzoo.models.registry import create_model, from_pretrained, list_models
from revzoo.weights.errors import WeightsError
from revzoo.weights.table import WeightsTable

__all__ = [
    "AdditiveCoupling",
    "AffineCoupling",
    "Coupling",
    "DriftError",
    "Invertible",
    "NotInvertibleError",
    "RangeError",
    "ReplayMismatchError",
    "ReversibleBlock",
    "ReversibleSequence",
    "Squeeze",
    "Step",
    "WeightsError",
    "WeightsTable",
    "check_inverse",
    "create_model",
    "drift",
    "from_pretrained",
    "invertible_checkpoint",
    "is_replaying",
    "list_models",
    "set_drift_limit",
    "set_memory",
]
