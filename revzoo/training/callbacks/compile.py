"""Compile each residual function with ``torch.compile`` during training.

Compiling the whole model would trace through its memory mode and keep every activation. So the
chain of steps stays eager, and each branch is compiled in place (``module.compile()``), which
changes no key of a ``state_dict``. Branches of one shape share one compiled graph.

Known limits: the first steps wait for the compiler. Each shape of branch needs a graph in training
and one in evaluation, more than torch allows one function by default: from the ninth on it would
only warn and not compile. So we raise that limit until the end of training.
"""

from __future__ import annotations

import pytorch_lightning as pl
import torch
import torch.compiler.config
from torch import nn

from revzoo._checks import did_you_mean
from revzoo.layers.coupling import Coupling
from revzoo.models.unit import ResidualUnit, Transition
from revzoo.training.callbacks.base import RestoresAfterFit

# training and evaluation, each with batches of the usual and of any other size
GRAPHS_PER_BRANCH = 4
LIMITS = ("recompile_limit", "accumulated_recompile_limit")


class CompiledBranches(RestoresAfterFit):
    """Compiles the residual functions of ``pl_module`` for the training.

    Args:
        backend: one of ``torch.compiler.list_backends()``, or a debugging one, such as
            ``"aot_eager"``, which needs no compiler.

    Raises:
        ValueError: torch knows no such backend.

    Example:
        >>> from revzoo.training.callbacks.compile import CompiledBranches
        >>> callback = CompiledBranches(backend="aot_eager")  # pl.Trainer(callbacks=[callback])
    """

    def __init__(self, *, backend: str = "inductor") -> None:
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            known = torch.compiler.list_backends()
            raise ValueError(
                f"backend={backend!r}: expected one of {', '.join(known)}"
                + did_you_mean(str(backend), known)
            )
        self.backend = backend
        self._limits: dict[str, int] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Mark the branches; each is compiled when it is first called.

        Raises:
            ValueError: the module has no residual function.
        """
        if stage != "fit":
            return
        branches = residual_functions(pl_module)
        if not branches:
            raise ValueError(
                f"{type(pl_module).__name__} has no residual function to compile: expected a model "
                "of create_model, or one of couplings; compile other models yourself"
            )
        self._limits = {name: getattr(torch.compiler.config, name) for name in LIMITS}
        for name, limit in self._limits.items():
            setattr(torch.compiler.config, name, max(limit, GRAPHS_PER_BRANCH * len(branches)))
        for branch in branches:
            branch.compile(backend=self.backend)

    def undo(self, pl_module: pl.LightningModule) -> None:
        if not self._limits:
            return
        for branch in residual_functions(pl_module):
            branch._compiled_call_impl = None
        for name, limit in self._limits.items():
            setattr(torch.compiler.config, name, limit)
        self._limits = {}


def residual_functions(model: nn.Module) -> list[nn.Module]:
    """The branches of all couplings and residual units of ``model``, in its order."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (Coupling, ResidualUnit)):
            found.append(module.branch)
        elif isinstance(module, Transition):
            found += [module.f, module.g]
    return found
