"""The training steps of a run as one CUDA graph: forward, loss, backward, clipping, optimiser, EMA.

Python takes longer to start the kernels of a small network than a GPU to run them; a graph starts
all of them at once (:mod:`revzoo.training.graphed_step`). Metrics and logs follow each step outside
of it, as always, and read no value.

NOTE [ Which steps run in the graph ]
    1. What differs from step to step enters by tensors that the graph reads: the batch and the
       learning rates. Dropout draws from torch's generator, which a graph advances as a step does.
    2. The rest is fixed in the graph: see ``_fixed_now``. We compare it before each step. If it has
       changed, the step runs without the graph; once it is the same in two steps, we capture anew.
       So neither the smaller last batch of an epoch nor BatchNorm's warm-up needs a rule.
    3. A graph cannot read the guard's figures. So every :data:`CHECK_EVERY`-th step runs without
       it, and is repeated as always after a drift or a range error. If a stream leaves its range
       between two such steps, the loss is NaN, and the run ends with an error.
    4. Callbacks that act between the forward pass and the new weights would see the new weights.
       With one that we do not know, there is no graph. Hooks of modules, parameters and optimiser
       would run once, in the capture, and so would a loss that reads the trainer.

Known limits: one process; no accumulated gradients; no float16, whose scale the host reads; in the
modes that replay, no dropout (torch cannot draw the same numbers twice inside a graph). Other
Python code of the network or the loss, such as a counter, runs only in the capture. A graph keeps
its memory for itself, so there must be room for a second step.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from revzoo.training.callbacks.ema import AveragedWeights
from revzoo.training.callbacks.figures import DriftLogger
from revzoo.training.callbacks.registry import RestoresAfterFit, is_nth_step
from revzoo.training.classifier import Classifier
from revzoo.training.graphed_step import Batch, kept, kind_of, try_to_capture, why_not
from revzoo.training.lightning_compat import (
    all_callbacks,
    average_of,
    callbacks_of,
    without_trainer,
)
from revzoo.training.memory import free_bytes
from revzoo.training.optim.muon import Muon
from revzoo.training.step_retry import FiniteLoss

log = logging.getLogger(__name__)

CHECK_EVERY = 100  # steps between two with the guard
PATIENCE = 10  # steps without a graph until a line says why
# hooks inside a step, and the callbacks whose hooks do not change it
INNER = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
HARMLESS = (FiniteLoss, DriftLogger)
# methods that the graph stands for: a subclass with its own trains without it
REPLACED = ("training_step", "backward", "optimizer_step", "optimizer_zero_grad")
# options of optimisers whose kernels read rates and counts on the device
ON_DEVICE = {"cuda": ("fused", "capturable")}
# attributes of modules that the guard or a row of its own covers
NOT_COMPARED = ("drift", "close_checks", "momentum")
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


class CudaGraph(RestoresAfterFit):
    """Runs the training steps of a :class:`~revzoo.training.Classifier` as a CUDA graph.

    On another device it does nothing. What cannot be captured runs as without it, and one line of
    the log says why.
    """

    replaying = False  # whether the graph runs the current step
    captures = 0  # in the last fit
    _module: Any = None  # if its steps may be captured
    _replay: Callable[[], None] | None = None
    _last: Mapping[str, Any] = {}  # what was fixed in the last step
    _fixed: Mapping[str, Any] = {}  # and in the graph
    _waited = 0

    def undo(self, pl_module: LightningModule) -> None:
        """Drop the graph with its memory."""
        if self._module is not None:
            self._module.graph = None
            del self._module.optimizer_step
        captures = self.captures
        vars(self).clear()
        self.captures = captures

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if why_not(pl_module.device):
            return
        if reason := _cannot_capture(trainer, pl_module):
            log.info("training runs without a CUDA graph: %s", reason)
            return
        self._trainer, self._module, self.captures = trainer, pl_module, 0
        self._optimizer = trainer.optimizers[0]
        # collected once: walking through all modules is slow
        self._tables = [vars(m) for m in pl_module.modules()]
        self._attributes = [
            (table, name)
            for table in self._tables
            for name, value in table.items()
            if isinstance(value, (int, float, str)) and name[0] != "_" and name not in NOT_COMPARED
        ]
        self._parameters = list(pl_module.parameters())
        self._averages = callbacks_of(trainer, AveragedWeights)
        averages = map(average_of, self._averages)
        self._averaged = [vars(m) for average in averages for m in average.modules()]
        self._checked = [CHECK_EVERY]
        self._checked += [c.every_n_steps for c in callbacks_of(trainer, DriftLogger)]
        pl_module.graph = self
        # of the object: Lightning warns of a class with this hook if gradients accumulate
        pl_module.optimizer_step = self._optimizer_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide how the step runs; capture it first if necessary."""
        self.replaying = False
        if self._module is None or any(is_nth_step(trainer, n) for n in self._checked):
            return
        last, self._last = self._last, self._fixed_now(batch)
        if self._last == last != self._fixed:
            self._capture(batch)
        elif self._replay is None:
            self._waited += 1
            if self._waited == PATIENCE:
                changed = ", ".join(name for name, v in self._last.items() if v != last[name])
                log.info("training runs without a CUDA graph until it stays the same: %s", changed)
        self.replaying = self._replay is not None and self._last == self._fixed

    def replay(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the step; returns the loss ``()`` and logits ``(B, classes)``.

        The next step overwrites the logits.
        """
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        for static, t in zip(self._static, batch, strict=True):
            static.copy_(t, non_blocking=True)
        assert self._replay is not None
        self._replay()
        return self._value.clone(), self._logits

    def give_gradients(self) -> None:
        """Set the parameters' gradients to those of the last replay."""
        for p, g in zip(self._parameters, self._gradients, strict=True):
            p.grad = g

    def _optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if self.replaying:
            optimizer_closure()  # training_step, which replays, and backward
        else:
            optimizer.step(closure=optimizer_closure)

    def _fixed_now(self, batch: Batch) -> dict[str, Any]:
        """By name, what a graph would have fixed if it were captured now."""
        groups, tables = self._optimizer.param_groups, self._tables
        growths = [g for table in tables if (g := table.get("growth")) is not None]
        return {
            "the shapes of batches": [kind_of(t) for t in batch],
            "frozen parameters": [p.requires_grad for p in self._parameters],
            "the options of the optimiser": [
                {**group, "lr": None, "params": [*map(id, group["params"])]} for group in groups
            ],
            "the memory of weights, buffers or the optimiser's state": [
                t.data_ptr() for t in self._state()
            ],
            "gradient clipping": (
                self._trainer.gradient_clip_val,
                self._trainer.gradient_clip_algorithm,
            ),
            "hooks": self._hooks(),
            "BatchNorm's momentum (callbacks.batch_norm.warmup)": [
                table.get("momentum") for table in tables
            ],
            "attributes of modules": [table.get(name) for table, name in self._attributes],
            "the grids of memory=exact": [(g.ratio, g.floor) for g in growths],
        }

    def _state(self) -> list[Tensor]:
        """What a step changes in place."""
        tables = [*self._tables, *self._averaged]
        holders = [table[name] for table in tables for name in ("_parameters", "_buffers")]
        holders += self._optimizer.state.values()
        return [t for holder in holders for t in holder.values() if isinstance(t, Tensor)]

    def _hooks(self) -> list[Any]:
        """The hooks of modules, parameters and optimiser."""
        owners = (*self._tables, vars(self._optimizer))
        found = [owner.get(name) for owner in owners for name in HOOKS]
        found += [getattr(p, name, None) for p in self._parameters for name in HOOKS]
        return [hook for hooks in found if hooks for hook in hooks.values()]

    def _capture(self, batch: Batch) -> None:
        self._replay = None  # frees the memory of the last one
        optimizer, device = self._optimizer, self._module.device
        hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook in self._hooks()]
        reason = f"the hook {hooks[0]} acts inside a step" if hooks else ""
        if reason := reason or _too_little_memory(device):
            self._end(reason)
            return
        self._static = [t.clone() for t in batch]
        # fused kernels of a GPU read float32
        kind = torch.float32 if device.type == "cuda" else torch.float64
        self._rates = [torch.zeros((), dtype=kind, device=device) for _ in optimizer.param_groups]
        for p, values in optimizer.state.items():  # AdamW counts its steps on the host
            values.update({k: v.to(p.device) for k, v in values.items() if isinstance(v, Tensor)})
        with kept(self._parameters, self._state()):
            self._replay, reason = try_to_capture(self._step, self._module)
            self._gradients = [p.grad for p in self._parameters]
        if reason:
            self._end(reason)
            return
        if not self.captures:
            step = self._trainer.global_step
            log.info("the training step is a CUDA graph from step %d on", step)
        self.captures += 1
        # anew, since AdamW's counts have moved
        self._fixed = self._last = self._fixed_now(batch)

    def _step(self) -> None:
        """What is captured: a training step, as Lightning runs it."""
        module, trainer, optimizer = self._module, self._trainer, self._optimizer
        with trainer.precision_plugin.train_step_context(), without_trainer(module):
            loss, logits = module.loss_and_logits(*self._static)
        optimizer.zero_grad()
        loss.backward()
        module.configure_gradient_clipping(
            optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        )
        with on_device(optimizer, self._rates):
            optimizer.step()
        for average in self._averages:
            average.update(module)
        self._value, self._logits = loss.detach(), logits.detach()

    def _end(self, reason: str) -> None:
        log.info("training runs without a CUDA graph: %s", reason)
        self.undo(self._module)


