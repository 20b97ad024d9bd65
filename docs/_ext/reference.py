"""Pages made when the site is built: the API, the commands, the configuration groups.

They are written into ``docs/reference``, beside the notebooks, from docstrings, from each command's
``--help`` and from the schema of the configuration, so that none of them can differ from the
program.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from revzoo._checks import expected_type
from revzoo.cli.commands.options import choices, sections, yaml_text
from revzoo.cli.main import COMMANDS, main
from revzoo.cli.schema import RUN, Option, Section

FENCE = "```"
INDEX = f"""# Reference

The build makes these pages from the code. [Models](../guide/models.md) lists the networks.

{FENCE}{{toctree}}
:maxdepth: 1

api
commands
configuration
{FENCE}
"""
API = """# API

Every name is an attribute of `revzoo`. The examples assume `import torch, revzoo` and
`from torch import nn`.
"""
TOPICS = {  # the names in the order of a reader's questions
    "Start": "create_model ReversibleBlock set_memory make_reversible",
    "Models and weights": "list_models from_pretrained predict load_published WeightsTable",
    "Build a reversible network": """
        ReversibleSequence AdditiveCoupling Coupling Residual reversible_blocks conversion
        recalibrate_batch_norm Step Invertible Reversed""",
    "Choose a memory mode": "memory audit plan_memory",
    "Recompute any function": "checkpoint invertible_checkpoint is_replaying",
    "A training step on a GPU": "graphed_step",
    "Check inverses and drift": "check_inverse is_invertible drift set_drift_limit",
    "Layers that only move values": """
        Squeeze HaarSqueeze ChannelPermutation InvertibleFlatten Split Merge ChannelPadding
        SpatialPadding""",
    "Layers that scale": """
        AffineCoupling ScaledCoupling AffineAdapterSigmoid AffineAdapterNaive ActNorm
        InvertibleBatchNorm InvertibleConv1x1 InvertibleLinear InjectiveLinear PatchConv
        InvertibleLeakyReLU MomentumBlock ContractiveBlock ContractiveConv2d ContractiveLinear""",
    "Register your own": """
        register_model register_data register_transform register_callback register_optimizer""",
    "Errors": """
        DriftError RangeError ReplayMismatchError NotInvertibleError BudgetError ConversionError
        WeightsError""",
}
ROOT = Path(__file__).parents[2]
CONFIGS, NOTEBOOKS = ROOT / "configs", ROOT / "notebooks"
RESULTS = ROOT / "benchmarks" / "results"
CONFIGURATION = """# Configuration

A run is composed of one choice from each group. `GROUP=CHOICE` chooses, `GROUP.OPTION=VALUE` sets
an option: `revzoo train model=revnet110 optim=muon optim.lr=0.02`. `revzoo train --cfg job` prints
the whole configuration, `revzoo options GROUP` the options of a group.
"""
GLOBAL = "# @package _global_\n"  # a directive of Hydra, not a comment for readers
LOG = re.compile(r"\[([^]]*)\]\((?:\.\./|docs/)*experiments\.md[^)]*\)")
NAME = re.compile(r"(?<![`\[}])`(revzoo\.(\w+)(?:\([^`<>]*\))?)`(?!`)")


def write(folder: Path) -> None:
    """Write every page that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["COLUMNS"] = "88"
    groups = {f"configuration/{group}": group_page(group) for group in choices()}
    made = {"api": api(), "commands": commands(), "configuration": configuration(), **groups}
    pages = {"index": INDEX, **made}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:  # else Sphinx would read it again
            path.write_text(text)
    copies = {notebook: folder / notebook.name for notebook in NOTEBOOKS.glob("*.ipynb")}
    copies |= {report: folder / "reports" / report.name for report in RESULTS.glob("*.md")}
    (folder / "reports").mkdir(exist_ok=True)
    for source, path in copies.items():
        if not path.exists() or path.read_bytes() != source.read_bytes():
            path.write_bytes(source.read_bytes())


def link_copies(app: Any, docname: str, source: list[str]) -> None:
    """Lead links to what was copied to the copy: in the checkout they lead to the files."""
    text = re.sub(
        r"\]\((?:\.\./)+benchmarks/results/(\w+\.md)", r"](/reference/reports/\1", source[0]
    )
    source[0] = re.sub(r"\]\((?:\.\./)+notebooks/(\w+\.ipynb)", r"](/reference/\1", text)
    if docname.startswith("reference/reports/"):
        text = text.replace("](curves/", "](../../../benchmarks/results/curves/")
        source[0] = re.sub(r"\]\((?:\.\./)+docs/", "](/", text)


def unlink_log(app: Any, docname: str, source: list[str]) -> None:
    """Name the log of experiments, a file of the checkout, where a page links it."""
    source[0] = LOG.sub(r"\1, `docs/experiments.md`", source[0])


