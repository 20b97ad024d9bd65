"""Couplings, invertible layers, containers and residual functions."""
