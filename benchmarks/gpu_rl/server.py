"""Runs `skyrl-tx serve` with default settings, in a new process group and with its own directories."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_rl.child import LOG_TAIL, PhaseCut, PhaseFailed, kill_group, start_group

_READY = re.compile(r"ready at (https?://\S+);")
_LOADED = re.compile(r"backend ready on .* after ([\d.]+) s")
_ENGINE = re.compile(r"engine process (\d+) started")
_STOP_S = 15.0
_POLL_S = 0.05


class Server:
    """A running server. Leaving the context ends its whole process group."""

    def __init__(
        self, model: Path, flags: Sequence[str], *, cache: Path, data: Path, log: Path, limit_s: float
    ) -> None:
        """Start it, with compiled programs in `cache`, and wait until it is ready.

        Its output is appended to the log. Raises PhaseCut if it is not ready within the limit, and PhaseFailed if it
        exits.
        """
        variables = os.environ | {
            "XDG_CACHE_HOME": str(cache),
            "XDG_DATA_HOME": str(data),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "skyrl_tx", "serve", "--base-model", str(model), "--port", "0", *flags]

        started = time.perf_counter()
        with log.open("ab") as file:
            self._log, self._log_begins_at = log, file.tell()
            self._process = start_group(command, variables, file)

        try:
            self.url = self._wait_until_ready(started + limit_s)
        except BaseException:
            kill_group(self._process)
            raise
        self._ready_s = time.perf_counter() - started

    @property
    def log(self) -> str:
        return self._log.read_bytes()[self._log_begins_at :].decode(errors="replace")

    @property
    def engine(self) -> int:
        """The process id of the engine that was started last."""
        return int(_ENGINE.findall(self.log)[-1])

    def describe_start(self) -> dict[str, Any]:
        """Return the seconds until it was ready and until the backend was, and what the log says until now."""
        loaded = _LOADED.search(self.log)
        return {
            "ready_s": round(self._ready_s, 2),
            "backend_ready_s": float(loaded[1]) if loaded else None,
            "log": [line for line in self.log.splitlines() if "import tinker" not in line and line.strip()],
        }

    def stop(self) -> None:
        """Stop the server, and wait until no process is left that may hold memory of the device."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            print(f"the server did not stop within {_STOP_S:.0f} s; it is killed", flush=True)
        kill_group(self._process)

    def kill(self) -> None:
        """End the server at once."""
        kill_group(self._process)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self, end: float) -> str:
        while True:
            found = _READY.search(self.log)
            if found:
                return found[1]
            if self._process.poll() is not None:
                raise PhaseFailed(f"the server exited with {self._process.returncode}: {self.log[-LOG_TAIL:]}", {})
            if time.perf_counter() > end:
                raise PhaseCut({"log": self.log.splitlines()[-20:]})
            time.sleep(_POLL_S)
