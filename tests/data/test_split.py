import pytest
import torch

from revzoo.data.order import held_back, stratified_split


def _labels() -> torch.Tensor:
    return torch.tensor([0] * 50 + [1] * 30 + [2] * 20)[torch.randperm(100)]


def test_parts_are_disjoint_and_complete() -> None:
    rest, held_back = stratified_split(_labels(), 0.2, seed=0)
    assert torch.cat([rest, held_back]).sort().values.tolist() == list(range(100))
    assert rest.tolist() == sorted(rest.tolist())


def test_class_frequencies_are_kept() -> None:
    labels = _labels()
    _, held_back = stratified_split(labels, 0.2, seed=0)
    assert torch.bincount(labels[held_back]).tolist() == [10, 6, 4]


def test_total_is_exact_where_class_quotas_are_fractions() -> None:
    labels = torch.arange(70) % 10  # 7 of each: a tenth is 0.7 per class
    _, held_back = stratified_split(labels, 0.1, seed=0)
    assert len(held_back) == 7


def test_depends_on_its_seed_and_on_nothing_else() -> None:
    labels = _labels()
    torch.manual_seed(1)
    first = stratified_split(labels, 0.2, seed=0)[1]
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(stratified_split(labels, 0.2, seed=0)[1], first)
    assert not torch.equal(stratified_split(labels, 0.2, seed=1)[1], first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


def test_a_class_of_one_image_stays_in_the_first_part() -> None:
    rest, held_back = stratified_split(torch.tensor([0, 1, 2, 2]), 0.9, seed=0)
    assert {0, 1} <= set(rest.tolist())
    assert len(held_back) == 1


@pytest.mark.parametrize("groups", [None, torch.arange(1000) // 7], ids=["single", "groups"])
def test_folds_have_equal_sizes_and_classes(groups: torch.Tensor | None) -> None:
    labels = (torch.arange(1000) * 7919 % 1000) % 10
    labels[labels > 4] = 0  # unequal classes
    held = [held_back(labels, groups, 0.1, 0, folds=4, fold=fold)[1] for fold in range(4)]
    assert torch.cat(held).sort().values.tolist() == list(range(1000))
    for part in held:
        assert abs(len(part) - 250) <= 7
        assert ((torch.bincount(labels[part]) - torch.bincount(labels) / 4).abs() <= 4).all()
    again, other = (held_back(labels, groups, 0.1, seed, folds=4, fold=0)[1] for seed in (0, 1))
    assert torch.equal(again, held[0])
    assert not torch.equal(other, held[0])
