import pytest
import torch

from revzoo.layers.norm import RELEASE


def test_running_mean_keeps_99_percent_as_tensorflow_decay_099_does():
    norm = RELEASE.normalise(1)
    norm(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
    assert norm.running_mean.item() == pytest.approx(0.99 * 0.0 + 0.01 * 2.0)


def test_epsilon_is_one_thousandth():
    norm = RELEASE.normalise(1).eval()
    norm.running_var.zero_()
    y = norm(torch.ones(1, 1, 1, 1, dtype=torch.float32))
    assert y.item() == pytest.approx(1000**0.5)
