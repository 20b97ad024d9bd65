"""The subcommands, one per module. They import torch when they run, so that help is fast.

A new subcommand is a module here, with ``add_arguments(parser)`` and ``run(args)``, and a row of
``COMMANDS`` in :mod:`revzoo.cli.main`. :data:`~revzoo.cli.terminal.USER_ERRORS` end it with their
message.
"""
