"""Draws images, their reconstructions by an i-RevNet, and the differences.

    python benchmarks/draw_inverse.py docs/pictures/irevnet13.png

The network is ``irevnet13.digits``; the images are from the test split of the digits. Below the
images are their reconstructions with everything in bfloat16, in float32, and in memory mode
``exact`` under bfloat16 autocast. Each has a row with the absolute difference, scaled so that the
largest value is white.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import make_grid

import revzoo
from revzoo.data import Digits

COUNT, SCALE, MARGIN = 12, 5, 250  # images in a row; enlargement; pixels for the labels


def reconstructions(images: Tensor) -> list[tuple[str, Tensor]]:
    """A label and the reconstruction of ``images`` for each precision."""
    found = []
    for words, mode, dtype, narrow in (
        ("all bfloat16", "invert", torch.bfloat16, False),
        ("float32", "invert", torch.float32, False),
        ("exact, bfloat16 autocast", "exact", torch.float32, True),
    ):
        model = revzoo.create_model("irevnet13.digits", pretrained=True, memory=mode)
        model.eval().to(dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            found.append((words, model.inverse(model.encode(images.to(dtype))).float()))
    return found


def main() -> None:
    """Write the picture and print the largest differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    data = Digits(batch_size=COUNT, eval_batch_size=COUNT)
    data.setup("test")
    pixels, _ = next(iter(data.test_dataloader()))
    # round to the grid of mode exact, so that the input itself can come back bit for bit
    images = (data.transform(pixels, training=False) * 2**14).round() / 2**14
    low, high = images.amin(), images.amax()
    rows = [("images", (images - low) / (high - low))]
    for words, back in reconstructions(images):
        difference = (back - images).abs()
        largest = difference.max().item()
        print(f"{words}: largest difference {largest:.2g}, of values from {low:.2f} to {high:.2f}")
        rows.append((words, ((back - low) / (high - low)).clamp(0, 1)))
        rows.append((f"difference, up to {largest:.1g}", difference / max(largest, 1e-30)))
    draw(rows).save(output)


def draw(rows: list[tuple[str, Tensor]]) -> Image.Image:
    """Draw each row of images ``(N, 1, H, W)`` in [0, 1] beside its label."""
    strips = [to_pil_image(make_grid(t, nrow=len(t), padding=1, pad_value=0.4)) for _, t in rows]
    strips = [
        s.resize((s.width * SCALE, s.height * SCALE), Image.Resampling.NEAREST) for s in strips
    ]
    height = strips[0].height
    picture = Image.new("RGB", (MARGIN + strips[0].width, height * len(rows)), "white")
    pen = ImageDraw.Draw(picture)
    for i, ((words, _), strip) in enumerate(zip(rows, strips, strict=True)):
        picture.paste(strip, (MARGIN, i * height))
        pen.text((10, i * height + height // 3), words, fill="black", font_size=16)
    return picture


if __name__ == "__main__":
    main()
