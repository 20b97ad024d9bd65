"""A run's folder, lock, errors and processes."""
