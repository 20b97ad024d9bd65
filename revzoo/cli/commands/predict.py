"""Classify images.

  revzoo predict NAME_OR_CKPT IMAGE_OR_FOLDER...

NAME_OR_CKPT is a checkpoint, or the folder of a run, for its best checkpoint; or weights: a name
such as revnet38.cifar10, a safetensors file, a folder of save_pretrained. Images are prepared as
for evaluation: converted to the model's channels, resized, cropped to the centre, and normalised
with the checkpoint's mean and deviation. It needs no data set. Prints a table with the --top most
probable classes of each image, or all classes with --json or --csv. An image that cannot be read
has a line on standard error and no row; then the command exits with 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from revzoo._checks import check_count, number_of
from revzoo._files import check_writable, write_atomically
from revzoo.cli.commands._models import (
    add_batch_size,
    add_image_size,
    add_saved_bits_option,
    check_side,
)
from revzoo.cli.terminal import ConfigError, message_line, status_of
from revzoo.weights.source import resolve_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("ckpt", metavar="NAME_OR_CKPT", help="also written ckpt=NAME_OR_CKPT")
    parser.add_argument("images", nargs="+", metavar="IMAGE_OR_FOLDER")
    parser.add_argument("--top", type=int, default=3, help="classes per line (3)")
    add_image_size(parser, help="side of the images in pixels")
    add_batch_size(parser, default=64, help="images per call of the model (64)")
    add_saved_bits_option(parser)
    parser.add_argument("--device", help="such as cuda:1 (default: a GPU if there is one)")
    form = parser.add_mutually_exclusive_group()
    for name in ("json", "csv"):
        help_text = f"all classes, to standard output or to a file: --{name} FILE.{name}"
        form.add_argument(
            f"--{name}", action="store_const", dest="form", const=name, help=help_text
        )
    parser.set_defaults(form="table")


def run(args: argparse.Namespace) -> None:
    """Classify, and print.

    Raises:
        ConfigError: the device, an image or a folder does not exist.
        UserError: the checkpoint cannot be used.
        DataError: some images cannot be read; raised after the rows of the others are printed.
    """
    for name in ("top", "image_size", "batch_size"):
        if getattr(args, name) is not None:
            check_count(f"--{name.replace('_', '-')}", getattr(args, name))
    # the form that revzoo eval takes
    source = args.ckpt.removeprefix("ckpt=")
    # argparse cannot tell --csv FILE IMAGES from --csv IMAGES
    outputs = [path for path in args.images if path.endswith(f".{args.form}")]
    args.images = [path for path in args.images if path not in outputs]
    if len(outputs) > 1 or not args.images:
        raise ConfigError(f"--{args.form} {' '.join(outputs)}: one file and images are needed")
    output = Path(outputs[0]) if outputs else None
    check_writable(output)
    # before torch is imported, which takes seconds
    for path in args.images:
        if not Path(path).exists():
            raise ConfigError(f"there is no image or folder {path}")
    source = resolve_source(source)
    with status_of("loading torch and Lightning"):
        import torch

        from revzoo.cli.run.folder import check_imports, run_of
        from revzoo.cli.run.predict import FORMS, predict
        from revzoo.data import DataError
        from revzoo.training.checkpoint.restore import restore
        from revzoo.training.quiet_lightning import quiet

    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # torch.device("cuda:7") does not raise; a tensor there does
        device = torch.empty(0, device=args.device or default).device
    except (RuntimeError, AssertionError) as error:
        # without torch's advice and addresses
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ConfigError(
            f"--device {args.device} ({reason}): expected a device of this machine: use --device "
            "cpu or leave it out"
        ) from None
    unreadable = 0

    def report(error: DataError) -> None:
        nonlocal unreadable
        unreadable += 1
        sys.stderr.write(f"{message_line(error)}\n")

    with quiet():
        check_imports(run_of(source))
        restored = restore(source, bits=args.bits)
        if args.image_size is not None:
            check_side(restored.network, args.image_size, "--image-size")
        options = {"batch_size": args.batch_size, "image_size": args.image_size, "device": device}
        # a list: the table aligns paths by the longest
        predictions = list(predict(restored, args.images, **options, on_error=report))
    rows = FORMS[args.form](predictions, args.top)
    if output is None:
        sys.stdout.write(rows)
    else:
        write_atomically(output, rows.encode())
    if unreadable:
        sys.stdout.flush()  # the rows before the last message, also in one log
        images = number_of(len(predictions) + unreadable, "image")
        raise DataError(
            f"{unreadable} of {images} could not be read: replace or remove them; revzoo check "
            "DIR lists all such images of a folder"
        )
