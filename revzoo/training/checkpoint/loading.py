"""The tensors of a checkpoint into a module: names, shapes and values are checked first.

Why not torch's ``load_state_dict`` alone: it fails in several ways where names or values are of
another kind, and takes NaN, and complex numbers for real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from revzoo.models.pretrained import check_fit
from revzoo.models.tensors import check_dense, check_finite
from revzoo.training.checkpoint.files import CheckpointError


def load_tensors(
    module: nn.Module, state: Mapping[str, Any], where: str, *, strict: bool = True
) -> None:
    """Load the ``state_dict`` of a checkpoint.

    Args:
        module: its own state may hold other things than tensors (``get_extra_state``); only these
            are left to it unchecked.
        state: from a file that may be anyone's.
        where: the file, for errors.
        strict: whether the names must be those of ``module``, all of them and no other.

    Raises:
        CheckpointError: it does not fit, is no tensors by name, or holds NaN or Inf; ``module`` is
            as it was.
    """
    known = module.state_dict()
    own = {key: value for key, value in known.items() if isinstance(value, Tensor)}
    tensors = {key: value for key, value in state.items() if key in own or key not in known}
    try:
        check_dense(tensors, where)
        check_finite(tensors, where)
        if not strict:
            shared = own.keys() & tensors.keys()
            own, tensors = ({key: of[key] for key in shared} for of in (own, tensors))
        check_fit(own, tensors, where)
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:  # torch's, or one of weights
        raise CheckpointError(str(error)) from None
