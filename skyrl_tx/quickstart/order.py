"""The order in which questions are met."""

import random


class Order:
    """Indices below `size`, shuffled anew each time all were met; equal seeds give equal orders."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._random = random.Random(seed)
        self._left: list[int] = []

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices, none of them twice within one round."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._left:
                self._left = list(range(self._size))
                self._random.shuffle(self._left)
            taken.append(self._left.pop())
        return taken
