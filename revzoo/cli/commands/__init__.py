"""The subcommands, one per module. They import torch when they run, so that help is fast."""
