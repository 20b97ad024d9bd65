"""The schema of the configuration as YAML, for ``revzoo options`` and the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from revzoo.cli.schema import RUN, Chosen, Option, Section, chosen


def sections(group: str) -> dict[str, Section]:
    """The options of a group: one section, or several with the values that choose them."""
    part = RUN.parts.get(group)
    if part is None:  # experiment, debug: their files set options of all groups
        return {}
    if isinstance(part, Section):
        return {f"{group}, all options": part}
    names = {
        id(known): [yaml_text(name) for name, other in part.sections.items() if other is known]
        for known in part.sections.values()
    }
    dots = "..." if group == "model" else ""
    return {
        f"{group}, all options with {part.by}: {', '.join(f'{n}{dots}' for n in names[id(s)])}": s
        for s in part.sections.values()
    }


def listing(section: Section, values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The options as lines of YAML, with these values or their defaults, and with comments."""
    for name, option in section.options.items():
        value = option.default if values is None else values.get(name, option.default)
        part = section.parts.get(name)
        about = comment(option)
        if isinstance(part, Chosen) and values is None:
            yield f"{name}:  # {about}"
            for chooser, known in part.sections.items():
                yield f"  # with {part.by}: {chooser}"
                yield from (f"  {line}" for line in listing(known))
        elif part is not None and (values is None or isinstance(value, Mapping)):
            known = part if isinstance(part, Section) else chosen(name, part, value)
            yield f"{name}:{'' if known.options else ' {}'}  # {about}"
            yield from (f"  {line}" for line in listing(known, value if values else None))
        else:
            if isinstance(part, Section) and part.options:  # callbacks.ema: null
                about += f"; options: {', '.join(part.options)}"
            yield f"{name}: {yaml_text(value)}  # {about}"


def yaml_text(value: Any) -> str:
    """A value in one line of YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump([plain], default_flow_style=True, width=10**6).strip()[1:-1]


def comment(option: Option) -> str:
    """The meaning of an option, and its valid values."""
    words = [option.about]
    if option.choices:
        words.append("one of " + ", ".join("null" if c is None else str(c) for c in option.choices))
    elif option.range:
        words.append(option.within)
    return "; ".join(words)
