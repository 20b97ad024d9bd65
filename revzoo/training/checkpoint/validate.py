"""Checks a checkpoint before a run resumes, for what torch and Lightning do not check.

Lightning ignores missing parts: without ``loops`` a run counts from 0 again, without ``callbacks``
it draws other random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch

from revzoo.models.weights_file import check_module
from revzoo.training.checkpoint.files import DamagedCheckpointError
from revzoo.training.classifier import Classifier
from revzoo.training.resume.run_state import RunState
from revzoo.weights.errors import WeightsError

PARTS = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


def check_complete(
    state: Mapping[str, Any], where: str, *, data: str, callbacks: Sequence[pl.Callback] = ()
) -> None:
    """Refuse the state of a run that lacks a part, or whose weights do not fit its model.

    Args:
        state: with hyperparameters that were checked.
        where: its file, for errors.
        data: name of the data module's class, which is the key of its state.
        callbacks: new instances of the run's callbacks; the state needs their keys.

    Raises:
        DamagedCheckpointError: names the parts.
    """
    lacking = [name for name in (*PARTS, data) if name not in state]
    # Lightning saves only callbacks that have a state
    keys = [RunState.__name__, *(c.state_key for c in callbacks if c.state_dict())]
    lacking += [f"callbacks[{key!r}]" for key in keys if key not in state.get("callbacks", {})]
    if lacking:
        raise DamagedCheckpointError(f"{where} lacks {', '.join(lacking)}: use another checkpoint")
    with torch.device("meta"):  # names and shapes, but no values
        module = Classifier(**state["hyper_parameters"])
    try:
        check_module(module, state["state_dict"], where)
    except WeightsError as error:
        raise DamagedCheckpointError(" ".join(str(error).split())) from None  # one line
