"""The subcommands, one per module. They import torch when they run, so that help is fast.

A new subcommand is a module here and a row of ``COMMANDS`` in :mod:`revzoo.cli.main`.
"""
