"""Classify images.

  revzoo predict NAME_OR_CKPT IMAGE_OR_FOLDER...

NAME_OR_CKPT is a checkpoint, or the folder of a run, for its best checkpoint; or weights: a name
such as revnet38.cifar10, a safetensors file, a folder of save_pretrained. Images are prepared as
for evaluation: converted to the model's channels, resized, cropped to the centre, and normalised
with the checkpoint's mean and deviation. It needs no data set. Prints a table with the --top most
probable classes of each image, or all classes with --json or --csv; for a model with several
labels, the probability of each and the labels above 0.5; for a regression, all values. An image
that cannot be read has a line on standard error and no row; then the command exits with 1.

A U-Net classifies each pixel: --masks DIR writes a PNG for each image, in its size, whose grey
values are the numbers of the classes. For volumes (.nii, .nii.gz, .npy, folders of DICOM slices) it
writes NIfTI files with the place of the volume, or .npy; --probabilities also writes those of all
classes.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revzoo._checks import Size, check_count, number_of, shortened, sides_of
from revzoo._files import check_writable, write_atomically
from revzoo.cli.commands._models import add_option, add_saved_bits_option, check_size, trained
from revzoo.cli.terminal import ConfigError, columns, message_line, one_line, printable, status_of
from revzoo.weights.source import resolve_source

if TYPE_CHECKING:  # torch is imported when the command runs, not for its help
    import torch

    from revzoo.data import DataError
    from revzoo.data.decode import Opened
    from revzoo.training.checkpoint.restore import Restored

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("ckpt", metavar="NAME_OR_CKPT", help="also written ckpt=NAME_OR_CKPT")
    parser.add_argument("images", nargs="+", metavar="IMAGE_OR_FOLDER")
    parser.add_argument("--top", type=int, default=3, help="classes per line (3)")
    add_option(parser, "--image-size", help="size of the images in pixels")
    add_option(parser, "--batch-size", default=64, help="images per call of the model (64)")
    add_saved_bits_option(parser)
    parser.add_argument("--device", help="such as cuda:1 (default: a GPU if there is one)")
    help_text = "mean over an image or volume and its mirror image"
    parser.add_argument("--tta", choices=("flip",), help=help_text)
    parser.add_argument("--masks", type=Path, metavar="DIR", help="of U-Nets: a new folder")
    parser.add_argument("--probabilities", action="store_true", help="with --masks, of volumes")
    form = parser.add_mutually_exclusive_group()
    for name in ("json", "csv"):
        help_text = f"all classes, to standard output or to a file: --{name} FILE.{name}"
        form.add_argument(
            f"--{name}", action="store_const", dest="form", const=name, help=help_text
        )
    parser.set_defaults(form="table")


def run(args: argparse.Namespace) -> None:
    """Classify, and print; a DataError after the rows if some images cannot be read."""
    check_count("--top", args.top)
    check_count("--batch-size", args.batch_size)
    if args.image_size is not None:
        sides_of("--image-size", args.image_size)
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
        if Path(path).is_dir() and not any(Path(path).iterdir()):
            raise ConfigError(f"no images in {path}: the folder is empty")
    # revzoo eval takes ckpt=
    source = resolve_source(args.ckpt.removeprefix("ckpt="))
    with status_of("loading torch and Lightning"):
        from revzoo.data import DataError
        from revzoo.training.lightning_compat import quiet

    device, unreadable = _device(args.device), 0

    def report(error: DataError) -> None:
        nonlocal unreadable
        unreadable += 1
        sys.stderr.write(f"{message_line(error)}\n")

    with quiet():
        restored = trained(source, args.bits)
        if (args.masks is not None) != restored.network.dense:
            got = "classifies whole images: leave --masks out"
            if args.masks is None:
                got = "classifies pixels: add --masks DIR"
            raise ConfigError(f"{source} {got}")
        answer = _rows if args.masks is None else _masks
        text, readable = answer(args, restored, device, report)
    if output is None:
        sys.stdout.write(text)
    else:
        write_atomically(output, text.encode())
    if unreadable:
        sys.stdout.flush()  # the rows before the last message, also in one log
        images = number_of(readable + unreadable, "image")
        raise DataError(
            f"{unreadable} of {images} could not be read: replace or remove them; revzoo check "
            "DIR lists all such images of a folder"
        )


def _device(name: str | None) -> torch.device:
    """The device of ``--device``; by default a GPU if there is one."""
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # torch.device("cuda:7") does not raise; a tensor there does
        return torch.empty(0, device=name or default).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {one_line(error)}") from None


Report = Callable[["DataError"], None]
"""Is called for each file that cannot be decoded, which is left out."""


def _raise(error: DataError) -> None:
    raise error


Prediction = tuple[str, dict[str, float]]
"""A path, and the probability of each class, the most probable first; or each target's value."""


