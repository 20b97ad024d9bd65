"""Floor 0, without torch at import: what is known of trained weights, and where their bytes are."""
