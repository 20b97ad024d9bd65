"""FSDP2: each process keeps a part of every weight, its gradient and its optimiser state.

A residual function's weights are gathered when it runs, and again for its replay in the backward
pass (``torch.distributed.fsdp.fully_shard``). Lightning's ``ModelParallelStrategy`` leaves this to
``configure_model`` of the module, and loads a checkpoint before callbacks can change it. Here:

1. Each coupling's branch, each step without an inverse and each list of blocks with side bits is
   gathered as a unit, and the network's other weights from the forward to the end of the backward
   pass. Under bfloat16 autocast, units without running statistics are gathered in bfloat16.
2. Validations and tests run on whole weights, with the buffers of process 0, as under
   ``DistributedDataParallel``. In mode ``exact``, a process repeats an evaluation whose grids have
   adapted to its own images, and no other process must wait for it.
3. A checkpoint is a folder to which each process writes its parts of weights, average and state of
   the optimiser (:mod:`torch.distributed.checkpoint`). Any number of processes can resume from it,
   and each reads only its parts; every command reads it in one process.

Known limits: a network without steps is one unit. The module may have parameters only in ``model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.strategies import ModelParallelStrategy, StrategyRegistry
from pytorch_lightning.trainer.states import TrainerFn
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from revzoo._checks import shortened
from revzoo.core.invertible import Step, steps_in
from revzoo.layers.contractive import ContractiveBlock
from revzoo.models.checkpoint_folder import filled, is_empty
from revzoo.models.weights_file import check_module
from revzoo.training.checkpoint.distributed import DistributedCheckpointIO
from revzoo.training.lightning_compat import average_of, callbacks_of, units_of

DIVIDED = ("state_dict", "current_model_state", "optimizer_states")
"""The parts of a checkpoint that hold divided tensors."""


class FSDP2(ModelParallelStrategy):
    """Trains ``module.model`` on all processes, its weights divided among them.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> from revzoo.training.fsdp2 import FSDP2
        >>> trainer = Trainer(strategy=FSDP2(), accelerator="cpu", devices=2, logger=False)
    """

    # Lightning then restores weights and optimiser as with other strategies
    lightning_restore_optimizer = True

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint_io = DistributedCheckpointIO()

    @property
    def network(self) -> Any:
        """The network, an ``FSDPModule`` after :meth:`setup`."""
        assert self.lightning_module is not None
        return self.lightning_module.model

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Lightning's own mesh divides tensors, not images, within a machine
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        if not isinstance(self.network, FSDPModule):  # a test follows the training
            half = self.precision_plugin.precision == "bf16-mixed"
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            shard(self.network, mesh, half=half)
        if trainer.state.fn == TrainerFn.FITTING:
            for callback in callbacks_of(trainer, WeightAveraging):
                divide_as(self.network, average_of(callback).module.get_submodule("model"))
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _begin_evaluation(self) -> None:
        for buffer in self.network.buffers():
            distributed.broadcast(buffer, src=0)
        for unit in units_of(self.network):
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def _end_evaluation(self) -> None:
        for unit in units_of(self.network):
            # the network keeps its own weights: its backward pass follows at once
            unit.set_reshard_after_forward(unit is not self.network, recurse=False)
            unit.reshard()

    on_validation_start = on_test_start = _begin_evaluation
    on_validation_end = on_test_end = _end_evaluation

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        module, self._loaded_from = self.lightning_module, Path(checkpoint_path)
        assert module is not None
        state = self.checkpoint_io.load_checkpoint(checkpoint_path)
        weights = module.state_dict()
        groups = [optimizer.param_groups for optimizer in self.optimizers]
        params = [[p for group in each for p in group["params"]] for each in groups]

        def parameter(key: str, name: Any, kind: str = "", i: int = 0, *_: Any) -> Any:
            if key != "optimizer_states":
                return weights.get(name)
            return params[name][i] if kind == "state" else None

        fits = module.trainer.state.fn == TrainerFn.FITTING
        used = {k: state[k] for k in DIVIDED if k in state and (fits or k == "state_dict")}
        own = filled(used, self._loaded_from, lambda keys, v: part_of(parameter(*keys), v))
        return {**state, **own}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, weights = self.lightning_module, checkpoint["state_dict"]
        assert module is not None
        check_module(module, weights, str(self._loaded_from), strict=strict)
        module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, own in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(own)


StrategyRegistry.register("fsdp2", FSDP2, "Divides weights, gradients and optimiser state (revzoo)")


def shard(network: nn.Module, mesh: DeviceMesh, *, half: bool) -> None:
    """Divide the weights of ``network`` among the processes of ``mesh``, unit by unit.

    ``half`` gathers them in bfloat16, except units with running statistics: torch's norms need
    weights of the dtype of their statistics.
    """
    own, every = (dict(network.named_parameters(remove_duplicate=alone)) for alone in (True, False))
    if shared := [name for name in every if name not in own]:
        raise ValueError(
            f"trainer=fsdp2 divides each parameter once, but modules share {shortened(shared)}: "
            "use trainer=ddp"
        )
    # torch divides no other layout; images keep theirs
    network.to(memory_format=torch.contiguous_format)
    units = {unit_of(network, path, step) for path, step in steps_in(network).items()}
    for unit in reversed([*network.modules()]):  # torch wants inner modules first
        if unit not in units or not any(True for _ in unit.parameters()):
            continue
        statistics = any(buffer.is_floating_point() for buffer in unit.buffers())
        in_half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = in_half if half and not statistics else MixedPrecisionPolicy()
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh)


def divide_as(module: nn.Module, copy: nn.Module) -> None:
    """Divide the parameters of ``copy`` among the processes, in the same way as ``module``."""
    copy.to(memory_format=torch.contiguous_format)
    for path, divided in module.named_parameters():
        owner, _, name = path.rpartition(".")
        part = part_of(divided, copy.get_parameter(path).detach())
        setattr(copy.get_submodule(owner), name, nn.Parameter(part))


def unit_of(network: nn.Module, path: str, step: Step) -> nn.Module | None:
    """The module whose weights a step's call gathers; None leaves them to the network."""
    if step.subject is not step:
        # torch copies the inputs of a unit, which would end a run of blocks with side bits
        blocks = network.get_submodule(path.rsplit(".", 2)[0])
        return blocks if isinstance(blocks, nn.Sequential) else step.subject
    if isinstance(step, ContractiveBlock):
        return None  # it reads the weights of its branch by itself
    # with hooks, an invertible step itself would be recomputed
    return getattr(step, "branch", None) if step.invertible else step


def part_of(parameter: Any, value: Any) -> Any:
    """This process's part of a tensor like ``parameter``, if this is divided, or ``value``."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    if is_empty(value):
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    whole, mesh = value.to(parameter.device), parameter.device_mesh
    # every process has read the value, so none sends it
    return distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
