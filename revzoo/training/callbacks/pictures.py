"""Pictures of a run for TensorBoard: sample predictions, and reconstructions of i-RevNets.

The callbacks reuse the batches of the validation and the logits that ``validation_step`` returns,
from the validated weights (the moving average, if there is one). Samples are the same images in
every validation, spread evenly over the split. The callbacks draw no random numbers, so a run has
the same weights, bit for bit, with and without pictures. Sanity checks and ``fast_dev_run`` show no
pictures.

Any validation may be the last: a time limit, early stopping or a signal can end the run. So every
validation keeps its few images and logits, which costs little. We compute inverses only for the
pictures that are shown.

Pillow and torchvision draw the pictures; the package needs both anyway.

Known limits: under data parallelism the samples come from the first process's part of the split.
Only the first validation loader is shown, and only if its length is known.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from PIL import Image, ImageDraw, ImageFont
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from revzoo._checks import check_count
from revzoo.core.evaluation import evaluation_mode
from revzoo.core.fixedpoint.rounding import round_to_grid
from revzoo.core.fixedpoint.scale import DEFAULT_BITS
from revzoo.data import ImageData
from revzoo.models.network import ImageNetwork
from revzoo.training.callbacks.graceful_stop import RunStopped
from revzoo.training.lightning_compat import data_of, is_fitting
from revzoo.training.metrics import true_classes

COLUMNS = 4  # images in a row: TensorBoard's cards are narrow
SIDE = 128  # small images are enlarged, by a whole factor, to at least this many pixels
LINE = 22  # pixels of a line of text
GROUP = "watch"  # TensorBoard's group of pictures: sorts after train and val
GAP = 4  # pixels around an image with its caption
NAMED = 30  # a matrix with more classes has no room for names and numbers
CELL = 48  # pixels of a cell of a matrix with names
COLOURS = ("red", "green")  # of wrong and of correct predictions


class PictureCallback(pl.Callback, ABC):
    """Gathers images in each validation; shows a picture every few epochs and at the end.

    If a signal stops a run, it still shows its last picture; a run that fails does not.

    Args:
        every_n_epochs: epochs between two pictures.

    Raises:
        ValueError: ``every_n_epochs`` is not a positive whole number.
    """

    def __init__(self, *, every_n_epochs: int) -> None:
        check_count("every_n_epochs", every_n_epochs)
        self.every_n_epochs = every_n_epochs
        self._step: int | None = None  # of gathered images that are not shown yet

    @abstractmethod
    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> None:
        """Keep the part of the ``i``-th batch ``(images, labels)`` and logits for the picture."""

    def finish_validation(self, trainer: pl.Trainer, module: Any) -> None:
        """Called at the end of a validation, in all processes."""

    @abstractmethod
    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Show the picture of the last validation; called in process 0 only.

        ``step`` is the last optimiser step before the validation, counted from 0 as in Lightning's
        logs: a resumed run keeps the pictures from before the save.
        """

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether the validations of this epoch are shown."""
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, i: int, loader: int = 0
    ) -> None:
        if not _validates_training(trainer) or loader:
            return
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"{type(self).__name__} got {type(outputs).__name__} from validation_step of "
                f"{type(pl_module).__name__}: expected the logits (B, classes); return them, or "
                "remove the callback"
            )
        # a new validation replaces images that no epoch has shown
        if i == 0:
            self._step = None
        self.gather(trainer, pl_module, outputs.detach(), batch, i)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _validates_training(trainer):
            return
        self.finish_validation(trainer, pl_module)
        self._step = trainer.global_step - 1
        if self.due(trainer):
            self._show(trainer, pl_module)

    # the last validation was perhaps not due
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer, pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # the pictures of a failed run would be misleading
        if isinstance(exception, RunStopped):
            self._show(trainer, pl_module)

    def _show(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._step is not None and trainer.is_global_zero:
            self.show(trainer, module, self._step)
        self._step = None


class Samples(PictureCallback):
    """Images of the validation split with true class, predicted class and its probability.

    Args:
        count: number of images.
        every_n_epochs: epochs between two pictures, tag ``samples``.
    """

    def __init__(self, *, count: int = 16, every_n_epochs: int = 5) -> None:
        super().__init__(every_n_epochs=every_n_epochs)
        check_count("count", count)
        self.count = count
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> None:
        if i == 0:
            self._seen = []
        chosen = chosen_images(trainer, self.count, len(logits), i)
        if trainer.is_global_zero and chosen:
            images, labels = batch
            self._seen.append((images[chosen], true_classes(labels)[chosen], logits[chosen]))

    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        if not self._seen:
            return
        kept, labels, logits = (torch.cat(tensors) for tensors in zip(*self._seen, strict=True))
        images, probabilities = to_pixels(trainer, kept).cpu(), logits.softmax(1).cpu()
        names = class_names(trainer, probabilities.shape[1])
        captions = []
        for label, row in zip(labels.tolist(), probabilities, strict=True):
            guess = int(row.argmax())
            text = f"{names[guess]} {float(row[guess]):.2f}"
            colour = COLOURS[guess == label]
            captions.append((TextLine(text, colour), TextLine(f"true: {names[label]}")))
        add_image(trainer, "samples", captioned(images, captions, columns=COLUMNS), step)


class Reconstructions(PictureCallback):
    """Images, their reconstructions by an i-RevNet, and the differences.

    Below each image are the inverse of its encoding and their absolute difference, brightened until
    its largest value is white. The error, also logged as scalar ``reconstruction/error``, is the
    largest difference divided by the largest value of the images. The images are first rounded to
    multiples of 2**-23, which mode ``exact`` reconstructs bit for bit. Networks that lose
    information have no pictures.

    If a run ends between two pictures, its last picture shows the network at that time. After a
    signal, this is a few steps past the validation, without averaging. Otherwise it is the average
    if ``AveragedWeights`` comes first (``ORDER`` in :mod:`revzoo.training.callbacks.registry`).

    Args:
        count: number of images.
        every_n_epochs: epochs between two pictures, tag ``reconstructions``.
    """

    def __init__(self, *, count: int = 8, every_n_epochs: int = 5) -> None:
        super().__init__(every_n_epochs=every_n_epochs)
        check_count("count", count)
        self.count = count
        self._seen: list[tuple[Tensor, Tensor | None]] = []

    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> None:
        if i == 0:
            self._seen = []
        network, chosen = module.model, chosen_images(trainer, self.count, len(logits), i)
        invertible = isinstance(network, ImageNetwork) and network.invertible
        if trainer.is_global_zero and chosen and invertible:
            images = round_to_grid(batch[0][chosen], DEFAULT_BITS)
            # invert now: the network holds the moving average only during the validation
            back = reconstruct(trainer, network, images) if self.due(trainer) else None
            self._seen.append((images, back))

    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        if not self._seen:
            return
        images = torch.cat([images for images, _ in self._seen])
        inverses = [back for _, back in self._seen if back is not None]
        if inverses:
            back = torch.cat(inverses)
        else:
            back, step = reconstruct(trainer, module.model, images), trainer.global_step - 1
            # a resumed run drops all rows from its first step on, so this row goes with them
            step += trainer.interrupted
        difference = (back - images).abs()
        # relative, as normalised images have no fixed range
        errors = difference.flatten(1).amax(1) / images.abs().max()
        # `tiny` keeps a perfect reconstruction black, not NaN
        brightened = difference / difference.max().clamp_min(torch.finfo(images.dtype).tiny)
        rows = (to_pixels(trainer, images), to_pixels(trainer, back), brightened.float())
        texts = ["image"] * len(images) + ["inverse"] * len(images)
        texts += [f"error {error:.1g}" for error in errors.tolist()]
        captions = [[TextLine(text)] for text in texts]
        picture = captioned(torch.cat(rows), captions, columns=len(images))
        add_image(trainer, "reconstructions", picture, step)
        for logger in trainer.loggers:
            # not module.log: Lightning refuses it at the end of training
            logger.log_metrics({"reconstruction/error": float(errors.max())}, step=step)


def reconstruct(trainer: pl.Trainer, network: ImageNetwork, images: Tensor) -> Tensor:
    """Encode and invert ``images``, in evaluation mode and in the run's precision."""
    precision = trainer.precision_plugin
    # evaluation mode: in training mode the running statistics would move
    with evaluation_mode(network), torch.no_grad(), precision.val_step_context():
        return network.inverse(network.encode(images)).to(images.dtype)


