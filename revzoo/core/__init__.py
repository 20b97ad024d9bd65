"""Floor 0, torch only: steps, the invertible checkpoint, faithful replays, memory modes."""
