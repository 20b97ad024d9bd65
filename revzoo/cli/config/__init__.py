"""The configuration: overrides, checks, building the parts of a run."""
