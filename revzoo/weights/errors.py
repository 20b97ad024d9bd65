"""Errors of weights, with a common base class."""

from __future__ import annotations

from collections.abc import Iterable

from revzoo._checks import UserError, shortened

REMEDY = "use another copy of it, or another checkpoint of the run"  # for a damaged file


class WeightsError(UserError, RuntimeError):
    """Weights cannot be used; no model has been changed."""


class EntryError(WeightsError):
    """The description of weights (a JSON file) is not valid; the message lists the faults."""


class UnknownWeightsError(WeightsError):
    """No weights have this name, or their file is missing."""


class DownloadError(WeightsError):
    """A download failed or ended early."""


class HashMismatchError(WeightsError):
    """The hash of a file differs from its entry: it was altered, truncated or replaced."""


class UnreadableWeightsError(WeightsError):
    """A file is damaged, or holds more than plain tensors."""


class NotFiniteError(WeightsError):
    """Tensors hold NaN or Inf; the message names them."""


class ArchitectureMismatchError(WeightsError):
    """The weights belong to another architecture."""


class HubError(WeightsError):
    """The Hugging Face hub cannot be used, or has no such repository."""


class StateMismatchError(WeightsError):
    """Tensors do not fit the model; the message names the first ones of each kind.

    Attributes:
        missing: names in the model but not in the file.
        unexpected: names in the file but not in the model.
        misshapen: lines ``name: shape in the file, shape in the model``.
    """

    def __init__(
        self,
        where: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        misshapen: Iterable[str] = (),
    ) -> None:
        self.missing, self.unexpected = sorted(missing), sorted(unexpected)
        self.misshapen = sorted(misshapen)
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape or type": self.misshapen,
        }
        lists = [f"\n  {len(n)} {kind}: {shortened(n)}" for kind, n in kinds.items() if n]
        super().__init__(
            f"the tensors of {where} do not fit the model; nothing was loaded. Create the model "
            f"with the keywords that the weights were trained with{''.join(lists)}"
        )
