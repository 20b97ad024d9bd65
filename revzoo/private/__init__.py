"""Gradients of single samples: their norms, clipping, and private training."""
