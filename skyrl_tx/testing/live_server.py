"""A real server in processes of its own, for tests and benchmarks that speak to it from outside."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

_READY = {"serve": re.compile(r"ready at (http://\S+);"), "api": re.compile(r"the API alone at (http://\S+),")}
_ENGINE = re.compile(r"engine process (\d+)")


class ServerFailed(Exception):
    """The server exited, or did not get ready in time; the message is its log."""


class LiveServer:
    """`skyrl-tx serve`, or the API alone, on a free port by default; leaving the context stops it, else kills it."""

    def __init__(
        self,
        data_dir: Path,
        *,
        command: Literal["serve", "api"] = "serve",
        port: int = 0,
        flags: Sequence[str] = ("--base-model", "fake", "--backend", "fake"),
        environment: Mapping[str, str] | None = None,
        ready_within_s: float = 60.0,
    ) -> None:
        """`environment` is the whole of it; None: this process's own."""
        self._log: list[str] = []
        self._grew = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "skyrl_tx", command, "--port", str(port), "--data-dir", str(data_dir), *flags],
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
        """All that the server has said."""
        with self._grew:
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
        """Wait until the log holds the pattern so often; return its first group in the last of them.

        Raises ServerFailed if the server ends before that, or the time is over.
        """
        with self._grew:
            self._grew.wait_for(lambda: len(pattern.findall("".join(self._log))) >= times or self._ended, within_s)
            found = pattern.findall("".join(self._log))
        if len(found) < times:
            raise ServerFailed(f"no {pattern.pattern!r} in the log:\n{self.log}")
        return found[-1]

    def signal(self, number: int) -> None:
        """Send a signal to the serving process alone."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 40.0) -> int:
        """Return the exit status once the server is gone."""
        status = self._process.wait(timeout_s)
        self._reader.join()
        return status

    def stop(self) -> int:
        """Stop as a service manager does; return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it now; the engine notices that its parent is gone."""
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
                with self._grew:
                    self._log.append(line)
                    self._grew.notify_all()
        with self._grew:
            self._ended = True
            self._grew.notify_all()
