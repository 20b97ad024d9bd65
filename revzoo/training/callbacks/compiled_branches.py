"""Compiles residual functions, and parts that store their activations, with ``torch.compile``.

Inside a compiled part, no memory mode applies. So the chain of steps stays eager and we compile
each residual function. If all steps of a part have mode ``store``, we compile the whole part, and
the network itself if it stores everything. Parts of one shape share one compiled graph. We also
compile the sums of fixed-point streams, with the same results bit for bit.

A graph keeps few activations: the backward kernels repeat everything that they can fuse, except
random draws, which torch's own ``activation_memory_budget`` may draw again (pytorch issue 190758).

Known limits: the first steps wait for the compiler. Each shape needs one graph for training and one
for evaluation, so we raise torch's limit of eight graphs per function until training ends. We
choose the parts when training starts: a storing part whose memory mode changes later still stores.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.compiler.config
from pytorch_lightning import LightningModule, Trainer
from torch import nn

from revzoo._checks import check_choice
from revzoo.core import kernels
from revzoo.core.invertible import Step, steps_in
from revzoo.layers.coupling import Coupling
from revzoo.models.network import ImageNetwork
from revzoo.models.revnet import ResidualUnit, Transition
from revzoo.training.callbacks.registry import ChecksModel, RestoresAfterFit

log = logging.getLogger(__name__)

# training and evaluation, for full batches and other batch sizes, with and without frozen parts
GRAPHS_PER_PART = 16
LIMITS = ("recompile_limit", "accumulated_recompile_limit")
# Private in torch 2.15: by default, hooks that are registered after compiling would not run.
SKIPS_HOOKS = "skip_nnmodule_hook_guards"
# Rules by which torch's partitioner keeps values that are cheap to repeat, for example if their
# uses lie far apart. They are private in torch 2.15, but there is no other access.
BANS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)


class CompiledBranches(RestoresAfterFit, ChecksModel):
    """Compiles the residual functions and the storing parts of ``pl_module`` during training.

    Args:
        backend: one of ``torch.compiler.list_backends()``, or one for debugging, such as
            ``"aot_eager"``, which needs no compiler.

    Raises:
        ValueError: torch has no such backend.

    Example:
        >>> from revzoo.training.callbacks.compiled_branches import CompiledBranches
        >>> callback = CompiledBranches(backend="aot_eager")  # Trainer(callbacks=[callback])
    """

    def __init__(self, *, backend: str = "inductor") -> None:
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            check_choice("backend", backend, torch.compiler.list_backends())
        self.backend = backend
        self._restore = ExitStack()  # torch's settings, and the user's earlier compile() calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Mark the parts; torch compiles each at its first call."""
        if stage != "fit":
            return
        self.check_model(pl_module)
        parts = [*compiled_parts(pl_module)]
        log.info("compiling %d parts: the first steps take a minute or two", len(parts))
        for name in LIMITS:
            limit = getattr(torch.compiler.config, name)
            self._replace(torch.compiler.config, name, max(limit, GRAPHS_PER_PART * len(parts)))
        for name in BANS:
            self._replace(torch._functorch.config, name, False)
        self._replace(torch._dynamo.config, SKIPS_HOOKS, False)
        self._replace(kernels, "backend", self.backend)
        for part in parts:
            # torch 2.15 has no public way to undo module.compile()
            self._restore.callback(setattr, part, "_compiled_call_impl", part._compiled_call_impl)
            # A replay must run the graph of the forward pass. With dynamic shapes, torch may choose
            # a different graph, which keeps other tensors.
            part.compile(backend=self.backend, dynamic=False)

    def check_model(self, network: nn.Module) -> None:
        """Raise a ValueError if the network has nothing to compile."""
        if not any(True for _ in compiled_parts(network)):
            raise ValueError(
                f"{type(network).__name__} has no residual function to compile: expected a model "
                "of couplings or residual units; compile other models with torch.compile"
            )

    def _replace(self, settings: Any, name: str, value: Any) -> None:
        self._restore.callback(setattr, settings, name, getattr(settings, name))
        setattr(settings, name, value)

    def undo(self, pl_module: LightningModule) -> None:
        self._restore.close()


def compiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts of this package that store, and the residual functions of other steps."""
    steps = steps_in(module).values()
    if not steps:
        return
    if all(step.memory == "store" for step in steps) and isinstance(module, (Step, ImageNetwork)):
        yield module
    elif isinstance(module, (Coupling, ResidualUnit)):
        yield module.branch
    elif isinstance(module, Transition):
        yield from (module.f, module.g)
    else:
        for child in module.children():
            yield from compiled_parts(child)
