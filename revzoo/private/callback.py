"""Differentially private training (DP-SGD), with any optimiser.

    g = (sum over the batch of g_n * min(1, C / |g_n|) + N(0, (s C)^2)) / E

with the gradients g_n of single samples, the largest norm C, the noise multiplier s and the
expected size E of a batch. Each batch draws each image with the same probability (M. Abadi et al.,
"Deep Learning with Differential Privacy", CCS 2016, arXiv 1607.00133, algorithm 1). Gradients are
clipped inside the backward pass, in the network's memory mode
(:mod:`revzoo.private.clipping`); Opacus computes the spent budget.

NOTE [ What is private ]
    1. The weights of a run are (epsilon, delta)-private for adding or removing one training image.
    2. Its log is not private: training loss and accuracy come from the images, unclipped and
       without noise. The pixel statistics of the data module and choices between runs are not
       private, either.
    3. Batches and noise come from torch's generators and the run's seed: keep the seed of published
       weights secret, and do not pick the best of several seeds.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from revzoo._checks import check_choice, check_number, package_needed
from revzoo.data import ImageData
from revzoo.data.order import PoissonSampler, hash_seed
from revzoo.private.clipping import ClippedGradients
from revzoo.private.gradients import refuse_unsupported
from revzoo.training.callbacks.registry import ChecksModel, RestoresAfterFit
from revzoo.training.lightning_compat import batches_of_epoch, data_of
from revzoo.training.optim.optimizers import BALANCED

log = logging.getLogger(__name__)

PRECISIONS = ("32-true", "64-true")  # a norm rounded to fewer bits would bound nothing


class PrivateTraining(RestoresAfterFit, ChecksModel):
    """Clips and perturbs gradients, draws Poisson batches, logs ``private/epsilon`` every epoch.

    The state of the accountant and the noise multiplier are part of a checkpoint, so a resumed run
    continues both.

    Args:
        epsilon: the budget that the whole run may spend.
        delta: the probability with which the guarantee may fail; less than 1 / training images.
        max_grad_norm: C.
        noise_multiplier: s; None for the smallest that keeps the budget. A value that you give may
            exceed the budget: watch ``private/epsilon``.
        accountant: ``"rdp"``; ``"prv"`` needs about 5 % less noise, and a minute to find it.

    Raises:
        ValueError: an argument is out of range. When training starts: Opacus is missing, the model
            has a batch normalisation, images are mixed, the weights of classes come from the data,
            or the trainer has options that do not fit.
    """

    def __init__(
        self,
        *,
        epsilon: float = 8.0,
        delta: float = 1e-5,
        max_grad_norm: float = 1.0,
        noise_multiplier: float | None = None,
        accountant: str = "rdp",
    ) -> None:
        check_number("epsilon", epsilon, open_low=True, open_high=True)
        check_number("delta", delta, high=1, open_low=True, open_high=True)
        check_number("max_grad_norm", max_grad_norm, open_low=True, open_high=True)
        if noise_multiplier is not None:
            check_number("noise_multiplier", noise_multiplier, open_high=True)
        check_choice("accountant", accountant, ("rdp", "prv"))
        self.epsilon, self.delta, self.max_grad_norm = epsilon, delta, max_grad_norm
        self.options: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "max_grad_norm": max_grad_norm,
            "accountant": accountant,
            "noise_multiplier": noise_multiplier,
        }
        self.noise_multiplier = noise_multiplier
        self._history: list[Any] = []  # of the accountant, from a checkpoint
        self._accountant: Any = None
        self._clipped: ClippedGradients | None = None
        self._sampler: PoissonSampler | None = None
        self._data: ImageData | None = None

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Refuse options that would break the guarantee, and ask for Poisson batches."""
        if stage != "fit":
            return
        try:
            from opacus.accountants import create_accountant
        except ImportError:
            raise ValueError(package_needed("callbacks.private needs", "opacus")) from None
        for wrong, why in _conflicts(trainer, pl_module):
            if wrong:
                raise ValueError(f"callbacks.private {why}")
        self.check_model(pl_module.model)
        self._data = data_of(trainer)
        assert self._data is not None
        self._data.poisson = True  # the loaders are built after this hook
        self._history, self.noise_multiplier = [], self.options["noise_multiplier"]
        self._accountant = create_accountant(self.options["accountant"])

    def check_model(self, network: nn.Module) -> None:
        """Raise a ValueError for a layer that mixes samples."""
        refuse_unsupported(network)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Choose the noise, and clip from here on: images, steps and checkpoint are known now."""
        # Lightning types the loader as any collection
        sampler = trainer.train_dataloader.sampler  # type: ignore[union-attr]
        assert isinstance(sampler, PoissonSampler)
        images, largest = len(sampler.dataset), self.max_grad_norm  # type: ignore[arg-type]
        if self.delta >= 1 / images:
            raise ValueError(
                f"callbacks.private.delta={self.delta} for {images} training images: "
                f"expected less than {1 / images:.1e}, since publishing one image at random would "
                "satisfy it"
            )
        # as Opacus writes them; a checkpoint holds lists
        self._accountant.history = [tuple(entry) for entry in self._history]
        self.noise_multiplier = self._noise_for(trainer, sampler.rate)
        expected = sampler.rate * images

        # the sampler replaces an empty batch by one image; division by infinity drops its gradient
        def size(count: int) -> float:
            drawn = count > 1 or sampler.batch(trainer.current_epoch, batches_of_epoch(trainer) - 1)
            # DDP averages the gradients of processes, the definition sums them
            return expected / trainer.world_size if drawn else math.inf

        self._sampler, self._scale = sampler, largest * self.noise_multiplier / expected
        self._clipped = ClippedGradients(pl_module.model, largest, size=size)
        if trainer.is_global_zero:
            log.info(
                "private: noise multiplier %.4g, batches of %.0f images on average",
                self.noise_multiplier,
                expected,
            )

    def _noise_for(self, trainer: pl.Trainer, rate: float) -> float:
        """The noise multiplier: the user's, the checkpoint's, or the smallest for the budget."""
        chosen: float | None = self.options["noise_multiplier"]
        if chosen is not None:
            return chosen
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ValueError(
                "a run without an end has no budget: give trainer.max_epochs or "
                "trainer.max_steps, or callbacks.private.noise_multiplier"
            )
        if self.noise_multiplier is not None:
            self._refuse_overspending(int(steps) - trainer.global_step, rate)
            return self.noise_multiplier
        from opacus.accountants.utils import get_noise_multiplier

        noise = _quiet(
            get_noise_multiplier,
            target_epsilon=self.epsilon,
            target_delta=self.delta,
            sample_rate=rate,
            steps=int(steps),
            accountant=self.options["accountant"],
        )
        return float(noise)

    def _refuse_overspending(self, steps: int, rate: float) -> None:
        """Raise a ValueError if the remaining steps, with the checkpoint's noise, cost too much."""
        # count the remaining steps in the accountant, then take them back
        before = list(self._accountant.history)
        for _ in range(steps):
            self._accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=rate)
        end, self._accountant.history = self.spent(), before
        # the planned end spends the whole budget, up to rounding
        if end > self.epsilon * (1 + 1e-6):
            raise ValueError(
                f"{steps} more steps with the noise of the checkpoint would spend epsilon "
                f"{end:.4g}, expected at most callbacks.private.epsilon={self.epsilon}: "
                "resume with the epochs and the batch size that the run began with"
            )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the noise, the same in all processes, and count the step."""
        assert self._sampler is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        generator = torch.Generator(pl_module.device)
        # from seed and step only: a resumed run repeats the noise, and processes agree on it
        generator.manual_seed(noise_seed(self._sampler.seed, trainer.global_step))
        for p in parameters:
            if not p.requires_grad:
                continue
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
            noise *= self._scale
            # even without a gradient: missing noise would reveal an empty batch
            p.grad = noise if p.grad is None else p.grad.add_(noise)
        self._accountant.step(
            noise_multiplier=self.noise_multiplier, sample_rate=self._sampler.rate
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.log("private/epsilon", self.spent(), rank_zero_only=True)

    def spent(self) -> float:
        """Epsilon of all steps so far, at ``delta``."""
        # Opacus raises for an empty history
        if not len(self._accountant):
            return 0.0
        return float(_quiet(self._accountant.get_epsilon, self.delta))

    def state_dict(self) -> dict[str, Any]:
        # Lightning also asks for the state in runs that only test
        if self._accountant is None:
            return {}
        return {
            "history": [list(entry) for entry in self._accountant.history],
            "noise_multiplier": self.noise_multiplier,
            "options": dict(self.options),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the accountant and the noise of the run that saved it.

        Raises:
            ValueError: the run has different options.
        """
        if (before := state_dict["options"]) != self.options:
            raise ValueError(
                f"callbacks.private is {self.options} now, {before} in the "
                "checkpoint: resume with the same options, or start a new run"
            )
        self._history = state_dict["history"]
        self.noise_multiplier = state_dict["noise_multiplier"]

    def undo(self, pl_module: pl.LightningModule) -> None:
        if self._clipped is not None:
            self._clipped.remove()
        if self._data is not None:
            self._data.poisson = False
        self._clipped = self._data = None


