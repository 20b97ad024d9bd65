"""What the networks are made of, without an inverse: residual functions and their layers."""
