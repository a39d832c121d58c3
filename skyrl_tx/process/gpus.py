"""The NVIDIA GPUs of this machine, as the driver's command `nvidia-smi` lists them."""

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_QUERY = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
_TIMEOUT_S = 60.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and the use of its memory."""

    index: str
    uuid: str
    name: str
    driver: str
    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """The memory that no program uses."""
        return self.total_bytes - self.used_bytes


def list_gpus() -> list[Gpu]:
    """Return the GPUs. The list is empty without the command, or if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True)) if done.returncode == 0 else []
    return [
        Gpu(row[0], row[1], row[2], row[3], int(row[4]) * _MIB, int(row[5]) * _MIB)
        for row in rows
        if len(row) == len(_QUERY) and row[4].isdigit() and row[5].isdigit()
    ]


def select_visible(gpus: list[Gpu], environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA shows to programs with these environment variables, in its order."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [gpu for name in names for gpu in gpus if name == gpu.index or gpu.uuid.startswith(name)]
