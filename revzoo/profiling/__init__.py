"""Floor 3: what a model costs."""
