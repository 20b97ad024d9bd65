import pytest
import torch

from revzoo.models.components.norm import ACTIVATIONS, RELEASE, NormAct


def test_running_mean_keeps_99_percent_as_tensorflow_decay_099_does():
    norm = RELEASE.normalise(1)
    norm(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
    assert norm.running_mean.item() == pytest.approx(0.99 * 0.0 + 0.01 * 2.0)


def test_epsilon_is_one_thousandth():
    norm = RELEASE.normalise(1).eval()
    norm.running_var.zero_()
    y = norm(torch.ones(1, 1, 1, 1, dtype=torch.float32))
    assert y.item() == pytest.approx(1000**0.5)


@pytest.mark.parametrize(("channels", "groups"), [(64, 4), (56, 7), (16, 1), (3, 3)])
def test_groups_have_16_channels_or_what_divides(channels, groups):
    norm = NormAct("group").normalise(channels)
    assert isinstance(norm, torch.nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (groups, channels)


def test_no_normalisation_is_the_identity():
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(NormAct("none").normalise(3)(x), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_leave_their_input_alone(name):
    x = torch.randn(5)
    before = x.clone()
    assert not torch.equal(NormAct(activation=name).activate()(x), before)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("field", "value", "known"), [("norm", "layer", "group"), ("activation", "rely", "relu")]
)
def test_unknown_names_are_refused(field, value, known):
    with pytest.raises(ValueError, match=f"{field}={value}.*{known}"):
        NormAct(**{field: value})
