"""Floor 3: the memory and time that a model needs."""
