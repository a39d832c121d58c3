"""Waiting for an effect of another thread or process."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], within_s: float = 60.0) -> T:
    """Poll until `look` returns a true value, and return it; raises AssertionError after the time limit.

    The limit is long, because only a failure reaches it and a busy machine may be slow.
    """
    end = time.monotonic() + within_s
    while not (value := look()):
        assert time.monotonic() < end, f"still {value!r} after {within_s:.0f} s"
        time.sleep(0.005)
    return value
