"""RevNet against its release in TensorFlow, renmengye/revnet-public, which runs here.

    python benchmarks/parity_tensorflow.py write FOLDER --original DIR
    python benchmarks/parity_tensorflow.py compare FOLDER

DIR is a checkout of the release. ``write`` runs it with random weights and needs tensorflow, not
torch, so that two environments can share the work. ``compare`` reads the weights, which
``tf.train.Saver`` has written, as published ones are read, and compares as ``parity.py`` does.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

BATCH = 2
WEIGHTS = "model.ckpt-1"
SHIFTS = ("beta", "ema_mean", "b")
WEIGHT_DECAY = 1e-30  # the release wants some in its own backward pass; less than a rounding


def release(original: Path, double: bool) -> tuple[Any, Callable[..., Any]]:
    """TensorFlow, and the release's RevNet-104, which was written for TensorFlow 1 and Python 2.

    We replace what these had and their successors lack: imports relative to the folder, lists from
    ``map`` and ``filter``, and ``__dict__`` of a named tuple. The network is the release's own.
    """
    import tensorflow.compat.v1 as tf  # type: ignore[import-not-found]

    tf.disable_v2_behavior()
    sys.path.insert(0, str(original))
    sys.modules["tensorflow"] = tf
    for package in ("resnet.models", "resnet.utils", "resnet.configs"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(original / package.replace(".", "/"))]
    sys.modules["resnet.models.model_factory"] = SimpleNamespace(  # type: ignore[assignment]
        RegisterModel=lambda name: lambda cls: cls
    )
    from resnet.configs.imagenet_configs import RevNet104Config  # type: ignore[import-not-found]
    from resnet.models import resnet_model, revnet_model  # type: ignore[import-not-found]

    revnet_model.map = lambda *a: list(map(*a))
    revnet_model.filter = lambda *a: list(filter(*a))
    revnet_model.namedtuple = lambda _, keys: (
        lambda *values: SimpleNamespace(**dict(zip(keys, values, strict=True)))
    )
    revnet_model.log.verbose_thresh = -1  # a line for each variable
    dtype = tf.float64 if double else tf.float32
    resnet_model.batch_norm = partial(resnet_model.batch_norm, dtype=dtype)
    config = RevNet104Config()
    config.wd, config.height, config.width = WEIGHT_DECAY, None, None  # None: images of any size

    def build(*, training: bool) -> Any:
        with tf.variable_scope("Model", dtype=dtype, reuse=tf.AUTO_REUSE):
            return revnet_model.RevNetModel(
                config, is_training=training, dtype=dtype, batch_size=BATCH
            )

    return tf, build


def write(folder: Path, original: Path, sizes: list[int], double: bool) -> None:
    """Write weights, images, logits, gradients and running statistics of the release."""
    tf, build = release(original, double)
    print(f"- Versions: Python {sys.version.split()[0]}, TensorFlow {tf.version.VERSION}")
    train, evaluation = build(training=True), build(training=False)
    variables = tf.trainable_variables()
    by_rule, places = zip(*train.grads_and_vars, strict=True)
    assert sorted(v.name for v in places) == sorted(v.name for v in variables)
    passes = {
        "eval": (evaluation, tf.gradients(evaluation.cross_ent, variables), variables),
        "train": (train, tf.gradients(train.cross_ent, variables), variables),
        "manual": (train, list(by_rule), places),  # by the release's own backward rule
    }
    rng, saver = np.random.default_rng(0), tf.train.Saver(max_to_keep=None)
    counted = sum(v.shape.num_elements() for v in variables)
    with tf.Session() as session:

        def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
            operations = [v.initializer for v in variables]
            inputs = (operation.inputs[1] for operation in operations)
            session.run(operations, dict(zip(inputs, values, strict=True)))

        session.run(tf.global_variables_initializer())
        vectors = [v for v in tf.global_variables() if v.shape.ndims == 1]
        leaves = [v.op.name.rpartition("/")[2] for v in vectors]
        ranges = ((-0.2, 0.2) if leaf in SHIFTS else (0.3, 1.0) for leaf in leaves)
        assign(vectors, [rng.uniform(*r, v.shape) for r, v in zip(ranges, vectors, strict=True)])
        saver.save(session, str(folder / WEIGHTS))
        for size in sizes:
            saver.restore(session, str(folder / WEIGHTS))
            images, found = rng.standard_normal((BATCH, size, size, 3)), {}
            for key, (model, gradients, _) in passes.items():
                logits = model.output.op.inputs[0]  # of the softmax
                feed = {model.input: images, model.label: np.arange(BATCH)}
                found[key] = session.run([logits, gradients], feed)
            session.run(train.bn_update_ops, {train.input: images})
            for key, (_, _, of) in passes.items():
                assign(of, found[key][1])  # a gradient in the place of its variable
                saver.save(session, str(folder / f"{key}.ckpt-{size}"), write_meta_graph=False)
            arrays = {key: logits for key, (logits, _) in found.items()}
            images = images.transpose(0, 3, 1, 2)
            np.savez(folder / f"{size}.npz", images=images, parameters=counted, **arrays)


def compare(folder: Path) -> None:
    """Print the tables."""
    import torch
    from measure import environment
    from parity import apart, run

    import revzoo
    from revzoo.models.weights_file import read_tensorflow

    print(environment(root=folder).replace("DIR", "FOLDER"))
    weights = folder / f"{WEIGHTS}.index"
    ours = revzoo.load_published(weights, "revnet")
    tensors = ours.adapt_state_dict(read_tensorflow(weights).tensors)  # perhaps in float64
    architecture, count = ours.spec.architecture, sum(p.numel() for p in ours.parameters())
    print("| model | images | pass | `memory` | logits | gradients | means | variances |")
    print("|---" * 8 + "|")
    for path in sorted(folder.glob("*.npz")):
        arrays = {key: torch.from_numpy(array) for key, array in np.load(path).items()}
        images, parameters, size = arrays.pop("images"), arrays.pop("parameters"), path.stem
        for key, expected in arrays.items():
            ours.to(expected.dtype).train(key != "eval")
            file = folder / f"{key}.ckpt-{size}.index"
            theirs = ours.adapt_state_dict(read_tensorflow(file).tensors)
            for memory in ("store", "exact"):
                ours.load_state_dict(tensors)
                revzoo.set_memory(ours, memory)
                logits, grads = run(ours, ours, images.to(expected.dtype))
                difference = float((logits - expected).abs().max())
                cells = (f"{difference:.0e}", f"{apart(grads, {k: theirs[k] for k in grads}):.0e}")
                for name in ("running_mean", "running_var"):
                    own = {k: t for k, t in ours.named_buffers() if k.endswith(name)}
                    moved = apart(own, {k: theirs[k] for k in own})
                    cells = (*cells, "-" if key == "eval" else f"{moved:.0e}")
                row = (architecture, f"{size}x{size}", key, f"`{memory}`", *cells)
                print("| " + " | ".join(row) + " |", flush=True)
    print("\n| model | parameters of the original | ours |\n|---|---|---|")
    print(f"| {architecture} | {int(parameters):,} | {count:,} |")


def main() -> None:
    """Run the release, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--original", type=Path, metavar="DIR")
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 160])
    parser.add_argument("--double", action="store_true", help="in float64")
    args = parser.parse_args()
    if args.command == "compare":
        compare(args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    write(args.folder, args.original, args.sizes, args.double)


if __name__ == "__main__":
    main()
