"""How often a process looks for cyclic garbage."""

import gc

_YOUNG = 10_000
_MIDDLE = 20


def collect_seldom(*, full_after: int) -> None:
    """Look less often, and never again among what is there by now; at all objects after so many smaller collections.

    A full collection goes through all that waits, a tenth of a second or more with ten thousand requests, in whichever
    thread it falls: an answer that was being written then was told that much later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, full_after)