def _validates_training(trainer: pl.Trainer) -> bool:
    """Whether this validation is part of a training run that writes results."""
    fitting = is_fitting(trainer)
    return fitting and not trainer.sanity_checking and not trainer.fast_dev_run  # type: ignore[attr-defined]


def chosen_images(trainer: pl.Trainer, count: int, images: int, batch: int) -> list[int]:
    """The indices of the images of a batch to show, so that ``count`` spread over all batches."""
    batches = trainer.num_val_batches[0]
    # differences of rounded multiples add up to `count` over all batches
    share = min(images, int(count * (batch + 1) // batches - count * batch // batches))
    # evenly spread, since folders list images by class
    return [images * j // share for j in range(share)]


def to_pixels(trainer: pl.Trainer, images: Tensor) -> Tensor:
    """Undo the normalisation of images; stretch them to [0, 1] if the data module is unknown."""
    data = data_of(trainer)
    if isinstance(data, ImageData):
        return data.shown(images)
    low, high = images.amin(), images.amax()
    return (images.float() - low) / (high - low).clamp_min(1e-12)


def class_names(trainer: pl.Trainer, count: int) -> list[str]:
    """The data's class names; numbers if the data module is unknown."""
    data = data_of(trainer)
    return data.classes if isinstance(data, ImageData) else [str(i) for i in range(count)]


def add_image(trainer: pl.Trainer, tag: str, picture: Tensor, step: int) -> None:
    """Log a picture (3, H, W) to the run's TensorBoard and W&B loggers."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(f"{GROUP}/{tag}", picture, step)
        elif isinstance(logger, WandbLogger):  # W&B does not sort by group
            logger.log_image(tag, [to_pil_image(picture)], step=step)


class TextLine(NamedTuple):
    """A line of text and its colour."""

    text: str
    colour: str = "black"


def captioned(images: Tensor, captions: Sequence[Sequence[TextLine]], *, columns: int) -> Tensor:
    """Images in rows of ``columns``, each above its caption.

    Args:
        images: (N, C, H, W) in [0, 1], C being 1 or 3.
        captions: the lines of each image, the same number for all.
        columns: images in a row.
    """
    min_width = text_width([line.text for lines in captions for line in lines])
    pairs = zip(images.cpu(), captions, strict=True)
    tiles = [_tile(image, lines, min_width=min_width) for image, lines in pairs]
    return make_grid([pil_to_tensor(t) for t in tiles], nrow=columns, padding=GAP, pad_value=255)


def _tile(image: Tensor, lines: Sequence[TextLine], *, min_width: int) -> Image.Image:
    """One image above its lines, at least ``min_width`` pixels wide to leave the lines uncut."""
    picture = to_pil_image(image.float().clamp(0, 1)).convert("RGB")
    # rounded up: a whole factor keeps pixels square
    factor = max(1, -(-SIDE // max(picture.size)))
    width, height = picture.width * factor, picture.height * factor
    tile = Image.new("RGB", (max(width, min_width), height + LINE * len(lines)), "white")
    tile.paste(picture.resize((width, height), Image.Resampling.NEAREST))
    pen = ImageDraw.Draw(tile)
    for i, line in enumerate(lines):
        pen.text((1, height + LINE * i), line.text, fill=line.colour, font=font())
    return tile


@cache
def font() -> Any:
    """Pillow's default font, in the size of a line."""
    return ImageFont.load_default(size=LINE - 4)


def text_width(texts: Sequence[str]) -> int:
    """The width of the longest text in pixels, with a margin."""
    return max((math.ceil(font().getlength(text)) + 4 for text in texts), default=0)


def matrix(counts: Tensor, names: Sequence[str]) -> Tensor:
    """Counts (N, N) as blue cells: true classes from top to bottom, predicted classes across.

    The colour of a cell shows its share of the row, that is, of the true class. Shares of half a
    percent and more are printed in percent. Above 30 classes there are no names and numbers.
    """
    count, named = len(names), len(names) <= NAMED
    cell = CELL if named else max(2, NAMED * CELL // count)
    # the corner holds three lines that explain the axes
    margin = max(LINE * 8, text_width(names)) if named else LINE * 2
    picture = Image.new("RGB", (margin + count * cell + 1,) * 2, "white")
    shares = counts.double() / counts.sum(dim=1, keepdim=True).clamp_min(1)
    darkening = torch.tensor((225, 180, 0))[:, None, None]  # of red, green, blue at a share of 1
    # white to dark blue
    cells = to_pil_image((255 - darkening * shares).round().to(torch.uint8))
    picture.paste(cells.resize((count * cell,) * 2, Image.Resampling.NEAREST), (margin, margin))
    pen = ImageDraw.Draw(picture)
    if named:
        _number(pen, shares, margin)
        picture.paste(_axis(names, margin, cell, right=True), (0, margin))
        # names of columns read from bottom to top
        upwards = _axis(names, margin, cell, right=False).transpose(Image.Transpose.ROTATE_90)
        picture.paste(upwards, (margin, 0))
    legend = "rows: true\ncolumns: predicted\ncells: % of the row"
    pen.text((2, 2), legend, fill="black", font=font(), spacing=8)
    return pil_to_tensor(picture)


def _number(pen: ImageDraw.ImageDraw, shares: Tensor, margin: int) -> None:
    """Frame each cell of ``shares`` (N, N), and write values of half a percent and more into it."""
    for row, values in enumerate((100 * shares).round().int().tolist()):
        for column, value in enumerate(values):
            x, y = margin + column * CELL, margin + row * CELL
            pen.rectangle((x, y, x + CELL, y + CELL), outline="lightgrey")
            if value:
                colour = "white" if value > 65 else "black"
                middle = (x + CELL / 2, y + CELL / 2)
                pen.text(middle, str(value), fill=colour, font=font(), anchor="mm")


def _axis(names: Sequence[str], width: int, cell: int, *, right: bool) -> Image.Image:
    """The names in rows of ``cell`` pixels, at the left or right edge."""
    picture = Image.new("RGB", (width, cell * len(names)), "white")
    pen = ImageDraw.Draw(picture)
    x, anchor = (width - 3, "rm") if right else (3, "lm")
    for i, name in enumerate(names):
        pen.text((x, (i + 0.5) * cell), name, fill="black", font=font(), anchor=anchor)
    return picture
