"""An earlier name of :mod:`revzoo.private.clipping`."""

from revzoo.private.clipping import ClippedGradients, SampleNorms

__all__ = ["ClippedGradients", "SampleNorms"]
