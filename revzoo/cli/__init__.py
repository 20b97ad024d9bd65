"""Command lines on Hydra."""
