"""How a program ends: with a message that says what to do, and a status that says how it went."""

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
TOLD = (ValueError, DataError, CheckpointError, MisconfigurationException, WeightsError, OSError)
# what ends a training that has begun
ENDINGS = (FloatingPointError, DataError, DriftError, RangeError, NoMemoryError, OSError)
TOLD_IN_TRAINING = (*ENDINGS, CheckpointError)
EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # sets held in memory are loaded fastest without any
    ".*LeafSpec.*is deprecated.*",  # by torch 2.15; Lightning 2.6 uses it
    "You requested to overfit",  # debug=overfit means it
    "It is recommended to use `self.log.'footprint/",  # of the first process, and so meant
    "Using `DistributedSampler` with",  # figures leave repeated images out
    "Checkpoint directory .* exists and is not empty",  # that of a run that goes on
    "Found .* in eval mode at the start of training",  # what fine-tuning freezes, in a search
)


@contextmanager
def told_plainly(kinds: tuple[type[Exception], ...] = TOLD) -> Iterator[None]:
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
