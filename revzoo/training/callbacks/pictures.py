"""Pictures of a run for TensorBoard: sample predictions, and reconstructions of i-RevNets.

They use what validation computes anyway: the batches and the logits that ``validation_step``
returns, of the validated weights (the moving average, if there is one). Samples are the same images
in every validation, spread evenly over the split. Nothing is drawn at random, so a run is bit for
bit the same without pictures. Sanity checks and ``fast_dev_run`` show nothing.

A validation does not know whether it is the last: time, early stopping or a signal may end the run.
So every validation keeps the few images and logits, which costs next to nothing; inverses are
computed only for the pictures that are shown.

They are drawn with Pillow and torchvision, which the package needs anyway.

Known limits: under data parallelism the samples come from the first process's part of the split;
of several validation loaders only the first is shown, and only if its length is known.
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
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from revzoo._checks import check_count
from revzoo.core.fixedpoint import DEFAULT_BITS, round_to_grid
from revzoo.data import ImageData
from revzoo.models.network import ImageNetwork
from revzoo.training.callbacks.graceful_stop import RunStopped
from revzoo.training.metrics import true_classes

COLUMNS = 4  # images in a row: TensorBoard's cards are narrow
SIDE = 128  # pixels of a small image once it is enlarged, by a whole factor
LINE = 22  # pixels of a line of words
GROUP = "watch"  # of pictures in TensorBoard: after train and val
GAP = 4  # pixels around an image with its words
NAMED = 30  # classes up to which a matrix has room for names and numbers
CELL = 48  # pixels of a cell of such a matrix
COLOURS = ("red", "green")  # of a wrong prediction, of a right one


class Shown(pl.Callback, ABC):
    """Gathers images in each validation; shows a picture every few epochs and at the end.

    A signal is an end, too; an error is none.

    Args:
        every_n_epochs: epochs between two pictures.

    Raises:
        ValueError: ``every_n_epochs`` is no positive whole number.
    """

    def __init__(self, *, every_n_epochs: int) -> None:
        check_count("every_n_epochs", every_n_epochs)
        self.every_n_epochs = every_n_epochs
        self._step: int | None = None  # of the gathered images that are not shown yet

    @abstractmethod
    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> None:
        """Keep what is needed of a batch ``(images, labels)``, the ``i``-th, and its logits."""

    def gathered(self, trainer: pl.Trainer, module: Any) -> None:
        """Close a validation, in all processes."""

    @abstractmethod
    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        """Show what the last validation gave, in process 0 alone.

        ``step`` is the last optimiser step before it, counted from 0 as for the figures that
        Lightning logs: pictures logged before a save stay when the run resumes.
        """

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether validations of this epoch are shown."""
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not _watched(trainer) or dataloader_idx:
            return
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"{type(self).__name__} got {type(outputs).__name__} from validation_step of "
                f"{type(pl_module).__name__}: expected the logits (B, classes); return them, or "
                "leave the callback out"
            )
        if batch_idx == 0:
            self._step = None
        self.gather(trainer, pl_module, outputs.detach(), batch, batch_idx)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _watched(trainer):
            return
        self.gathered(trainer, pl_module)
        self._step = trainer.global_step - 1
        if self.due(trainer):
            self._show(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer, pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, RunStopped):
            self._show(trainer, pl_module)

    def _show(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._step is not None and trainer.is_global_zero:
            self.show(trainer, module, self._step)
        self._step = None


class Samples(Shown):
    """Images of the validation split with true class, predicted class and its probability.

    Args:
        count: images.
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
        chosen = places(trainer, self.count, len(logits), i)
        if trainer.is_global_zero and chosen:
            images, labels = batch
            self._seen.append((images[chosen], true_classes(labels)[chosen], logits[chosen]))

    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        if not self._seen:
            return
        kept, labels, logits = (torch.cat(tensors) for tensors in zip(*self._seen, strict=True))
        images, shares = pixels_of(trainer, kept).cpu(), logits.softmax(1).cpu()
        names = class_names(trainer, shares.shape[1])
        words = []
        for label, found in zip(labels.tolist(), shares, strict=True):
            guess = int(found.argmax())
            text = f"{names[guess]} {float(found[guess]):.2f}"
            words.append((Words(text, COLOURS[guess == label]), Words(f"true: {names[label]}")))
        add_image(trainer, "samples", captioned(images, words, columns=COLUMNS), step)


class Reconstructions(Shown):
    """Images, their reconstructions by an i-RevNet, and the differences.

    Each image stands above the inverse of its encoding and their absolute difference, which is
    brightened until its largest value is white. The figure, also logged as scalar
    ``reconstruction/error``, is the largest difference relative to the largest value of the images;
    these are rounded to multiples of 2**-14 first, which mode ``exact`` reconstructs bit for bit.
    Networks that lose information have no pictures.

    A run that ends between two pictures shows the network as it is then: after a signal a few steps
    past the validation and not averaged, otherwise averaged if ``AveragedWeights`` comes first (see
    ``ORDER`` in :mod:`revzoo.training.callbacks.registry`).

    Args:
        count: images.
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
        network, chosen = module.model, places(trainer, self.count, len(logits), i)
        invertible = isinstance(network, ImageNetwork) and network.invertible
        if trainer.is_global_zero and chosen and invertible:
            images = round_to_grid(batch[0][chosen], DEFAULT_BITS)
            # now: an average is in the network's place only as long as it is validated
            back = reconstruct(trainer, network, images) if self.due(trainer) else None
            self._seen.append((images, back))

    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        if not self._seen:
            return
        images = torch.cat([images for images, _ in self._seen])
        found = [back for _, back in self._seen if back is not None]
        if found:
            back = torch.cat(found)
        else:
            back, step = reconstruct(trainer, module.model, images), trainer.global_step - 1
            # a resumed run drops what was logged from its step on: no row for each stop
            step += trainer.interrupted
        difference = (back - images).abs()
        error = float(difference.max() / images.abs().max())
        own = difference.flatten(1).amax(1) / images.abs().max()
        brightened = difference / difference.max().clamp_min(torch.finfo(images.dtype).tiny)
        rows = (pixels_of(trainer, images), pixels_of(trainer, back), brightened.float())
        words = [[Words(name)] for name in [*["image"] * len(images), *["inverse"] * len(images)]]
        words += [[Words(f"error {value:.1g}")] for value in own.tolist()]
        picture = captioned(torch.cat(rows), words, columns=len(images))
        add_image(trainer, "reconstructions", picture, step)
        for logger in trainer.loggers:
            logger.log_metrics({"reconstruction/error": error}, step=step)


def reconstruct(trainer: pl.Trainer, network: ImageNetwork, images: Tensor) -> Tensor:
    """The inverse of the encoding of images, in evaluation mode and in the run's precision."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            return network.inverse(network.encode(images)).to(images.dtype)
    finally:
        for module, training in modes.items():
            module.training = training


def _watched(trainer: pl.Trainer) -> bool:
    """Whether this is a validation of a training that leaves results."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    return fitting and not trainer.sanity_checking and not trainer.fast_dev_run  # type: ignore[attr-defined]


def places(trainer: pl.Trainer, count: int, images: int, batch: int) -> list[int]:
    """Which of a batch's images are shown, so that ``count`` are spread over all batches."""
    batches = trainer.num_val_batches[0]
    share = min(images, int(count * (batch + 1) // batches - count * batch // batches))
    return [images * j // share for j in range(share)]


def pixels_of(trainer: pl.Trainer, images: Tensor) -> Tensor:
    """Normalised images in [0, 1]: as they were, or stretched where the data module is unknown."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, ImageData):
        return data.shown(images)
    low, high = images.amin(), images.amax()
    return (images.float() - low) / (high - low).clamp_min(1e-12)


def class_names(trainer: pl.Trainer, count: int) -> list[str]:
    """The data's class names, or numbers."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data.classes if isinstance(data, ImageData) else [str(i) for i in range(count)]


def add_image(trainer: pl.Trainer, tag: str, picture: Tensor, step: int) -> None:
    """Log a picture (3, H, W) to the run's TensorBoard or W&B logger, if any.

    TensorBoard opens the first two groups of charts by name: they are of training and validation.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(f"{GROUP}/{tag}", picture, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [to_pil_image(picture)], step=step)


class Words(NamedTuple):
    """A line of text and its colour."""

    text: str
    colour: str = "black"


def captioned(images: Tensor, words: Sequence[Sequence[Words]], *, columns: int) -> Tensor:
    """Images in rows of ``columns``, each above its lines of words.

    Args:
        images: (N, C, H, W) in [0, 1], C being 1 or 3.
        words: for each image as many lines as for the others.
        columns: images in a row.
    """
    least = longest([line.text for lines in words for line in lines])
    pairs = zip(images.cpu(), words, strict=True)
    tiles = [_tile(image, lines, least=least) for image, lines in pairs]
    return make_grid([pil_to_tensor(t) for t in tiles], nrow=columns, padding=GAP, pad_value=255)


def _tile(image: Tensor, lines: Sequence[Words], *, least: int) -> Image.Image:
    """One image above its lines, ``least`` pixels wide at least, so that no line is cut."""
    picture = to_pil_image(image.float().clamp(0, 1)).convert("RGB")
    factor = max(1, -(-SIDE // max(picture.size)))
    width, height = picture.width * factor, picture.height * factor
    tile = Image.new("RGB", (max(width, least), height + LINE * len(lines)), "white")
    tile.paste(picture.resize((width, height), Image.Resampling.NEAREST))
    pen = ImageDraw.Draw(tile)
    for i, line in enumerate(lines):
        pen.text((1, height + LINE * i), line.text, fill=line.colour, font=font())
    return tile


@cache
def font() -> Any:
    """Pillow's own, in the size of a line."""
    return ImageFont.load_default(size=LINE - 4)


def longest(texts: Sequence[str]) -> int:
    """The pixels that the longest text takes, with a margin."""
    return max((math.ceil(font().getlength(text)) + 4 for text in texts), default=0)


def matrix(counts: Tensor, names: Sequence[str]) -> Tensor:
    """Counts (N, N) as blue cells, true classes from top to bottom, predicted ones across.

    A cell is as dark as its share of the row, that is of the true class, and has it in percent from
    half a percent on. More than 30 classes are drawn without names and numbers.
    """
    count, named = len(names), len(names) <= NAMED
    cell = CELL if named else max(2, NAMED * CELL // count)
    margin = max(LINE * 8, longest(names)) if named else LINE * 2
    picture = Image.new("RGB", (margin + count * cell + 1,) * 2, "white")
    shares = counts.double() / counts.sum(dim=1, keepdim=True).clamp_min(1)
    falling = torch.tensor((225, 180, 0))[:, None, None]  # of red, green and blue, with the share
    cells = to_pil_image((255 - falling * shares).round().to(torch.uint8))
    picture.paste(cells.resize((count * cell,) * 2, Image.Resampling.NEAREST), (margin, margin))
    pen = ImageDraw.Draw(picture)
    if named:
        _number(pen, shares, margin)
        picture.paste(_axis(names, margin, cell), (0, margin))
        upwards = _axis(names, margin, cell).transpose(Image.Transpose.ROTATE_90)
        picture.paste(upwards, (margin, 0))
    pen.text((2, 2), "true: down", fill="black", font=font())
    pen.text((2, 2 + LINE), "predicted: across", fill="black", font=font())
    pen.text((2, 2 + 2 * LINE), "in % of the true", fill="black", font=font())
    return pil_to_tensor(picture)


def _number(pen: ImageDraw.ImageDraw, shares: Tensor, margin: int) -> None:
    """Frame each cell of ``shares`` (N, N), and write values of half a percent and more into it."""
    for row, values in enumerate((100 * shares).round().int().tolist()):
        for column, value in enumerate(values):
            x, y = margin + column * CELL, margin + row * CELL
            pen.rectangle((x, y, x + CELL, y + CELL), outline="lightgrey")
            if value:
                colour = "white" if value > 50 else "black"
                middle = (x + CELL / 2, y + CELL / 2)
                pen.text(middle, str(value), fill=colour, font=font(), anchor="mm")


def _axis(names: Sequence[str], width: int, cell: int) -> Image.Image:
    """The names one below the other, ``cell`` pixels each."""
    picture = Image.new("RGB", (width, cell * len(names)), "white")
    pen = ImageDraw.Draw(picture)
    for i, name in enumerate(names):
        pen.text((2, (i + 0.5) * cell), name, fill="black", font=font(), anchor="lm")
    return picture
