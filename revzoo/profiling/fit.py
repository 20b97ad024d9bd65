"""Finds the largest batch, image or depth within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable


def largest(
    need: Callable[[int], int | None], budget: int, *, start: int, power: int = 1, most: int = 2**20
) -> int | None:
    """The largest integer whose ``need`` is at most ``budget``.

    Guesses assume that the need is proportional to ``number ** power``, then bisect. An impossible
    number counts as the next smaller possible one.

    Args:
        need: bytes for a number, increasing; None for an impossible number. A call takes seconds.
        budget: bytes.
        start: the first guess.
        power: 1 for a batch, 2 for the side of an image.
        most: the largest number to try.

    Returns:
        None if not even the smallest possible number fits.
    """
    low, high = 0, most + 1  # low fits, high does not
    best: int | None = None
    guess = start
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        at, bytes_ = guess, need(guess)
        while bytes_ is None and at > low + 1:
            at -= 1
            bytes_ = need(at)
        if bytes_ is None:  # no possible number between low and the guess
            low = guess
            guess = (low + high) // 2 if high <= most else low + 1
        elif bytes_ <= budget:
            best, low = at, max(guess, at)
            growth = (budget / max(1, bytes_)) ** (1 / power)
            guess = max(low + 1, int(at * growth))
            if high <= most:
                guess = min(guess, (low + high + 1) // 2)
        else:
            high = at
            shrunk = int(at * (budget / bytes_) ** (1 / power))
            guess = max(shrunk, (low + high) // 2) if low else shrunk
    return best
