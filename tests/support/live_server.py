"""A server in its own processes, for tests and benchmarks."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from tests.support.with_constants import FLAG

_READY = {
    "serve": re.compile(r"ready at (https?://\S+);"),
    "api": re.compile(r"API only, at (https?://\S+),"),
    "engine": re.compile(r"which follows (\S+)|INFO engine ready\n"),
}
_ENGINE = re.compile(r"engine process (\d+)")


class ServerFailed(Exception):
    """The server exited or was not ready in time; the message contains its log."""


class LiveServer:
    """A running `skyrl-tx serve`, `api` or `engine`, by default on a free port.

    Leaving the context stops it.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        command: Literal["serve", "api", "engine"] = "serve",
        port: int = 0,
        flags: Sequence[str] = ("--base-model", "fake", "--backend", "fake"),
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        ready_within_s: float = 300.0,
    ) -> None:
        """Start the server and wait until it is ready; raises ServerFailed.

        `environment` replaces this process's environment, and `launcher` is a command that runs the server's.
        `flags` may have other constants than the product's, see `tests.support.with_constants`.
        """
        self._log: list[str] = []
        self._changed = threading.Condition()
        self._has_ended = False
        self._process = subprocess.Popen(
            [
                *launcher,
                sys.executable,
                "-m",
                "tests.support.with_constants" if FLAG in flags else "skyrl_tx",
                command,
                "--port",
                str(port),
                "--data-dir",
                str(data_dir),
                *flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        assert self._process.stderr is not None

        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()

        try:
            self.url = self.wait_for(_READY[command], within_s=ready_within_s)
        except BaseException:
            self.kill()
            raise

    @property
    def log(self) -> str:
        """The server's log so far."""
        with self._changed:
            return "".join(self._log)

    @property
    def pid(self) -> int:
        """The process id of the serving process."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """The process id of the newest engine."""
        return int(_ENGINE.findall(self.log)[-1])

    def wait_for(self, pattern: re.Pattern[str], *, times: int = 1, within_s: float = 30.0) -> str:
        """Wait until the log contains the pattern `times` times; return the first group of its last match.

        Raises ServerFailed if the server exits or the time limit passes.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(pattern.findall("".join(self._log))) >= times or self._has_ended, within_s
            )
            found = pattern.findall("".join(self._log))
        if len(found) < times:
            raise ServerFailed(f"no {pattern.pattern!r} in the log:\n{self.log}")
        return found[-1]

    def signal(self, number: int) -> None:
        """Send a signal to the serving process, not to the engine."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 40.0) -> int:
        """Wait for the server's exit and return its status."""
        status = self._process.wait(timeout_s)
        self._reader.join()
        return status

    def stop(self) -> int:
        """Stop with SIGTERM; return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill the server; the engine exits when its parent has ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                with self._changed:
                    self._log.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
