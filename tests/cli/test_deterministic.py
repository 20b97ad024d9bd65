"""``trainer.deterministic=true``: the same bits in each run."""

import pytest
import torch
from small_images import image_folder
from small_run import QUICK

from revzoo.cli.run.train import train
from revzoo.core.modes import MODES

# a warning on machines with one CPU
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SMALL = (*QUICK, "trainer.deterministic=true", "model.dropout=0.1", "test=false")


def weights(run_dir):
    state = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    for optimizer in state["optimizer_states"]:
        for group in optimizer["param_groups"]:
            del group["name"]  # assert_close() knows no strings
    return state["state_dict"], state["optimizer_states"]


def assert_same_bits(one, other):
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_are_the_same(mode, compose, tmp_path):
    for workers in (0, 2):
        config = compose(*SMALL, f"memory={mode}", f"data.num_workers={workers}")
        train(config, run_dir=tmp_path / str(workers))
    assert_same_bits(tmp_path / "0", tmp_path / "2")


def test_images_augmented_by_workers_are_the_same(compose, tmp_path):
    root = image_folder(tmp_path / "images")
    images = ("data=imagefolder", f"data.root={root}", "data.cache_bytes=0", "data.batch_size=8")
    images += ("data.image_size=8",)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = compose(*SMALL, *images, "data.num_workers=2", f"seed={seed}")
        train(config, run_dir=tmp_path / name)
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_bits(tmp_path / "a", tmp_path / "c")
