from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from revzoo._checks import cores
from revzoo.data import Augment, Digits
from revzoo.data.file_images import FileImages
from revzoo.data.folders import Files
from revzoo.data.images import TensorImages
from revzoo.data.loaders import eval_loader


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


def test_workers_leave_signals_to_the_training_process() -> None:
    """Batch systems send SIGTERM to all processes: without its worker, a run could not save."""
    data = Digits(num_workers=1)
    data.setup("fit")
    loader = data.train_dataloader()
    batches = iter(loader)
    next(batches)  # the worker has begun
    (worker,) = loader._iterator._workers  # type: ignore[union-attr]
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        # by another process: a worker ends if its parent sends SIGTERM
        subprocess.run(["kill", f"-{signum:d}", str(worker.pid)], check=True)
    assert len(list(batches)) == 19
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


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
    images = FileImages(
        files, classes=["a"], channels=3, sizes=(16, 16), augment=Augment(), training=True
    )

    def drawn(seed: int) -> list[torch.Tensor]:
        images.begin_epoch(seed, 0)
        return [images[0][0], images[1][0]]

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_machine_bounds_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    """``num_workers: 100000`` in a downloaded run started 1,100 processes before it was stopped."""
    pixels, labels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    image_set = TensorImages(pixels, labels, classes=["a"])
    images = eval_loader(image_set, batch_size=2, workers=100_000, trainer=None)
    assert images.num_workers == 4 * cores()
    assert "data.num_workers=100000 is too many" in caplog.text
