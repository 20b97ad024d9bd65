"""Evaluate a trained model.

  revzoo eval RUN_DIR

RUN_DIR, also written ckpt=RUN_DIR, is the folder of a run, for its best checkpoint; or a
checkpoint, such as RUN_DIR/checkpoints/last.ckpt. It may also be weights: a name (revzoo eval
revnet38.cifar10 data=cifar10), a safetensors file or a folder of save_pretrained. Weights do not
name their data, so data= is needed.

By default it evaluates the run's data, from its config.yaml; data.root=DIR says where they are now.
Other data must have the same classes (data=imagefolder data.root=DIR); they are normalised with the
checkpoint's mean and deviation. Prints one line per figure. The memory mode does not matter: an
evaluation keeps no activations. bits=null evaluates a network of reversible blocks as the plain
network.

Keys, in the grammar of revzoo train: ckpt, split=val, batch_size, bits, data, precision, trainer.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence

from revzoo.cli.invocation import override_argument
from revzoo.cli.terminal import ConfigError, FoldedFormat, status_of
from revzoo.weights.source import resolve_source

# the reason why an evaluation lacks a section
REASONS = {
    "memory": "; the memory mode does not matter: an evaluation keeps no activations",
    "model": "; the checkpoint contains the model, and bits=null makes its blocks plain",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "overrides",
        nargs="*",
        type=override_argument,
        metavar="KEY=VALUE",
        help="such as ckpt=PATH",
    )


def run(args: argparse.Namespace) -> None:
    """Evaluate, and print the figures.

    Raises:
        ConfigError: a key or an option does not exist.
        UserError: the checkpoint or the data cannot be used, or memory ran out.
    """
    from revzoo.cli.config import EVAL, compose
    from revzoo.cli.run.folder import run_of, take_root

    # on standard error: standard output has only the figures
    handler = logging.StreamHandler()
    handler.setFormatter(FoldedFormat())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    given = with_key(args.overrides)
    _check_keys(given)
    others, root = take_root(given)
    names_data = any(override.startswith("data=") for override in others)
    overrides = given if names_data else others
    # refuse wrong keys and names before importing torch
    config = compose(overrides, EVAL).config
    config["ckpt"] = resolve_source(str(config["ckpt"]))
    with status_of("loading torch and Lightning"):
        from revzoo.cli.run.evaluate import evaluate
        from revzoo.cli.run.folder import check_imports
        from revzoo.training.distributed import is_first_process
        from revzoo.training.quiet_lightning import quiet

    with quiet():
        check_imports(run_of(str(config["ckpt"])))
        figures = evaluate(config, root=None if names_data else root)
    # the figures are means over all processes
    if is_first_process():
        sys.stdout.write("".join(f"{name} {value:.4f}\n" for name, value in figures.items()))


def with_key(overrides: Sequence[str]) -> list[str]:
    """The overrides, with ``ckpt=`` before a word without a key, the first one."""
    from revzoo.cli.config import quoted_if_needed

    words = [word for word in overrides if "=" not in word and not word.startswith("~")]
    named = any(override.startswith("ckpt=") for override in overrides)
    first = None if named or not words else words[0]
    return [f"ckpt={quoted_if_needed(o)}" if o is first else o for o in overrides]


def _check_keys(overrides: Iterable[str]) -> None:
    """Refuse overrides that only revzoo train takes; Hydra would suggest nothing.

    Raises:
        ConfigError: the form or the key of an override is wrong.
    """
    from revzoo.cli.schema import CONFIGS, EVALUATION

    for override in overrides:
        key, _, value = override.partition("=")
        if key == "model":
            raise ConfigError(f"{override}: expected ckpt={value}, which names a trained model")
        section = key.lstrip("+").partition(".")[0]
        if (CONFIGS / section).is_dir() and section not in EVALUATION.options:
            keys = ", ".join(EVALUATION.options)
            raise ConfigError(
                f"{override}: expected one of the keys of an evaluation, {keys}"
                + REASONS.get(section, "")
            )
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"{override}: expected KEY=VALUE")
