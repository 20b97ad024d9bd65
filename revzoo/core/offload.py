"""Mode offload: activations wait in host memory for their backward pass.

``torch.autograd.graph.save_on_cpu`` does the copying too, but it moves the weights as well, and it
does not see that a tensor it kept was changed in place: on the CPU, where a "copy" is the tensor
itself, that gives wrong gradients. Here weights and whatever is on the CPU already stay where they
are and are checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from revzoo.core.recording import Recording, Resident, unpack_resident
from revzoo.core.replay import address

_STAYS = ("cpu", "meta")  # on the host already, or without data to move


class _Moved(NamedTuple):
    copy: Tensor
    device: torch.device


def offloaded(module: nn.Module) -> Recording:
    """A context in which the graph of ``module`` keeps activations in pinned host memory."""
    resident = {address(t) for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)}

    def pack(t: Tensor) -> Resident | _Moved:
        if t.device.type in _STAYS or address(t) in resident:
            return Resident.of(t)
        copy = torch.empty_like(t, device="cpu", pin_memory=t.device.type == "cuda")
        return _Moved(copy.copy_(t), t.device)

    return Recording(pack, _unpack)


def _unpack(packed: Resident | _Moved) -> Tensor:
    if isinstance(packed, _Moved):
        return packed.copy.to(packed.device, non_blocking=True)
    return unpack_resident(packed)
