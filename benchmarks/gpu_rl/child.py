"""The process of a phase. It has its own process group, so that all its children can be killed at the time limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_rl.shapes import ROOT

LOG_TAIL = 3000
_POLL_S = 0.05
_running: "set[subprocess.Popen[bytes]]" = set()


class PhaseCut(Exception):
    """A phase was ended at its limit."""

    def __init__(self, results: dict[str, Any]) -> None:
        """Keep what was measured until then."""
        super().__init__("a phase was ended at its limit")
        self.results = results


class PhaseFailed(Exception):
    """A phase failed; the message says why."""

    def __init__(self, message: str, results: dict[str, Any]) -> None:
        """Keep what was measured until then."""
        super().__init__(message)
        self.results = results


def run_module(
    module: str,
    arguments: dict[str, Any],
    log: Path,
    limit_s: float,
    python: Path = Path(sys.executable),
    package: str = "gpu_rl",
) -> dict[str, Any]:
    """Run a module of a package of benchmarks, and return its figures; raises PhaseCut or PhaseFailed.

    Its output is appended to the log.
    """
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if python != Path(sys.executable):
        variables.pop("PYTHONPATH", None)  # packages for this interpreter

    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        begins_at = output.tell()
        inputs, results = Path(folder) / "arguments.json", Path(folder) / "results.json"
        inputs.write_text(json.dumps(arguments))
        command = [str(python), "-m", f"benchmarks.{package}.{module}", str(inputs), str(results)]
        process = start_group(command, variables, output)

        try:
            code = process.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            raise PhaseCut(_read(results)) from None
        finally:
            kill_group(process)
            figures = _read(results)

        if code:
            text = log.read_bytes()[begins_at:].decode(errors="replace")
            raise PhaseFailed(f"{module} ended with {code}: {text.strip()[-LOG_TAIL:]}", figures)
        return figures


def start_group(command: Sequence[str], variables: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a program in a new process group, with the root of the repository as working directory."""
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=variables, process_group=0
    )
    _running.add(process)
    return process


def exit_on_sigterm() -> None:
    """Let SIGTERM end all groups and this process at once. An exception could be lost, as handlers run in any call."""

    def end(number: int, _: object) -> None:
        for process in list(_running):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill all processes of a group that this process started, and wait for their end."""
    while True:
        process.poll()
        if not is_alive(process.pid):
            _running.discard(process)
            return
        with contextlib.suppress(ProcessLookupError):  # the last one has ended meanwhile
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def is_alive(group: int) -> bool:
    """Return whether a process of the group is running. A process that has ended but is not reaped does not count."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX":
            return True
    return False


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
