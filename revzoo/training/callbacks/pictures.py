"""Pictures of a run for TensorBoard and W&B: predictions, reconstructions, the confusion matrix.

They show the batches of the validation, by the validated weights (the moving average, if there is
one). A run has the same weights, bit for bit, with and without. Known limits: under data
parallelism the samples come from the first process's part of the split. Only the first validation
loader is shown, and only if its length is known.
"""

from __future__ import annotations

import csv
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.nn import functional
from torchmetrics.classification import MulticlassConfusionMatrix

from revzoo._checks import check_count
from revzoo._files import replacing_table
from revzoo.core.invertible import evaluation_mode
from revzoo.core.kernels import DEFAULT_BITS, round_to_grid
from revzoo.data import ImageData
from revzoo.models.network import ImageNetwork
from revzoo.training.lightning_compat import data_of, is_fitting
from revzoo.training.loggers import GROUP
from revzoo.training.metrics import count_unrepeated, true_classes

log = logging.getLogger(__name__)

NAMED = 30  # a matrix with more classes has no room for names and numbers

Parts = tuple[Tensor, ...]


class PictureCallback(pl.Callback, ABC):
    """Gathers in each validation, as any may be the last; shows every few epochs and at the end.

    Without TensorBoard and W&B nothing is drawn; drawing takes longer than many a short run.

    Args:
        every_n_epochs: epochs between two pictures.
        count: number of images, spread evenly over the split.
    """

    tag: str

    def __init__(self, *, every_n_epochs: int = 5, count: int = 16) -> None:
        check_count("every_n_epochs", every_n_epochs)
        check_count("count", count)
        self.every_n_epochs, self.count = every_n_epochs, count
        self._seen: list[Parts] = []
        self._step = 0

    @abstractmethod
    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> Parts:
        """What the picture needs of the ``i``-th batch ``(images, labels)``; may be empty."""

    @abstractmethod
    def draw(self, trainer: pl.Trainer, gathered: list[Tensor]) -> Figure:
        """The picture of all that was gathered, in process 0."""

    def record(self, trainer: pl.Trainer, gathered: list[Tensor]) -> None:
        """Write what was gathered as numbers, in process 0, with or without a picture."""

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._seen = []

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, i: int, loader: int = 0
    ) -> None:
        dry = trainer.sanity_checking or trainer.fast_dev_run  # type: ignore[attr-defined]
        if dry or loader or not is_fitting(trainer):
            return
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"{type(self).__name__} expected the logits (B, classes) of validation_step, "
                f"got {type(outputs).__name__}: return them, or remove the callback"
            )
        if found := self.gather(trainer, pl_module, outputs.detach(), batch, i):
            self._seen.append(found)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step - 1  # counted from 0 as in Lightning's logs
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the last validation, if it was not due."""
        seen, self._seen = self._seen, []
        if seen and trainer.is_global_zero:
            tensors = [torch.cat(parts).cpu() for parts in zip(*seen, strict=True)]
            self.record(trainer, tensors)
            add_figure(trainer, self.tag, lambda: self.draw(trainer, tensors), self._step)

    def chosen(self, trainer: pl.Trainer, images: int, batch: int) -> list[int]:
        """The indices of a batch's images to show: ``count``, evenly spread over all batches."""
        batches = int(trainer.num_val_batches[0])
        share = self.count * (batch + 1) // batches - self.count * batch // batches
        return [images * j // share for j in range(share)] if share < images else [*range(images)]


class Samples(PictureCallback):
    """Images of the validation split with predicted class, its probability, and true class.

    With masks, each image beside its predicted mask, its true mask and the errors, in white; of a
    volume the middle slice across its last axis. With several labels or targets, the first of them
    with predicted and true value.
    """

    tag = "samples"

    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> Parts:
        chosen = self.chosen(trainer, len(logits), i)
        if getattr(module, "task", "") in ("multilabel", "regression"):
            return batch[0][chosen], batch[1][chosen], module.predicted(logits[chosen])
        images, labels, logits = (t[chosen] for t in (batch[0], true_classes(batch[1]), logits))
        if logits.dim() == 5:
            images, logits = middle_slices(images), middle_slices(logits)
            labels = middle_slices(labels[:, None])[:, 0].long()
        return images, labels, logits

    def draw(self, trainer: pl.Trainer, gathered: list[Tensor]) -> Figure:
        images, labels, logits = gathered
        if logits.dim() > 2:
            return masks_figure(to_pixels(trainer, images), logits.argmax(1), labels)
        names = class_names(trainer, logits.shape[1])
        if labels.dim() > 1:
            return images_figure(to_pixels(trainer, images), listed(names, logits, labels))
        shares, guesses = logits.softmax(1).max(1)
        captions = [
            f"{names[guess]} {share:.2f}\ntrue: {names[label]}"
            for share, guess, label in zip(shares.tolist(), guesses, labels, strict=True)
        ]
        colours = ["green" if right else "red" for right in guesses == labels]
        return images_figure(to_pixels(trainer, images), captions, colours=colours)


class Reconstructions(PictureCallback):
    """Images, their reconstructions by an i-RevNet, and the differences.

    Below each image are the inverse of its encoding and their absolute difference, brightened until
    its largest value is white. The error, also logged as ``reconstruction/error``, is the largest
    difference divided by the largest value of the images. The images are first rounded to multiples
    of 2**-23, which mode ``exact`` reconstructs bit for bit. Networks that lose information have no
    pictures.
    """

    tag = "reconstructions"

    def __init__(self, *, every_n_epochs: int = 5, count: int = 8) -> None:
        super().__init__(every_n_epochs=every_n_epochs, count=count)

    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> Parts:
        network, chosen = module.model, self.chosen(trainer, len(logits), i)
        if not (chosen and isinstance(network, ImageNetwork) and network.invertible):
            return ()
        images = round_to_grid(batch[0][chosen], DEFAULT_BITS)
        # the run's precision; in training mode the running statistics would move
        with trainer.precision_plugin.val_step_context(), evaluation_mode(network), torch.no_grad():
            return images, network.inverse(network.encode(images)).to(images.dtype)

    def record(self, trainer: pl.Trainer, gathered: list[Tensor]) -> None:
        error = float(relative_errors(*gathered).max())
        for logger in trainer.loggers:
            # not module.log: Lightning refuses it at the end of training
            logger.log_metrics({"reconstruction/error": error}, step=self._step)

    def draw(self, trainer: pl.Trainer, gathered: list[Tensor]) -> Figure:
        images, back = gathered
        difference = (back - images).abs()
        # `tiny` keeps a perfect reconstruction black, not NaN
        brightened = difference / difference.max().clamp_min(torch.finfo(images.dtype).tiny)
        rows = torch.cat([to_pixels(trainer, images), to_pixels(trainer, back), brightened.float()])
        texts = ["image"] * len(images) + ["inverse"] * len(images)
        texts += [f"error {error:.1g}" for error in relative_errors(images, back).tolist()]
        return images_figure(rows, texts, columns=len(images))


class ConfusionMatrix(PictureCallback):
    """Draws the confusion matrix, tag ``confusion``, and writes it as a CSV file.

    Counts all processes' images; an image that a sampler repeats counts once. The file ``path``
    belongs to the latest picture: a row per true class, a column per predicted class. The picture
    shows each cell's share of its row, that is, of the true class, in percent.
    """

    tag = "confusion"

    def __init__(self, path: str | Path, *, every_n_epochs: int = 5) -> None:
        super().__init__(every_n_epochs=every_n_epochs)
        self.path = Path(path)
        self._metric: MulticlassConfusionMatrix | None = None

    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> Parts:
        if getattr(module, "task", "") in ("multilabel", "regression"):
            return ()  # there are no classes to confuse
        if i == 0:
            # checks of values would make the host wait for the GPU at every batch
            options: dict[str, Any] = {"ignore_index": -1, "validate_args": False}  # of masks
            metric = MulticlassConfusionMatrix(logits.shape[1], **options)
            self._metric = metric.to(logits.device)
        assert self._metric is not None
        count = count_unrepeated(trainer.val_dataloaders, i, len(logits))
        self._metric.update(logits[:count], true_classes(batch[1])[:count])
        return ()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._metric is not None:
            # in all processes: compute() adds their counts
            self._seen, self._metric = [(self._metric.compute(),)], None
        super().on_validation_epoch_end(trainer, pl_module)

    def record(self, trainer: pl.Trainer, gathered: list[Tensor]) -> None:
        (counts,) = gathered
        names = class_names(trainer, len(counts))
        rows = [[name, *row] for name, row in zip(names, counts.tolist(), strict=True)]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_table(self.path) as file:
                csv.writer(file).writerows([["true / predicted", *names], *rows])
        except OSError as error:
            log.error("cannot write %s (%s): the run continues", self.path, error.strerror)

    def draw(self, trainer: pl.Trainer, gathered: list[Tensor]) -> Figure:
        (counts,) = gathered
        return matrix(counts, class_names(trainer, len(counts)))


def relative_errors(images: Tensor, back: Tensor) -> Tensor:
    """The largest difference of each image, relative to the largest value of all."""
    return (back - images).abs().flatten(1).amax(1) / images.abs().max()


def matrix(counts: Tensor, names: list[str]) -> Figure:
    """Counts (N, N) as blue cells: true classes from top to bottom, predicted classes across."""
    named, longest = len(names) <= NAMED, max(map(len, names))
    # inches: half a one for each class, and the names at two sides
    side = 2 + 0.5 * len(names) + 0.07 * longest if named else 8.0
    axes = (figure := Figure(figsize=(side, side), layout="constrained")).subplots()
    percent = (100 * counts / counts.sum(dim=1, keepdim=True).clamp_min(1)).round().int()
    MulticlassConfusionMatrix(len(names)).plot(
        percent, ax=axes, add_text=named, labels=names, cmap="Blues"
    )
    axes.set_title("% of each true class")
    # torchmetrics slants the names, and long ones leave the picture
    axes.tick_params(axis="x", rotation=90 if longest > 3 else 0)
    axes.tick_params(axis="y", rotation=0)
    if not named:
        axes.set(xticks=[], yticks=[])
    return figure


def to_pixels(trainer: pl.Trainer, images: Tensor) -> Tensor:
    """Undo the normalisation of images; stretch them to [0, 1] if the data module is unknown.

    Of two channels the first is shown, of more than three the first three.
    """
    data, shown = data_of(trainer), 3 if images.shape[1] >= 3 else 1
    if isinstance(data, ImageData):
        return data.shown(images)[:, :shown]
    low, high = images.amin(), images.amax()
    return ((images.float() - low) / (high - low).clamp_min(1e-12))[:, :shown]


def class_names(trainer: pl.Trainer, count: int) -> list[str]:
    """The data's class names; numbers if the data module is unknown."""
    data = data_of(trainer)
    return data.classes if isinstance(data, ImageData) else [str(i) for i in range(count)]


def images_figure(
    images: Tensor, captions: Sequence[str], *, columns: int = 4, colours: Sequence[str] = ()
) -> Figure:
    """Images (N, C, H, W) in [0, 1], C being 1 or 3, in rows of ``columns``, with captions."""
    rows = -(-len(images) // columns)
    # inches; letters of size 9 are 0.08 inches wide, so captions do not run into each other
    width = max(1.5, 0.08 * max(len(line) for text in captions for line in text.splitlines()))
    figure = Figure(figsize=(width * columns, 2 * rows), layout="constrained")
    pixels = images.float().clamp(0, 1).cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    for i, (image, caption) in enumerate(zip(pixels, captions, strict=True)):
        panel = figure.add_subplot(rows, columns, i + 1)
        panel.axis("off")
        panel.imshow(image.numpy())
        panel.set_title(caption, fontsize=9, color=colours[i] if colours else "black")
    return figure


def listed(names: Sequence[str], found: Tensor, true: Tensor) -> list[str]:
    """A caption for each row of predictions (N, K) and true values: a line each, four at most."""
    return [
        "\n".join(f"{n} {a:.2f}, true {b:g}" for n, a, b in [*zip(names, *pair, strict=True)][:4])
        for pair in zip(found.tolist(), true.tolist(), strict=True)
    ]


def masks_figure(images: Tensor, found: Tensor, true: Tensor) -> Figure:
    """Rows of an image (N, C, H, W) in [0, 1], its two masks (N, H, W), and the errors."""
    colours = torch.tensor([c[:3] for c in colormaps["tab10"].colors])  # type: ignore[attr-defined]
    colours = torch.cat([colours, torch.zeros(1, 3)])  # black does not count
    masks = [colours[torch.where(m < 0, 10, m % 10)].permute(0, 3, 1, 2) for m in (found, true)]
    wrong = ((found != true) & (true >= 0)).float().unsqueeze(1)
    rows = [images.float().cpu().expand(-1, 3, -1, -1), *masks, wrong.expand(-1, 3, -1, -1)]
    captions = [
        text
        for share in wrong.flatten(1).mean(1).tolist()
        for text in ("image", "predicted", "true", f"{share:.1%} wrong")
    ]
    return images_figure(torch.stack(rows, 1).flatten(0, 1), captions, columns=8)


def middle_slices(volumes: Tensor) -> Tensor:
    """Slices (B, C, 128, 128) across the last axis of volumes (B, C, D, H, W) of any sizes."""
    slices = volumes[..., volumes.shape[-1] // 2]
    return functional.interpolate(slices.float(), size=(128, 128))


def add_figure(trainer: pl.Trainer, tag: str, draw: Callable[[], Figure], step: int) -> None:
    """Draw a figure for the run's TensorBoard and W&B loggers; without them, do not draw."""
    showing = [x for x in trainer.loggers if isinstance(x, TensorBoardLogger | WandbLogger)]
    if not showing:
        return
    figure = draw()
    for logger in showing:
        if isinstance(logger, TensorBoardLogger):
            with suppress(OSError):  # a full disk, which the logger reports
                logger.experiment.add_figure(f"{GROUP}/{tag}", figure, step)
        else:  # W&B does not sort by group
            logger.log_image(tag, [figure], step=step)
