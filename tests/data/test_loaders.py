from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import get_worker_info

from revzoo._checks import cores
from revzoo.data import Augment, Digits
from revzoo.data.errors import DataError
from revzoo.data.file_images import FileImages
from revzoo.data.folders import Files
from revzoo.data.images import Batch, TensorImages
from revzoo.data.loaders import eval_loader, train_loader


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_begins_at_the_first_batch_asked_for(workers: int) -> None:
    def labels(first: int) -> list[torch.Tensor]:
        data = Digits(num_workers=workers)
        data.setup("fit")
        loader = data.train_dataloader()
        loader.first_batch = lambda: first  # type: ignore[attr-defined]
        return [labels for _, labels in loader]

    torch.manual_seed(0)
    whole, rest = labels(0), labels(15)
    assert len(rest) == len(whole) - 15
    assert all(map(torch.equal, whole[15:], rest))


def test_loading_draws_nothing_from_the_models_generator() -> None:
    data = Digits()
    data.setup("fit")
    before = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_files_are_augmented_by_epoch_and_image(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()
    Image.fromarray(noise).save(tmp_path / "0.png")
    files = Files([str(tmp_path / "0.png")] * 2, [0, 0])
    images = FileImages(files, classes=["a"], channels=3, size=16, augment=Augment(), training=True)

    def drawn(seed: int) -> list[torch.Tensor]:
        images.begin_epoch(seed)
        return [images[0][0], images[1][0]]

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1])


class Deadly(TensorImages):
    """Kills the first ``times`` workers that read the image ``bad``."""

    def __init__(self, *, bad: int, times: int) -> None:
        images = torch.arange(64, dtype=torch.uint8).view(64, 1, 1, 1)
        super().__init__(images, torch.arange(64), classes=["a"])
        self.bad, self.left = bad, torch.tensor(times).share_memory_()

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        if self.bad in indices and self.left > 0 and get_worker_info() is not None:
            self.left -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_killed_worker_changes_nothing(evaluates: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A killed DataLoader worker ends the run."""

    def labels(times: int, workers: int) -> list[torch.Tensor]:
        images = Deadly(bad=60, times=times)
        options: dict[str, Any] = {"batch_size": 8, "workers": workers}
        if evaluates:
            loader: Any = eval_loader(images, **options, trainer=None)
        else:
            loader = train_loader(images, **options, seed=0, trainer=None)
        return [labels for passes in range(2) for _, labels in loader]

    whole, found = labels(0, 0), labels(2, 2)
    assert len(whole) == len(found) == 16
    assert all(map(torch.equal, whole, found))
    assert len([m for m in caplog.messages if "restarting the workers" in m]) == 2


def test_workers_that_are_always_killed_end_the_pass_with_the_cause() -> None:
    """In 4 of 9 cases the message wrongly was "cannot write best.ckpt: free space"."""
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(
        DataError, match=r"killed 4 times in a row at batch [67].*lower data.num_workers"
    ):
        list(eval_loader(Deadly(bad=60, times=9), batch_size=8, workers=1, trainer=None))
    assert signal.getsignal(signal.SIGCHLD) == before  # nothing raises in the middle of a save


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_machine_bounds_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    """``num_workers: 100000`` in a downloaded run started 1,100 processes before it was stopped."""
    pixels, labels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    image_set = TensorImages(pixels, labels, classes=["a"])
    images = eval_loader(image_set, batch_size=2, workers=100_000, trainer=None)
    assert images.num_workers == 4 * cores()
    assert "data.num_workers=100000 is too many" in caplog.text
