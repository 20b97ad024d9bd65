"""Poisson batches: independent images, resumable, shared among processes."""

import pytest
import torch

from revzoo.data import Digits
from revzoo.data.order import PoissonSampler


def test_each_image_is_drawn_independently_with_the_rate():
    sampler = PoissonSampler(200, batch_size=20, seed=1)
    drawn = torch.zeros(300, 200)
    for k in range(300):
        drawn[k, sampler.batch(k // 10, k % 10)] = 1
    assert sampler.rate == 0.1
    assert drawn.mean() == pytest.approx(0.1, rel=0.03)
    sizes = drawn.sum(1)
    assert sizes.var() == pytest.approx(200 * 0.1 * 0.9, rel=0.3)  # binomial
    shares = drawn.mean(0)
    assert shares.std() == pytest.approx((0.1 * 0.9 / 300) ** 0.5, rel=0.3)


def test_processes_share_one_batch():
    whole = PoissonSampler(200, batch_size=20, seed=1)
    parts = [PoissonSampler(200, batch_size=10, seed=1, processes=2, rank=r) for r in range(2)]
    assert {p.rate for p in parts} == {whole.rate}
    assert {len(p) for p in parts} == {len(whole)}
    for k in range(10):
        together = sorted(parts[0].batch(3, k) + parts[1].batch(3, k))
        assert together == whole.batch(3, k)


def test_a_pass_may_begin_in_the_middle_of_an_epoch():
    def batches(first):
        torch.manual_seed(0)
        data = Digits(batch_size=64)
        data.poisson = True
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        loader.first_batch = lambda: first
        return [labels for _, labels in loader], len(loader)

    (whole, count), (rest, _) = batches(0), batches(5)
    assert len(whole) == count == 20
    assert len({len(labels) for labels in whole}) > 5
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[5:], strict=True))


def test_an_empty_batch_has_one_image_in_its_place():
    sampler = PoissonSampler(50, batch_size=1, seed=0)
    sizes = [len(sampler.batch(0, k)) for k in range(50)]
    assert 0 in sizes
    assert [len(batch) for batch in sampler] == [max(1, size) for size in sizes]
