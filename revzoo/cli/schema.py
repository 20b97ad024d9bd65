"""Every option of a run: its name, type, default, range, choices and meaning.

The files in ``configs/`` hold values, this file the options. :mod:`revzoo.cli.config` compares a
composed configuration with it before torch is imported, ``revzoo options`` prints it, and the
reference in the documentation is made from it. A test compares it with the constructors.

The options of a plugin are the parameters of the class or function that it has registered.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from revzoo._checks import check_choice, did_you_mean, shortened
from revzoo._libraries import LIBRARIES, check_library_name, library_hint
from revzoo.cli.terminal import ConfigError
from revzoo.training.figure_names import ORDER, SURFACES, higher_is_better

MISSING: Any = "???"  # as in OmegaConf
CONFIGS = Path(str(files("revzoo.configs")))
Config = Mapping[str, Any]
NUMBER = int | float | None
COUNT, RATE, PART, LEAST_0 = "[1, inf)", "(0, inf)", "[0, 1)", "[0, inf)"
ACTIVATIONS = ("relu", "leaky_relu", "elu", "gelu", "silu", "hardswish", "tanh")
CONVENTIONS = ("gomez", "gomez_same", "memcnn", "memcnn_fix")
MODES = ("store", "offload", "recompute", "invert", "exact")
ACCELERATORS = ("auto", "gpu", "cuda", "mps", "cpu")
PROFILERS = ("simple", "advanced", "pytorch")
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")
PLANS = ("auto", "balanced", "budget")
OPTIMIZERS = ("sgd", "adamw", "muon", "lamb")
BITS = ("saved", *range(1, 9))
MONITORED = {
    f"{split}/{name}": "max" if higher_is_better(name) else "min"
    for split, names in (("val", ORDER), ("train", ("loss", "acc", "mae")))
    for name in names
    if name not in SURFACES
}  # logged figures -> whether the best is the largest or the smallest
TASKS = ("classification", "multilabel", "regression", "segmentation")
LOSSES = (
    *("cross_entropy", "focal", "ordinal", "bce"),
    *("mse", "mae", "huber", "dice_ce"),
)


@dataclass(frozen=True)
class Option:
    """An option."""

    type: Any  # a type hint
    default: Any  # ??? if it must be given
    about: str  # its meaning, one line
    range: str = ""  # of numbers, such as [0, 1)
    choices: Sequence[Any] = ()  # all valid values, besides null where the type allows it
    pattern: str = ""  # a regular expression: of texts that are valid besides ``choices``
    also: Sequence[Any] = ()  # valid besides ``range``
    remedy: str = ""  # the end of messages about its value
    registry: str = ""  # the name in REGISTRIES of a table of more choices

    @property
    def within(self) -> str:
        """The range in words: ``>= 1``, ``> 0`` or ``in [0, 1)``."""
        low = self.range[1:-1].partition(",")[0]
        least = f"> {low}" if self.range.startswith("(") else f">= {low}"
        return least if self.range.endswith("inf)") else f"in {self.range}"


@dataclass(frozen=True)
class Section:
    """A mapping of a configuration."""

    about: str  # its meaning, one line
    options: Mapping[str, Option]  # those that are mappings included
    parts: Mapping[str, Section | Chosen]  # these mappings
    default: Any = None  # ??? if the section must be given


@dataclass(frozen=True)
class Chosen:
    """Several sections, of which the option ``by`` chooses one."""

    by: str
    sections: Mapping[Any, Section]
    about: str = ""
    default: Any = None


def section(
    about: str, *bases: Section, default: Any = None, **own: Option | Section | Chosen
) -> Section:
    """A section with the options of its bases, and its own."""
    options: dict[str, Option] = {}
    parts: dict[str, Section | Chosen] = {}
    for base in bases:
        options |= base.options
        parts |= base.parts
    for name, entry in own.items():
        if not isinstance(entry, Option):
            parts[name] = entry
            kind = Mapping | None if entry.default is None else Mapping
            entry = Option(kind, entry.default, entry.about)
        options[name] = entry
    return Section(about, options, parts, default)


AUGMENT = section(
    "random changes of the training images",
    crop_padding=Option(int | None, None, "pixels around the crop; null: 1/8 of the side", LEAST_0),
    crop_scale=Option(float, 0.08, "least share of the area in crops of files", "(0, 1]"),
    flip=Option(bool, True, "mirror left and right, half of the time"),
    policy=Option(
        str | None,
        None,
        "torchvision's, timm's such as rand-m9-mstd0.5-inc1, or a registered one",
        choices=("randaugment", "trivialaugment", "augmix"),
        pattern="rand-.+",
        registry="transforms",
    ),
    magnitude=Option(int, 9, "of randaugment, up to 30", "[0, 30]"),
    rotation=Option(float, 0.0, "degrees, to both sides", "[0, 180]"),
    color=Option(float, 0.0, "largest change of brightness, contrast, saturation", "[0, 1]"),
    blur=Option(float, 0.0, "probability of a Gaussian blur", "[0, 1]"),
    erasing=Option(float, 0.0, "probability that a random box becomes the mean colour", "[0, 1]"),
    erasing_noise=Option(bool, False, "fill the box with noise, as timm does"),
    chunk=Option(int, 1, "images that share one crop offset and one flip", COUNT),
    mixup=Option(float, 0.0, "alpha of Mixup, such as 0.2; 0.0: none", LEAST_0),
    cutmix=Option(float, 0.0, "alpha of CutMix, such as 1.0; 0.0: none", LEAST_0),
)
DIGITS = section(
    "Images of the package.",
    _target_=Option(str, MISSING, "the data set"),
    batch_size=Option(int, 128, "training images per step and process", COUNT),
    eval_batch_size=Option(int, 512, "images per step of validation and test", COUNT),
    num_workers=Option(int | None, None, "loader processes; null: as the data need", LEAST_0),
    val_fraction=Option(float, 0.1, "of the training images, if there is no val/", "(0, 1)"),
    split_seed=Option(int, 0, "chooses the images held back for validation"),
    folds=Option(int, 1, "cross-validation: parts of the training images", COUNT),
    fold=Option(int, 0, "the part to validate with, from 0", LEAST_0),
    augment=AUGMENT,
    on_device=Option(
        str | bool,
        "auto",
        "images in the device's memory; auto: on a GPU, if they take a quarter of it at most",
        choices=("auto", True, False),
    ),
)
CIFAR = section(
    "CIFAR-10 or CIFAR-100.",
    DIGITS,
    root=Option(str, "./data", "folder of the files"),
    download=Option(bool, True, "download missing files"),
)
GIVE_ROOT = "give data.root=DIR, the folder above train/CLASS/*.jpg"
FOLDER = section(
    "A folder of images.",
    DIGITS,
    root=Option(str, MISSING, "the folder above train/CLASS/*.jpg", remedy=GIVE_ROOT),
    image_size=Option(
        int | Sequence | None,
        None,
        "pixels, or [height, width]; null: of the images or the checkpoint",
        COUNT,
    ),
    progressive=Option(
        Sequence | None, None, "[[epoch, side], ...] of growing training images; see the guide"
    ),
    crop_pct=Option(
        float | None,
        None,
        "side of the evaluation's crop in the resized image; null: 0.875, in memory 1",
        "(0, 1]",
    ),
    in_chans=Option(int, 3, "1: grey; other numbers than 1 and 3: as in the files", COUNT),
    cache_bytes=Option(int, 2**32, "workers read larger decoded sets from files", LEAST_0),
    cache_dir=Option(str | None, "auto", "keeps decoded images for the next run; null: none"),
    on_error=Option(str, "raise", "skip: leave unreadable images out", choices=("raise", "skip")),
    max_errors=Option(int, 100, "with skip: at most this many images of a split", COUNT),
)
TABLE = section(
    "Images listed in a table.",
    FOLDER,
    table=Option(
        str, MISSING, "CSV or Parquet: a row for each image", remedy="give data.table=FILE"
    ),
    root=Option(str | None, None, "where relative paths start; null: the table's folder"),
    path_column=Option(str, "path", "of the images"),
    label_column=Option(str | Sequence, "label", "of the classes; several: [a,b]"),
    task=Option(str | None, None, "as the option task", choices=TASKS[:3]),
    split_column=Option(str | None, None, "train, val or test; null: all rows are for training"),
    group_column=Option(str | None, None, "rows with one value, a patient, stay in one split"),
)
COLUMNS = {n: TABLE.options[n] for n in ("path_column", "split_column", "group_column")}
VOLUMES = section(
    "Volumes with masks.",
    DIGITS,
    root=Option(str | None, None, "the folder above train/images and train/labels, or imagesTr"),
    table=Option(str | None, None, "CSV or Parquet: a row for each volume"),
    **COLUMNS,
    label_column=Option(str, "mask", "of the masks"),
    classes=Option(Sequence | None, None, "names by label; null: of dataset.json, or numbers"),
    patch=Option(Sequence, (64, 64, 64), "voxels of a training patch and of a window"),
    patches=Option(int, 1, "of each volume in an epoch", COUNT),
    window=Option(Sequence | None, None, "[low, high] for CT; null: z-scores of each volume"),
)

SHARDS = section(
    "Images in shards of litdata or webdataset.",
    FOLDER,
    root=Option(
        str,
        MISSING,
        "the output of revzoo pack-data: a folder or s3://BUCKET/FOLDER",
        remedy="give data.root=DIR, the output of revzoo pack-data",
    ),
    endpoint_url=Option(str | None, None, "of an S3 service other than AWS"),
    shard_cache_bytes=Option(int, 2**36, "of an address: size of the copies on disk", LEAST_0),
    window=Option(int, 8, "shards whose images are shuffled together", COUNT),
    prefetch=Option(int, 8, "shards of an address that are downloaded ahead", LEAST_0),
)

MASKS = section(
    "Images with masks.",
    FOLDER,
    root=Option(str | None, None, "the folder above train/images and train/masks"),
    classes=Option(
        Sequence | Mapping | None, None, "names: [background, cell], or {0: background, 128: cell}"
    ),
    table=Option(str | None, None, "CSV or Parquet instead of folders"),
    **COLUMNS,
    mask_column=Option(str, "mask", "of the masks"),
)

MODEL = section(
    "Keywords of create_model.",
    name=Option(str, MISSING, "a name of `revzoo list`, alone or with the tag of weights"),
    pretrained=Option(bool, False, "start from the default weights, adapted to the data"),
    checkpoint_path=Option(
        str | None, None, "weights to start from: a file, or the folder of a run"
    ),
    cache_dir=Option(str | None, None, "folder of downloads; null: the user's cache"),
    allow_nonfinite=Option(bool, False, "also load weights with NaN or Inf"),
)
CONVERTIBLE = section(
    "",
    reversible_bits=Option(
        int | str | None,
        None,
        "make blocks reversible; 4 is a good choice; auto: outputs change by 0.5 % at most",
        choices=("auto", *range(1, 9)),
    ),
    reversible_runs=Option(
        str | None,
        None,
        "blocks: null or paying: where it saves memory; checkpoint: recompute the others; all",
        choices=("paying", "checkpoint", "all"),
    ),
)
LIBRARY = section(
    "A network of torchvision or timm.",
    MODEL,
    CONVERTIBLE,
    img_size=Option(int | None, None, "pixels, for networks whose weights depend on it", COUNT),
)
NETWORK = section(
    "",
    MODEL,
    drop_rate=Option(float, 0.0, "dropout of pooled features, before the classifier", PART),
    dropout=Option(float, 0.0, "dropout inside every residual function", PART),
    drop_path_rate=Option(float, 0.0, "stochastic depth: of the last branch; rises from 0", PART),
    activation=Option(str, "relu", "of the residual functions", choices=ACTIVATIONS),
    global_pool=Option(str, "avg", "pooling", choices=("avg", "max", "avgmax", "catavgmax")),
)
CONVOLUTIONAL = section(
    "",
    NETWORK,
    norm=Option(str, "batch", "normalisation", choices=("batch", "group", "none")),
    units=Option(Sequence, None, "number of blocks of each stage"),
    strides=Option(Sequence, None, "stride of each stage"),
)
REVNET = section(
    "A RevNet.",
    CONVOLUTIONAL,
    stem_width=Option(int, None, "channels of the stem", COUNT),
    widths=Option(Sequence, None, "channels of each stage"),
    branch=Option(str, None, "residual function", choices=("basic", "bottleneck")),
    downsampling_stem=Option(bool, None, "a stem for large images"),
    convention=Option(str, None, "whose code", choices=CONVENTIONS),
)
IREVNET = section(
    "An i-RevNet.",
    CONVOLUTIONAL,
    channels=Option(Sequence | None, None, "channels of a stream in each stage"),
    squeeze=Option(int, None, "factor of the squeeze before the first block", COUNT),
    bottleneck=Option(int, None, "output width of a branch over its inner width", COUNT),
    image_size=Option(int, None, "pixels of the publication's images", COUNT),
)
REVVIT = section(
    "A reversible vision transformer.",
    NETWORK,
    activation=Option(str, "gelu", "of the MLPs", choices=ACTIVATIONS),
    img_size=Option(int, 224, "side of the images in pixels", COUNT),
    patch_size=Option(int, 16, "side of a patch in pixels; divides img_size", COUNT),
    width=Option(int, None, "width of a token in one stream", COUNT),
    depth=Option(int, None, "number of blocks", COUNT),
    heads=Option(int, None, "heads of the attention; divides width", COUNT),
    mlp_ratio=Option(int, None, "hidden width of an MLP over width", COUNT),
)
REVMVIT = section(
    "A reversible multiscale vision transformer.",
    NETWORK,
    **{name: REVVIT.options[name] for name in ("activation", "img_size", "mlp_ratio")},
    width=Option(int, None, "width of a token in one stream of the first stage", COUNT),
    units=Option(Sequence, None, "number of blocks of each stage"),
    heads=Option(int, 1, "heads in the first stage; divides width", COUNT),
)
REVBIFPN = section(
    "A reversible feature pyramid.",
    MODEL,
    drop_rate=Option(float, None, "dropout of pooled features; null: the publication's", PART),
    drop_path_rate=Option(float, None, "stochastic depth of the last stage; likewise", PART),
    global_pool=NETWORK.options["global_pool"],
    norm=CONVOLUTIONAL.options["norm"],
    activation=Option(str, "hardswish", "of all branches", choices=ACTIVATIONS),
    channels=Option(Sequence, None, "of each level, the finest first"),
    head_channels=Option(Sequence, None, "of each level after the neck"),
    features=Option(int, None, "channels before the classifier", COUNT),
    fusions=Option(int, None, "stages after those that add a level", LEAST_0),
    blocks=Option(int, 2, "residual blocks of each level in a stage", LEAST_0),
    image_size=Option(int, 224, "pixels of the publication's images", COUNT),
)
REVCOL = section(
    "A reversible column network.",
    MODEL,
    **{name: NETWORK.options[name] for name in ("drop_rate", "drop_path_rate", "global_pool")},
    columns=Option(int, None, "number of columns", COUNT),
    widths=Option(Sequence, None, "channels of each level"),
    units=Option(Sequence, None, "number of blocks of each level"),
    kernel_size=Option(int, 3, "side of the depthwise convolutions, odd", COUNT),
    top_to_bottom=Option(bool, None, "level 0 also reads the last level, as in revcol_huge"),
    image_size=Option(int, 224, "pixels of the publication's images", COUNT),
)
MOMENTUMNET = section(
    "A Momentum ResNet.",
    MODEL,
    **{name: NETWORK.options[name] for name in ("drop_rate", "global_pool")},
    units=Option(Sequence, None, "number of blocks of each stage"),
    widths=Option(Sequence, None, "channels of each stage"),
    strides=Option(Sequence, None, "stride of each stage"),
    branch=Option(str, None, "residual function", choices=("basic", "bottleneck")),
    gamma=Option(float, 0.9, "the momentum", "[0.001, 1)"),
    downsampling_stem=Option(bool, False, "a stem for large images"),
)
IRESNET = section(
    "An i-ResNet.",
    MODEL,
    **{name: NETWORK.options[name] for name in ("drop_rate", "global_pool")},
    units=Option(Sequence, None, "number of blocks of each stage"),
    inner=Option(Sequence, None, "channels inside the branches of each stage"),
    strides=Option(Sequence, None, "stride of each stage"),
    padding=Option(int, 13, "channels of zeros that are appended to the image", COUNT),
    coefficient=Option(float, 0.9, "largest singular value of a convolution", "(0, 1)"),
    image_size=Option(int, 32, "pixels of the publication's images", COUNT),
)
UNET = section(
    "",
    MODEL,
    drop_rate=Option(float, 0.0, "dropout of values, before the last convolution", PART),
    dims=Option(int, None, "axes of an image", choices=(1, 2, 3)),
    channels=Option(Sequence, None, "of each level, the finest first"),
    image_size=Option(int, None, "side of an image, for audits", COUNT),
)
IUNET = section(
    "A U-Net that is bijective between its first and last convolution.",
    UNET,
    units=Option(Sequence, None, "couplings of each level, in the encoder and in the decoder"),
    stride=Option(int | Sequence, 2, "of each downsampling, or one for each axis", COUNT),
    convolutions=Option(int, 2, "of a coupling", COUNT),
    rotation=Option(str, "cayley", "form of the learned rotations", choices=("cayley", "exp")),
)
REVUNET = section(
    "A U-Net of reversible blocks.",
    UNET,
    units=Option(Sequence, None, "blocks of each level, in the encoder and in the decoder"),
    groups=Option(int, None, "of the normalisations; divides half of the channels", COUNT),
)

SCHEDULE = section("A constant rate.", name=Option(str, MISSING, "the course of the rate"))
SCHEDULES = {
    "constant": SCHEDULE,
    "step": section(
        "The rate falls at parts of the run.",
        SCHEDULE,
        milestones=Option(Sequence, (0.5, 0.75), "fractions of the run"),
        gamma=Option(float, 0.1, "factor of the rate at each milestone", "(0, 1]"),
    ),
    "onecycle": section(
        "The rate rises and falls.",
        SCHEDULE,
        warmup=Option(float, 0.25, "fraction of the run in which the rate rises", "(0, 1)"),
        start=Option(float, 0.04, "first rate, as a fraction of lr", "(0, 1]"),
        end=Option(float, 1e-5, "last rate, as a fraction of lr", "(0, 1]"),
        anneal=Option(str, "cos", "how it falls", choices=("cos", "linear")),
    ),
    "cosine": section(
        "A linear rise, then half a cosine.",
        SCHEDULE,
        warmup=Option(float, 0.05, "fraction of the run in which the rate rises", PART),
        end=Option(float, 0.0, "last rate, as a fraction of lr", "[0, 1]"),
    ),
}
OPTIM = section(
    "optimiser, schedule and loss",
    default=MISSING,
    name=Option(str, MISSING, "sgd, adamw, muon, lamb or a registered optimiser"),
    lr=Option(float, MISSING, "peak rate; with muon, of the hidden weights", RATE),
    sgd_lr=Option(float | None, None, "with muon: rate of norms, biases, the classifier", RATE),
    momentum=Option(float, 0.9, "of sgd and muon", PART),
    nesterov=Option(bool, True, "Nesterov momentum, with sgd"),
    weight_decay=Option(float, MISSING, "with sgd coupled: added to the gradient", LEAST_0),
    decay_all=Option(bool, False, "decay norms and biases, too; not with muon"),
    loss=Option(str | None, None, "null: the task's; see the guide", choices=LOSSES),
    label_smoothing=Option(float, 0.0, "of the training loss", PART),
    label_threshold=Option(float | None, None, "with bce: larger shares of a label are 1", PART),
    class_weights=Option(str | Sequence | None, None, "balanced, or one per class, as in [1, 3]"),
    layer_decay=Option(float, 1.0, "factor of the rate per stage, down to the stem", "(0, 1]"),
    schedule=Chosen("name", SCHEDULES, "the learning rate over the run", {"name": "step"}),
)
GIVE_BYTES = "give memory.bytes=4GiB, say"
MEMORY = section(
    "what a training step keeps of its activations",
    default=MISSING,
    mode=Option(str | None, MISSING, "see memory=MODE", choices=(*MODES, *PLANS)),
    bytes=Option(
        NUMBER | str, None, "auto, budget: the peak of all tensors in a step", remedy=GIVE_BYTES
    ),
    fraction=Option(float, 0.8, "auto: the part of the device's free memory to use", "(0, 1]"),
    inverting=Option(str | None, None, "null: the model's own", choices=("invert", "exact")),
    plan=Option(Mapping | None, None, "steps and their memory modes"),
    planned_for=Option(Mapping | None, None, "the conditions of the plan"),
)
PRECISION = section(
    "number formats",
    default=MISSING,
    trainer=Option(str, MISSING, "see precision=NAME", choices=PRECISIONS),
    tf32=Option(bool, MISSING, "TensorFloat-32 in matrix products and convolutions"),
    channels_last=Option(bool, MISSING, "order of images in memory; often faster"),
)
NO_TEST = "test=false skips the test"
TRAINER = section(
    "devices and length: Lightning's Trainer; other sections set its other arguments",
    default=MISSING,
    accelerator=Option(str, MISSING, "auto: a GPU if there is one", choices=ACCELERATORS),
    devices=Option(int | str | Sequence, MISSING, "processes on each machine, or auto"),
    strategy=Option(str, MISSING, "auto; for several processes ddp or fsdp2"),
    num_nodes=Option(int, 1, "machines", COUNT),
    timeout=Option(float | None, None, "seconds to wait for a process; null: torch's", RATE),
    max_epochs=Option(int | None, None, "-1: no limit; then set max_steps", COUNT, also=(-1,)),
    min_epochs=Option(int | None, None, "do not stop earlier", LEAST_0),
    max_steps=Option(int, -1, "optimiser steps; -1: no limit", COUNT, also=(-1,)),
    min_steps=Option(int | None, None, "do not stop earlier", LEAST_0),
    max_time=Option(str | Mapping | None, None, "DAYS:HOURS:MINUTES:SECONDS"),
    accumulate_grad_batches=Option(int, 1, "batches of an optimiser step", COUNT),
    gradient_clip_val=Option(float | None, None, "largest norm of gradients", LEAST_0),
    gradient_clip_algorithm=Option(str | None, None, "norm or value"),
    check_val_every_n_epoch=Option(int | None, 1, "epochs between two validations", COUNT),
    val_check_interval=Option(NUMBER | str | Mapping, None, "batches, or part of an epoch", RATE),
    inference_mode=Option(bool, True, "of validation and test: false for no_grad"),
    fast_dev_run=Option(int | bool, False, "Lightning's trial of one batch, or of some"),
    limit_predict_batches=Option(NUMBER, None, "number or fraction", LEAST_0),
    num_sanity_val_steps=Option(int | None, None, "batches to validate before training"),
    limit_train_batches=Option(NUMBER, None, "number or fraction of the batches", RATE),
    limit_val_batches=Option(NUMBER, None, "0: no validation, and so no best.ckpt", LEAST_0),
    limit_test_batches=Option(NUMBER, None, "number or fraction", RATE, remedy=NO_TEST),
    overfit_batches=Option(int | float, 0.0, "number or fraction to overfit; 0.0: off", LEAST_0),
    log_every_n_steps=Option(int | None, None, "steps between two logged figures", LEAST_0),
    profiler=Option(str | None, None, "writes a time profile", choices=PROFILERS),
    deterministic=Option(
        bool | str | None,
        None,
        "the same bits in each run, also on GPUs",
        choices=(True, False, "warn"),
    ),
    benchmark=Option(bool | None, None, "let cuDNN try its kernels and choose the fastest"),
    detect_anomaly=Option(bool, False, "find the operation that makes a NaN; slow"),
    sync_batchnorm=Option(bool, False, "statistics over all processes"),
    use_distributed_sampler=Option(bool, True, "divide the data among the processes"),
    reload_dataloaders_every_n_epochs=Option(int, 0, "0: never", LEAST_0),
)

BEST = section(
    "checkpoints/best.ckpt: the weights that the test and `revzoo eval` use",
    monitor=Option(str | None, None, "null: that of the run", choices=tuple(MONITORED)),
    mode=Option(
        str | None, None, "null: max, or min for a loss or an error", choices=("max", "min")
    ),
)
PICTURES = section("", every_n_epochs=Option(int, 5, "and at the end", COUNT))
OFTEN = Option(int, 10, "optimiser steps", COUNT)
CALLBACKS = {
    "best_checkpoint": BEST,
    "last_checkpoint": section(
        "checkpoints/last.ckpt: the state that --resume continues from",
        minutes=Option(float, 10.0, "a killed run loses at most about this much training", RATE),
    ),
    "learning_rate": section("the rate of each logged step"),
    "footprint": section("memory and images per second of each epoch"),
    "epoch_log": section("one line per epoch on the terminal and in train.log"),
    "drift": section(
        "relative error of inverted activations, for each step of the network",
        every_n_steps=Option(int, 100, "at the 100th step, the 200th, and so on", COUNT),
    ),
    "samples": section(
        "TensorBoard: validation images, true and predicted class",
        PICTURES,
        count=Option(int, 16, "images", COUNT),
    ),
    "reconstructions": section(
        "TensorBoard: images, their reconstructions by an i-RevNet, the difference",
        PICTURES,
        count=Option(int, 8, "images", COUNT),
    ),
    "confusion": section("TensorBoard and confusion.csv", PICTURES),
    "progress_bar": section(
        "on a terminal a bar, else lines of the log",
        refresh_rate=Option(int, 1, "batches between two drawings, at most five a second", COUNT),
        log_seconds=Option(float, 30.0, "between log lines, without a terminal", RATE),
    ),
    "early_stopping": section(
        "stop after validations without a better figure",
        BEST,
        patience=Option(int, 10, "validations", COUNT),
    ),
    "ema": section(
        "validate, test and save a moving average of the weights",
        decay=Option(float, 0.999, "of the average", PART),
        warmup=Option(bool, True, "false for a constant decay"),
    ),
    "batch_norm": section(
        "running statistics",
        momentum=Option(float | None, None, "null: the models' 0.01", "(0, 1]"),
        warmup=Option(bool, True, "larger in the first 890 batches; not in compiled parts"),
        recalibrate=Option(int, 0, "training batches that replace the first statistics", LEAST_0),
    ),
    "side_bits": section(
        "raise the bits of reversible blocks over the last epochs",
        epochs=Option(int, MISSING, "number of these epochs", COUNT),
        most=Option(int, 8, "bits at the end", "[1, 8]"),
    ),
    "finetuning": section(
        "freeze the network first; see experiment=finetune",
        unfreeze=Option(
            Mapping | Sequence | None,
            None,
            "epochs, or fractions, that each unfreeze one more part; null: none",
        ),
    ),
    "compiled_branches": section(
        "torch.compile of each residual function, and of parts that store; needs a compiler",
        backend=Option(str, "inductor", "of torch.compile"),
    ),
    "private": section(
        "differential privacy; needs model.norm=group and pip install '.[opacus]'",
        epsilon=Option(float, 8.0, "the privacy budget", RATE),
        delta=Option(float, 1e-5, "the probability that the budget fails", "(0, 1)"),
        max_grad_norm=Option(float, 1.0, "clips the gradient of each image", RATE),
        noise_multiplier=Option(float | None, None, "null: as epsilon needs", LEAST_0),
        accountant=Option(str, "rdp", "of Opacus", choices=("rdp", "prv")),
    ),
    "gradient_noise_scale": section(
        "the batch size up to which larger batches pay; needs model.norm=group",
        every_n_steps=OFTEN,
        decay=Option(float, 0.9, "of the moving average", PART),
    ),
    "hard_samples": section(
        "TensorBoard: the images of an epoch with the largest gradients; needs model.norm=group",
        count=Option(int, 16, "images", COUNT),
        every_n_steps=Option(int, 1, "optimiser steps", COUNT),
    ),
}
LOGGER = section("Figures of a run.", kind=Option(str | None, MISSING, "the logger"))
LOGGERS = {
    "tensorboard": LOGGER,
    "csv": LOGGER,
    None: LOGGER,
    "wandb": section(
        "Weights & Biases.",
        LOGGER,
        project=Option(str, "revzoo", "the project"),
        offline=Option(bool, False, "upload only with `wandb sync`"),
    ),
    "mlflow": section(
        "MLflow.",
        LOGGER,
        experiment=Option(str, "revzoo", "the experiment"),
        tracking_uri=Option(str | None, None, "such as sqlite:///mlflow.db; null: environment's"),
    ),
}
TUNER = section(
    "",
    kind=Option(str, MISSING, "the value to search for"),
    then=Option(str, MISSING, "use: train with the value", choices=("stop", "train", "use")),
)
TUNERS = {
    "lr": section(
        "The rate at which the loss falls fastest.",
        TUNER,
        min_lr=Option(float, MISSING, "the first rate", RATE),
        max_lr=Option(float, MISSING, "the last rate", RATE),
        steps=Option(int, MISSING, "batches between min_lr and max_lr", "[15, inf)"),
    ),
    "batch_size": section(
        "The largest batch that fits into memory.",
        TUNER,
        max_bytes=Option(float | None, MISSING, "null: 4/5 of the free memory", RATE),
        max_size=Option(float, MISSING, "largest batch to try", "[2, inf)"),
    ),
}

FAMILIES = {
    "revnet": REVNET,
    "resnet": section("A ResNet.", REVNET, CONVERTIBLE),
    "irevnet": IREVNET,
    "revvit": REVVIT,
    "revmvit": REVMVIT,
    "revbifpn": REVBIFPN,
    "revcol": REVCOL,
    "momentumnet": MOMENTUMNET,
    "iresnet": IRESNET,
    "iunet": IUNET,
    "revunet": REVUNET,
    "vit": section("A vision transformer.", REVVIT, CONVERTIBLE),
    "torchvision": LIBRARY,
    "timm": LIBRARY,
}  # by the start of a model's name
DATA = {
    "revzoo.data.Blobs3d": DIGITS,
    "revzoo.data.Digits": DIGITS,
    "revzoo.data.CIFAR10": CIFAR,
    "revzoo.data.CIFAR100": CIFAR,
    "revzoo.data.ImageFolder": FOLDER,
    "revzoo.data.Masks": MASKS,
    "revzoo.data.Shapes": DIGITS,
    "revzoo.data.Shards": SHARDS,
    "revzoo.data.Table": TABLE,
    "revzoo.data.Volumes": VOLUMES,
}
FITTED = {
    "memory": "the mode of memory=MODE",
    "num_classes": "the number of classes of the data",
    "in_chans": "the channels of the data; data.in_chans=N for a folder of images",
    "reversible_size": "the size of the data's images; data.image_size=N for a folder of images",
}  # arguments of create_model that a run fills in, and their sources
SURFACE_DISTANCES = Option(bool, False, "of masks: also assd and hd95, in the test; slow")
RUN = section(
    "revzoo train",
    model=Chosen("name", FAMILIES, "the network", MISSING),
    data=Chosen("_target_", DATA, "the images", MISSING),
    memory=MEMORY,
    precision=PRECISION,
    optim=OPTIM,
    trainer=section(
        TRAINER.about,
        TRAINER,
        default=MISSING,
        cuda_graph=Option(
            bool | str,
            "auto",
            "a training step as one CUDA graph; auto: on a GPU, where it can be captured",
            choices=("auto", True, False),
        ),
    ),
    callbacks=section("what a run does besides; null removes one", default=MISSING, **CALLBACKS),
    logger=Chosen("kind", LOGGERS, "where figures go", MISSING),
    tuner=Chosen("kind", TUNERS, "a search before the run, or instead"),
    task=Option(str | None, None, "null: as the data say; a table may have several", choices=TASKS),
    monitor=Option(
        str | None,
        None,
        "figure of the best checkpoint and of early stopping; null: the task's",
        choices=tuple(MONITORED),
    ),
    seed=Option(int, MISSING, "of the initial weights, order and augmentation", "[0, 4294967295]"),
    threads=Option(int | None, None, "CPU threads; null: one per core, or OMP_NUM_THREADS", COUNT),
    test=Option(bool, MISSING, "evaluate the best checkpoint on the test split at the end"),
    surface_distances=SURFACE_DISTANCES,
)
GIVE_CKPT = "give the folder of a run, ckpt=RUN_DIR, or weights such as ckpt=revnet38.cifar10"
EVALUATION = section(
    "revzoo eval",
    ckpt=Option(Any, MISSING, "a run's folder, a checkpoint or weights", remedy=GIVE_CKPT),
    split=Option(str, MISSING, "the images", choices=("test", "val")),
    batch_size=Option(int | None, None, "images per step; null: data.eval_batch_size", COUNT),
    bits=Option(int | str | None, "saved", "null: the plain network", choices=BITS),
    tta=Option(str | None, None, "flip: mean over images and mirror images", choices=("flip",)),
    surface_distances=SURFACE_DISTANCES,
    csv=Option(str | None, None, "a file for the figures and those of each class"),
    data=Chosen("_target_", DATA, "null: the run's"),
    precision=PRECISION,
    trainer=TRAINER,
)
REGISTRIES = {
    "callbacks": "revzoo.training.callbacks.registry:CALLBACKS",
    "data": "revzoo.data.registry:DATA",
    "model": "revzoo.models.registry:MODELS",
    "optim": "revzoo.training.optim.optimizers:OPTIMIZERS",
    "transforms": "revzoo.data.augment:POLICIES",
}
OF_PLUGIN = Option(Any, None, "of the plugin")

# What to write -> words of Lightning, lightning-hydra-template and timm, KEY or KEY=VALUE; @ is the
# value. Keys whose last part is ours, such as lr, need no row: the nearest is suggested anyway.
_OURS = {
    "monitor=val/acc": "callbacks=model_checkpoint eval_metric",
    "callbacks.best_checkpoint=null callbacks.last_checkpoint=null": "trainer.enable_checkpointing",
    "compile=true": "compile model.compile torchcompile",
    "callbacks.early_stopping.patience=10": "callbacks=early_stopping",
    "callbacks.early_stopping=null, one key for each": "trainer.callbacks",
    "callbacks.ema.decay=0.999": "model_ema use_ema",
    "callbacks.ema.decay=@": "model_ema_decay",
    "callbacks.progress_bar=null": "trainer.enable_progress_bar",
    "data.augment.color=@": "color_jitter",
    "data.augment.erasing=@": "reprob",
    "data.augment.erasing_noise=true": "remode=pixel",
    "data.augment.flip=true, which mirrors left and right": "hflip vflip",
    "data.augment.policy=@": "aa auto_augment",
    "data.image_size=@": "img_size input_size",
    "data=imagefolder data.root=@": "data.data_dir data_dir data_path paths.data_dir",
    "debug=smoke": "fast_dev_run",
    "hydra.run.dir=@": (
        "output output_dir paths.log_dir paths.output_dir task_name trainer.default_root_dir"
    ),
    "logger=none": "trainer.logger",
    "logger=wandb logger.project=@": "logger.wandb.project",
    "model.checkpoint_path=@ for its weights; train --resume RUN_DIR continues a run": (
        "checkpoint ckpt ckpt_path initial_checkpoint resume_from_checkpoint"
    ),
    "model.drop_rate=@": "drop",
    "model=@": "arch",
    "optim.label_threshold=@": "bce_target_thresh",
    "optim.loss=bce": "bce_loss",
    "optim.lr=@": "learning_rate",
    "optim.schedule.end=0.01, a fraction of the rate": "min_lr",
    "optim.schedule.name=@": "optim.scheduler.name",
    "optim.schedule.warmup=0.1, a fraction of the run": "warmup_epochs warmup_steps",
    "optim.weight_decay=@": "wd",
    "optim=@": "lr_scheduler opt optimizer sched scheduler",
    "optim=onecycle, cosine or step: SGD with this schedule": "optim=momentum optim=sgd",
    "precision=@": "trainer.precision",
    "precision=bf16": "amp fp16 precision=bf16-mixed precision=bf16-true use_amp",
    "precision=fp16": "precision=16 precision=16-mixed precision=16-true",
    "precision=fp32": "precision=32 precision=32-true",
    "precision=fp64": "precision=64 precision=64-true",
    "revzoo eval ckpt=RUN_DIR, which only evaluates": "train",
    "revzoo sweep, which searches ranges such as 'optim.lr=interval(0.01,1)'": "hparams_search",
    "seed=@": "seed_everything",
    "trainer.accelerator=@": "device",
    "trainer.accelerator=gpu": "cuda gpu",
    "trainer.accelerator=gpu trainer.devices=@": "gpus trainer.gpus",
    "trainer.accelerator=mps": "trainer=mps",
    "trainer.accumulate_grad_batches=@": "accumulate_grad grad_accum_steps",
    "trainer.devices=@": "world_size",
    "trainer.gradient_clip_val=@": "clip_grad grad_clip max_grad_norm",
    "trainer.log_every_n_steps=@": "log_interval",
    "trainer.profiler=simple": "debug=profiler",
}
SPELLINGS = {theirs: ours for ours, words in _OURS.items() for theirs in words.split()}


def registered(group: str) -> Mapping[str, Any]:
    """What plugins and the package have registered; empty until the table is imported."""
    module, _, table = REGISTRIES[group].partition(":")
    return getattr(sys.modules.get(module), table, {})


def of_plugin(builder: Callable[..., Any], *bases: Section) -> Section:
    """The parameters of a registered class or function; of a callback those with keywords only."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = {
        p.name: Option(Any, MISSING if p.default is p.empty else p.default, "of the plugin")
        for p in inspect.signature(builder).parameters.values()
        if p.kind in kinds[: 1 + len(bases)]
    }
    return section("of a plugin", *bases, **own)


