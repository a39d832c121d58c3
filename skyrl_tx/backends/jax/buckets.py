"""Round sizes up to a short list of them, so that few shapes are ever compiled."""

from collections.abc import Callable, Iterator


def bucket(size: int, smallest: int = 1) -> int:
    """Return the least of `smallest` · (1, 1.5, 2, 3, 4, 6, 8 …) that holds `size`: at most a third is padding."""
    power = smallest
    while power < size:
        power *= 2
    midpoint = power * 3 // 4
    return midpoint if power > smallest and midpoint >= size else power


def next_power(size: int) -> int:
    """Return the least power of two that holds `size`."""
    return 1 << (size - 1).bit_length()


def ascending(rounded_up: Callable[[int], int], last: int) -> Iterator[int]:
    """Yield every size that sizes are rounded up to, and at last the greatest size."""
    size = rounded_up(1)
    while size < last:
        yield size
        size = rounded_up(size + 1)
    yield last
