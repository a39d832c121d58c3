"""Runs a command, and ends it with all of its processes when standard input ends.

The engine holds the other end of standard input. However the engine ends, also by SIGKILL, that end closes. This
program is a file of its own that needs nothing else, so that it has one thread and starts at once.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_GRACE_S = 5.0
"""How long the command may take to end; it has nothing to save."""


def _die_with_parent() -> None:
    """Let the kernel kill the command if this program is killed, where the kernel can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(leader, number)


def main(command: list[str]) -> int:
    """Run a command until it ends or standard input does. Returns its exit status, or the negative signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)
        return 127

    def follow() -> None:
        while sys.stdin.buffer.read(1):
            pass
        _signal_group(child.pid, signal.SIGTERM)
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _signal_group(child.pid, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    status = child.wait()
    _signal_group(child.pid, signal.SIGKILL)  # what the command left
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # A thread may still read standard input, for which an ordinary exit would wait.
    sys.stdout.flush()
    os._exit(status if status >= 0 else 128 - status)
