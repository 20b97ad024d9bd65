"""Counts the memory that a training step keeps, and its peak, before the step runs.

::

    report = revzoo.audit(model, (64, 3, 32, 32))
    print(report)
    report.plot("step.png")

``torch.profiler`` and ``torch.cuda.memory._snapshot`` need a step that has run on this machine. An
audit counts a step on fake tensors instead.
"""

from __future__ import annotations

import csv
import itertools
import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from revzoo._checks import check_choice
from revzoo._files import replacing, replacing_table
from revzoo.core.invertible import Step
from revzoo.core.modes import MODES, assign_memory, in_table_order, modes_in, set_memory
from revzoo.core.twins import copied, fake_twin, images_for, in_training
from revzoo.layers.make_reversible import make_reversible, reversible_blocks
from revzoo.profiling.count import (
    Trace,
    checked_arguments,
    modes_on,
    trace_step,
    uncounted_in,
    undisturbed,
)
from revzoo.profiling.stages import OUTSIDE, stages_of
from revzoo.profiling.units import in_one_unit, peak_note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_MIXED = "as set"  # the name of the current setting if its steps have different modes

_SHOWN = 8  # rows of the largest tensors in the printed report


@dataclass(frozen=True, slots=True)
class Row:
    """A storage that autograd or a tape keeps from the forward to the backward pass."""

    mode: str  # the memory mode of the step
    stage: str  # the part of the model, such as stages.1
    module: str  # path of the module that made it
    operation: str  # the operator that made it
    shape: str  # of the tensor
    dtype: str  # without "torch."
    bytes: int
    saved: int  # number of saved tensors in this storage; 0 if a tape holds it


class Audit:
    """The memory of one training step in one memory mode.

    Attributes:
        kept_bytes: activations alive between forward and backward pass.
        activation_bytes: the peak without parameters, buffers, gradients, input and optimiser.
        peak_bytes: largest number of bytes alive at once.
        kinds: bytes at that peak, by kind (:class:`~revzoo.profiling.count.Allocation`).
        stages: kept bytes of each part of the model.
        rows: see :class:`Row`, the largest first.
        uncounted: users of memory that is not counted, and why.
    """

    def __init__(self, mode: str, trace: Trace, stages: Mapping[str, str], extra: int) -> None:
        self.mode, self._trace, self._stages = mode, trace, stages
        self.uncounted = trace.uncounted
        kept = [t for t in trace.allocations if t.kind == "kept"]
        self.kept_bytes = sum(t.size for t in kept)
        self.activation_bytes = trace.peak - trace.base
        self.peak_bytes = trace.peak + extra
        worst = max(range(trace.tick), key=trace.levels.__getitem__)  # the operator at the peak
        alive = [(t.kind, t.size) for t in trace.allocations if t.alive(worst)]
        self.kinds = _sums([("optimiser", extra), *alive] if extra else alive)
        self.stages = _sums((stages[t.module], t.size) for t in kept)
        self.rows = [
            Row(
                mode,
                stages[t.module],
                t.module,
                t.operation,
                "x".join(map(str, t.shape)),
                str(t.dtype).removeprefix("torch."),
                t.size,
                t.saved,
            )
            for t in sorted(kept, key=lambda t: -t.size)
        ]

    def series(self) -> tuple[dict[str, list[int]], int]:
        """Bytes of activations by stage after each operator, and the first operator of backward."""
        length = self._trace.tick + 1
        changes: dict[str, list[int]] = {}
        for t in self._trace.allocations:
            if t.kind in ("kept", "temporary"):
                row = changes.setdefault(self._stages[t.module], [0] * length)
                row[min(t.born, length - 1)] += t.size
                if t.died is not None:
                    row[min(t.died, length - 1)] -= t.size
        levels = {stage: list(itertools.accumulate(row)) for stage, row in changes.items()}
        return levels, self._trace.turn


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, size in pairs:
        sums[name] = sums.get(name, 0) + size
    return sums


