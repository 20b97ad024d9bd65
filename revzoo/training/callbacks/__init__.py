"""Lightning callbacks, one per file, and their registry."""
