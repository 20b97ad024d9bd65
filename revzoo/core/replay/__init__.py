"""The one backward rule: a tape of steps, and slots in the graph that a replay fills."""