def predict(
    restored: Restored,
    paths: Sequence[str | Path],
    *,
    batch_size: int = 64,
    tta: str | None = None,
    image_size: Size | None = None,
    device: str | torch.device = "cpu",
    on_error: Report = _raise,
) -> Iterator[Prediction]:
    """Yield the class probabilities of image files, and of all images in folders.

    Images are prepared as for evaluation: resized, the centre cropped. Folders are searched
    recursively.
    """
    from revzoo.data import DataError
    from revzoo.training.predict import classify

    # before the first image is read
    if image_size is None and restored.image_size is None:
        raise DataError("the checkpoint has no image size: give --image-size PIXELS")
    # a list: check all paths before the first result
    files = [*image_files(paths)]
    # classify opens a whole batch before its first result
    opened: deque[str] = deque()

    def images() -> Iterator[Opened]:
        for path, image in _opened(files, restored.in_chans, on_error):
            opened.append(str(path))
            yield image

    network = restored.network.to(device)
    found = classify(network, images(), size=image_size, batch_size=batch_size, tta=tta)
    return ((opened.popleft(), classes) for classes in found)


def _opened(
    files: Iterable[Path], channels: int, on_error: Report
) -> Iterator[tuple[Path, Opened]]:
    from revzoo.data import DataError
    from revzoo.data.decode import open_image

    for path in files:
        try:
            image = open_image(str(path), channels)
        except DataError as error:
            on_error(error)
        else:
            yield path, image


def _rows(
    args: argparse.Namespace, restored: Restored, device: torch.device, on_error: Report
) -> tuple[str, int]:
    """The predictions for images as a text, and their number."""
    check_size(restored.network, args.image_size)
    options = {name: getattr(args, name) for name in ("batch_size", "tta", "image_size")}
    # a list: the table aligns paths by the longest
    predictions = [*predict(restored, args.images, **options, device=device, on_error=on_error)]
    task = restored.module.task
    top = len(restored.data_state["classes"]) if task == "regression" else args.top
    return FORMS[args.form](predictions, top, task), len(predictions)


def _masks(
    args: argparse.Namespace, restored: Restored, device: torch.device, on_error: Report
) -> tuple[str, int]:
    """Write the masks of images or volumes; return a line that says where, and their number."""
    volumes = restored.network.dims == 3
    if args.form != "table":
        raise ConfigError(f"--{args.form} is for whole images: leave it out with --masks")
    if args.probabilities and not volumes:
        raise ConfigError("--probabilities is for volumes: leave it out")
    restored.network.to(device)
    count = (_write_volume_masks if volumes else _write_masks)(args, restored, on_error)
    classes = ", ".join(f"{i} {name}" for i, name in enumerate(restored.data_state["classes"]))
    return f"{number_of(count, 'mask')} in {args.masks}: {classes}\n", count


def _write_masks(args: argparse.Namespace, restored: Restored, on_error: Report) -> int:
    """Write the mask of each image as ``FOLDER/NAME.png``; return their number."""
    from PIL import Image

    from revzoo.training.predict import segment

    files, written = [*image_files(args.images)], 0
    _make_folder(args.masks, (path.stem for path in files))
    size = args.image_size or restored.image_size
    for path, image in _opened(files, restored.in_chans, on_error):
        mask = segment(restored.network, image, size=size, tta=args.tta)
        Image.fromarray(mask.numpy()).save(args.masks / f"{path.stem}.png")
        written += 1
    return written


