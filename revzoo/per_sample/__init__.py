"""Gradients of single samples: their norms, and clipping by them."""
