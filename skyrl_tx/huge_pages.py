"""Large buffers of host memory on huge pages, where glibc's malloc can be told to ask for them.

XLA on CPU takes a micro-batch's temporary memory from malloc and gives it back each time. On pages of 4 KB the kernel
was measured to spend a fifth of a training step on page faults. glibc reads its tunables when a process starts, so
they travel by environment: see "Memory Allocation Tunables" in the GNU C library's manual.
"""

import os
import sys
from collections.abc import MutableMapping

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"


def ask_for_huge_pages(environment: MutableMapping[str, str]) -> bool:
    """Set the tunable for processes that start with `environment`; whether that changed anything.

    A value that the user has set stays. Elsewhere than on Linux nothing is changed; another C library ignores it.
    """
    known = environment.get(_VARIABLE, "")
    if not sys.platform.startswith("linux") or _TUNABLE in known:
        return False
    environment[_VARIABLE] = f"{known}:{_TUNABLE}=1" if known else f"{_TUNABLE}=1"
    return True


def restart_with_huge_pages() -> None:
    """Begin this process anew with the tunable set; return at once if it is. For a program's first line."""
    if ask_for_huge_pages(os.environ):
        os.execv(sys.executable, sys.orig_argv)
