import pytest
import torch
from torch import nn

from revzoo.training.optim import muon
from revzoo.training.optim.muon import Muon, newton_schulz


@pytest.mark.parametrize("shape", [(8, 40), (16, 16)])
def test_newton_schulz_makes_all_singular_values_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(matrix).float())
    assert torch.linalg.svdvals(matrix).max() > 3
    assert values.max() < 1.3
    assert values.median() > 0.6
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert (newton_schulz(matrix).float() * (u @ vh)).sum() > 0.6 * shape[0]  # same directions


def test_with_a_zero_gradient_only_decay_acts() -> None:
    weight = nn.Parameter(torch.ones(4, 2, 3, 3))
    weight.grad = torch.zeros_like(weight)
    Muon([{"params": [weight], "lr": 0.1, "weight_decay": 0.5, "orthogonal": True}]).step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.95))


def test_a_convolution_moves_as_its_matrix_in_torch() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 2, 3, 3))
    matrix = nn.Parameter(weight.detach().flatten(1).clone())
    ours = Muon([{"params": [weight], "lr": 0.1, "weight_decay": 0.2, "orthogonal": True}])
    torchs = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.2, momentum=0.9)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        matrix.grad = weight.grad.flatten(1)
        ours.step()
        torchs.step()
    torch.testing.assert_close(weight.flatten(1), matrix, rtol=0, atol=0.02)  # bfloat16 products


def test_a_tall_matrix_is_scaled_by_its_shape() -> None:
    weight = nn.Parameter(torch.zeros(32, 8))
    weight.grad = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    Muon([{"params": [weight], "lr": 1.0, "orthogonal": True}]).step()
    assert torch.linalg.svdvals(weight.detach()).median() == pytest.approx(2.0, rel=0.3)


def test_other_groups_move_as_in_torchs_nesterov_sgd() -> None:
    torch.manual_seed(0)
    ours, torchs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizers = [
        Muon([{"params": [ours], "lr": 0.1, "momentum": 0.8}]),
        torch.optim.SGD([torchs], lr=0.1, momentum=0.8, nesterov=True),
    ]
    for _ in range(4):
        ours.grad = torch.randn(5)
        torchs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, torchs)


def test_a_bias_cannot_be_orthogonalised() -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\) cannot be orthogonalised.*another group"):
        Muon([{"params": [nn.Parameter(torch.ones(5))], "lr": 0.1, "orthogonal": True}])


@pytest.mark.parametrize("values", [muon.MAX_STACKED, 1, 100])
def test_matrices_of_one_size_move_as_each_by_itself(
    values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights() -> list[nn.Parameter]:
        torch.manual_seed(0)
        sizes = [(6, 2, 3, 3), (4, 5), (6, 18), (5, 4), (6, 2, 3, 3), (4, 5), (0, 8)]
        found = [nn.Parameter(torch.randn(size)) for size in sizes]
        for weight in found:
            weight.grad = torch.randn_like(weight)
        found[0].data = found[0].data.contiguous(memory_format=torch.channels_last)
        return found

    options = {"lr": 0.1, "weight_decay": 0.5, "orthogonal": True}
    expected = weights()
    for weight in expected:
        Muon([{"params": [weight], **options}]).step()
    monkeypatch.setattr(muon, "MAX_STACKED", values)
    found = weights()
    Muon([{"params": found, **options}]).step()
    assert all(map(torch.equal, found, expected))