class Report:
    """One training step of a model, in its current setting and in each memory mode.

    Attributes:
        audits: by mode, the current setting first.
        listed: the audits in the order of the tables.
        kept_bytes, activation_bytes, peak_bytes, rows: of the current setting, see :class:`Audit`.
        input_shape: of the batch.
        plain: the audit of the plain network, for a model of :func:`revzoo.make_reversible`.
        uncounted: users of memory that is not counted in some mode, and why; usually empty.
    """

    def __init__(
        self,
        model: str,
        input_shape: tuple[int, ...],
        audits: Sequence[Audit],
        *,
        plain: Audit | None = None,
        uncounted: Iterable[str] = (),
        on_host: Sequence[str] = (),
    ) -> None:
        self.model, self.input_shape, self.plain = model, input_shape, plain
        self.audits = {audit.mode: audit for audit in audits}
        self.listed = [self.audits[mode] for mode in in_table_order(self.audits)]
        self._on_host = on_host  # modes with activations in host memory; not counted
        # each note once: most are the same in all modes
        of_modes = itertools.chain.from_iterable(audit.uncounted for audit in audits)
        self.uncounted = [*dict.fromkeys([*uncounted, *of_modes])]
        self._present = present = audits[0]
        self.kept_bytes, self.activation_bytes = present.kept_bytes, present.activation_bytes
        self.peak_bytes, self.rows = present.peak_bytes, present.rows

    def to_csv(self, path: str | Path) -> None:
        """Write the rows of every mode."""
        with replacing_table(Path(path)) as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Row)])
            for audit in self.listed:
                writer.writerows(map(astuple, audit.rows))

    def figure(self) -> Figure:
        """Memory over the operators of a step, stacked by stage, one panel per mode."""
        # not pyplot, which would change the caller's backend; imported here: most draw nothing
        from matplotlib.figure import Figure

        width = max(4.8, 3.6 * len(self.listed))  # inches
        figure = Figure(figsize=(width, 3.6), layout="constrained")
        panels = figure.subplots(1, len(self.listed), sharey=True, squeeze=False)[0]
        series = [audit.series() for audit in self.listed]
        # every panel has the same names in the same order, so one legend serves all
        names = [*dict.fromkeys(name for levels, _ in series for name in levels)]
        sized = in_one_unit(max(audit.activation_bytes for audit in self.listed))
        for axes, audit, (levels, turn) in zip(panels, self.listed, series, strict=True):
            length = len(next(iter(levels.values())))
            rows = [[b / 2**20 for b in levels.get(name, [0] * length)] for name in names]
            axes.stackplot(range(length), rows, labels=names, step="post")
            axes.axvline(turn, color="#7d858d", lw=1, ls=":")
            title = f"{audit.mode}: activations peak at {sized(audit.activation_bytes)}"
            axes.set(title=title, xlabel="operator (dotted: backward)")
        panels[0].set_ylabel("activations, MiB")
        shape = "x".join(map(str, self.input_shape))
        figure.suptitle(f"{self.model}, a training step on {shape}", fontsize="medium")
        handles, labels = panels[0].get_legend_handles_labels()
        # an estimate: inches of a letter, and of the colour with its margins
        columns = int(width / (0.09 * max(map(len, labels)) + 0.7))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        return figure

    def plot(self, path: str | Path) -> None:
        """Draw :meth:`figure` into a file, e.g. a PNG."""
        figure = self.figure()
        with replacing(Path(path)) as file:
            figure.savefig(file, dpi=120)

    def to_tensorboard(self, folder: str | Path) -> None:
        """Write the picture and the peaks as an event file."""
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder)) as writer:
            writer.add_figure("memory/step", self.figure(), close=False)  # pyplot does not know it
            for mode, audit in self.audits.items():
                writer.add_scalar(f"memory/peak_bytes/{mode}", audit.peak_bytes)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        shape = "x".join(map(str, self.input_shape))
        present = self._present
        # one unit for all tables
        sized = in_one_unit(max(audit.peak_bytes for audit in self.listed))
        yield f"{self.model}, one training step on {shape}"
        yield "kept: activations between the forward and the backward pass"
        yield peak_note(present.kinds.get("optimiser", 0), sized)
        yield ""
        yield f"{'mode':12}{'kept':>14}{'peak':>14}"
        for mode in in_table_order([*self.audits, *self._on_host]):
            audit = self.audits.get(mode)
            if audit is None:
                yield f"{mode:12}keeps {MODES[mode].keeps}: it helps on a GPU only"
                continue
            kept, peak = sized(audit.kept_bytes), sized(audit.peak_bytes)
            note = "  (the model's mode)" if audit is present and len(self.audits) > 1 else ""
            yield f"{audit.mode:12}{kept:>14}{peak:>14}{note}"
        if self.plain is not None:
            kept, peak = sized(self.plain.kept_bytes), sized(self.plain.peak_bytes)
            yield f"{'plain':12}{kept:>14}{peak:>14}  (without reversible blocks)"
        for note in self.uncounted:
            yield textwrap.fill(f"not counted: {note}", 79, subsequent_indent="    ")
        kinds = {_KINDS[kind]: size for kind, size in present.kinds.items()}
        kept, peak = sized(present.kept_bytes), sized(present.peak_bytes)
        yield from _sizes(f"{present.mode}: the {peak} at the peak", kinds, sized)
        title = f"{present.mode}: the {kept} kept, by part of the model"
        yield from _sizes(title, present.stages, sized)
        if OUTSIDE in present.stages:
            yield f"{OUTSIDE} is the model's own forward and the loss"
        if present.rows:
            yield f"\n{present.mode}: the largest kept tensors, and what keeps them"
        for row in present.rows[:_SHOWN]:
            by = "autograd" if row.saved else "revzoo"
            source = f"{row.module or OUTSIDE} {row.operation}"
            tensor = f"{row.shape or 'scalar'} {row.dtype}"
            yield _indented(sized(row.bytes), f"{tensor}, {by}: {source}")


_KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimiser": "state of the optimiser",
    "input": "input",
    "kept": "activations of the forward pass that are still needed",
    "temporary": "temporary tensors",
}


def _sizes(title: str, sizes: Mapping[str, int], sized: Callable[[float], str]) -> Iterator[str]:
    """A title, and a line for each size."""
    if sizes:
        yield f"\n{title}"
    for name, size in sizes.items():
        yield _indented(sized(size), name)


def _indented(size: str, text: str) -> str:
    return textwrap.fill(text, 79, initial_indent=f"{size:>14}  ", subsequent_indent=" " * 16)


def audit(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    modes: Sequence[str] | None = None,
    real: bool = False,
    extra: int | str = 0,
) -> Report:
    """Count the memory that a training step of ``model`` keeps, and its peak, in each memory mode.

    Neither runs nor changes the model. If training uses autocast, call this under autocast, too.
    Gradients count as present from the start, as in gradient accumulation.

    Args:
        model: any module that maps a batch, one floating-point tensor, to a tensor or a collection
            of tensors. Wrap one with other inputs in a module that makes them from such a tensor.
            The loss is cross-entropy for logits ``(B, classes)``, a sum for other outputs.
        input_shape: of the batch, e.g. ``(64, 3, 32, 32)``.
        modes: modes to count besides the current setting; None for all modes that fit all steps.
        real: run real steps of a copy instead of fake ones, which allocate nothing (but see
            :func:`revzoo.profiling.count.with_real_sizes`).
        extra: bytes to add to the peak, such as an optimiser's state; a number, or a string such
            as ``"1GiB"``.

    Raises:
        TypeError: the model is not a module, or is TorchScript.
        ValueError: the shape or ``extra`` is not valid; no parameter or output requires gradient; a
            mode does not fit; ``real`` for a model on the meta device; a layer is lazy, or a tensor
            sparse.

    Example:
        >>> report = revzoo.audit(revzoo.create_model("revnet38"), (64, 3, 32, 32), modes=["store"])
        >>> round(report.peak_bytes / 2**20), "MiB"
        (44, 'MiB')
    """
    shape, added = checked_arguments(model, input_shape, extra)
    if isinstance(modes, str):
        raise TypeError(f"modes={modes!r}: expected a list, [{modes!r}]")
    found = modes_in(model) or {"store"}  # without steps
    present = _MIXED if len(found) > 1 else found.pop()
    wanted = modes_on([p.device for p in model.parameters()]) if modes is None else list(modes)
    for mode in wanted:
        check_choice("modes", mode, MODES)
    if real and any(p.device.type == "meta" for p in model.parameters()):
        raise ValueError("real=True got a model on the meta device: expected one with weights")

    def twin() -> nn.Module:
        return in_training(copied(model)) if real else fake_twin(model)

    audits = []
    plain = None
    with undisturbed(model):
        for mode in dict.fromkeys([present, *wanted]):  # each once, the current setting first
            log.debug("counting a training step in mode %s", mode)
            changed = twin()  # a step changes it
            if mode != present:
                try:
                    set_memory(changed, mode)
                except ValueError:
                    if modes is None:
                        continue  # the mode does not fit all steps, and nobody asked for it
                    raise
            audits.append(audit_of(changed, shape, mode, added))
        if reversible_blocks(model):
            plain = audit_of(made_plain(twin()), shape, "plain", added)
    spec = getattr(model, "spec", None)
    name = spec.architecture if spec else type(model).__name__
    # no mode fits a model without steps, so its report compares none
    compared = modes is None and len(audits) > 1
    on_host = [m for m in MODES if MODES[m].on_host and m not in wanted] if compared else []
    notes = uncounted_in(model)
    return Report(name, shape, audits, plain=plain, uncounted=notes, on_host=on_host)


def audit_of(twin: nn.Module, shape: tuple[int, ...], mode: str, extra: int = 0) -> Audit:
    """Count a training step of ``twin``, which it changes."""
    stages = stages_of([path for path, _ in twin.named_modules() if path])
    trace = trace_step(twin, images_for(twin, shape))
    return Audit(mode, trace, {"": OUTSIDE, **stages}, extra)


def made_plain(twin: nn.Module) -> nn.Module:
    """``twin`` without :func:`revzoo.make_reversible`; steps inside its blocks store, too."""
    make_reversible(twin, None)
    assign_memory([m for m in twin.modules() if isinstance(m, Step)], "store")
    return twin
