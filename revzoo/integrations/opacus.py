"""Public name of :mod:`revzoo.private.opacus`."""

from revzoo.private.opacus import PrivacyEngine

__all__ = ["PrivacyEngine"]
