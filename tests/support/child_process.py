"""Run a function of a test module in a child process, so that it cannot disturb other tests."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_PROGRAM = """
import importlib, pathlib, sys
module, name, folder = sys.argv[1:]
getattr(importlib.import_module(module), name)(pathlib.Path(folder))
"""
_TIMEOUT_S = 120


def run_in_own_process(function: Callable[[Path], None], folder: Path) -> None:
    """Call a function, found by its module and name, with a folder. Fails with its output if it raises."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, function.__module__, function.__name__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
