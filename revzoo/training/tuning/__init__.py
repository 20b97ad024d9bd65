"""Searches before a run: learning rate and batch size, within a limit of memory."""