def noise_seed(seed: int, step: int) -> int:
    """The seed of an optimiser step's noise, which batches and augmentation do not use."""
    # those hash up to four numbers; the fifth here must not be 0: trailing zeros do not count
    return hash_seed(seed, step, 0, 0, 1)


def _conflicts(trainer: pl.Trainer, module: Any) -> Iterator[tuple[bool, str]]:
    """Conditions that would break the guarantee, and what to say of each."""
    data, batches = data_of(trainer), trainer.accumulate_grad_batches
    yield (
        not isinstance(data, ImageData),
        f"got {type(data).__name__} as data: expected a data module of revzoo.data, whose batches "
        "can be drawn by Poisson sampling",
    )
    yield (
        data.augment.mixup or data.augment.cutmix,
        "with mixup or cutmix: one image would change the gradients of two samples. Set "
        "data.augment.mixup=0 and data.augment.cutmix=0",
    )
    yield (
        module.optim.class_weights == BALANCED,
        f"with optim.class_weights={BALANCED}: one image would change the weights of all others. "
        "Give a list of numbers, which do not come from the data",
    )
    yield (
        batches != 1,
        f"with trainer.accumulate_grad_batches={batches}: expected 1, since several batches drawn "
        "one by one are not a Poisson batch. Raise data.batch_size: memory=exact has room for "
        "larger batches",
    )
    yield (
        trainer.precision not in PRECISIONS,
        f"with precision {trainer.precision!r}: expected one of {', '.join(PRECISIONS)} "
        "(precision=fp32), since clipping must bound the norm",
    )
    yield bool(trainer.overfit_batches), "with trainer.overfit_batches: expected 0"  # type: ignore[attr-defined]
    # gradients of a model in evaluation mode are not clipped
    yield not module.model.training, "needs the model in training mode: call model.train()"


def _quiet(fn: Any, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        # Opacus warns if the best order of the Renyi divergence is the first or last that it tries
        warnings.filterwarnings("ignore", "Optimal order is the")
        return fn(*args, **options)
