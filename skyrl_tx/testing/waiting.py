"""Waiting for what another thread or process is about to do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], within_s: float = 60.0) -> T:
    """Look again and again until what is seen counts as true, and return it; raises AssertionError after that time.

    It is long because only a failure takes it: on a busy machine anything else may take many times its usual time.
    """
    end = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < end, f"still {seen!r} after {within_s:.0f} s"
        time.sleep(0.005)
    return seen
