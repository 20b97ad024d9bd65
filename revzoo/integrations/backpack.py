"""Public name of :mod:`revzoo.private.backpack`."""

from revzoo.private.backpack import BatchDotGrad, extend, remove

__all__ = ["BatchDotGrad", "extend", "remove"]
