"""The subcommands, one per module. They import torch when they run, not for help or typos."""
