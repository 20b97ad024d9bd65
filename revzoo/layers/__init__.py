"""Layers with an inverse, and sequences of them."""
