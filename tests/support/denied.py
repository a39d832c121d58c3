"""A directory that this process may not enter, for tests that run as root or as another user."""

import ctypes
import os
import pwd
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522
_IGNORES_MODES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@contextmanager
def obey_modes() -> Iterator[None]:
    """Let the modes of files apply to this thread and threads that it starts, also for root."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, before, reduced = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    reduced[:] = before[:]
    reduced[0] &= ~_IGNORES_MODES
    assert libc.capset(header, reduced) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@contextmanager
def deny_directory(*files: str) -> Iterator[tuple[Path, str]]:
    """Yield the directory, which has empty files with these names, and the reason that errors name."""
    with tempfile.TemporaryDirectory(prefix="skyrl_tx-") as temporary:
        directory = Path(temporary) / "data"
        directory.mkdir(mode=0o700)
        for name in files:
            (directory / name).touch()

        if os.geteuid() == 0:
            os.chown(directory, pwd.getpwnam("nobody").pw_uid, -1)
            reason = "belongs to nobody (mode 0700): run as that user"
        else:
            directory.chmod(0o000)
            reason = "has mode 0000: change its mode"
        try:
            with obey_modes():
                yield directory, reason
        finally:
            directory.chmod(0o700)
