"""Validates a checkpoint before a run resumes.

Lightning ignores missing parts: without ``loops`` a run counts from 0 again, without ``callbacks``
it draws other random numbers, and a buffer of the wrong shape fails in the first step. We compare
the state with the state that a run of the same hyperparameters would save. For this we build the
model on torch's ``meta`` device, which has names and shapes but no values.

A good checkpoint of another run (model, recipe, length, number of processes) passes here. Then
``resume`` and :class:`~revzoo.training.resume.run_state.RunState` refuse it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor

from revzoo.data.state import faults_of
from revzoo.training.callbacks.finetuning import Finetuning
from revzoo.training.checkpoint.files import DamagedCheckpointError
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import new_fit_state, optimiser_steps
from revzoo.training.optim.optimizers import build_optimizer, build_schedule
from revzoo.training.resume.run_state import RunState

SCALER = "MixedPrecision"  # Lightning's key for the state of fp16's gradient scaler

# keys that checkpoints of earlier versions lack
OPTIONAL = (
    "least_loss",
    "best_figures",
    "notes",
    "recomputed",
    "growth",
    "row",
    "name",  # of a parameter group
)

WITH_MOMENTUM = ("sgd", "muon")  # optimisers whose state is a momentum buffer per parameter

# the parts that the checks of hyperparameters and data read
PARTS: dict[str, Any] = {
    "epoch": 0,
    "global_step": 0,
    "hyper_parameters": {"model": {"name": "", "num_classes": 0, "in_chans": 0}, "optim": {}},
    "callbacks": {RunState.__name__: {"metrics": {}, "figures": {}}},
    "optimizer_states": [{"state": {}, "param_groups": None}],
    "lr_schedulers": [{}],
}


def check_parts(state: Mapping[str, Any]) -> None:
    """Check that a state has all parts, each of the right type.

    Args:
        state: from :func:`revzoo.training.checkpoint.files.read_checkpoint`.

    Raises:
        DamagedCheckpointError: naming the first wrong part.
    """
    _raise_first(differences({**PARTS, "loops": {"fit_loop": new_fit_state()}}, state, ""))
    # two counters of the same steps: they differ if a file was edited or merged
    steps = optimiser_steps(state["loops"]["fit_loop"])
    if state["global_step"] != steps:
        raise DamagedCheckpointError(
            f"global_step is {state['global_step']}, but its loops say {steps}"
        )


def check_contents(
    state: Mapping[str, Any], *, data: str, callbacks: Sequence[pl.Callback] = ()
) -> None:
    """Check that the parts of a state fit together.

    Args:
        state: one that has passed :func:`check_parts`; its hyperparameters are checked, too.
        data: name of the data module's class, which is the key of its state.
        callbacks: new instances of the run's callbacks; the state needs their keys.

    Raises:
        DamagedCheckpointError: naming the first wrong part.
    """
    hyper = state["hyper_parameters"]
    try:
        with torch.device("meta"):
            module = Classifier(**hyper)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DamagedCheckpointError(f"hyper_parameters describe no model ({reason})") from None
    _raise_first(_wrong_weights(module, state, callbacks))
    _raise_first(_wrong_optimizer(module, state, callbacks))
    _raise_first(_wrong_callbacks(module, state["callbacks"], callbacks))
    _raise_first(_wrong_data(hyper["model"], state, data))
    if SCALER in state:
        _raise_first(differences(torch.amp.GradScaler("cpu").state_dict(), state[SCALER], SCALER))


def differences(expected: Any, got: Any, key: str) -> Iterator[str]:
    """Yield each place where ``got`` lacks a key of ``expected``, or differs in type or shape.

    Values may differ, and ``got`` may have more keys. It may lack the keys of :data:`OPTIONAL`.
    None in ``expected`` matches anything.
    """
    kind = type(expected)
    wrong = f"{key} is {_described(got)}, expected {_described(expected)}"
    if expected is None:
        return
    if kind is Tensor:
        if type(got) is not Tensor or _described(got) != _described(expected):
            yield wrong
    elif kind in (dict, OrderedDict):
        if not isinstance(got, dict):
            yield wrong
            return
        for name, value in expected.items():
            place = f"{key}[{name!r}]" if key else str(name)
            if name in got:
                yield from differences(value, got[name], place)
            elif name not in OPTIONAL:
                yield f"{place} is missing"
    elif kind in (list, tuple):
        if not isinstance(got, list | tuple) or len(got) != len(expected):
            yield wrong
            return
        for index, value in enumerate(expected):
            yield from differences(value, got[index], f"{key}[{index}]")
    elif type(got) is not kind and not (kind is float and type(got) is int):
        # exact types: True is an int; a rate of 1 may be written for 1.0
        yield wrong


def not_finite(value: Any, key: str) -> Iterator[str]:
    """Yield each place in ``value`` that holds NaN or infinity."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from not_finite(item, f"{key}[{name!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from not_finite(item, f"{key}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key} is {value}"
    elif isinstance(value, Tensor) and not bool(value.isfinite().all()):
        yield f"{key} has NaN or infinity"


def _wrong_weights(
    module: Classifier, state: Mapping[str, Any], callbacks: Sequence[pl.Callback]
) -> Iterator[str]:
    expected = {"state_dict": dict(module.state_dict())}
    # then state_dict is the average, and current_model_state has the weights
    if any(isinstance(c, WeightAveraging) for c in callbacks):
        expected["current_model_state"] = expected["state_dict"]
        expected["averaging_state"] = {"n_averaged": torch.tensor(0)}
    yield from differences(expected, state, "")
    for name in expected:
        # for weights, unlike elsewhere, more keys are wrong: they belong to another model
        if more := [key for key in state[name] if key not in expected[name]]:
            yield f"{name} has {more[0]!r}, which the model does not have"
        yield from not_finite(state[name], name)


def _wrong_optimizer(
    module: Classifier, state: Mapping[str, Any], callbacks: Sequence[pl.Callback]
) -> Iterator[str]:
    optimizer = build_optimizer(module.model, module.optim)
    # any length: only keys and types are compared
    schedule = build_schedule(optimizer, module.optim, total_steps=1)
    expected = optimizer.state_dict()
    saved, key = state["optimizer_states"][0], "optimizer_states[0]"
    yield from differences(expected, saved, key)
    for index, group in enumerate(expected["param_groups"]):
        if saved["param_groups"][index]["params"] != group["params"]:
            yield f"{key}['param_groups'][{index}] does not list the model's parameters"
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    buffers = {index: {"momentum_buffer": p} for index, p in enumerate(params)}
    # frozen parameters, and parameters whose every step the scaler skipped, have no buffer
    partial = SCALER in state or any(isinstance(c, Finetuning) for c in callbacks)
    # before the first step there are no buffers
    if module.optim.name in WITH_MOMENTUM and module.optim.momentum and state["global_step"]:
        needed = {i: buffer for i, buffer in buffers.items() if i in saved["state"] or not partial}
        yield from differences(needed, saved["state"], f"{key}['state']")
    if more := [index for index in saved["state"] if index not in buffers]:
        yield f"{key}['state'] has {more[0]!r}, which is not a parameter of the model"
    yield from not_finite(saved, key)
    yield from differences([schedule.state_dict()], state["lr_schedulers"], "lr_schedulers")
    yield from not_finite(state["lr_schedulers"], "lr_schedulers")


def _wrong_callbacks(
    module: Classifier, states: Mapping[str, Any], callbacks: Sequence[pl.Callback]
) -> Iterator[str]:
    # Lightning saves only callbacks that have a state
    expected_states = {c.state_key: state for c in callbacks if (state := c.state_dict())}
    yield from differences(expected_states, states, "callbacks")
    saved, place = states[RunState.__name__], f"callbacks[{RunState.__name__!r}]"
    # before `layout`, which needs its length
    if not saved.get("random") or not isinstance(saved["random"], list):
        yield f"{place}['random'] holds no random states"
        return
    yield from differences(RunState.layout(saved, module.training_metrics()), saved, place)


def _wrong_data(model: Mapping[str, Any], state: Mapping[str, Any], data: str) -> Iterator[str]:
    if data not in state:
        yield f"{data} is missing"
        return
    # images of other channels are from another run, which the data module refuses
    faults = faults_of(state[data], num_classes=model["num_classes"])
    yield from (f"in {data}, {fault}" for fault in faults)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "floating-point" if value.is_floating_point() else "whole-number"
        return f"a {kind} tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"{type(value).__name__} {value!r:.40}" if not isinstance(value, dict) else "a mapping"


def _raise_first(faults: Iterator[str]) -> None:
    # the first one: later ones often follow from it
    for fault in faults:
        raise DamagedCheckpointError(fault)
