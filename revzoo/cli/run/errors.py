"""Which errors end a program with their message alone."""

from __future__ import annotations

import os
import sys
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
