import torch
from torch.utils.data import DataLoader, DistributedSampler

from revzoo.data.images import TensorImages, as_is


def _set(count: int = 20) -> TensorImages:
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 4, 4)
    return TensorImages(images, torch.arange(count) % 5, classes=list("abcde"))


def test_a_batch_is_the_stack_of_its_images() -> None:
    data = _set()
    images, labels = data.__getitems__([3, 19, 0])
    assert torch.equal(images, torch.stack([data[i][0] for i in (3, 19, 0)]))
    assert labels.tolist() == [3, 4, 0]
    assert images[:, 0, 0, 0].tolist() == [3, 19, 0]


def test_subsets_of_subsets_keep_images_with_their_labels() -> None:
    subset = (
        _set()
        .subset(torch.arange(1, 20, 2), training=True)
        .subset(torch.tensor([9, 0]), training=False)
    )
    images, labels = subset.__getitems__([0, 1])
    assert images[:, 0, 0, 0].tolist() == [19, 1]
    assert labels.tolist() == subset.labels.tolist() == [4, 1]
    assert subset.sample()[:, 0, 0, 0].tolist() == [19, 1]
    assert subset.classes == list("abcde")


def test_subsets_share_pixels() -> None:
    data = _set()
    subset = data.subset(torch.arange(20), training=True)
    assert subset.sample().data_ptr() == data.sample().data_ptr()


def test_an_ordinary_loader_with_a_distributed_sampler_covers_the_set() -> None:
    data = _set()
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True)
        loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=as_is)
        seen += [value for images, _ in loader for value in images[:, 0, 0, 0].tolist()]
    assert sorted(seen) == list(range(20))
