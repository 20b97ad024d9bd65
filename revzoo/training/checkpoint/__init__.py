"""Checkpoints of a run: files, contents, validation, restoring."""
