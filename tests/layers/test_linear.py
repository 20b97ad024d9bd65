"""Invertible linear maps and 1x1 convolutions against torch's own; matrices stay invertible."""

import pytest
import torch
from compare import error
from torch.nn import functional

from revzoo import InvertibleConv1x1, InvertibleLinear
from revzoo.layers.linear import MATRICES, OrthogonalMatrix, PLUMatrix

both = pytest.mark.parametrize("kind", MATRICES)


def trained(kind, n=6):
    """A matrix of random parameters in float64."""
    torch.manual_seed(0)
    matrix = MATRICES[kind](n).double()
    with torch.no_grad():
        for p in matrix.parameters():
            p += 0.3 * torch.randn_like(p)
    return matrix


@both
def test_inverse_and_determinant(kind):
    matrix = trained(kind)
    w = matrix()
    assert (matrix.inverse() @ w - torch.eye(6)).abs().max() < 1e-13
    expected = torch.linalg.slogdet(w).logabsdet
    assert abs(matrix.log_abs_det() - expected) < 1e-13
    assert (abs(expected) > 0.1) == (kind == "plu")


@both
def test_it_starts_at_a_random_rotation(kind):
    w = MATRICES[kind](8)()
    assert (w @ w.mT - torch.eye(8)).abs().max() < 1e-5
    assert (w - MATRICES[kind](8)()).abs().max() > 0.1


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cast_leaves_it_invertible(kind, dtype):
    # What is stored is rounded; the matrix must be what its inverse undoes all the same.
    matrix = trained(kind).to(dtype).double()
    assert (matrix.inverse() @ matrix() - torch.eye(6)).abs().max() < 1e-9


@both
def test_every_parameter_has_its_gradient(kind):
    matrix = trained(kind, 4)
    parameters = list(matrix.parameters())
    for evaluate in (matrix, matrix.inverse):
        assert torch.autograd.gradcheck(lambda *_, e=evaluate: e(), parameters)


def test_only_the_triangles_count():
    for matrix, masks in (
        (PLUMatrix(5), {"lower": torch.triu, "upper": torch.tril}),
        (OrthogonalMatrix(5), {"skew": torch.triu}),
    ):
        before = matrix().detach().clone()
        for name, mask in masks.items():
            with torch.no_grad():
                matrix.get_parameter(name).add_(mask(torch.ones(5, 5)))
        assert torch.equal(matrix(), before)


@both
def test_against_torch(kind):
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    conv = InvertibleConv1x1(6, matrix=kind).double()
    y = torch.cat(conv(*x.chunk(2, dim=1)), dim=1)
    assert error([y], [functional.conv2d(x, conv.matrix()[:, :, None, None])]) < 1e-14
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    linear = InvertibleLinear(6, matrix=kind, streams=1).double()
    assert error([linear(x)], [functional.linear(x, linear.matrix())]) < 1e-14


@both
def test_autocast_does_not_narrow_the_streams(kind):
    conv, x = InvertibleConv1x1(6, matrix=kind, streams=1), torch.randn(2, 6, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv(x)
        back = conv.inverse(y)
    assert y.dtype == torch.float32
    assert error([back], [x]) < 1e-5


def test_shapes_alone():
    conv = InvertibleConv1x1(4).to("meta")
    assert [y.shape for y in conv(*torch.zeros(2, 1, 2, 3, 3, device="meta"))] == [(1, 2, 3, 3)] * 2


def test_refusals():
    with pytest.raises(ValueError, match="matrix=qr: expected one of plu, orthogonal"):
        InvertibleLinear(4, matrix="qr")
    with pytest.raises(ValueError, match=r"InvertibleConv1x1 got streams of shape .*expected 6"):
        InvertibleConv1x1(6)(*torch.zeros(2, 1, 2, 4, 4))
