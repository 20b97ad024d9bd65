"""Trained weights: descriptions and files. ``torch_file`` and ``transforms`` import torch."""
