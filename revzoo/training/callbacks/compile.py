"""Compiles each residual function with ``torch.compile`` during training.

Compiling the whole model would trace through its memory mode and keep every activation. So the
chain of steps stays eager, and each branch is compiled in place (``module.compile()``), which
changes no key of a ``state_dict``. Branches of one shape share one compiled graph.

Known limits: the first steps wait for the compiler. Each shape of branch needs one graph for
training and one for evaluation. Torch allows eight graphs per function by default; beyond that it
warns and runs eagerly. So we raise the limit until training ends.
"""

from __future__ import annotations

import pytorch_lightning as pl
import torch
import torch.compiler.config
from torch import nn

from revzoo._checks import check_choice
from revzoo.layers.coupling import Coupling
from revzoo.models.unit import ResidualUnit, Transition
from revzoo.training.callbacks.base import RestoresAfterFit

# training and evaluation, each for full batches and for other batch sizes
GRAPHS_PER_BRANCH = 4
LIMITS = ("recompile_limit", "accumulated_recompile_limit")


class CompiledBranches(RestoresAfterFit):
    """Compiles the residual functions of ``pl_module`` during training.

    Args:
        backend: one of ``torch.compiler.list_backends()``, or one for debugging, such as
            ``"aot_eager"``, which needs no compiler.

    Raises:
        ValueError: torch knows no such backend.

    Example:
        >>> from revzoo.training.callbacks.compile import CompiledBranches
        >>> callback = CompiledBranches(backend="aot_eager")  # pl.Trainer(callbacks=[callback])
    """

    def __init__(self, *, backend: str = "inductor") -> None:
        # backends for debugging work, but the message does not suggest them
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            check_choice("backend", backend, torch.compiler.list_backends())
        self.backend = backend
        self._limits: dict[str, int] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Mark the branches; torch compiles each at its first call.

        Raises:
            ValueError: the module has no residual function.
        """
        if stage != "fit":
            return
        branches = residual_functions(pl_module)
        if not branches:
            raise ValueError(
                f"{type(pl_module).__name__} has no residual function to compile: expected a model "
                "from create_model, or one with couplings; compile other models with torch.compile"
            )
        # the limits belong to the process, so `undo` restores them
        self._limits = {name: getattr(torch.compiler.config, name) for name in LIMITS}
        for name, limit in self._limits.items():
            setattr(torch.compiler.config, name, max(limit, GRAPHS_PER_BRANCH * len(branches)))
        for branch in branches:
            branch.compile(backend=self.backend)

    def undo(self, pl_module: pl.LightningModule) -> None:
        # setup has not compiled anything: it failed, or this is no fit
        if not self._limits:
            return
        for branch in residual_functions(pl_module):
            # torch 2.15 has no public way to undo module.compile()
            branch._compiled_call_impl = None
        for name, limit in self._limits.items():
            setattr(torch.compiler.config, name, limit)
        self._limits = {}


def residual_functions(model: nn.Module) -> list[nn.Module]:
    """The branches of all couplings and residual units of ``model``, in its order."""
    branches: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (Coupling, ResidualUnit)):
            branches.append(module.branch)
        elif isinstance(module, Transition):
            branches += [module.f, module.g]
    return branches
