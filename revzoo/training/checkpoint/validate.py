"""Validates a checkpoint before a run resumes.

Lightning loads what it finds and ignores what is missing: without ``loops`` a run counts from 0
again, without ``callbacks`` it draws other random numbers, and a buffer of another shape fails in
the first step. Here a state is compared with one that a run of its hyperparameters would save. The
model is built on torch's ``meta`` device, which has names and shapes but no values.

A good checkpoint of another run (model, recipe, length, number of processes) passes; ``resume`` and
:class:`~revzoo.training.checkpoint.state.RunState` refuse it.
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

from revzoo.training.callbacks.finetune import Finetuning
from revzoo.training.checkpoint.files import DamagedCheckpoint
from revzoo.training.checkpoint.state import RunState, random_states_of_cpu
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import new_fit_state, optimiser_steps
from revzoo.training.optim.optimizers import build_optimizer, build_schedule

SCALER = "MixedPrecision"  # where Lightning keeps the state of fp16's gradient scaler

# missing in checkpoints of earlier versions
LATER = ("least_loss", "pixel_max", "order_seed", "notes", "recomputed", "row")

WITH_MOMENTUM = ("sgd", "muon")  # optimisers whose state is known here

# the parts that the checks of hyperparameters and data need
PARTS: dict[str, Any] = {
    "epoch": 0,
    "global_step": 0,
    "hyper_parameters": {"model": {"name": "", "num_classes": 0, "in_chans": 0}, "optim": {}},
    "callbacks": {RunState.__name__: {"metrics": {}, "figures": {}}},
    "optimizer_states": [{"state": {}, "param_groups": None}],
    "lr_schedulers": [{}],
}


def check_parts(state: Mapping[str, Any]) -> None:
    """Refuse a state that lacks a part or has another type in its place.

    Args:
        state: from :func:`revzoo.training.checkpoint.files.read_checkpoint`.

    Raises:
        DamagedCheckpoint: naming the first place.
    """
    _refuse(unlike({**PARTS, "loops": {"fit_loop": new_fit_state()}}, state, ""))
    steps = optimiser_steps(state["loops"]["fit_loop"])
    if state["global_step"] != steps:
        raise DamagedCheckpoint(f"global_step is {state['global_step']}, its loops counted {steps}")


def check_contents(
    state: Mapping[str, Any], *, data: str, callbacks: Sequence[pl.Callback] = ()
) -> None:
    """Refuse a state whose parts do not fit together.

    Args:
        state: one that has passed :func:`check_parts`, of hyperparameters that may be used.
        data: name of the data module's class, under which its state is kept.
        callbacks: new ones of the run; the state must have what they would save.

    Raises:
        DamagedCheckpoint: naming the first place.
    """
    hyper = state["hyper_parameters"]
    try:
        with torch.device("meta"):
            module = Classifier(**hyper)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DamagedCheckpoint(f"hyper_parameters describe no model ({reason})") from None
    _refuse(_wrong_weights(module, state, callbacks))
    _refuse(_wrong_optimizer(module, state, callbacks))
    _refuse(_wrong_callbacks(module, state["callbacks"], callbacks))
    _refuse(_wrong_data(hyper["model"], state, data))
    if SCALER in state:
        _refuse(unlike(torch.amp.GradScaler("cpu").state_dict(), state[SCALER], SCALER))


def unlike(expected: Any, found: Any, key: str) -> Iterator[str]:
    """Yield each place where ``found`` lacks a key, or has another type or shape than ``expected``.

    Values may differ, and ``found`` may have more keys. It may lack the keys of :data:`LATER`. None
    in ``expected`` matches anything.
    """
    kind = type(expected)
    if expected is None:
        return
    if kind is Tensor:
        if type(found) is not Tensor or _looks(found) != _looks(expected):
            yield f"{key} is {_looks(found)}, expected {_looks(expected)}"
    elif kind in (dict, OrderedDict):
        if not isinstance(found, dict):
            yield f"{key} is {_looks(found)}, expected a mapping"
            return
        for name, value in expected.items():
            place = f"{key}[{name!r}]" if key else str(name)
            if name in found:
                yield from unlike(value, found[name], place)
            elif name not in LATER:
                yield f"{place} is missing"
    elif kind in (list, tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            yield f"{key} is {_looks(found)}, expected {_looks(expected)}"
            return
        for index, value in enumerate(expected):
            yield from unlike(value, found[index], f"{key}[{index}]")
    elif type(found) is not kind and not (kind is float and type(found) is int):
        yield f"{key} is {_looks(found)}, expected {_looks(expected)}"


def not_finite(value: Any, key: str) -> Iterator[str]:
    """The places in ``value`` that hold NaN or infinity."""
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
    kept = {"state_dict": dict(module.state_dict())}
    if any(isinstance(c, WeightAveraging) for c in callbacks):
        kept["current_model_state"] = kept["state_dict"]
        kept["averaging_state"] = {"n_averaged": torch.tensor(0)}
    yield from unlike(kept, state, "")
    for name in kept:
        more = [key for key in state[name] if key not in kept[name]]
        if more:
            yield f"{name} has {more[0]!r}, which the model has not"
        yield from not_finite(state[name], name)


def _wrong_optimizer(
    module: Classifier, state: Mapping[str, Any], callbacks: Sequence[pl.Callback]
) -> Iterator[str]:
    optimizer = build_optimizer(module.model, module.optim)
    schedule = build_schedule(optimizer, module.optim, total_steps=1)
    expected = optimizer.state_dict()
    found, key = state["optimizer_states"][0], "optimizer_states[0]"
    yield from unlike(expected, found, key)
    for index, group in enumerate(expected["param_groups"]):
        if found["param_groups"][index]["params"] != group["params"]:
            yield f"{key}['param_groups'][{index}] numbers other parameters than the model's"
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    buffers = {index: {"momentum_buffer": p} for index, p in enumerate(params)}
    # frozen parameters have none, nor have parameters whose every step the scaler skipped
    partial = SCALER in state or any(isinstance(c, Finetuning) for c in callbacks)
    if module.optim.name in WITH_MOMENTUM and module.optim.momentum and state["global_step"]:
        kept = {i: buffer for i, buffer in buffers.items() if i in found["state"] or not partial}
        yield from unlike(kept, found["state"], f"{key}['state']")
    if more := [index for index in found["state"] if index not in buffers]:
        yield f"{key}['state'] has {more[0]!r}, which is no parameter of the model"
    yield from not_finite(found, key)
    yield from unlike([schedule.state_dict()], state["lr_schedulers"], "lr_schedulers")
    yield from not_finite(state["lr_schedulers"], "lr_schedulers")


def _wrong_callbacks(
    module: Classifier, found: Mapping[str, Any], callbacks: Sequence[pl.Callback]
) -> Iterator[str]:
    states = {callback.state_key: callback.state_dict() for callback in callbacks}
    yield from unlike({key: kept for key, kept in states.items() if kept}, found, "callbacks")
    saved, place = found[RunState.__name__], f"callbacks[{RunState.__name__!r}]"
    processes = saved.get("random")
    if not isinstance(processes, list) or not processes:
        yield f"{place}['random'] holds no random states"
        return
    notes, names, row = (saved.get(part) for part in ("notes", "recomputed", "row"))
    if not isinstance(notes or {}, dict) or not isinstance(names or [], list):
        yield f"{place}['notes'] or {place}['recomputed'] is of another type than saved by a run"
    if row is not None:
        yield from unlike([0, {}], row, f"{place}['row']")
    expected = {**random_states_of_cpu(), "cuda": None}
    yield from unlike([expected] * len(processes), processes, f"{place}['random']")
    metrics = {
        name: {"updates": 0, "values": dict(metric.metric_state)}
        for name, metric in module.training_metrics().items()
        if name in saved["metrics"]
    }
    yield from unlike(metrics, saved["metrics"], f"{place}['metrics']")
    yield from unlike(dict.fromkeys(saved["figures"], 0.0), saved["figures"], f"{place}['figures']")


def _wrong_data(model: Mapping[str, Any], state: Mapping[str, Any], data: str) -> Iterator[str]:
    channels = [0.0] * model["in_chans"]
    kept = {
        "classes": [""] * model["num_classes"],
        "normalisation": {"mean": channels, "std": channels},
        "pixel_max": 0,
        "order_seed": 0,
    }
    yield from unlike({data: kept}, state, "")
    yield from not_finite(state[data], data)


def _looks(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "floating-point" if value.is_floating_point() else "whole-number"
        return f"a {kind} tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"{type(value).__name__} {value!r:.40}" if not isinstance(value, dict) else "a mapping"


def _refuse(places: Iterator[str]) -> None:
    for place in places:
        raise DamagedCheckpoint(place)
