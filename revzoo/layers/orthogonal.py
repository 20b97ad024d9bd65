"""Learned rotations of channels, which mode ``exact`` undoes bit for bit.

    y = Q x         at each position;  Q = (I + A)^-1 (I - A),  A = weight - weight^T

The Cayley transform (Cayley 1846) of a skew-symmetric A is a rotation, and its inverse the
transpose. Etmann et al. 2020 (arXiv 2005.05220) learn the down- and upsampling of their iUNets in
this way: a squeeze, then a rotation of each channel's block. They also offer the matrix
exponential, ``exp(A)``. :class:`~revzoo.InvertibleLinear` has a rotation, too, but no fixed point.

NOTE [ Rotations by lifting ]
    A product with Q leaves the grid. But with ``I + A = L D U`` (L, U with a unit diagonal) we have
    ``I - A = (I + A)^T = U^T D L^T``, so

        Q = U^-1 (D^-1 L^-1 U^T D) L^T

    has three triangular factors with unit diagonals. A 2x2 rotation is three shears: this is the
    same for all sizes. No pivots are needed, since the symmetric part of I + A is I. Halve the
    channels: a unit upper triangular factor is

        [[U1, V], [0, U2]] = [[U1, 0], [0, U2]]  [[I, U1^-1 V], [0, I]]

    The right factor adds a function of one half to the other: a coupling, which rounds its value to
    the grid and can be undone. U1 and U2 are smaller triangles. So log2(n) couplings make a factor,
    and three factors the rotation (lifting: Sweldens 1996; of rotations: Daubechies and Sweldens
    1998). The channels are filled up with zeros to a power of two.

    Gradients are those of the product. Known limit: for rotations by nearly 180 degrees the shears
    are large, and so is the rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_choice
from revzoo.core.invertible import Invertible, State
from revzoo.core.replay import Recorder
from revzoo.core.sums import plus, read_for
from revzoo.core.words import Fixed, apply_to_words, as_floats, words_in
from revzoo.layers.streams import at_least_float32, without_autocast

Rotation = Literal["cayley", "exp"]


def cayley(a: Tensor) -> Tensor:
    """``(I + A)^-1 (I - A)`` of skew-symmetric matrices ``(..., n, n)``."""
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve(unit + a, unit - a)


ROTATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "cayley": cayley,
    "exp": torch.linalg.matrix_exp,
}


class OrthogonalMix(Invertible):
    """Rotates the channels of some streams ``(B, C, ...)``, concatenated; the other streams pass.

    Args:
        weight: ``(n, n)``, one matrix for all n channels; or ``(G, n, n)``: each of G blocks of n
            successive channels has its own. Its initial value.
        streams: number of streams of the state.
        takes: positions of the rotated streams, in the order of concatenation.
        back: apply the inverse, ``Q^T``.
        rotation: ``"cayley"``, or ``"exp"``, which does not fit mode ``exact``.

    Raises:
        ValueError: unknown rotation.
    """

    sums = True

    def __init__(
        self,
        weight: Tensor,
        *,
        streams: int = 1,
        takes: tuple[int, ...] = (0,),
        back: bool = False,
        rotation: Rotation = "cayley",
    ) -> None:
        super().__init__()
        check_choice("rotation", rotation, ROTATIONS)
        self.weight = nn.Parameter(weight)
        self.streams, self.takes, self.back, self.rotation = streams, takes, back, rotation
        self.exact = rotation == "cayley"
        self.inexact = "only the Cayley transform is a product of couplings (rotation='cayley')"

    def forward(self, *state: Tensor, **context: Any) -> State:
        words = [words_in(self, state[i]) for i in self.takes]
        y = self._times(state, self.back) if torch.is_grad_enabled() or None in words else None
        if None in words:
            assert y is not None
            return self._with(state, y)
        fixed = self._lifted([w for w in words if w is not None])
        if y is None:
            return self._with(state, as_floats(fixed))
        return self._with(state, [read_for(f, t, self) for f, t in zip(fixed, y, strict=True)])

    def inverse(self, *state: Tensor, **context: Any) -> State:
        return as_floats(self._undone(state))

    def replay(
        self, outputs: Any, record: Recorder, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        with torch.no_grad():
            inputs = self._undone(outputs)
        if not record.records:
            return inputs, ()
        leaves = [record.leaf(i, t) for i, t in enumerate(inputs)]
        # not on the grid: the gradient is the product's
        return inputs, self._with(leaves, self._times(leaves, self.back))

    def _undone(self, state: State) -> tuple[Tensor | Fixed, ...]:
        words = [words_in(self, state[i]) for i in self.takes]
        if None in words:
            return self._with(state, self._times(state, not self.back))
        return self._with(state, self._lifted([w for w in words if w is not None], undo=True))

    def matrix(self) -> Tensor:
        """Q, ``(G, n, n)``, in float32 or wider."""
        return ROTATIONS[self.rotation](self._skew()).reshape(-1, *self.weight.shape[-2:])

    def _skew(self) -> Tensor:
        weight = at_least_float32(self.weight)
        return weight - weight.mT

    def _with(self, state: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
        """The ``state`` with other streams at ``takes``."""
        new = dict(zip(self.takes, values, strict=True))
        return tuple(new.get(i, t) for i, t in enumerate(state))

    def _times(self, state: Sequence[Any], back: bool) -> State:
        """The products with Q, or ``Q^T``."""
        parts = [state[i] for i in self.takes]
        x = _joined(*parts)
        with without_autocast(x):
            q = self.matrix().to(x.dtype)
            blocks = x.reshape(x.shape[0], len(q), q.shape[-1], -1)
            # not a convolution, which may compute in TF32, see revzoo.layers.linear
            y = ((q.mT if back else q) @ blocks).reshape(x.shape)
        return _cut(y, [t.shape[1] for t in parts])

    def _lifted(self, streams: Sequence[Fixed], *, undo: bool = False) -> Sequence[Fixed]:
        """The rotated streams by NOTE [ Rotations by lifting ]; ``undo``: from their values."""
        sizes, dtypes = [f.shape[1] for f in streams], [f.dtype for f in streams]
        (whole,) = apply_to_words(_joined, streams, dtypes[:1])
        with torch.no_grad():
            lifts = list(_lifts(self._skew()))
            if self.back:
                lifts = [lift._replace(weight=-lift.weight) for lift in reversed(lifts)]
            whole = _apply(whole, lifts, self, undo)
        return apply_to_words(lambda t: _cut(t, sizes), [whole], dtypes)

    def extra_repr(self) -> str:
        back = ", back=True" if self.back else ""
        return f"{tuple(self.weight.shape)}, {self.rotation!r}, streams={self.streams}{back}"


class _Lift(NamedTuple):
    """Of each block of channels, the half ``target`` becomes itself plus ``weight`` the other."""

    target: int
    weight: Tensor  # (G, blocks, h, h)


def _apply(fixed: Fixed, lifts: Sequence[_Lift], step: OrthogonalMix, undo: bool) -> Fixed:
    shape, size = fixed.shape, step.weight.shape[-1]
    filled = 2 * lifts[0].weight.shape[1:3].numel()
    words = functional.pad(
        fixed.words.reshape(shape[0], -1, size, shape[2:].numel()), (0, 0, 0, filled - size)
    )
    words = words.clone() if filled == size else words
    dtype = torch.promote_types(fixed.dtype, torch.float32)
    for target, weight in reversed(lifts) if undo else lifts:
        _, blocks, half, _ = weight.shape
        halves = torch.unflatten(words, 2, (blocks, 2, half))
        before = fixed.with_words(halves.select(3, target).contiguous(), dtype)
        source = fixed.with_words(halves.select(3, 1 - target).contiguous(), dtype)
        value = weight.to(dtype) @ source.read()
        after = before.minus(value, fixed.down) if undo else plus(before, value, dtype, step)[1]
        halves.select(3, target).copy_(after.words)
        bound = max(fixed.bound, after.bound)
        fixed = Fixed(fixed.words, fixed.scale, fixed.dtype, down=after.down, bound=bound)
    return fixed.with_words(words[:, :, :size].reshape(shape))


def _lifts(a: Tensor) -> Iterator[_Lift]:
    """The couplings of the Cayley transform of ``a (..., n, n)``, in order."""
    n = a.shape[-1]
    a = a.double().reshape(-1, n, n)
    unit = torch.eye(n, dtype=a.dtype, device=a.device)
    lu = _eliminated(unit + a)
    lower, scaled = lu.tril(-1) + unit, lu.triu()
    d = scaled.diagonal(dim1=-2, dim2=-1)
    upper = scaled / d.unsqueeze(-1)
    middle = torch.linalg.solve_triangular(lower, upper.mT, upper=False, unitriangular=True)
    middle = middle * d.unsqueeze(-2) / d.unsqueeze(-1)
    last = torch.linalg.solve_triangular(upper, unit.expand_as(upper), upper=True)
    filled = 2 ** max(1, (n - 1).bit_length())
    for factor, target in ((lower.mT, 0), (middle, 1), (last, 0)):
        whole = torch.eye(filled, dtype=a.dtype, device=a.device).repeat(len(a), 1, 1)
        whole[:, :n, :n] = factor
        half = filled // 2
        while half:
            # (G, blocks, 2 half, 2 half): the triangles on the diagonal
            blocks = torch.unflatten(whole, 2, (-1, 2 * half))
            blocks = torch.unflatten(blocks, 1, (-1, 2 * half))
            blocks = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
            own, other = slice(half), slice(half, None)
            if target:
                own, other = other, own
            weight = torch.linalg.solve_triangular(
                blocks[..., own, own],
                blocks[..., own, other],
                upper=target == 0,
                unitriangular=True,
            )
            yield _Lift(target, weight)
            half //= 2


def _eliminated(m: Tensor) -> Tensor:
    """L below the diagonal and U of ``m = L U``, without pivots."""
    if m.is_cuda:
        return torch.linalg.lu_factor_ex(m, pivot=False)[0]
    m = m.clone()  # torch needs pivots on a CPU
    for k in range(m.shape[-1] - 1):
        column = m[..., k + 1 :, k] / m[..., k, k, None]
        m[..., k + 1 :, k] = column
        m[..., k + 1 :, k + 1 :] -= column.unsqueeze(-1) * m[..., k, None, k + 1 :]
    return m


def _joined(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _cut(x: Tensor, sizes: list[int]) -> State:
    # dense copies, see revzoo.layers.streams
    return (x,) if len(sizes) == 1 else tuple(t.contiguous() for t in torch.split(x, sizes, dim=1))
