"""Checks of the fuzz tests: response time, memory, and no server errors."""

import random
import time
import tracemalloc
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings

HANG_S = 10.0
"""Time limit of an input, generous for shared machines; decoding takes milliseconds."""


class Finding(AssertionError):
    """An input that violates a guarantee; the message states which."""


class ServerError(Finding):
    """The response was a 5xx."""


class Hang(Finding):
    """The response was late."""


class ExcessiveMemory(Finding):
    """The input took more memory than the limit."""


@dataclass(slots=True)
class Tally:
    """Number of inputs, and the resources they took."""

    num_inputs: int = 0
    longest_s: float = 0.0
    peak_bytes: int = 0
    """Largest allocation by Python and numpy for one input, if traced."""
    statuses: dict[int, int] = field(default_factory=dict[int, int])

    @contextmanager
    def watch(self, max_bytes: int | None = None) -> Generator[None]:
        """Time one input, and trace its memory if there is a limit. Raises Hang or ExcessiveMemory."""
        self.num_inputs += 1
        before = 0
        if max_bytes is not None:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
        started = time.monotonic()
        yield
        elapsed = time.monotonic() - started
        self.longest_s = max(self.longest_s, elapsed)
        if elapsed > HANG_S:
            raise Hang(f"took {elapsed:.1f} s")
        if max_bytes is not None:
            taken = tracemalloc.get_traced_memory()[1] - before
            self.peak_bytes = max(self.peak_bytes, taken)
            if taken > max_bytes:
                raise ExcessiveMemory(f"took {taken} bytes")


@contextmanager
def tracing() -> Generator[None]:
    """Trace allocations, as `Tally.watch` requires for a limit."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def examples(number: int, *, is_random: bool = False) -> settings:
    """Return Hypothesis settings for `number` inputs, fixed or random."""
    return settings(
        max_examples=number,
        derandomize=not is_random,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


def mutations(whole: bytes, number: int) -> Iterator[bytes]:
    """Yield an input and `number` damaged copies: truncated, overwritten or repeated in places; deterministic."""
    yield whole
    dice = random.Random(zlib.crc32(whole))
    for _ in range(number):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            start = dice.randint(0, len(data))
            end = min(len(data), start + dice.randint(0, 4))
            data[start:end] = _patch(dice, bytes(data[start:end]))
        yield bytes(data)


def _patch(dice: random.Random, old: bytes) -> bytes:
    kinds: list[Callable[[], bytes]] = [
        lambda: dice.randbytes(dice.randint(0, 4)),
        lambda: old * 2,
        lambda: bytes(byte ^ 1 << dice.randrange(8) for byte in old),
        lambda: b"\xff" * 9 + b"\x01",  # the longest varint
    ]
    return dice.choice(kinds)()
