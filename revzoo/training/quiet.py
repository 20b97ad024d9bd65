"""Training without Lightning's greetings and advice.

Lightning greets with the devices it finds, recommends its own services, and gives advice that is
wrong for data held in memory. In scripts and notebooks::

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
