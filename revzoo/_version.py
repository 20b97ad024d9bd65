"""The version. Not in the facade, because no part of the package may import the facade."""

__version__ = "0.1.0"
