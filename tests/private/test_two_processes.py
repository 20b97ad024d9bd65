"""BackPACK and Opacus under data parallelism: two processes equal one."""

import pytest
import torch
from per_sample_nets import batch, looped, network
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from two_processes import WORLD, run

pytest.importorskip("backpack")
pytest.importorskip("opacus")

CLIP = 0.5


def share(rank):
    images, labels = batch(4)
    return images[rank::WORLD], labels[rank::WORLD]


def with_backpack(rank):
    from backpack import backpack
    from backpack.extensions import BatchGrad

    from revzoo.integrations.backpack import extend

    net = extend(network("revnet38", "exact"))
    parallel = DistributedDataParallel(net)
    images, labels = share(rank)
    with backpack(BatchGrad()):
        functional.cross_entropy(parallel(images), labels).backward()
    return {n: (p.grad, p.grad_batch * len(images)) for n, p in net.named_parameters()}


def with_opacus(rank, mode):
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    from revzoo.integrations.opacus import PrivacyEngine

    net = network("revnet38", "exact")
    images, labels = share(rank)
    made = PrivacyEngine().make_private(
        module=DifferentiallyPrivateDistributedDataParallel(net),
        optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(*batch(4)), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    model, optimizer = made[:2]
    criterion = made[2] if mode == "ghost" else functional.cross_entropy
    criterion(model(images), labels).backward()
    optimizer.step()
    return {n: p.grad for n, p in net.named_parameters()}


def all_of_them(rank):
    return with_backpack(rank), with_opacus(rank, "hooks"), with_opacus(rank, "ghost")


def test_two_processes_equal_one():
    net = network("revnet38")
    loop = looped(net, *batch(4))
    norms = sum(g.flatten(1).square().sum(1) for g in loop.values()).sqrt()
    scale = (CLIP / (norms + 1e-6)).clamp(max=1)
    for rank, (packed, hooked, ghost) in enumerate(run(all_of_them)):
        for n, g in loop.items():
            mean, samples = packed[n]
            torch.testing.assert_close(mean, g.mean(0), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(samples, g[rank::WORLD], rtol=1e-10, atol=1e-10)
            clipped = torch.tensordot(scale, g, 1) / 4
            torch.testing.assert_close(hooked[n], clipped, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(ghost[n], clipped, rtol=1e-10, atol=1e-10)
