"""Fake tensors whose mode remembers what operators return."""

import contextlib

import pytest
import torch
from torch import nn

from revzoo.core.twins import Fakes

aten = torch.ops.aten
ONE, ZERO = [1, 1], [0, 0]
CALLS = {
    "one": lambda x: x + x,
    "channels last": lambda x: nn.functional.conv2d(
        x.contiguous(memory_format=torch.channels_last), x.new_empty(3, 2, 1, 1)
    ),
    "several": lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    "none": lambda x: aten.convolution_backward(
        x, x, x.new_empty(2, 2, 1, 1), None, ONE, ZERO, ONE, False, ZERO, 1, [False, True, False]
    ),
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1) + 1,
    "list": lambda x: torch.cat([x, x], 1),
}


def looks(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in outputs]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_remembered_outputs_look_like_the_first_ones(call):
    with Fakes() as mode:
        x = torch.empty(4, 2, 8, 8)
        first = call(x)
        known = len(mode._known)
        second = call(x)
        assert known
        assert len(mode._known) == known
    assert looks(first) == looks(second)
    assert looks(first) == looks(call(torch.empty(4, 2, 8, 8)))


def test_numbers_of_other_types_are_other_calls():
    with Fakes():
        x = torch.ones(3, dtype=torch.int64)
        assert [(x + n).dtype for n in (1, 1.0)] == [torch.int64, torch.float32]


def test_a_shared_storage_stays_shared():
    with Fakes():
        x = torch.empty(4, 6)
        for _ in range(2):
            y = aten._unsafe_view(x, [24])
            assert y.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_new_tensors_are_new_from_the_first_call_on():
    """The fake ``native_dropout`` returns its input here, the real one a copy."""
    for mode in (contextlib.nullcontext(), Fakes()):
        with mode:
            x = torch.empty(4, 6)
            for _ in range(2):
                y, _ = torch.native_dropout(x, 0.5, False)
                assert y.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_conjugate_views_are_not_remembered():
    with Fakes():
        x = torch.empty(3, dtype=torch.complex64)
        plain = [torch.vdot(x, x).is_conj() for _ in range(2)]
        conjugate = [torch.vdot(x, x.conj()).is_conj() for _ in range(2)]
    assert plain[0] == plain[1]
    assert conjugate[0] == conjugate[1] != plain[0]


def test_the_default_dtype_counts():
    with Fakes():
        x = torch.ones(3, dtype=torch.int64)
        single = (x * 2.0).dtype
        torch.set_default_dtype(torch.float64)
        try:
            assert (single, (x * 2.0).dtype) == (torch.float32, torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_sparse_tensor_is_not_remembered():
    with Fakes() as mode:
        x = torch.empty(4, 6).to_sparse()
        assert (x + x).layout is torch.sparse_coo
        assert not any(func is aten.add.Tensor for func, *_ in mode._known)


def test_values_of_constants_are_not_forgotten():
    with Fakes():
        unknown = torch.empty((), dtype=torch.int64)
        assert (unknown + unknown).shape == ()
        assert (torch.tensor(2) + torch.tensor(2)).item() == 4
