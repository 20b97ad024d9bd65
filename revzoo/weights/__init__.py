"""Trained weights: descriptions and files. Only ``torch_file`` and ``transforms`` import torch."""
