"""Image classification as a Lightning module: loss, metrics, optimiser.

The model is a plain specification (the arguments of :func:`revzoo.models.create_model`) or a module
passed as an instance. Checkpoints keep specifications as plain containers, so they load with
``weights_only=True`` and without a configuration library.

The training loss (``optim.loss``, by default the cross-entropy) may be smoothed
(``label_smoothing``) and weighted (``class_weights``); validation and test losses never are, so
they compare across recipes with one loss. The other tasks are subclasses, see
:mod:`revzoo.training.tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from revzoo._checks import did_you_mean, shortened
from revzoo.core.modes import mode_of
from revzoo.data import DataError, ImageData
from revzoo.data.images import Batch
from revzoo.data.state import check_state, normalisation_for
from revzoo.layers.make_reversible import described_runs
from revzoo.layers.norm_act import ActNorm
from revzoo.layers.side_bits import NAME, SideBits
from revzoo.models import create_model
from revzoo.models.network import ImageNetwork
from revzoo.models.registry import WEIGHTS_ARGUMENTS
from revzoo.models.weights_file import check_module
from revzoo.training.checkpoint.files import (
    CheckpointError,
    check_hyperparameters,
    check_model_options,
    read_checkpoint,
)
from revzoo.training.lightning_compat import (
    all_callbacks,
    batches_of_step,
    check_accumulation,
    data_of,
    logs_step,
    trainer_of,
)
from revzoo.training.metrics import (
    by_split,
    classification_figures,
    count_unrepeated,
    log_metrics,
    true_classes,
)
from revzoo.training.optim.optimizers import (
    BALANCED,
    ConstantSchedule,
    OptimSpec,
    build_optimizer,
    build_schedule,
    make_schedule,
)
from revzoo.training.resume import RunState
from revzoo.training.step_retry import FiniteLoss, StepRetry
from revzoo.training.tasks.losses import CLASSIFICATION, Loss
from revzoo.training.tta import flipped_mean
from revzoo.weights.errors import WeightsError
from revzoo.weights.source import resolve_source


class Classifier(pl.LightningModule):
    """Train, validate, test and predict with a classification model.

    Batches are ``(images, labels)``: float images (B, C, H, W), already normalised, and int64
    labels (B,) or class probabilities (B, num_classes), whose largest counts for the accuracy. Logs
    ``train/loss``, ``train/acc``, ``val/loss``, ``val/acc``, ``test/loss`` and ``test/acc`` per
    epoch, accuracies in [0, 1]; ``train/loss_step`` every ``log_every_n_steps`` of the trainer.
    Validation and test also log ``balanced_acc``, ``f1``, ``auroc``, ``ap`` (average precision),
    ``sensitivity`` and ``specificity``, means over the classes; ``ece``, the calibration error; and
    ``acc5`` if there are more than five classes. With two classes ``ap``, ``sensitivity`` and
    ``specificity`` are those of the second one.

    A subclass may override :meth:`loss`.

    Attributes:
        task: the value of ``ImageData.task`` that the module trains on.
        losses: the choices of ``optim.loss``, the default first.
        monitor: the figure that chooses the best checkpoint by default.
        console: the figures that a run prints.
        graph: replays training steps as a CUDA graph, see
            :mod:`revzoo.training.callbacks.cuda_graph`; None without one.
        tta: ``"flip"``: evaluations take the mean over an image and its mirror image.

    Args:
        model: a module ``(B, C, H, W) -> (B, num_classes)`` with an attribute ``num_classes``, or
            the keyword arguments of :func:`revzoo.models.create_model` with ``name``.
        optim: see :class:`OptimSpec`.
        channels_last: keep weights and images in torch's channels-last memory format, which
            changes the speed of convolutions, and values by rounding only.

    Raises:
        ValueError: a specification has an unknown model, option or value, or a value that a
            checkpoint cannot hold.

    Example:
        >>> from revzoo.training.classifier import Classifier
        >>> module = Classifier({"name": "revnet38", "num_classes": 10}, optim={"lr": 0.1})
    """

    task: ClassVar[str] = "classification"
    losses: ClassVar[Mapping[str, Loss]] = CLASSIFICATION
    monitor: ClassVar[str] = "val/acc"
    console: ClassVar[tuple[str, ...]] = ("loss", "acc", "balanced_acc", "acc5")
    graph: Any = None
    tta: str | None = None
    _logged_in: int | None = None  # the epoch

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        *,
        optim: OptimSpec | Mapping[str, Any] | None = None,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.optim = OptimSpec.of(optim)
        if (loss := self.optim.loss) not in (None, *self.losses):
            raise ValueError(
                f"optim.loss={loss} with task={self.task}: expected one of "
                f"{', '.join(self.losses)}{did_you_mean(loss, self.losses)}"
            )
        # plain containers: weights_only refuses Hydra's types
        plain: dict[str, Any] = {"optim": self.optim.plain(), "channels_last": channels_last}
        self.model = model if isinstance(model, nn.Module) else model_from(model)
        self.class_weights = self._listed_weights()
        if not isinstance(model, nn.Module):
            # a module passed as an instance cannot be created again from a file
            plain["model"] = _storable(model, self.model)
        self.save_hyperparameters(plain)
        self.lay_out(channels_last=channels_last)
        # a submodule: Lightning moves its states to the device
        self.metrics = by_split(self.figures)
        self.retry = StepRetry(self)

    def figures(self, evaluated: bool) -> dict[str, Metric]:
        """The figures of a split besides the loss; training has fewer than an evaluation."""
        return classification_figures(class_count(self.model), evaluated)

    def measured(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The arguments of the metrics' ``update`` for a batch."""
        return {"preds": logits, "target": true_classes(labels)}

    def lay_out(self, *, channels_last: bool) -> None:
        """Set the memory format of weights and images; under bfloat16 it changes rounding.

        Networks of signals and volumes keep the default.
        """
        last = channels_last and getattr(self.model, "dims", 2) == 2
        self.memory_format = torch.channels_last if last else torch.contiguous_format
        self.model.to(memory_format=self.memory_format)

    @property
    def memory_mode(self) -> str:
        """The mode of a model from the zoo; ``store`` for one that keeps the same elsewhere."""
        mode = str(self.hparams["model"].get("memory") or self.model.default_memory)
        return "store" if mode_of(mode).on_host else mode

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = "cpu",
        *,
        strict: bool = True,
        **options: Any,
    ) -> Self:
        """Load a local checkpoint. Its hyperparameters must be plain options of the zoo.

        Why not Lightning's: see :mod:`revzoo.training.checkpoint.files`.

        Args:
            checkpoint_path: a checkpoint that a run saved, or the run's folder for its best one.
            map_location: the device of the tensors.
            strict: whether the checkpoint must have exactly the tensors of the module.
            options: arguments of the constructor that replace the file's; ``model`` is required if
                the run trained a module passed as an instance. ``weights_only`` has no effect: the
                file is always read as plain data.

        Raises:
            CheckpointError: the file is damaged, its hyperparameters are refused, or its tensors do
                not fit the model or hold NaN or Inf.
            WeightsError: the folder has no best checkpoint.
            ValueError: one of ``options`` is wrong.
        """
        options.pop("weights_only", None)
        if Path(checkpoint_path).is_dir():
            checkpoint_path = resolve_source(checkpoint_path)
        state = read_checkpoint(checkpoint_path, map_location=map_location)
        module = cls.from_state(state, str(checkpoint_path), strict=strict, **options)
        tensors = (v for v in state["state_dict"].values() if isinstance(v, Tensor))
        # the constructor ignores map_location; the tensors have followed it
        return module.to(next(tensors, torch.empty(0)).device)

    @classmethod
    def from_state(
        cls, state: dict[str, Any], where: str, *, strict: bool = True, **options: Any
    ) -> Self:
        """As :meth:`load_from_checkpoint`, from the content of the file ``where``; on the CPU."""
        hyper = check_hyperparameters(_with_runs(state), replaced=options)
        try:
            module = cls(**{**hyper, **options})
        except Exception as error:  # wrong options from a file can raise anything
            if options:  # the caller's own arguments may be wrong, not the file
                raise
            raise CheckpointError(
                f"the model of {where} cannot be created ({type(error).__name__}: {error!s:.300}): "
                "use the version of revzoo that wrote it"
            ) from None
        module.on_load_checkpoint(state)  # Lightning's loader would call it
        try:
            check_module(module, state["state_dict"], where, strict=strict)
            if (data := saved_data(state)) is not None:
                channels = getattr(module.model, "in_chans", None)
                check_state(data, num_classes=class_count(module.model), in_chans=channels)
        except WeightsError as error:
            raise CheckpointError(str(error)) from None
        except DataError as error:
            raise CheckpointError(f"{where} cannot be used: {error}") from None
        module.load_state_dict(state["state_dict"], strict=strict)
        module.learn_from(data)
        return module

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the runs of reversible blocks and their bits, which training may change."""
        model = checkpoint["hyper_parameters"].get("model") or {}
        if not model.get("reversible_bits"):
            return
        checkpoint["reversible_runs"] = described_runs(self.model)
        bits = [step.bits for step in self.model.modules() if isinstance(step, SideBits)]
        if bits and model["reversible_bits"] != "auto":
            model = {**model, "reversible_bits": max(bits)}
            checkpoint["hyper_parameters"] = {**checkpoint["hyper_parameters"], "model": model}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give reversible blocks the bits that the saved weights were trained with.

        Raises:
            CheckpointError: other blocks are reversible.
        """
        model = checkpoint.get("hyper_parameters", {}).get("model") or {}
        saved = checkpoint.get("reversible_runs")
        if not model.get("reversible_bits"):
            return
        if saved is None and (self.hparams.get("model") or {}).get("reversible_runs") == "all":
            return  # of an earlier version, see _with_runs
        if saved is None:
            raise CheckpointError(
                "the checkpoint does not list its reversible blocks, since an earlier version of "
                "revzoo wrote it: resume the run with that version"
            )
        present = {
            path: step for path, step in self.model.named_modules() if isinstance(step, SideBits)
        }
        bits = dict(word.rpartition(":")[::2] for run in saved for word in run.split())
        if {f"{path}.{NAME}" for path in bits} != present.keys():
            raise CheckpointError(
                f"the checkpoint has the reversible blocks {shortened([*bits])}, the model others: "
                "give the options that it was trained with (model.reversible_runs, the size of "
                "the images)"
            )
        for path, count in bits.items():
            present[f"{path}.{NAME}"].bits = int(count)

    def setup(self, stage: str) -> None:
        """Compare the number of classes with the data's, and count the images for the weights."""
        data = data_of(self.trainer)
        classes = getattr(data, "num_classes", None)
        # otherwise cross-entropy fails on a GPU without a message, or trains idle logits
        if isinstance(classes, int) and classes != class_count(self.model):
            raise ValueError(
                f"the model has num_classes={class_count(self.model)}, the data have {classes} "
                f"classes: create the model with num_classes={classes}"
            )
        if stage == "fit":
            check_accumulation(self.trainer)
            self.balance(data)

    def balance(self, data: Any) -> None:
        """Learn from the training labels, after their ``setup``: the weights ``balanced``."""
        if self.optim.class_weights != BALANCED:
            return
        if not isinstance(data, ImageData):
            raise ValueError(
                f"optim.class_weights={BALANCED} counts the images of a data module of "
                f"revzoo.data, got {type(data).__name__}: give a list of numbers, one per class"
            )
        self.class_weights = self.balanced(data.train_labels, data.classes)

    def balanced(self, labels: Tensor, classes: Sequence[str]) -> Tensor:
        """The weights ``balanced`` of the classes (C,), in float64."""
        counted = labels[labels < len(classes)]  # of masks, 255 does not count
        return balanced_weights(counted, classes)

    def _listed_weights(self) -> Tensor | None:
        """The weights that the options list; None without a list."""
        weights = self.optim.class_weights
        if weights is None or weights == BALANCED:
            return None
        if len(weights) != (count := class_count(self.model)):
            raise ValueError(
                f"optim.class_weights={list(weights)}: expected {count} numbers, one for each class"
            )
        return torch.tensor(weights, dtype=torch.float64)

    def on_train_start(self) -> None:
        """Describe the data to the network, so that :meth:`save_pretrained` can write them."""
        self._check_norms()
        data = data_of(self.trainer)
        self.learn_from(data.state_dict() if isinstance(data, ImageData) else None)

    def _check_norms(self) -> None:
        """Refuse an ActNorm without values in several processes: each would set its own."""
        blank = [
            name
            for name, m in self.model.named_modules()
            if isinstance(m, ActNorm) and not m.initialised
        ]
        divided = isinstance(self.trainer.strategy, ModelParallelStrategy)
        if blank and (divided or self.trainer.world_size > 1):
            raise ValueError(
                f"the first batch sets {shortened(blank, 2)} (ActNorm), and each process would set "
                "its own: train a step in one process without fsdp2, and begin with its weights, "
                "model.checkpoint_path=RUN/checkpoints/last.ckpt"
            )

    def learn_from(self, data_state: Mapping[str, Any] | None) -> None:
        """Set the network's facts from the state of a data module; None if the data are unknown."""
        if isinstance(self.model, ImageNetwork):
            facts = {} if data_state is None else facts_of(data_state, self.model)
            self.model.trained_on, self.model.fresh_head = facts, False

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, C, H, W)."""
        return self.model(images.contiguous(memory_format=self.memory_format))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss () of a batch, ``optim.loss``, which a subclass may replace.

        Training, validation and test call it. In training (``self.training``) ``optim`` says how
        labels are smoothed, rounded and weighted.

        Args:
            logits: (B, num_classes), float32 or float64.
            labels: int64 (B,), or class probabilities (B, num_classes).

        Raises:
            ValueError: the weights are ``balanced``, and no images were counted.
        """
        function = self.losses[self.optim.loss or next(iter(self.losses))]
        if not self.training:
            return function(logits, labels)
        weight = None if self.optim.class_weights is None else self.weights_for(logits)
        threshold = self.optim.label_threshold
        if threshold is not None and labels.is_floating_point():
            labels = (labels > threshold).to(labels)
        return function(logits, labels, weight=weight, smoothing=self.optim.label_smoothing)

    def weights_for(self, logits: Tensor) -> Tensor:
        """The weights (C,) of the classes, in the dtype and on the device of the logits.

        Raises:
            ValueError: the weights are ``balanced``, and no images were counted.
        """
        if self.class_weights is None:
            raise ValueError(
                f"optim.class_weights={BALANCED} needs the training images: call balance(DATA) "
                "after DATA.setup('fit'), as a Lightning trainer does"
            )
        # copied to the device at the first step only
        weights = self.class_weights = self.class_weights.to(logits)
        return weights

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        if self.in_graph:
            self.retry.loss = None
            loss, logits = self.graph.replay(batch)
        else:
            self.retry.begin(batch, batch_idx)
            loss, logits = self.retry.forward(lambda: self.loss_and_logits(images, labels))
        self.update_metrics("train", loss, logits, labels)
        return loss

    def loss_and_logits(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The forward pass of a step: the loss (), and logits (B, num_classes)."""
        logits = at_least_float32(self(images))
        return self.loss(logits, labels), logits

    @property
    def in_graph(self) -> bool:
        """Whether a CUDA graph runs this training step."""
        return self.graph is not None and self.graph.replaying

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; compute the step again after a failure that can be mended."""
        if self.in_graph:
            self.graph.give_gradients()
            return
        # super() without arguments does not work inside the lambda
        backward = super().backward
        self.retry.backward(loss, lambda loss: backward(loss, *args, **kwargs))
        # Lightning divides each loss by accumulate_grad_batches, but the last step of an epoch may
        # sum fewer batches; only now is it sure that a stream without a length has ended
        planned, summed = self.trainer.accumulate_grad_batches, batches_of_step(self.trainer)
        if summed is not None and summed != planned:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(planned / summed)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures of the epoch; validate before a run of ``max_steps`` ends."""
        trainer, metrics = self.trainer, self.metrics_of("train")
        # once per epoch: Lightning computes the logged metrics at its end
        if self._logged_in != trainer.current_epoch:
            self._logged_in = trainer.current_epoch
            if all(m.update_called for m in metrics.values()):  # a subclass may not use them
                log_metrics(self, metrics)
        if 0 < trainer.max_steps <= trainer.global_step:
            # Lightning 2.6 validates before it obeys this, but not when it reaches max_steps by
            # itself: the final weights could never be the best
            trainer.should_stop = True
        # here, since should_stop makes the loggers write this step; only then, since log is slow;
        # and at the end of an epoch, for the summary of the run
        if outputs and (logs_step(trainer) or trainer.is_last_batch):
            loss = outputs["loss"] * trainer.accumulate_grad_batches  # Lightning has divided it
            self.log("train/loss_step", loss, on_step=True, on_epoch=False, prog_bar=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the logits (B, num_classes), for callbacks that show them."""
        return self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Return the :meth:`predicted` values of a batch; its labels are ignored."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.predicted(self.evaluated(images))

    def predicted(self, logits: Tensor) -> Tensor:
        """Class probabilities (B, num_classes)."""
        return logits.softmax(dim=1)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Callbacks of every run: stop at NaN, resume exactly."""
        if (trainer := trainer_of(self)) is not None:
            # an earlier fit left such callbacks; Lightning would log that it replaces them
            present = all_callbacks(trainer)
            present[:] = [c for c in present if type(c) not in (FiniteLoss, RunState)]
        return [FiniteLoss(), RunState()]

    def training_metrics(self) -> dict[str, Metric]:
        return dict(self.metrics_of("train").items(keep_base=True))

    def planned_steps(self) -> float | None:
        """The optimiser steps that the schedule covers; None for constant rates."""
        if isinstance(make_schedule(self.optim.schedule), ConstantSchedule):
            return None
        return self.trainer.estimated_stepping_batches

    def configure_optimizers(self) -> Any:
        """The optimiser, and its schedule over the whole run, which follows every step."""
        total = self.planned_steps() or 1  # a constant rate ignores it
        if total == float("inf"):
            raise ValueError(
                "the schedule of the learning rate needs the length of the run: give "
                'trainer.max_epochs or trainer.max_steps, or use the schedule "constant"'
            )
        optimizer = build_optimizer(self.model, self.optim)
        schedule = build_schedule(optimizer, self.optim, total_steps=int(total))
        scheduler = {"scheduler": schedule, "interval": "step", "name": "lr"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def evaluated(self, images: Tensor) -> Tensor:
        """The logits (B, num_classes) of images in an evaluation, by :attr:`tta`."""

        def network(images: Tensor) -> Tensor:
            return at_least_float32(self(images))

        return flipped_mean(network, images, self.task) if self.tta == "flip" else network(images)

    def _evaluate(self, split: str, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.evaluated(images)
        loaders = getattr(trainer_of(self), f"{split}_dataloaders", None)
        # all images of a process may be repeated ones
        if count := count_unrepeated(loaders, batch_idx, len(logits)):
            loss = self.loss(logits[:count], labels[:count])
            self.update_metrics(split, loss, logits[:count], labels[:count])
            log_metrics(self, self.metrics_of(split))
        return logits

    def update_metrics(self, split: str, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: its mean loss (), logits (B, num_classes) and labels, as in the batch."""
        # one loss per image: MeanMetric ignores weights if it does not check values
        values, metrics = loss.detach().expand(len(labels)), self.metrics_of(split)
        where = next(iter(metrics.values())).device  # the logits of windows are on the CPU
        measured = self.measured(logits.detach(), labels)
        metrics.update(value=values, **{name: t.to(where) for name, t in measured.items()})

    def metrics_of(self, split: str) -> MetricCollection:
        """The metrics of ``train``, ``val`` or ``test``."""
        return cast(MetricCollection, self.metrics[f"{split}_metrics"])


def balanced_weights(labels: Tensor, classes: Sequence[str]) -> Tensor:
    """The weights (C,) in float64 for training images with ``labels`` (n,).

    As scikit-learn's ``class_weight="balanced"``, ``w_c = n / (C n_c)`` for n images of C classes
    (G. King and L. Zeng, "Logistic Regression in Rare Events Data", Political Analysis 2001).

    Raises:
        DataError: a class has no training images.
    """
    counts = torch.bincount(labels, minlength=len(classes)).double()
    if empty := [name for name, n in zip(classes, counts.tolist(), strict=True) if not n]:
        raise DataError(
            f"optim.class_weights={BALANCED} divides by the number of images of each class, but "
            f"there are no training images of {shortened(empty)}: add some, or give a list of "
            "numbers, one for each class"
        )
    return counts.sum() / (len(classes) * counts)


def model_from(spec: Mapping[str, Any]) -> nn.Module:
    """Create the model of a plain specification; the zoo checks its name and keywords."""
    if not isinstance(spec, Mapping):
        raise ValueError(f'model={spec!r}: expected a module or a mapping {{"name": "revnet38"}}')
    options = dict(spec)
    name = options.pop("name", None)
    if name is None:
        raise ValueError("model.name is missing: give the name of a model, such as revnet38")
    return create_model(name, **options)


def _with_runs(state: Mapping[str, Any]) -> Any:
    """The hyperparameters of a checkpoint, with the runs of blocks that are reversible in it."""
    hyper = state.get("hyper_parameters", {})
    model = hyper.get("model") if isinstance(hyper, dict) else None
    if not isinstance(model, dict) or not model.get("reversible_bits"):
        return hyper
    # older checkpoints have all runs
    runs = state.get("reversible_runs", "all")
    return {**hyper, "model": {**model, "reversible_runs": runs}}


def _storable(spec: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The specification for a checkpoint; a ValueError if a checkpoint could not be loaded."""
    kept = {key: value for key, value in spec.items() if key not in WEIGHTS_ARGUMENTS}
    # weights may change classes and options, and their name differs from their architecture's
    made = model.spec if isinstance(model, ImageNetwork) else None
    if made is not None and (kept != spec or kept["name"] != made.architecture):
        sizes = {"num_classes": model.num_classes, "in_chans": model.in_chans}
        options = {k: v for k, v in made.options.items() if k != "reversible_runs"}
        kept |= {**options, **sizes, "name": made.architecture}
    try:
        return check_model_options(kept)
    except CheckpointError as error:
        raise ValueError(
            f"{error}; a run's checkpoints could not be loaded: choose a number, a word, or a "
            "list of them"
        ) from error


def class_count(model: nn.Module) -> int:
    """The number of classes of a model; a ValueError without an attribute ``num_classes``."""
    count = getattr(model, "num_classes", None)
    if not isinstance(count, int):
        raise ValueError(
            f"{type(model).__name__}.num_classes is {count!r}: give the module an attribute "
            "num_classes, the number of its logits"
        )
    return count


def saved_data(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the data module in a checkpoint; None unless there is exactly one."""
    needed = {"classes", "normalisation"}  # Lightning's key is the name of the class
    found = [v for v in state.values() if isinstance(v, dict) and needed <= set(v)]
    return found[0] if len(found) == 1 else None


def facts_of(data_state: Mapping[str, Any], network: ImageNetwork) -> dict[str, Any]:
    """The fields of a weights entry from the state of a data module, for pixels in [0, 1]."""
    task, targets = data_state.get("task", Classifier.task), data_state.get("targets") or {}
    return {
        "classes": tuple(data_state["classes"]),
        **{k: tuple(v) for k, v in normalisation_for(data_state, 1).items()},
        "crop_pct": data_state.get("crop_pct"),
        "input_size": network.batch_shape(1, data_state.get("image_size"))[1:],
        **({} if task == Classifier.task else {"task": task}),
        **{f"target_{name}": tuple(values) for name, values in targets.items()},
    }


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits for a loss: float32 after autocast; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
