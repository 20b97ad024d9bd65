"""Floor 0, torch only: steps, the invertible checkpoint, faithful replays, memory modes."""

from revzoo.core import modes  # noqa: F401 -- a step needs it, but cannot import it
