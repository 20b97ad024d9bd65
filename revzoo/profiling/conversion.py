"""What :func:`revzoo.make_reversible` saves in a network: one table, one sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from revzoo.core.twins import fake_twin
from revzoo.layers.choose_runs import kept_bytes
from revzoo.layers.make_reversible import make_reversible, reversible_blocks
from revzoo.layers.side_bits import SideBits
from revzoo.profiling.audit import made_plain
from revzoo.profiling.count import undisturbed

MIB = 2**20


@dataclass(frozen=True)
class ConversionRow:
    """The blocks of one list in a model.

    Attributes:
        path: of the list.
        blocks: how many are in it.
        inverted: how many are inverted.
        recomputed: how many are recomputed from their input; the others are plain.
        before: bytes that training of the plain network keeps for an image, in the blocks and as
            their input.
        now: the same of the network as it is.
    """

    path: str
    blocks: int
    inverted: int
    recomputed: int
    before: float
    now: float

    @property
    def plain(self) -> int:
        """How many blocks are neither inverted nor recomputed."""
        return self.blocks - self.inverted - self.recomputed

    @property
    def time(self) -> float:
        """Of a step in these blocks, over the plain one: counted, not measured.

        A block that is inverted or recomputed runs forward once more; a backward pass counts as two
        forward passes.
        """
        return 1 + (self.blocks - self.plain) / self.blocks / 3

    def __str__(self) -> str:
        counts = {"inverted": self.inverted, "recomputed": self.recomputed, "plain": self.plain}
        modes = ", ".join(f"{count} {mode}" for mode, count in counts.items() if count)
        return (
            f"{self.path}: {modes}; {self.before / MIB:.3g} MiB an image, now {self.now / MIB:.3g}"
            f"; about {self.time:.2f} times the time"
        )


@dataclass(frozen=True)
class Conversion:
    """The memory of a network before and after :func:`revzoo.make_reversible`; prints as a table.

    ``time`` is that of a step in the blocks over the plain one, counted in passes.

    Attributes:
        rows: one for each list of blocks.
        before, now, checkpointed: bytes that training keeps for an image, in the whole network:
            plain, as it is, and with each block recomputed from its input.
    """

    rows: tuple[ConversionRow, ...]
    before: float
    now: float
    checkpointed: float

    def sentence(self, option: str = "checkpoint=True") -> str:
        """What the network saves, or why it does not; ``option`` recomputes the plain blocks."""
        kept = (
            f"training keeps {self.now / MIB:.3g} MiB an image, the plain network "
            f"{self.before / MIB:.3g}, a checkpoint of each block {self.checkpointed / MIB:.3g}"
        )
        if not any(row.plain for row in self.rows):
            return kept
        if any(row.inverted + row.recomputed for row in self.rows):
            return f"{kept}; {option} recomputes the plain blocks, too"
        return (
            "nothing to invert here: no run keeps at least 10 % less than with a checkpoint of "
            f"each block; {kept}; {option} saves {1 - self.checkpointed / self.before:.0%}"
        )

    def __str__(self) -> str:
        wide = max([12, *(len(row.path) for row in self.rows)])
        lines = [f"{'MiB an image':{wide}} blocks inverted recomputed plain before   now  time"]
        for row in self.rows:
            lines.append(
                f"{row.path:{wide}} {row.blocks:>6} {row.inverted:>8} {row.recomputed:>10} "
                f"{row.plain:>5} {row.before / MIB:>6.3g} {row.now / MIB:>5.3g} {row.time:>5.2f}"
            )
        return "\n".join([*lines, *textwrap.wrap(self.sentence(), 80)])


def conversion(model: nn.Module, input_shape: Sequence[int]) -> Conversion:
    """Count what training ``model`` keeps, plain and as :func:`revzoo.make_reversible` left it.

    Counts on fake tensors: the model neither runs nor changes.

    Args:
        model: plain or reversible.
        input_shape: of a batch, such as ``(1, 3, 224, 224)``.

    Raises:
        ValueError: the model has no run of blocks.

    Example:
        >>> net = revzoo.create_model("torchvision:resnet18", memory="store")
        >>> net = revzoo.make_reversible(net, input_shape=(1, 3, 64, 64))
        >>> report = revzoo.conversion(net, (1, 3, 64, 64))
        >>> report.rows[0].inverted, report.now < report.before
        (2, True)
    """
    shape = tuple(input_shape)
    with undisturbed(model):
        checkpointed = make_reversible(fake_twin(model), 4)
        for step in checkpointed.modules():
            if isinstance(step, SideBits):
                step.last = True  # no run continues, so each block is recomputed
        lists: dict[str, list[str]] = {}
        for row in reversible_blocks(checkpointed):
            lists.setdefault(row.path.rpartition(".")[0], []).append(row.path)

        def counted(twin: nn.Module) -> Mapping[Any, int]:
            groups = {twin.get_submodule(b): name for name, bs in lists.items() for b in bs}
            return kept_bytes(twin, groups, shape)[0]

        now_twin = fake_twin(model)
        counts = now, plain, _ = [
            counted(twin) for twin in (now_twin, made_plain(fake_twin(model)), checkpointed)
        ]
        roles = {row.path: row.role for row in reversible_blocks(now_twin)}
    rows = []
    for path, blocks in lists.items():
        block_roles = [roles.get(block) for block in blocks]
        joined = [i for i, role in enumerate(block_roles) if role in ("joins", "ends")]
        inverted = {*joined, *(i - 1 for i in joined)}
        recomputed = sum(role is not None for role in block_roles) - len(inverted)
        before, after = (kept[path] / shape[0] for kept in (plain, now))
        rows.append(ConversionRow(path, len(blocks), len(inverted), recomputed, before, after))
    present, before, least = (sum(kept.values()) / shape[0] for kept in counts)
    return Conversion(tuple(rows), before, present, least)
