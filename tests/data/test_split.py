import torch

from revzoo.data.order import stratified_split


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
