"""How many CPUs this process may use.

``os.cpu_count`` counts the machine's; a container or a batch job is often given fewer.
"""

import os


def available_cpus() -> int:
    """CPUs in this process's affinity mask, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