def chosen(path: str, part: Section | Chosen, values: Config) -> Section:
    """The section that describes ``values``."""
    own = registered(path) if path in ("callbacks", "data") else {}
    if isinstance(part, Section):  # of the callbacks, also those of plugins
        added = {name: of_plugin(own[name]) for name in own if name not in part.options}
        return section("", part, **added) if added else part
    value = values.get(part.by)
    if path == "model":
        return _model(value)
    if isinstance(value, str | None) and value in part.sections:
        return part.sections[value]
    if isinstance(value, str) and value in own:
        return of_plugin(own[value], DIGITS)
    if path == "data" and value is None and values:  # data.image_size=64 without data
        key = next(iter(values))
        choices = having(path, part, key)
        raise ConfigError(f"data.{key}={values[key]}, but data is null: add {choices}")
    check_choice(f"{path}.{part.by}", value, [*part.sections, *own])
    raise AssertionError(path)


def _model(name: Any) -> Section:
    """The keywords of a model: of its family, or all for a file, a folder or a repository."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"model.name={name}: expected the name of a model")
    architecture, packaged, own = name.partition(".")[0], model_names(), registered("model")
    if name.startswith(LIBRARIES):
        check_library_name(name)
    elif architecture in own and architecture not in packaged:
        return section("", MODEL, **dict.fromkeys(own[architecture].keywords, OF_PLUGIN))
    elif not re.fullmatch(r"[\w.]+", name) or Path(name).exists():
        return section("", *FAMILIES.values())
    elif architecture not in packaged:
        hint = library_hint(name) or did_you_mean(name, packaged, n=3)
        hint = hint or "; --import MODULE adds yours"
        raise ConfigError(f"model.name={name}: there is no model of this name{hint}")
    return next(known for start, known in FAMILIES.items() if architecture.startswith(start))


def model_names() -> list[str]:
    """The models of the zoo: each has a configuration file. The registry would import torch."""
    names = {file.stem for file in (CONFIGS / "model").glob("*.yaml")}
    return sorted(names.difference(LIBRARIES))  # their files hold the options of all networks


def names_in(part: Section | Chosen | None, values: Any, path: str = "") -> Iterator[str]:
    """All dotted names that a configuration may have."""
    values = values if isinstance(values, Mapping) else {}
    try:
        known = section("") if part is None else chosen(path, part, values)
    except ValueError:
        return
    for key in known.options:
        name = f"{path}.{key}" if path else key
        yield name
        yield from names_in(known.parts.get(key), values.get(key), name)


def having(path: str, part: Chosen, key: str) -> str:
    """The choices that have an option, as a user chooses them."""
    found = [value for value, known in part.sections.items() if key in known.options]
    forms = {"data": "data={}", "model": "model={}..."}
    if path == "data":
        names = {"revzoo.data.Shards": "litdata"}  # webdataset has the same options
        found = [names.get(value, value.rpartition(".")[2].lower()) for value in found]
    form = forms.get(path, f"{path}.{part.by}={{}}")
    return shortened(map(form.format, found)) if found else ""
