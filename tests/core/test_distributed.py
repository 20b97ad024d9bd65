"""Two processes on gloo: gradients and statistics equal the single process."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from compare import conv_net, error, images, linear_net
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from two_processes import WORLD, run

import revzoo
from revzoo import set_memory

pytestmark = pytest.mark.timeout(300)


def gradients(net):
    return [p.grad for p in net.parameters() if p.grad is not None]


def shard(rank):
    return images(batch=4)[rank::WORLD]


def ddp(rank, mode, **options):
    net = conv_net(norm=lambda c: nn.GroupNorm(1, c))
    set_memory(net, mode)
    return DistributedDataParallel(net, **options)


def plain_step(rank):
    net = ddp(rank, "invert")
    net(shard(rank)).square().mean().backward()
    return gradients(net)


def static_graph(rank):
    net = ddp(rank, "invert", static_graph=True)
    for _ in range(2):
        net.zero_grad()
        net(shard(rank)).square().mean().backward()
    return gradients(net)


def accumulated(rank):
    net = ddp(rank, "invert")
    with net.no_sync():
        net(shard(rank)).square().mean().backward()
    net(shard(rank)).square().mean().backward()
    return [g / 2 for g in gradients(net)]


@pytest.mark.parametrize("task", [plain_step, static_graph, accumulated])
def test_ddp_equals_a_single_process(task):
    net = conv_net(norm=lambda c: nn.GroupNorm(1, c))
    set_memory(net, "store")
    (sum(net(shard(rank)).square().mean() for rank in range(WORLD)) / WORLD).backward()
    for result in run(task):
        assert error(result, gradients(net)) < 1e-12


class SynchronisedNorm(nn.BatchNorm2d):
    """Computes what ``nn.SyncBatchNorm`` does, whose kernels need a GPU."""

    def forward(self, x):
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        count = WORLD * x[:, 0].numel()
        mean, square = all_reduce(sums, "sum", dist.group.WORLD) / count
        variance = square - mean.square()
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        mean, variance = mean[:, None, None], variance[:, None, None]
        scale, shift = self.weight[:, None, None], self.bias[:, None, None]
        return (x - mean) / (variance + self.eps).sqrt() * scale + shift


MODES = {"store": 1e-12, "recompute": 1e-12, "invert": 1e-12, "exact": 1e-4}


def synchronised_statistics(rank):
    found = {}
    for mode in MODES:
        net = conv_net(norm=SynchronisedNorm)
        set_memory(net, mode)
        parallel = DistributedDataParallel(net)
        for _ in range(2):
            net.zero_grad()
            parallel(shard(rank)).square().mean().backward()
        found[mode] = gradients(net), list(net.buffers())
    return found


def test_synchronised_statistics_are_those_of_the_whole_batch_counted_once():
    net = conv_net()
    set_memory(net, "store")
    for _ in range(2):
        net.zero_grad()
        net(images(batch=4)).square().mean().backward()
    for result in run(synchronised_statistics):
        for mode, (grads, buffers) in result.items():
            assert error(grads, gradients(net)) < MODES[mode], mode
            for found, expected in zip(buffers, net.buffers(), strict=True):
                torch.testing.assert_close(found, expected, rtol=MODES[mode], atol=1e-6, msg=mode)


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = linear_net(seed=0), linear_net(seed=1)

    def forward(self, x):
        return self.used(x)


def unused_parameters(rank):
    net = DistributedDataParallel(PartlyUsed(), find_unused_parameters=True)
    for _ in range(2):
        net.zero_grad()
        net(torch.ones(2, 8, dtype=torch.float64) * (rank + 1)).square().mean().backward()
    return gradients(net.module.used)


def test_ddp_with_unused_parameters():
    """Asked at https://github.com/lucidrains/performer-pytorch/issues/14 and
    https://github.com/RobinBruegger/RevTorch/issues/10."""
    net = linear_net(seed=0)
    set_memory(net, "store")
    x = torch.ones(2, 8, dtype=torch.float64)
    (sum(net(x * (rank + 1)).square().mean() for rank in range(WORLD)) / WORLD).backward()
    for result in run(unused_parameters):
        assert error(result, gradients(net)) < 1e-12


def fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    results = []
    for mode in ("store", "invert"):
        net = linear_net()
        set_memory(net, mode)
        for block in net:
            fully_shard(block)
        fully_shard(net)
        net(torch.ones(2, 8, dtype=torch.float64) * (rank + 1)).square().mean().backward()
        results.append([p.grad.full_tensor() for p in net.parameters()])
    return results


def test_fsdp2():
    net = linear_net()
    set_memory(net, "store")
    x = torch.ones(2, 8, dtype=torch.float64)
    (sum(net(x * (rank + 1)).square().mean() for rank in range(WORLD)) / WORLD).backward()
    for stored, inverted in run(fsdp):
        assert error(stored, gradients(net)) < 1e-12
        assert error(inverted, gradients(net)) < 1e-12


def fsdp_of_branches(rank):
    from torch.distributed.fsdp import fully_shard

    results = []
    for mode in ("recompute", "invert"):
        for reshard in (True, False):  # gathered again for the replay, or still
            net = linear_net()
            set_memory(net, mode)
            for coupling in (coupling for block in net for coupling in block):
                fully_shard(coupling.branch, reshard_after_forward=reshard)
            for _ in range(2):
                net.zero_grad()
                net(torch.ones(2, 8, dtype=torch.float64) * (rank + 1)).square().mean().backward()
            results.append([p.grad.full_tensor() for p in net.parameters()])
    return results


def test_fsdp2_of_single_branches():
    # A step's conditions hold shards, but its branch runs, and is replayed, on gathered parameters.
    net = linear_net()
    set_memory(net, "store")
    x = torch.ones(2, 8, dtype=torch.float64)
    (sum(net(x * (rank + 1)).square().mean() for rank in range(WORLD)) / WORLD).backward()
    for results in run(fsdp_of_branches):
        for result in results:
            assert error(result, gradients(net)) < 1e-12


class Collectives(TorchDispatchMode):
    """Counts them; torch's CommDebugMode fails when a module runs in the backward pass."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def fsdp_of_all(rank):
    from torch.distributed.fsdp import fully_shard

    results = []
    for mode in ("store", "recompute", "invert", "exact"):
        net = linear_net()
        set_memory(net, mode)
        for coupling in (coupling for block in net for coupling in block):
            fully_shard(coupling.branch)
        fully_shard(net)
        y = net(torch.ones(2, 8, dtype=torch.float64) * (rank + 1))
        with Collectives() as collectives:
            y.square().mean().backward()
        results.append((dict(collectives.counts), [p.grad.full_tensor() for p in net.parameters()]))
    return results


def test_fsdp2_of_branches_and_their_network():
    """Gradients of replayed branches were lost: they came after FSDP2 had reduced the branch's."""
    net = linear_net()
    set_memory(net, "store")
    x = torch.ones(2, 8, dtype=torch.float64)
    (sum(net(x * (rank + 1)).square().mean() for rank in range(WORLD)) / WORLD).backward()
    branches = sum(len(block) for block in net)
    for results in run(fsdp_of_all):
        for counts, result in results:
            assert error(result, gradients(net)) < 1e-8  # exact rounds streams to 2**-23
            # a replay gathers the weights of a branch once, and reduces its gradients once
            assert counts == {
                "c10d::_allgather_base_": branches,
                "c10d::_reduce_scatter_base_": branches,
            }


def tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, results = init_device_mesh("cpu", (WORLD,)), []
    for mode in ("store", "recompute", "invert"):
        net = linear_net()
        set_memory(net, mode)
        for coupling in (coupling for block in net for coupling in block):
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(coupling.branch, mesh, plan)
        net(torch.ones(2, 8, dtype=torch.float64)).square().mean().backward()
        results.append([p.grad.full_tensor().clone() for p in net.parameters()])
        y = revzoo.checkpoint(net[0][0].branch, torch.ones(2, 4, dtype=torch.float64))
        y.square().mean().backward()
    return results


def test_tensor_parallel_branches():
    """The guard could not read a DTensor: recompute, exact and checkpoint() raised."""
    net = linear_net()
    set_memory(net, "store")
    net(torch.ones(2, 8, dtype=torch.float64)).square().mean().backward()
    for results in run(tensor_parallel):
        for result in results:
            assert error(result, gradients(net)) < 1e-12