@contextlib.contextmanager
def on_device(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """A context in which ``optimizer`` reads ``rates``, of each group, and counts on the device."""
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        flags = [flag for flag in ON_DEVICE.get(rate.device.type, ()) if flag in group]
        group.update(dict.fromkeys(flags, True), lr=rate)
    try:
        with warnings.catch_warnings():  # of the runs before the capture
            warnings.filterwarnings("ignore", "This instance was constructed with capturable")
            yield
    finally:
        for group, values in zip(groups, before, strict=True):
            group.update(values)


def _cannot_capture(trainer: Trainer, module: Any) -> str:
    """Why no training step can be captured; empty if it may be possible."""
    if trainer.world_size > 1:
        return "there are several processes"
    if trainer.accumulate_grad_batches > 1:
        return f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "precision=fp16 reads its scale on the host; use precision=bf16"
    optimizer = trainer.optimizers[0]
    if not (isinstance(optimizer, Muon) or {"fused", "capturable"} & optimizer.defaults.keys()):
        return f"{type(optimizer).__name__} has no option fused or capturable"
    for name in REPLACED:
        if _differs(module, Classifier, name):
            return f"{type(module).__name__} overrides {name}"
    callbacks = [c for c in all_callbacks(trainer) if not isinstance(c, HARMLESS)]
    for owner, base in ((module, LightningModule), *((c, Callback) for c in callbacks)):
        for name in INNER:
            if _differs(owner, base, name):
                return f"{type(owner).__name__} acts inside a step ({name})"
    return ""


def _differs(owner: Any, base: type, name: str) -> bool:
    """Whether the method of ``owner`` is not that of ``base``; a LambdaCallback has its own."""
    return getattr(getattr(owner, name), "__func__", None) is not getattr(base, name)


def _too_little_memory(device: torch.device) -> str:
    """Why a graph does not fit beside the steps that run without it; empty if it does."""
    if device.type != "cuda":
        return ""
    # of the last epoch's steps
    step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    if (free_bytes(device) or 0) >= 2 * step:
        return ""
    return f"a step takes {step / 2**20:.0f} MiB, a second one needs more than is free"
