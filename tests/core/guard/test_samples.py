"""The places that the guard samples, in every layout."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from revzoo.core.guard.samples import figures_of, sample

LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "turned": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "with gaps": lambda t: torch.stack((t, t + 1), -1)[..., 0],
}


def stream(dtype=torch.float32):
    t = torch.randn(3, 5, 6, 7, generator=torch.Generator().manual_seed(0))
    return (100 * t).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("replayed", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_may_have_another_layout(layout, replayed, dtype):
    t = LAYOUTS[layout](stream(dtype))
    (found,) = sample((t,), ())
    assert torch.equal(figures_of(LAYOUTS[replayed](stream(dtype)), found.plan), found.figures)
    changed = stream(dtype)
    changed[1] *= -1
    assert not torch.equal(figures_of(LAYOUTS[replayed](changed), found.plan), found.figures)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "turned"])
def test_a_dense_layout_needs_no_indices(layout, monkeypatch):
    monkeypatch.setattr(torch, "take", None)
    monkeypatch.setattr(torch, "arange", None)
    sample((LAYOUTS[layout](stream()),), (), channels=False)


def test_single_values_are_among_the_figures():
    t = stream()
    (found,) = sample((t,), (), channels=False)
    singles = found.figures[: len(found.figures) // 2]
    assert torch.isin(singles, t).all()


def test_no_figure_keeps_the_stream():
    t = stream()
    (found,) = sample((t,), ())
    storage = StorageWeakRef(t.untyped_storage())
    del t
    assert found.figures.numel()
    assert storage.expired()


@pytest.mark.parametrize("channels", [True, False])
def test_each_value_of_a_sum_counts(channels):
    """With a weight of 1, the first was lost beside the others, if no single value showed it."""
    t = stream()
    (found,) = sample((t,), (), channels=channels)
    effects = []
    for at in found.plan.summed[: found.plan.each]:
        changed = t.clone()
        changed.view(-1)[at] += 1000
        effects.append(float((figures_of(changed, found.plan) - found.figures).abs().max()))
    assert min(effects) >= max(effects) / 2 or (not channels and min(effects) >= 999)
