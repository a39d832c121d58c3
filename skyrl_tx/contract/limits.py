"""How many targets the positions of a sequence may have: refused by API and engine before memory is taken."""

MAX_CELLS = 2**24
"""Of one matrix of targets [T, K], and of what a backend computes at once of many: 64 MiB for each float32 array."""
_FEWEST_POSITIONS = 32
"""Backends pad short sequences: a single position takes the memory of so many."""


def max_targets(num_positions: int) -> int:
    """Return how many targets each of so many positions may have: a power of two, to which backends pad."""
    fitting = max(MAX_CELLS // max(num_positions, _FEWEST_POSITIONS), 1)
    return 1 << fitting.bit_length() - 1
