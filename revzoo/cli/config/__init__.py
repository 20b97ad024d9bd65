"""The configuration: composing it, checking it, and building the parts of a run."""
