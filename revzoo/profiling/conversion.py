"""What :func:`revzoo.make_reversible` saves in a network: one table, one sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from revzoo.core.twins import fake_twin
from revzoo.layers.make_reversible import make_reversible, reversible_blocks
from revzoo.layers.side_bits import SideBits
from revzoo.profiling.audit import Audit, audit_of, made_plain
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
        before: bytes that training of the plain network keeps for an image, inside the blocks.
        now: the same of the network as it is.
    """

    path: str
    blocks: int
    inverted: int
    recomputed: int
    before: float
    now: float

    def __str__(self) -> str:
        counts = {"inverted": self.inverted, "recomputed": self.recomputed}
        counts["plain"] = self.blocks - self.inverted - self.recomputed
        modes = ", ".join(f"{count} {mode}" for mode, count in counts.items() if count)
        return (
            f"{self.path}: {modes}; {self.before / MIB:.3g} MiB an image, now {self.now / MIB:.3g}"
        )


@dataclass(frozen=True)
class Conversion:
    """The memory of a network before and after :func:`revzoo.make_reversible`; prints as a table.

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
        if all(row.inverted + row.recomputed == row.blocks for row in self.rows):
            return kept
        if any(row.inverted + row.recomputed for row in self.rows):
            return f"{kept}; {option} recomputes the plain blocks, too"
        return (
            "nothing to invert here: no run keeps at least 10 % less than with a checkpoint of "
            f"each block; {kept}; {option} saves {1 - self.checkpointed / self.before:.0%}"
        )

    def __str__(self) -> str:
        wide = max([12, *(len(row.path) for row in self.rows)])
        lines = [f"{'MiB an image':{wide}} blocks inverted recomputed plain before   now"]
        for row in self.rows:
            plain = row.blocks - row.inverted - row.recomputed
            lines.append(
                f"{row.path:{wide}} {row.blocks:>6} {row.inverted:>8} {row.recomputed:>10} "
                f"{plain:>5} {row.before / MIB:>6.3g} {row.now / MIB:>5.3g}"
            )
        return "\n".join([*lines, *textwrap.wrap(self.sentence(), 80)])


def conversion(model: nn.Module, input_shape: Sequence[int]) -> Conversion:
    """Count what training ``model`` keeps, plain and as :func:`revzoo.make_reversible` left it.

    Counts on fake tensors: the model neither runs nor changes.

    Args:
        model: plain or reversible.
        input_shape: of a batch, such as ``(1, 3, 224, 224)``.

    Raises:
        ValueError: the model has no run of blocks, or does not take such a batch.

    Example:
        >>> net = revzoo.create_model("torchvision:resnet18", memory="store")
        >>> net = revzoo.make_reversible(net, input_shape=(1, 3, 64, 64))
        >>> report = revzoo.conversion(net, (1, 3, 64, 64))
        >>> report.rows[0].inverted, report.now < report.before
        (2, True)
    """
    shape = tuple(input_shape)

    def counted(twin: nn.Module) -> tuple[Audit, dict[str, str]]:
        audit = audit_of(twin, shape, "")
        return audit, {row.path: row.role for row in reversible_blocks(twin)}

    with undisturbed(model):
        now, roles = counted(fake_twin(model))
        plain, _ = counted(made_plain(fake_twin(model)))
        recomputed_twin = make_reversible(fake_twin(model), 4)
        for step in recomputed_twin.modules():
            if isinstance(step, SideBits):
                step.last = True  # no run continues, so each block is recomputed
        checkpointed, paths = counted(recomputed_twin)
    lists: dict[str, list[str]] = {}
    for path in paths:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    rows = []
    for path, blocks in lists.items():
        block_roles = [roles.get(block) for block in blocks]
        joined = [i for i, role in enumerate(block_roles) if role in ("joins", "ends")]
        inverted = {*joined, *(i - 1 for i in joined)}
        recomputed = sum(role is not None for role in block_roles) - len(inverted)
        before, after = (_inside(audit, blocks) / shape[0] for audit in (plain, now))
        rows.append(ConversionRow(path, len(blocks), len(inverted), recomputed, before, after))
    sizes = (audit.kept_bytes / shape[0] for audit in (plain, now, checkpointed))
    return Conversion(tuple(rows), *sizes)


def _inside(audit: Audit, blocks: Sequence[str]) -> int:
    """Kept bytes of the modules in these blocks."""
    starts = tuple(f"{block}." for block in blocks)
    return sum(row.bytes for row in audit.rows if f"{row.module}.".startswith(starts))
