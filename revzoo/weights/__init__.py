"""Trained weights: their descriptions, and their files. ``torch_file`` alone imports torch."""
