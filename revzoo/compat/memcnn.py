"""MemCNN's names (van de Leemput et al. 2019, JOSS 4(39) 1576; version 1.5.2, its last).

    from revzoo.compat import memcnn        # instead of: import memcnn

Signatures, attributes and ``state_dict`` keys are MemCNN's. The mechanism is revzoo's, with these
improvements: branches are evaluated once in the backward pass, statistics count a
batch once, dropout draws the same mask, ``autograd.grad`` and any number of backward passes work,
hooks run, the backward pass runs under the forward pass's autocast, and the
caller's tensors keep their storage, so ``x + f(x)`` is right.

=========================================  =======================================================
``keep_input=False``                       memory mode ``invert``
``keep_input=True``                        memory mode ``recompute``
``disable=True``                           memory mode ``store``
``num_bwd_passes``                         no effect, any number of backward passes works
``preserve_rng_state``                     no effect, replays always draw the same numbers
``implementation_fwd``, ``_bwd``           no effect, there is one implementation
=========================================  =======================================================

New code should use :class:`~revzoo.ReversibleSequence`, which does not merge and split streams
between blocks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.core.checkpoint import InvertibleCheckpoint, checkpoint, run_checkpoint
from revzoo.core.invertible import State, Step, as_state
from revzoo.layers import coupling as couplings
from revzoo.layers.coupling import AffineAdapterNaive, AffineAdapterSigmoid, ScaledCoupling
from revzoo.layers.sequence import ReversibleSequence

__all__ = [
    "AdditiveCoupling",
    "AffineAdapterNaive",
    "AffineAdapterSigmoid",
    "AffineCoupling",
    "InvertibleModuleWrapper",
    "ReversibleBlock",
    "create_coupling",
    "is_invertible_module",
]


# the coupling that a wrapper calls in this thread, and the memory mode that the wrapper chooses
_called: ContextVar[tuple[Any, str]] = ContextVar("called", default=(None, "store"))


class _Coupling(nn.Module):
    """Two one-sided couplings of ``Fm`` and ``Gm`` on the halves of one tensor."""

    def __init__(
        self,
        Fm: nn.Module,
        Gm: nn.Module | None = None,
        implementation_fwd: int = -1,
        implementation_bwd: int = -1,
        split_dim: int = 1,
    ) -> None:
        super().__init__()
        # Gm before Fm, as in MemCNN: optimisers number parameters in order, so saved states load
        self.Gm = copy.deepcopy(Fm) if Gm is None else Gm
        self.Fm = Fm
        self.implementation_fwd = implementation_fwd
        self.implementation_bwd = implementation_bwd
        self.split_dim = split_dim
        if (implementation_fwd, implementation_bwd) != (-1, -1):
            warnings.warn(
                "implementation_fwd and implementation_bwd have no effect: leave them out",
                DeprecationWarning,
                stacklevel=2 if isinstance(self, AdditiveCoupling) else 3,
            )

    def forward(self, x: Tensor) -> Tensor:
        coupling, memory = _called.get()
        return cast(Tensor, self.block(memory if coupling is self else "store")(x))

    def inverse(self, y: Tensor) -> Tensor:
        return cast(Tensor, self.block("store").inverse(y))

    def block(self, memory: str) -> ReversibleSequence:
        """The coupling as a sequence in a memory mode; it shares ``Fm`` and ``Gm``."""
        parts = self.Fm, self.Gm, self.split_dim
        # cached in vars(), not as a submodule, which would add keys to the state_dict
        cached: tuple[Any, ...] = vars(self).get("_block", ())
        # a caller may replace Fm, Gm or split_dim at any time
        if not cached or any(a is not b for a, b in zip(cached, parts, strict=False)):
            steps = [self._step(self.Fm), self._step(self.Gm)]
            # memory=None: steps in Fm and Gm keep their modes
            block = ReversibleSequence(steps, memory=None, dim=self.split_dim)
            cached = vars(self)["_block"] = *parts, block
        sequence: ReversibleSequence = cached[-1]
        for step in sequence:
            step.memory = memory
        return sequence

    def _step(self, branch: nn.Module) -> Step:
        raise NotImplementedError


class AdditiveCoupling(_Coupling):
    """``y1 = x1 + Fm(x2)``, ``y2 = x2 + Gm(y1)`` on the halves of ``x`` along ``split_dim``.

    Args:
        Fm: keeps the shape of a half.
        Gm: likewise; None for a copy of ``Fm``.
        implementation_fwd: no effect.
        implementation_bwd: no effect.
        split_dim: the dimension along which ``x`` is split.

    Example:
        >>> from revzoo.compat import memcnn
        >>> coupling = memcnn.AdditiveCoupling(nn.Conv2d(5, 5, 3, padding=1)).eval()
        >>> x = torch.rand(2, 10, 8, 8)
        >>> torch.allclose(coupling.inverse(coupling(x)), x, atol=1e-5)
        True
    """

    def _step(self, branch: nn.Module) -> Step:
        return couplings.AdditiveCoupling(branch)


class AffineCoupling(_Coupling):
    """``y1 = s * x1 + t`` with ``(s, t) = Fm(x2)``; the same for ``y2``, ``x2`` and ``Gm(y1)``.

    Args:
        Fm: returns scale and shift, or the input of ``adapter``.
        Gm: likewise; None for a copy of ``Fm``.
        adapter: a class that wraps ``Fm`` and ``Gm``, such as :class:`AffineAdapterSigmoid`.
        implementation_fwd: no effect.
        implementation_bwd: no effect.
        split_dim: the dimension along which ``x`` is split.
    """

    def __init__(
        self,
        Fm: nn.Module,
        Gm: nn.Module | None = None,
        adapter: Callable[[nn.Module], nn.Module] | None = None,
        implementation_fwd: int = -1,
        implementation_bwd: int = -1,
        split_dim: int = 1,
    ) -> None:
        # copied before it is wrapped: adapter(None) would wrap nothing
        Gm = copy.deepcopy(Fm) if Gm is None else Gm
        if adapter is not None:
            Fm, Gm = adapter(Fm), adapter(Gm)
        super().__init__(Fm, Gm, implementation_fwd, implementation_bwd, split_dim)

    def _step(self, branch: nn.Module) -> Step:
        return ScaledCoupling(branch)


class InvertibleModuleWrapper(nn.Module):
    """``fn`` in a memory mode; :meth:`inverse` runs ``fn.inverse`` in a memory mode.

    Args:
        fn: a module with ``forward`` and ``inverse``, for one or more tensors.
        keep_input: keep the input of ``forward``, not its output. Like every option, it may change
            between calls.
        keep_input_inverse: likewise for ``inverse``.
        num_bwd_passes: no effect: a retained graph allows any number of backward passes.
        disable: call ``fn`` directly.
        preserve_rng_state: no effect: replays always draw the same random numbers.

    Raises:
        TypeError: in a call that needs it, if ``fn`` has no ``inverse``.
    """

    # revzoo.core.modes: messages of set_memory name these attributes
    memory_options = "keep_input, keep_input_inverse and disable"

    def __init__(
        self,
        fn: nn.Module,
        keep_input: bool = False,
        keep_input_inverse: bool = False,
        num_bwd_passes: int = 1,
        disable: bool = False,
        preserve_rng_state: bool = False,
    ) -> None:
        super().__init__()
        self.disable = disable
        self.keep_input = keep_input
        self.keep_input_inverse = keep_input_inverse
        self.num_bwd_passes = num_bwd_passes
        self.preserve_rng_state = preserve_rng_state
        self._fn = fn

    @property
    def memory(self) -> str:
        """The memory mode that the options choose for ``forward``."""
        return "store" if self.disable else "recompute" if self.keep_input else "invert"

    def _inverse(self) -> Callable[..., Any]:
        if not callable(inverse := getattr(self._fn, "inverse", None)):
            raise TypeError(
                f"InvertibleModuleWrapper got a {type(self._fn).__name__}, which has no inverse(): "
                "expected a module with forward and inverse, such as an AdditiveCoupling; "
                "keep_input=True recomputes any module from its input"
            )
        return inverse

    def forward(self, *xin: Tensor) -> Any:
        fn: Any = self._fn
        if self.disable:
            return _unpacked(fn(*xin))
        directions = type(fn).forward, getattr(type(fn), "inverse", None)
        # with its own forward or inverse, or compiled, a coupling is a module like any other
        replaced = "forward" in vars(fn) or fn._compiled_call_impl is not None
        if directions == (_Coupling.forward, _Coupling.inverse) and not replaced:
            # as a sequence it inverts and replays one branch at a time, not both
            token = _called.set((fn, self.memory))
            try:
                return fn(*xin)
            finally:
                _called.reset(token)
        if self.keep_input:  # needs no inverse
            return _unpacked(checkpoint(fn, *xin))
        return _inverting(fn, self._inverse(), xin, "keep_input=True", "its inverse")

    def inverse(self, *yin: Tensor) -> Any:
        inverse = self._inverse()
        if self.disable:
            return _unpacked(inverse(*yin))
        if self.keep_input_inverse:
            return _unpacked(checkpoint(inverse, *yin))
        wrong = "its forward, the inverse of its inverse"
        return _inverting(inverse, self._fn, yin, "keep_input_inverse=True", wrong)


def _inverting(
    fn: Callable[..., Any], inverse: Callable[..., Any], inputs: State, option: str, wrong: str
) -> Any:
    """``fn(*inputs)`` in mode ``invert``; errors recommend the wrapper's ``option``."""
    step = InvertibleCheckpoint(fn, inverse, inputs)
    wrapper = "on the InvertibleModuleWrapper of this module"
    step.remedy = f"set disable=True {wrapper}"
    step.drift_remedy = f"set {option} {wrapper}, or correct {wrong}"
    return _unpacked(run_checkpoint(step, inputs, {}))


