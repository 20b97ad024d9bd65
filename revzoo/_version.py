"""The version; a module of its own, since no part of the package imports the facade."""

__version__ = "0.1.0"
