"""Memory of the GPU, and facts about it, from nvidia-smi, and memory of a process from /proc (Linux).

No process of the benchmark but server and peers opens the device.
"""

import shutil
import subprocess
import threading
from pathlib import Path

NO_GPU = "cpu"


def read_device_name() -> str:
    """Return the name of the first GPU, such as `NVIDIA H200`, or `cpu`."""
    found = _ask("name")
    return found[0] if found else NO_GPU


def read_driver_version() -> str | None:
    found = _ask("driver_version")
    return found[0] if found else None


def read_process_memory(process: int) -> dict[str, int]:
    """Return the resident memory of a process and its peak since its start, in megabytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return {"resident_mb": kilobytes["VmRSS"] * 1024 // 10**6, "peak_mb": kilobytes["VmHWM"] * 1024 // 10**6}


class MemoryWatch:
    """Notes the most memory of the first GPU that was in use within the context."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._peak_mb: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def figures(self) -> dict[str, int]:
        return {} if self._peak_mb is None else {"gpu_memory_mb": self._peak_mb}

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            found = _ask("memory.used")
            if not found:
                return
            self._peak_mb = max(self._peak_mb or 0, int(found[0]))
            if self._ended.wait(self._every_s):
                return


def _ask(field: str) -> list[str]:
    """Return a field of each GPU; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip().splitlines() if run.returncode == 0 else []
