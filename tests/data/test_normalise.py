import pytest
import torch

from revzoo.data.normalise import Normalisation


def _images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([255, 100, 20]).view(3, 1, 1)
    return (torch.rand(50, 3, 4, 4, generator=generator) * scale).to(torch.uint8)


def test_measured_statistics_equal_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("revzoo.data.normalise._CHUNK", 7)  # several chunks, the last one short
    measured = Normalisation.measure(_images())
    pixels = _images().double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(measured.mean.flatten().double(), pixels.mean(1))
    torch.testing.assert_close(measured.std.flatten().double(), pixels.std(1, correction=0))


def test_normalised_training_images_have_mean_0_and_deviation_1() -> None:
    images = _images()
    out = Normalisation.measure(images)(images)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std((0, 2, 3), correction=0), torch.ones(3))


def test_a_constant_channel_becomes_zero() -> None:
    images = torch.full((4, 1, 2, 2), 77, dtype=torch.uint8)
    assert torch.equal(Normalisation.measure(images)(images), torch.zeros(4, 1, 2, 2))


def test_input_is_not_changed_even_if_it_is_float() -> None:
    images = _images().float()
    Normalisation([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])(images)
    assert torch.equal(images, _images().float())


def test_state_is_plain_and_complete() -> None:
    measured = Normalisation.measure(_images())
    state = measured.state_dict()
    assert all(type(value) is float for values in state.values() for value in values)
    assert torch.equal(Normalisation(**state)(_images()), measured(_images()))
