"""Streams of mode ``exact``: integers beside float tensors."""
