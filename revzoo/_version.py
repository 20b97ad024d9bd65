"""The version. Not in the facade, which no part of the package may import."""

__version__ = "0.1.0"
