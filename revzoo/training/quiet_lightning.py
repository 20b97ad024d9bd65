"""Training without Lightning's startup messages and advice.

Lightning logs the devices it finds, recommends its services, and gives advice that is wrong for
data held in memory. In scripts and notebooks::

    with revzoo.training.quiet():
        trainer = pl.Trainer(max_epochs=10)
        trainer.fit(module, datamodule=data)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # data in memory load fastest without workers
    ".*LeafSpec.*is deprecated.*",  # by torch 2.15; Lightning 2.6 uses it
    "The number of training batches .* is smaller than the logging interval",  # of small data sets
    "You requested to overfit",  # debug=overfit does so on purpose
    "It is recommended to use `self.log.'footprint/",  # only the first process logs it
    "Using `DistributedSampler` with",  # metrics.py excludes repeated images
    "Checkpoint directory .* exists and is not empty",  # a resumed run has checkpoints
    "Found .* in eval mode at the start of training",  # fine-tuning freezes modules in a search
)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Lightning's startup messages and the warnings of :data:`EXPECTED_WARNINGS`."""
    logger = logging.getLogger("pytorch_lightning")
    # warnings still show, startup messages are at INFO
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.setLevel(level)
