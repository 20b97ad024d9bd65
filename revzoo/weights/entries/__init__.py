"""Data: ``NAME.json`` for each set of weights that the package knows; some with the weights."""