def link_names(app: Any, docname: str, source: list[str]) -> None:
    """Link public names, such as `revzoo.audit` or `revzoo.predict(...)`, to the API."""
    if docname.startswith("reference/"):
        return
    blocks = re.split(r"(?ms)^( *```.*?^ *```$)", source[0])  # the code blocks at odd places
    source[0] = "".join(b if i % 2 else NAME.sub(_role, b) for i, b in enumerate(blocks))


def _role(found: re.Match[str]) -> str:
    module = import_module("revzoo.api")
    if found[2] not in module.__all__:
        return found[0]
    value = getattr(module, found[2])
    return f"{{py:obj}}`{found[1]} <{value.__module__}.{value.__qualname__}>`"


def api() -> str:
    """A chapter for each topic, a section for each public name, from its docstring."""
    module = import_module("revzoo.api")
    lines = [API, *overview(), ""]
    for topic, names in TOPICS.items():
        lines += [f"## {topic}", ""]
        for name in names.split():
            value = getattr(module, name)
            kind = "autoclass" if isinstance(value, type) else "autofunction"
            options = [":members:", ":show-inheritance:"] if kind == "autoclass" else []
            lines += [
                f"### {name}", "", f"{FENCE}{{eval-rst}}",
                f".. {kind}:: {value.__module__}.{value.__qualname__}",
                *(f"   {option}" for option in options), FENCE, "",
            ]  # fmt: skip
    return "\n".join(lines)


def overview() -> list[str]:
    """A table of the public names by topic."""
    rows = [
        (topic, ", ".join(f"[`{name}`](#{name.lower()})" for name in names.split()))
        for topic, names in TOPICS.items()
    ]
    return table(("for", "names"), rows)


def commands() -> str:
    """The help of every command."""
    lines = ["# Commands", ""]
    for name in COMMANDS:
        text = io.StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            main([name, "--help"])
        lines += [f"## revzoo {name}", "", f"{FENCE}text", text.getvalue().rstrip(), FENCE, ""]
    return "\n".join(lines)


def configuration() -> str:
    """The groups with their choices, and the primary file."""
    primary = (CONFIGS / "train.yaml").read_text()
    default = dict(re.findall(r"^  - (\w+): (\w+)$", primary, re.MULTILINE))
    rows = [
        (f"[{group}](configuration/{group}.md)", default.get(group, ""), ", ".join(names))
        for group, names in choices().items()
    ]
    tree = [
        f"{FENCE}{{toctree}}",
        ":hidden:",
        "",
        *(f"configuration/{g}" for g in choices()),
    ]
    return "\n".join([
        CONFIGURATION, *table(("group", "default", "choices"), rows), "", *tree, FENCE, "",
        "## Options of a run", "", *options_of(RUN), "",
    ])  # fmt: skip


def group_page(group: str) -> str:
    """The options of a group as tables, from the schema, and the files of its choices."""
    lines = [
        f"# {group}",
        "",
        f"`{group}=CHOICE` chooses, `{group}.OPTION=VALUE` sets an option.",
        "",
    ]
    for title, section in sections(group).items():
        lines += [f"## {title}", "", section.about, "", *options_of(section, f"{group}."), ""]
    for name in choices()[group]:
        text = (CONFIGS / group / f"{name}.yaml").read_text().replace(GLOBAL, "")
        lines += [f"## {group}/{name}", "", *about(text), ""]
        lines += [f"{FENCE}yaml", text.rstrip(), FENCE, ""]
    return "\n".join(lines)


def options_of(section: Section, prefix: str = "") -> list[str]:
    """A table of the options, with those of nested sections."""
    return table(("option", "default", "values", "meaning"), list(rows(section, prefix)))


def rows(section: Section, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """A row for each option."""
    for name, option in section.options.items():
        default = "" if option.default == MISSING else f"`{yaml_text(option.default)}`"
        yield f"`{prefix}{name}`", default, values_of(option), option.about
        part = section.parts.get(name)
        if prefix and isinstance(part, Section):
            yield from rows(part, f"{prefix}{name}.")
        elif prefix and part is not None:
            for value, chosen in part.sections.items():
                for key, *row in rows(chosen, f"{prefix}{name}."):
                    if not key.endswith(f".{part.by}`"):
                        yield key, row[0], row[1], f"{value}: {row[2]}"


def values_of(option: Option) -> str:
    """The valid values."""
    words = [", ".join(f"`{yaml_text(choice)}`" for choice in option.choices)]
    words += [expected_type(object(), option.type) if not option.choices else ""]
    return " ".join(filter(None, [*words, option.range and option.within]))


def about(text: str) -> list[str]:
    """The comments at the top of a file."""
    return [re.sub(r"^#\s*(=+\s*)?", "", line) + "  " for line in top_comments(text)]


def top_comments(text: str) -> Iterator[str]:
    """Prose of the comments before the first key; commands in them are in the file below."""
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        if not line.startswith("#   "):
            yield line


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "reference"))
    app.connect("source-read", unlink_log)
    app.connect("source-read", link_copies)
    app.connect("source-read", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
