"""Pictures for TensorBoard, as uint8 tensors (3, H, W): images with words, and a table of counts.

Drawn with Pillow and torchvision, which the package needs anyway; matplotlib is no requirement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

SIDE = 96  # pixels of a small image once it is enlarged, by a whole factor
LINE = 14  # pixels of a line of words
NAMED = 30  # classes up to which a matrix has room for names and numbers
CELL = 40  # pixels of a cell of such a matrix


class Words(NamedTuple):
    """A line of text and its colour."""

    text: str
    colour: str = "black"


def captioned(images: Tensor, words: Sequence[Sequence[Words]], *, columns: int) -> Tensor:
    """Images in rows of ``columns``, each above its lines of words.

    Args:
        images: (N, C, H, W) in [0, 1], C being 1 or 3.
        words: for each image as many lines as for the others.
        columns: images in a row.
    """
    tiles = [_tile(image, lines) for image, lines in zip(images.cpu(), words, strict=True)]
    return make_grid([pil_to_tensor(t) for t in tiles], nrow=columns, padding=2, pad_value=255)


def _tile(image: Tensor, lines: Sequence[Words]) -> Image.Image:
    picture = to_pil_image(image.float().clamp(0, 1)).convert("RGB")
    factor = max(1, -(-SIDE // max(picture.size)))
    width, height = picture.width * factor, picture.height * factor
    tile = Image.new("RGB", (width, height + LINE * len(lines)), "white")
    tile.paste(picture.resize((width, height), Image.Resampling.NEAREST))
    pen = ImageDraw.Draw(tile)
    for i, line in enumerate(lines):
        pen.text((1, height + LINE * i), line.text, fill=line.colour, font_size=LINE - 3)
    return tile


def matrix(counts: Tensor, names: Sequence[str]) -> Tensor:
    """Counts (N, N) as blue cells, true classes from top to bottom, predicted ones across.

    A cell is as dark as its share of the row, that is of the true class. More than 30 classes are
    drawn without names and numbers.
    """
    count, told = len(names), len(names) <= NAMED
    cell = CELL if told else max(2, NAMED * CELL // count)
    margin = LINE * (8 if told else 2)
    picture = Image.new("RGB", (margin + count * cell + 1,) * 2, "white")
    shares = counts.double() / counts.sum(dim=1, keepdim=True).clamp_min(1)
    falling = torch.tensor((225, 180, 0))[:, None, None]  # of red, green and blue, with the share
    cells = to_pil_image((255 - falling * shares).round().to(torch.uint8))
    picture.paste(cells.resize((count * cell,) * 2, Image.Resampling.NEAREST), (margin, margin))
    pen = ImageDraw.Draw(picture)
    if told:
        _number(pen, counts, shares, margin)
        picture.paste(_axis(names, margin, cell), (0, margin))
        upwards = _axis(names, margin, cell).transpose(Image.Transpose.ROTATE_90)
        picture.paste(upwards, (margin, 0))
    pen.text((2, 2), "true: down", fill="black", font_size=LINE - 4)
    pen.text((2, 2 + LINE), "predicted: across", fill="black", font_size=LINE - 4)
    return pil_to_tensor(picture)


def _number(pen: ImageDraw.ImageDraw, counts: Tensor, shares: Tensor, margin: int) -> None:
    """Frame each cell of ``counts`` (N, N), and write what is not zero into it."""
    for row, values in enumerate(counts.tolist()):
        for column, value in enumerate(values):
            x, y = margin + column * CELL, margin + row * CELL
            pen.rectangle((x, y, x + CELL, y + CELL), outline="lightgrey")
            if value:
                colour = "white" if shares[row, column] > 0.5 else "black"
                middle = (x + CELL / 2, y + CELL / 2)
                pen.text(middle, str(value), fill=colour, font_size=LINE - 3, anchor="mm")


def _axis(names: Sequence[str], width: int, cell: int) -> Image.Image:
    """The names one below the other, ``cell`` pixels each."""
    picture = Image.new("RGB", (width, cell * len(names)), "white")
    pen = ImageDraw.Draw(picture)
    for i, name in enumerate(names):
        pen.text((4, (i + 0.5) * cell), name, fill="black", font_size=LINE - 2, anchor="lm")
    return picture
