from __future__ import annotations

import torch

from revzoo.training.callbacks.pictures import (
    CELL,
    GAP,
    LINE,
    NAMED,
    SIDE,
    TextLine,
    captioned,
    matrix,
    text_width,
)


def test_images_are_enlarged_pixel_by_pixel_above_their_captions() -> None:
    images = torch.rand(3, 3, 8, 8)
    picture = captioned(images, [[TextLine("a", "red"), TextLine("b")]] * 3, columns=2)
    height, width = SIDE + 2 * LINE, SIDE
    assert picture.shape == (3, 2 * (height + GAP) + GAP, 2 * (width + GAP) + GAP)
    tile = picture[:, GAP : GAP + height, GAP : GAP + SIDE]
    shown = tile[:, :SIDE][:, 8::16, 8::16]  # the middle of each pixel
    assert torch.equal(shown, (images[0] * 255).byte())
    words = tile[:, SIDE:].int()
    assert ((words[0] - words[1]) > 100).any()  # red
    assert (words.sum(0) < 100).any()  # black


def test_grey_images_and_large_ones_stay_as_they_are() -> None:
    images = torch.rand(2, 1, 130, 140)
    picture = captioned(images, [[], []], columns=1)
    assert torch.equal(
        picture[:, GAP : 130 + GAP, GAP:-GAP], (images[0] * 255).byte().expand(3, -1, -1)
    )


def test_long_captions_are_not_cut() -> None:
    """``said automobile: 0.97`` was cut at the edge of its image."""
    text = "said automobile: 0.97, of all things"
    wide = captioned(torch.zeros(2, 3, 8, 8), [[TextLine("a")], [TextLine(text)]], columns=2)
    assert wide.shape[2] == 2 * (text_width([text]) + GAP) + GAP
    assert text_width([text]) > SIDE
    last = wide[:, :, -GAP - 12 : -GAP - 4].int()
    assert (last.sum(0) < 100).any()  # its last letter


def test_long_names_of_classes_are_not_cut() -> None:
    name = "a class with a long name, of which some end alike"
    picture = matrix(torch.eye(2).long(), [name, "b"])
    assert picture.shape[1] == text_width([name]) + 2 * CELL + 1 > LINE * 8 + 2 * CELL + 1


def cells(picture: torch.Tensor, count: int) -> torch.Tensor:
    """The colour (3,) of each cell, read at its corner."""
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


def test_the_names_of_classes_touch_the_matrix_and_numbers_contrast() -> None:
    """Short names stood 150 pixels away, and 54 % was white on pale blue."""
    picture = matrix(torch.tensor([[54, 46], [54, 46]]), ["cat", "dog"]).float().mean(0)
    margin = picture.shape[0] - 2 * CELL - 1
    row = picture[margin : margin + CELL]
    assert row[:, margin - 20 : margin].min() < 64
    assert picture[margin - 20 : margin, margin : margin + CELL].min() < 64
    inside = row[2:-2, margin + 2 : margin + CELL - 2]
    assert inside.min() < 64
    assert inside.max() < 200
