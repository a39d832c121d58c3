"""The quickstart's server: `skyrl-tx serve` in its own processes."""

import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_READY = re.compile(r"ready at (https?://\S+);")
_READY_WITHIN_S = 120.0
_STOPPED_WITHIN_S = 40.0


class ServerFailed(Exception):
    """The server exited or was not ready in time; the message contains its log."""


@contextmanager
def serve(data_dir: Path, log: Path, *flags: str) -> Generator[str]:
    """Serve on a free port until the context is left; give the URL. The server writes its log to the file `log`.

    Raises ServerFailed.
    """
    command = [sys.executable, "-m", "skyrl_tx", "serve", "--port", "0", "--data-dir", str(data_dir), *flags]
    # In a process group of its own, Ctrl-C does not reach the server before its clients have ended.
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, process_group=0) as process:
        try:
            url = _url_when_ready(process, log)
            try:
                yield url
            finally:
                process.terminate()
                process.wait(_STOPPED_WITHIN_S)
        finally:
            process.kill()  # has no effect on a process that has ended


def _url_when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + _READY_WITHIN_S
    has_ended = False
    while not has_ended and time.monotonic() < end:
        has_ended = process.poll() is not None
        if found := _READY.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.05)
    raise ServerFailed(f"the server exited or was not ready after {_READY_WITHIN_S:.0f} s:\n{log.read_text()}")
