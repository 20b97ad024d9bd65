"""The model card of an entry: Markdown with the hub's YAML header."""

from __future__ import annotations

import json
from collections.abc import Iterator

from revzoo.weights.entry import WeightsEntry


def model_card(entry: WeightsEntry, *, source: str = "DIR", reversible: bool = False) -> str:
    """``README.md`` for ``entry``, without empty fields.

    Args:
        entry: the description of the weights.
        source: the argument of ``from_pretrained`` in the example: a folder or a repository.
        reversible: whether the network has steps with an inverse, for the tags.
    """
    return "\n".join([*_header(entry, reversible), "", *_body(entry, source)]) + "\n"


def _header(entry: WeightsEntry, reversible: bool) -> Iterator[str]:
    """YAML; strings are JSON strings, which are valid YAML."""
    yield "---"
    if entry.license:
        yield f"license: {json.dumps(entry.license.lower())}"  # the hub's spelling of SPDX names
    yield "library_name: revzoo"
    yield "pipeline_tag: image-classification"
    yield f"tags: [image-classification, {'reversible, ' * reversible}revzoo]"
    if entry.metrics:
        yield "model-index:"
        yield f"- name: {json.dumps(entry.name)}"
        yield "  results:"
        yield "  - task: {type: image-classification}"
        yield f"    dataset: {{name: {json.dumps(entry.measured_on or 'unknown')}, type: unknown}}"
        yield "    metrics:"
        for name, value in entry.metrics.items():
            yield f"    - {{type: {json.dumps(name)}, value: {value}}}"
    yield "---"


def _body(entry: WeightsEntry, source: str) -> Iterator[str]:
    yield f"# {entry.name}"
    yield ""
    size = " x ".join(map(str, entry.input_size))
    yield f"Weights of `{entry.architecture}` for images of {size}, {entry.num_classes} classes."
    yield ""
    yield from ("```python", "import revzoo", "")
    yield f"model = revzoo.from_pretrained({json.dumps(source)})"
    yield "```"
    # empty values are left out below; `and` keeps None
    facts = {
        "Mean of pixels in [0, 1]": entry.mean and _numbers(entry.mean),
        "Standard deviation": entry.std and _numbers(entry.std),
        "Centre crop, share of the shorter side": entry.crop_pct,
        "Classes": entry.classes and ", ".join(entry.classes),
        "Options": entry.options and f"`{json.dumps(dict(entry.options))}`",
        "Licence": entry.license,
        "Measured": ", ".join(f"{name} {value:g}" for name, value in entry.metrics.items()),
        "Measured on": entry.measured_on,
        "SHA-256": f"`{entry.sha256}`",
    }
    yield ""
    for name, value in facts.items():
        if value:
            yield f"- {name}: {value}"
    if entry.recipe:
        yield from ("", "Trained with", "", "```bash", entry.recipe, "```")


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
