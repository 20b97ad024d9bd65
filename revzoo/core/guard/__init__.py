"""Detects wrong reconstructions: drift, and streams that leave their range."""
