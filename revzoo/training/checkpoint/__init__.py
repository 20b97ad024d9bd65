"""Checkpoints of a run: writing, reading, validation, restoring."""
