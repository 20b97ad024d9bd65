"""A folder of images of two classes, dark and light."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def image_folder(root: Path, splits: tuple[str, ...] = ("train", "test"), side: int = 8) -> Path:
    rng = np.random.default_rng(0)
    for split in splits:
        for name in ("dark", "light"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(20):
                low = 0 if name == "dark" else 128
                pixels = rng.integers(low, low + 128, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root
