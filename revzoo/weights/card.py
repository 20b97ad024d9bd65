"""The model card of an entry: Markdown with the hub's YAML header."""

from __future__ import annotations

import json

from revzoo.weights.entry import WeightsEntry


def model_card(entry: WeightsEntry, *, source: str = "DIR", reversible: bool = False) -> str:
    """``README.md`` for ``entry``, without empty fields.

    Args:
        entry: the description of the weights.
        source: the argument of ``from_pretrained`` in the example: a folder or a repository.
        reversible: whether the network has steps with an inverse, for the tags.
    """
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": entry.measured_on or "unknown", "type": "unknown"},
        "metrics": [{"type": name, "value": value} for name, value in entry.metrics.items()],
    }
    # JSON is valid YAML
    header = {
        "license": entry.license and entry.license.lower(),  # the hub's spelling of SPDX names
        "library_name": "revzoo",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", *["reversible"] * reversible, "revzoo"],
        "model-index": entry.metrics and [{"name": entry.name, "results": [result]}],
    }
    facts = {
        "Mean of pixels in [0, 1]": _numbers(entry.mean),
        "Standard deviation": _numbers(entry.std),
        "Centre crop, share of the shorter side": entry.crop_pct,
        "Classes": ", ".join(entry.classes or ()),
        "Options": entry.options and f"`{json.dumps(dict(entry.options))}`",
        "Licence": entry.license,
        "Citation": entry.citation,
        "Measured": ", ".join(f"{name} {value:g}" for name, value in entry.metrics.items()),
        "Measured on": entry.measured_on,
        "SHA-256": entry.sha256 and f"`{entry.sha256}`",
    }
    size = " x ".join(map(str, entry.input_size))
    yaml = "".join(f"{key}: {json.dumps(value)}\n" for key, value in header.items() if value)
    listed = "".join(f"- {name}: {value}\n" for name, value in facts.items() if value)
    recipe = f"\nTrained with\n\n```bash\n{entry.recipe}\n```\n" if entry.recipe else ""
    return (
        f"---\n{yaml}---\n\n# {entry.name}\n\n"
        f"Weights of `{entry.architecture}` for images of {size}, {entry.num_classes} classes.\n\n"
        "```python\nimport revzoo\n\n"
        f"model = revzoo.from_pretrained({json.dumps(source)})\n```\n\n{listed}{recipe}"
    )


def _numbers(values: tuple[float, ...] | None) -> str:
    return ", ".join(f"{value:.6g}" for value in values or ())
