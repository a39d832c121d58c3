"""Runs a command, and kills it with all its child processes when standard input is closed.

The engine holds the other end of standard input, which closes when the engine ends, even after SIGKILL. This program
imports nothing of the package, so it starts at once and has no other threads when it forks.
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
"""How long the command may take to end. It has nothing to save."""


def _die_with_parent() -> None:
    """On Linux, make the kernel kill the command if this program is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(leader, number)


def main(command: list[str]) -> int:
    """Run a command until it ends or standard input is closed. Returns its exit status, or the negative signal."""
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
    _signal_group(child.pid, signal.SIGKILL)  # child processes that the command left behind
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # The thread may still be reading standard input, and an ordinary exit would wait for it.
    sys.stdout.flush()
    os._exit(status if status >= 0 else 128 - status)
