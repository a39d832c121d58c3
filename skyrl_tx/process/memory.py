"""The memory of this machine and of its GPUs: how much this process may use, and how to return memory.

A container or a systemd service has a control group (cgroup, version 1 or 2), which may limit its
memory. Without a limit, a process may use all memory of the machine.
"""

import csv
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The files with limit and usage of a control group, of version 2 and of version 1.

The third name is an entry of `memory.stat`: cached file pages. They do not count as used, because
the kernel drops them before it kills a process for lack of memory.
"""

_GPU_QUERY = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
_GPU_QUERY_TIMEOUT_S = 60.0
_MIB = 2**20

ENGINES_ON_HOST = "SKYRL_TX_ENGINES_ON_HOST"
"""An environment variable that `serve` sets for its engines: how many of them share the host."""


def get_physical_memory() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def get_memory_limit() -> int:
    """Return how many bytes this process may use: the limit of its control group, or all memory.

    Multiple engines of one server get equal parts.
    """
    limit = min((get_physical_memory(), *(limit for limit, _ in _iter_cgroup_limits())))
    return limit // int(os.environ.get(ENGINES_ON_HOST, "1"))


def read_available_memory() -> int:
    """Return how many bytes this process could allocate now, in addition to its present memory."""
    available = get_memory_limit()
    with suppress(OSError, ValueError, KeyError):
        available = min(available, int(_read_table(_PROC / "meminfo")["MemAvailable:"]) * 1024)
    return min((available, *(max(limit - used, 0) for limit, used in _iter_cgroup_limits())))


def _iter_cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage of each control group of this process that has a limit."""
    for directory in _list_cgroups():
        for limit_name, usage_name, file_entry in _CGROUP_FILES:
            with suppress(OSError, ValueError):  # the group has no such file, or the limit is "max"
                limit, used = (int((directory / name).read_text()) for name in (limit_name, usage_name))
                yield limit, used - int(_read_table(directory / "memory.stat").get(file_entry, 0))


def _list_cgroups() -> list[Path]:
    """Return the directories of the control groups of this process, with all parents.

    A container often sees its own group as the root, but the path of the host in /proc/self/cgroup.
    Directories that do not exist are therefore normal.
    """
    directories: list[Path] = []
    with suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                root = _CGROUP / "memory" if controllers else _CGROUP
                group = root / path.lstrip("/")
                directories += (group, *(parent for parent in group.parents if parent.is_relative_to(root)))
    return directories


def _read_table(path: Path) -> dict[str, str]:
    """Return the second word of each line of a file, by the first word.

    For example `{"MemAvailable:": "1024"}` for the line `MemAvailable: 1024 kB`.
    """
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}


def discard_zeros(address: int, num_bytes: int) -> None:
    """Return memory that holds zeros to the system, although it stays allocated.

    The system provides a page of zeros again when a page of this memory is read or written. The
    memory must be private and anonymous, as the memory of malloc is. Does nothing except on Linux.
    """
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform.startswith("linux") and first < last:
        _load_libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def trim_allocator() -> None:
    """Return freed memory to the system, which glibc would keep. Does nothing without glibc."""
    if (trim := getattr(_load_libc(), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


@cache
def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU and the use of its memory."""

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
    """Return the GPUs that the driver's command `nvidia-smi` lists, or none if it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True)) if done.returncode == 0 else []
    return [
        Gpu(row[0], row[1], row[2], row[3], int(row[4]) * _MIB, int(row[5]) * _MIB)
        for row in rows
        if len(row) == len(_GPU_QUERY) and row[4].isdigit() and row[5].isdigit()
    ]


def select_visible(gpus: list[Gpu], environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA shows to programs with these environment variables, in its order."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [gpu for name in names for gpu in gpus if name == gpu.index or gpu.uuid.startswith(name)]
