"""The errors that end a program with their message, without a traceback."""

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

# during the preparation of a run
USER_ERRORS = (
    ValueError,
    DataError,
    CheckpointError,
    MisconfigurationException,
    WeightsError,
    OSError,
)
# errors that end training after its start; the run still writes its summary
ENDINGS = (FloatingPointError, DataError, DriftError, RangeError, NoMemoryError, OSError)
TRAINING_ERRORS = (*ENDINGS, CheckpointError)


@contextmanager
def user_errors(kinds: tuple[type[Exception], ...] = USER_ERRORS) -> Iterator[None]:
    """End the program with the message of an error of these ``kinds``.

    With ``HYDRA_FULL_ERROR=1`` in the environment the error passes, with its traceback.
    """
    try:
        yield
    except kinds as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"revzoo: {error}")