class ReversibleBlock(InvertibleModuleWrapper):
    """Wraps the result of :func:`create_coupling`; deprecated in MemCNN."""

    def __init__(
        self,
        Fm: nn.Module,
        Gm: nn.Module | None = None,
        coupling: str = "additive",
        keep_input: bool = False,
        keep_input_inverse: bool = False,
        implementation_fwd: int = -1,
        implementation_bwd: int = -1,
        adapter: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        warnings.warn(
            "ReversibleBlock is deprecated in MemCNN: use InvertibleModuleWrapper, or "
            "revzoo.ReversibleBlock",
            DeprecationWarning,
            stacklevel=2,
        )
        fn = create_coupling(Fm, Gm, coupling, implementation_fwd, implementation_bwd, adapter)
        super().__init__(fn, keep_input, keep_input_inverse)


def create_coupling(
    Fm: nn.Module,
    Gm: nn.Module | None = None,
    coupling: str = "additive",
    implementation_fwd: int = -1,
    implementation_bwd: int = -1,
    adapter: Callable[[nn.Module], nn.Module] | None = None,
) -> AdditiveCoupling | AffineCoupling:
    """Create a coupling, ``"additive"`` or ``"affine"``.

    Raises:
        NotImplementedError: ``coupling`` is neither.
    """
    if coupling == "additive":
        return AdditiveCoupling(Fm, Gm, implementation_fwd, implementation_bwd)
    if coupling == "affine":
        return AffineCoupling(Fm, Gm, adapter, implementation_fwd, implementation_bwd)
    raise NotImplementedError(f"coupling={coupling!r}: expected 'additive' or 'affine'")


def is_invertible_module(
    module_in: nn.Module,
    test_input_shape: Iterable[Any],
    test_input_dtype: torch.dtype = torch.float32,
    atol: float = 1e-6,
    random_seed: int = 42,
) -> bool:
    """Whether ``inverse`` undoes ``forward``, and vice versa, on random inputs.

    For revzoo's modules use :func:`revzoo.is_invertible`. The global random state does not change.

    Args:
        module_in: any module; for a wrapper, we test the wrapped module.
        test_input_shape: shape of the input, or of each input.
        test_input_dtype: of the inputs.
        atol: largest absolute error.
        random_seed: of the inputs.

    Raises:
        ValueError: ``test_input_shape`` is neither a shape nor a tuple of shapes.
    """
    fn: Any = module_in._fn if isinstance(module_in, InvertibleModuleWrapper) else module_in
    if not hasattr(fn, "inverse"):
        return False  # as MemCNN does; the wrapper itself raises
    shape: Any = test_input_shape
    shapes = (shape,) if _is_shape(shape) else shape
    if not (isinstance(shapes, (tuple, list)) and shapes and all(map(_is_shape, shapes))):
        raise ValueError(f"test_input_shape={shape!r}: expected a shape, or a tuple of shapes")
    generator = torch.Generator().manual_seed(random_seed)
    inputs = tuple(torch.rand(s, dtype=test_input_dtype, generator=generator) for s in shapes)
    # the forked state: dropout in fn must not advance the caller's random numbers
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = as_state(fn(*inputs))
        back = as_state(fn.inverse(*outputs))
        for actual, expected in ((back, inputs), (as_state(fn(*back)), outputs)):
            if len(actual) != len(expected):
                return False
            pairs = zip(actual, expected, strict=True)
            if not all(torch.allclose(*pair, atol=atol) for pair in pairs):
                return False
    for name, tensors in (("forward", inputs + outputs), ("inverse", outputs + back)):
        if len({id(t) for t in tensors}) < len(tensors):
            # such a wrapper works, so the answer is True
            warnings.warn(
                f"some inputs and outputs of the {name} pass are the same tensor, as in an "
                "identity: a wrapper saves no memory there",
                UserWarning,
                stacklevel=2,
            )
    return True


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (tuple, list)) and {*map(type, shape)} == {int}


def _unpacked(x: Any) -> Any:
    return x[0] if isinstance(x, tuple) and len(x) == 1 else x
