"""Processes of phases: each in a group of its own, so that all of it ends at the limit."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_rl.shapes import ROOT

LOG_TAIL = 3000
_POLL_S = 0.05


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
    module: str, arguments: dict[str, Any], log: Path, limit_s: float, python: Path = Path(sys.executable)
) -> dict[str, Any]:
    """Run a module of this package, and return its figures; raises PhaseCut or PhaseFailed.

    Its output is appended to the log.
    """
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if python != Path(sys.executable):
        variables.pop("PYTHONPATH", None)  # packages for this interpreter
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        begins_at = output.tell()
        inputs, results = Path(folder) / "arguments.json", Path(folder) / "results.json"
        inputs.write_text(json.dumps(arguments))
        process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.gpu_rl.{module}", str(inputs), str(results)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=variables,
            process_group=0,
        )
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


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill all processes of a group that this process started, and wait for their end."""
    while True:
        process.poll()  # so that it does not remain in its group as a zombie
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(_POLL_S)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
