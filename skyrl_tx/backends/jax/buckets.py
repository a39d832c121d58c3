"""Round sizes up to a short list of them, so that few shapes are ever compiled."""


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
