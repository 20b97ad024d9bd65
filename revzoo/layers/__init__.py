"""Floor 1: couplings, containers and residual functions."""
