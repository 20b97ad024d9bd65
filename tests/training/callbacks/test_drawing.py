from __future__ import annotations

import torch

from revzoo.training.callbacks.pictures import CELL, LINE, NAMED, SIDE, Words, captioned, matrix


def test_images_are_enlarged_pixel_by_pixel_above_their_words() -> None:
    images = torch.rand(3, 3, 8, 8)
    picture = captioned(images, [[Words("a", "red"), Words("b")]] * 3, columns=2)
    height, width = SIDE + 2 * LINE, SIDE
    assert picture.shape == (3, 2 * (height + 2) + 2, 2 * (width + 2) + 2)
    shown = picture[:, 2 : 2 + SIDE, 2 : 2 + SIDE][:, 6::12, 6::12]  # the middle of each pixel
    assert torch.equal(shown, (images[0] * 255).byte())
    words = picture[:, 2 + SIDE : 2 + height, 2 : 2 + SIDE].int()
    assert ((words[0] - words[1]) > 100).any()  # red
    assert (words.sum(0) < 100).any()  # black


def test_grey_images_and_large_ones_stay_as_they_are() -> None:
    images = torch.rand(2, 1, 100, 120)
    picture = captioned(images, [[], []], columns=1)
    assert torch.equal(picture[:, 2:102, 2:-2], (images[0] * 255).byte().expand(3, -1, -1))


def cells(picture: torch.Tensor, count: int) -> torch.Tensor:
    """A colour (3,) of each cell, from its corner."""
    margin = LINE * 8
    places = [margin + i * CELL + 4 for i in range(count)]
    return picture[:, places][:, :, places]


def test_a_matrix_has_the_true_class_in_rows() -> None:
    counts = torch.tensor([[9, 1, 0], [0, 5, 0], [0, 0, 0]])
    red = cells(matrix(counts, ["cat", "dog", "horse"]), 3)[0].int()
    assert red[0, 0] == round(255 - 225 * 0.9)
    assert red[0, 1] == round(255 - 225 * 0.1)
    assert red[1, 0] == 255
    assert red[1, 1] == 30
    assert (red[2] == 255).all()  # a class without images


def test_a_matrix_of_many_classes_stays_small() -> None:
    count = 1000
    picture = matrix(torch.eye(count).long(), [f"class {i}" for i in range(count)])
    assert max(picture.shape) < 3 * NAMED * CELL
