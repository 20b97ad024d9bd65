"""Searches before a run: learning rate, batch size, and the memory they may use."""
