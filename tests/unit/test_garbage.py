"""Looking for cyclic garbage seldom, and still at all."""

import gc
import weakref

from skyrl_tx.garbage import collect_seldom


class Node:
    """Something that can be part of a circle."""

    def __init__(self) -> None:
        self.other = self


def test_circles_made_later_are_found_and_what_was_there_is_passed_over() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom(full_after=30)
        assert gc.get_threshold()[2] == 30 and gc.get_freeze_count() > 1000
        seen = weakref.ref(Node())
        assert seen() is not None
        gc.collect()
        assert seen() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
