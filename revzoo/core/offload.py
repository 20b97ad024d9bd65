"""Mode offload: activations wait in host memory for their backward pass.

Why not ``torch.autograd.graph.save_on_cpu``: it also moves the weights, and it does not detect
in-place changes of kept tensors. On the CPU, where its copy is the tensor itself, this gives wrong
gradients. Here weights and tensors on the CPU stay in place, and their versions are checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from revzoo.core.saved import Versioned
from revzoo.core.tensors import storage_id

_STAYS = ("cpu", "meta")  # on the host already, or without data to move


class _Moved(NamedTuple):
    copy: Tensor
    device: torch.device


def offloaded(module: nn.Module) -> saved_tensors_hooks:
    """A context in which the graph of ``module`` keeps activations in pinned host memory."""
    resident = {storage_id(t) for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)}

    def pack(t: Tensor) -> Versioned | _Moved:
        if t.device.type in _STAYS or storage_id(t) in resident:
            return Versioned.of(t)
        # pinned: otherwise the copy back (non_blocking) waits for the GPU
        copy = torch.empty_like(t, device="cpu", pin_memory=t.device.type == "cuda")
        return _Moved(copy.copy_(t), t.device)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Versioned | _Moved) -> Tensor:
    if isinstance(packed, _Moved):
        return packed.copy.to(packed.device, non_blocking=True)
    return packed.get()