def _write_volume_masks(args: argparse.Namespace, restored: Restored, on_error: Report) -> int:
    """Write the mask of each volume in its format, and ``NAME_probabilities``; as _write_masks."""
    import numpy as np

    from revzoo.data import DataError
    from revzoo.data.volume_files import (
        case_name,
        channels_of,
        is_series,
        volumes_in,
        write_volume,
    )
    from revzoo.data.volumes import read_prepared
    from revzoo.training.predict import segment_volume

    cases: list[tuple[Path, ...]] = []
    for path in map(Path, args.images):
        found = volumes_in(path) if path.is_dir() and not is_series(path) else [channels_of(path)]
        if not any(found):
            raise DataError(f"no volumes in {path}: expected .nii, .nii.gz, .npy or DICOM series")
        cases += filter(None, found)
    _make_folder(args.masks, map(case_name, cases))
    state, written = restored.data_state, 0
    window = state.get("patch") or sides_of("image_size", state["image_size"], 3)
    for channels in cases:
        try:
            if len(channels) != restored.in_chans:
                raise DataError(
                    f"{channels[0]} has {number_of(len(channels), 'channel')}: expected "
                    f"{restored.in_chans}, files NAME_0000, NAME_0001 and so on"
                )
            volume, like = read_prepared(channels, state)
        except DataError as error:
            on_error(error)
            continue
        show = sys.stderr.isatty()
        shares = segment_volume(
            restored.network, volume, window, tta=args.tta, progress=show
        ).numpy()
        target = args.masks / case_name(channels)
        write_volume(target, shares.argmax(0).astype(np.uint8), like)
        if args.probabilities:  # NIfTI has channels last
            moved = shares if like.affine is None else np.moveaxis(shares, 0, -1)
            write_volume(target.with_name(f"{target.name}_probabilities"), moved, like)
        written += 1
    return written


def _make_folder(folder: Path, names: Iterable[str]) -> None:
    """Create a folder for masks; a ConfigError if it has files or two masks have one name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"several images have the name {shortened(twice)}: give one folder alone")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--masks {folder} is not empty: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)


def image_files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """Yield the files among ``paths``, and the images below the folders, sorted by name."""
    from revzoo.data.folders import images_below, no_images, unread_files

    for path in map(Path, paths):
        if path.is_file():
            yield path
            continue
        unread: Counter[str] = Counter()
        images = [Path(name) for name in images_below(path, unread)]
        if not images:
            raise no_images(path)
        for note in unread_files(path, unread):
            log.warning("%s", note)
        yield from images


def as_table(predictions: Sequence[Prediction], top: int, task: str = "classification") -> str:
    """A line per image: its path, then classes with their probabilities, or values."""
    form = "{} {:.6g}" if task == "regression" else "{} {:.4f}"
    shown = [_in_line(path) for path, _ in predictions]
    width = max(map(len, shown), default=0)
    lines = []
    for path, (_, classes) in zip(shown, predictions, strict=True):
        best = list(classes.items())[:top]
        figures = "  ".join(form.format(_in_line(name), value) for name, value in best)
        line = f"{path:{width}}  {figures}"
        too_long = 0 < columns() < len(line)  # 0 without a terminal
        lines.append(f"{path}\n  {figures}" if too_long else line)
    return "".join(f"{line}\n" for line in lines)


def _in_line(name: str) -> str:
    # the name of a file or class may hold the end of a line
    return printable(name).replace("\n", r"\n")


def _decided(found: Mapping[str, float], task: str) -> dict[str, Any]:
    """The class of an image, or its labels; a regression decides nothing."""
    if task == "multilabel":
        return {"labels": [name for name, p in found.items() if p > 0.5]}
    return {} if task == "regression" else {"class": next(iter(found), "")}


def as_json(predictions: Sequence[Prediction], top: int, task: str = "classification") -> str:
    """A list of objects with path, class or labels, and probabilities by name; or values."""
    kind = "values" if task == "regression" else "probabilities"
    rows = [{"path": path, **_decided(found, task), kind: found} for path, found in predictions]
    return json.dumps(rows, indent=1) + "\n"


def as_csv(predictions: Sequence[Prediction], top: int, task: str = "classification") -> str:
    """Columns path, class or labels, and the probability of each by its name; or values."""
    text = io.StringIO()
    # csv's default is \r\n, which many tools show as ^M
    writer = csv.writer(text, lineterminator="\n")
    # each image orders its classes by probability; columns need one order
    first = predictions[0][1] if predictions else {}
    names = sorted(first)
    digits = ".9g" if task == "regression" else ".6f"  # 9 digits give each float32 back
    writer.writerow(["path", *_decided(first, task), *names])
    for path, found in predictions:
        words = [v if isinstance(v, str) else ";".join(v) for v in _decided(found, task).values()]
        writer.writerow([path, *words, *(f"{found[name]:{digits}}" for name in names)])
    return text.getvalue()


FORMS = {"table": as_table, "json": as_json, "csv": as_csv}
