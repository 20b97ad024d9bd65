"""Running: training, resuming, evaluation, and a run's folder, lock and processes."""
