"""Which errors end a program with their message alone, and which warnings mean nothing to users."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fabric.utilities.exceptions import MisconfigurationException

from revzoo.core.guard import DriftError, RangeError
from revzoo.data import DataError
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.tuning.out_of_memory import NoMemoryError
from revzoo.weights.errors import WeightsError

# while a run is being prepared
USER_ERRORS = (
    ValueError,
    DataError,
    CheckpointError,
    MisconfigurationException,
    WeightsError,
    OSError,
)
# what ends a training that has begun
ENDINGS = (FloatingPointError, DataError, DriftError, RangeError, NoMemoryError, OSError)
TRAINING_ERRORS = (*ENDINGS, CheckpointError)
EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # sets held in memory are loaded fastest without any
    ".*LeafSpec.*is deprecated.*",  # by torch 2.15; Lightning 2.6 uses it
    "The number of training batches .* is smaller than the logging interval",  # of a small set
    "You requested to overfit",  # debug=overfit means it
    "It is recommended to use `self.log.'footprint/",  # the first process logs its own
    "Using `DistributedSampler` with",  # figures leave repeated images out
    "Checkpoint directory .* exists and is not empty",  # a resumed run has checkpoints
    "Found .* in eval mode at the start of training",  # fine-tuning freezes modules in a search
)


@contextmanager
def user_errors(kinds: tuple[type[Exception], ...] = USER_ERRORS) -> Iterator[None]:
    """End the program with an error's message alone, where the message says what to do.

    With ``HYDRA_FULL_ERROR=1`` in the environment the error passes, traceback and all.
    """
    try:
        yield
    except kinds as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"revzoo: {error}")


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's greetings, and the warnings of :data:`EXPECTED_WARNINGS`."""
    greeter = logging.getLogger("pytorch_lightning")
    level = greeter.level
    greeter.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        greeter.setLevel(level)
