"""Two figures from per-sample gradients: the gradient noise scale, and the hardest images.

Both take the norms from an ordinary backward pass, at little cost and without more memory
(:mod:`revzoo.private.clipping`). Steps without measurement run as usual.

The gradient noise scale is the batch size up to which larger batches pay: the trace of the
covariance of per-sample gradients over the squared norm of their mean (S. McCandlish, J. Kaplan,
D. Amodei, "An Empirical Model of Large-Batch Training", 2018, arXiv 1812.06162, equation 2.9). With
B samples of mean squared norm S, and the squared norm G of their mean gradient,

    |mean|^2 = (B G - S) / (B - 1)        trace = B (S - G) / (B - 1)

are unbiased: the paper's appendix A.1 with batches of 1 and B. As in the paper, we average both
before we divide.

Under data parallelism, S and the images come from the first process, G from the whole batch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from revzoo._checks import check_count, check_number
from revzoo.private.callback import PrivateTraining
from revzoo.private.clipping import SampleNorms
from revzoo.private.gradients import refuse_unsupported
from revzoo.training.callbacks.pictures import add_figure, class_names, images_figure, to_pixels
from revzoo.training.callbacks.registry import (
    ChecksModel,
    MeasuresSteps,
    RestoresAfterFit,
    is_nth_step,
)
from revzoo.training.lightning_compat import callbacks_of, data_of
from revzoo.training.metrics import true_classes


class ReadsNorms(RestoresAfterFit, MeasuresSteps, ChecksModel):
    """Passes the norms of every ``every_n_steps``-th step to :meth:`read`.

    Args:
        every_n_steps: measure at the n-th optimiser step, the 2n-th, and so on.

    Raises:
        ValueError: ``every_n_steps`` is not a positive whole number. When training starts: the
            model has a batch normalisation, gradients are accumulated or scaled, or training is
            private.
    """

    def __init__(self, *, every_n_steps: int) -> None:
        check_count("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._norms: SampleNorms | None = None
        self._batch: Any = None

    @abstractmethod
    def read(self, trainer: pl.Trainer, module: Any, squares: Tensor, batch: Any) -> None:
        """Called with the squared norms ``(B,)`` of the per-sample gradients."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        name = type(self).__name__
        if callbacks_of(trainer, PrivateTraining):
            raise ValueError(f"{name} with callbacks.private: its figures would not be private")
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"{name} with trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: "
                "expected 1"
            )
        if trainer.precision == "16-mixed":
            raise ValueError(
                f"{name} with precision=fp16, whose gradients are scaled: expected precision=bf16 "
                "or precision=fp32"
            )
        self.check_model(pl_module.model)
        self._norms = SampleNorms(pl_module.model)

    def check_model(self, network: nn.Module) -> None:
        """Raise a ValueError for a layer that mixes samples."""
        refuse_unsupported(network)

    def restart(self) -> None:
        if self._norms is not None and self._norms.collecting:
            self._norms.start(len(self._batch[0]))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._norms is not None
        if is_nth_step(trainer, self.every_n_steps):
            self._norms.start(len(batch[0]))
            self._batch = batch

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self._norms is not None
        if not self._norms.collecting:
            return
        # until the next measured step
        batch, self._batch, self._norms.collecting = self._batch, None, False
        # in float32, since B squared times a float16 could overflow
        squares = self._norms.take().float()
        # the loss is a mean over B, so a sample's gradient is B times its part
        self.read(trainer, pl_module, squares * len(squares) ** 2, batch)

    def undo(self, pl_module: pl.LightningModule) -> None:
        if self._norms is not None:
            self._norms.remove()
        self._norms = self._batch = None


class GradientNoiseScale(ReadsNorms):
    """Logs ``gradients/noise_scale``, in samples, and ``gradients/norm`` of the batch's gradient.

    Args:
        every_n_steps: measure at every n-th optimiser step.
        decay: weight of earlier measurements in the moving averages.
    """

    def __init__(self, *, every_n_steps: int = 10, decay: float = 0.9) -> None:
        super().__init__(every_n_steps=every_n_steps)
        check_number("decay", decay, high=1, open_high=True)
        self.decay = decay
        self._trace = self._square = 0.0

    def read(self, trainer: pl.Trainer, module: Any, squares: Tensor, batch: Any) -> None:
        gradients = [p.grad for p in module.model.parameters() if p.grad is not None]
        whole = float(sum(g.detach().float().square().sum() for g in gradients))
        module.log("gradients/norm", whole**0.5, on_step=True, on_epoch=False)
        count, mean = len(squares) * trainer.world_size, float(squares.mean())
        # one sample has no variance
        if count < 2:
            return
        trace, square = count * (mean - whole) / (count - 1), (count * whole - mean) / (count - 1)
        # both averages start at 0, and the same bias cancels in their ratio
        self._trace += (1 - self.decay) * (trace - self._trace)
        self._square += (1 - self.decay) * (square - self._square)
        if self._square > 0:  # otherwise noise hides the mean gradient
            scale = self._trace / self._square
            module.log("gradients/noise_scale", scale, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        return {"trace": self._trace, "square": self._square}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trace, self._square = state_dict["trace"], state_dict["square"]


class HardSamples(ReadsNorms):
    """Shows the training images with the largest gradients of an epoch, tag ``hard_samples``.

    Often these are hard or mislabelled. Logs the median and the largest norm of each measured batch
    as ``gradients/sample_median`` and ``gradients/sample_max``.

    Args:
        count: images of the picture.
        every_n_steps: measure at every n-th optimiser step.
    """

    def __init__(self, *, count: int = 16, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps=every_n_steps)
        check_count("count", count)
        self.count = count
        self._top: list[tuple[float, Tensor, int]] = []  # norm, image, label

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if getattr(data_of(trainer), "task", "classification") != "classification":
            raise ValueError(
                "HardSamples names the class of each image, but the data have masks, or several "
                "labels or targets"
            )
        super().on_fit_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._top = []

    def read(self, trainer: pl.Trainer, module: Any, squares: Tensor, batch: Any) -> None:
        # rounding can make a sum of products slightly negative
        norms = squares.clamp(min=0).sqrt()
        module.log("gradients/sample_median", norms.median(), on_step=True, on_epoch=False)
        module.log("gradients/sample_max", norms.max(), on_step=True, on_epoch=False)
        images, labels = batch
        values, places = norms.topk(min(self.count, len(norms)))
        labels = true_classes(labels)
        # clones: a view would keep the whole batch in memory
        hardest = [
            (float(v), images[i].detach().clone(), int(labels[i]))
            for v, i in zip(values, places.tolist(), strict=True)
        ]
        # sort by the norm, the first item: images have no order
        self._top = sorted([*self._top, *hardest], key=lambda t: -t[0])[: self.count]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not self._top or not trainer.is_global_zero:
            return
        images = to_pixels(trainer, torch.stack([image for _, image, _ in self._top]))
        names = class_names(trainer, pl_module.model.num_classes)
        captions = [f"{names[label]}\nnorm {norm:.3g}" for norm, _, label in self._top]
        # the last step, counted from 0 as in Lightning's logs
        step = trainer.global_step - 1
        add_figure(trainer, "hard_samples", lambda: images_figure(images, captions), step)
