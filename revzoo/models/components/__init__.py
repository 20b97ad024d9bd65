"""Residual functions and the layers inside them, which have no inverse."""
