"""An earlier name of :mod:`revzoo.private`."""
