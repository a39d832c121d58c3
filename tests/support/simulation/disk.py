"""The disk under the artifacts: faults on demand, and what survives a loss of power.

Files are real, in memory. After a loss of power a file has what was flushed by `fsync`, or anything in between if it
was not; a directory has its flushed entries, and each later change of it or not.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from tests.support.simulation.scheduler import Scheduler


class Disk:
    """The artifact directory of one history."""

    def __init__(self, root: Path, scheduler: Scheduler, watch: Callable[[str], None], *, may_lose_power: bool) -> None:
        """`watch` is called with "write" or "flush" before each, and raises the error of a fault."""
        self.root = root
        self._scheduler = scheduler
        self._watch = watch
        self._is_tracking = may_lose_power
        self._paths: dict[int, str] = {}
        self._files: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}

    def open(self, path: Any, flags: int, *args: Any) -> int:
        """Stand for `os.open`."""
        descriptor = os.open(path, flags, *args)
        if self._is_tracking:
            self._paths[descriptor] = os.fspath(path)
        return descriptor

    def fsync(self, descriptor: int) -> None:
        """Stand for `os.fsync`."""
        self._watch("flush")
        if self._is_tracking:
            path = self._paths[descriptor]
            inode = os.fstat(descriptor).st_ino
            if os.path.isdir(path):
                self._entries[inode] = _entries(path)
            else:
                self._files[inode] = Path(path).read_bytes()

    def utime(self, path: Any, *args: Any) -> None:
        """Stand for `os.utime`, with the virtual clock."""
        os.utime(path, *(args or ((self._scheduler.wall,) * 2,)))

    def rmtree(self, path: Any, ignore_errors: bool = False) -> None:
        """Stand for `shutil.rmtree`. A killed process removes nothing."""
        if not self._scheduler.current.process.is_dead:
            shutil.rmtree(path, ignore_errors=ignore_errors)

    def save_file(self, arrays: Any, path: Path) -> None:
        """Stand for the function that writes the fake backend's files. A failed write leaves a part of the file."""
        self._scheduler.pause()
        try:
            self._watch("write")
        except OSError:
            save_file(arrays, path)
            os.truncate(path, self._scheduler.random.randrange(path.stat().st_size))
            raise
        save_file(arrays, path)

    def lose_power(self) -> None:
        """Restore a state that the disk may have after a loss of power. No process runs."""
        root = self.root.stat().st_ino
        # Files next to the artifacts, such as the identity, are flushed when they are written.
        now = {name: inode for name, inode in _entries(self.root).items() if (self.root / name).is_dir()}
        durable = {name: inode for name, inode in self._entries.get(root, {}).items() if "." not in name[1:]}
        names = {inode: name for name, inode in durable.items()}, {inode: name for name, inode in now.items()}
        kept: dict[str, dict[str, bytes]] = {}

        for inode in sorted({*durable.values(), *now.values()}):
            is_flushed = self._scheduler.random.random() < 0.5
            name = names[0 if is_flushed else 1].get(inode)
            if name is None:
                continue
            present = names[1].get(inode)
            entries = self._entries.get(inode) if is_flushed or present is None else _entries(self.root / present)
            kept[name] = {file: self._content(node, present, file) for file, node in (entries or {}).items()}

        stamps = {name: (self.root / name).stat().st_mtime for name in now}
        for name in now:
            shutil.rmtree(self.root / name)

        for name, files in kept.items():
            (self.root / name).mkdir(mode=0o700)
            for file, content in files.items():
                (self.root / name / file).write_bytes(content)
            os.utime(self.root / name, (stamps.get(name, self._scheduler.wall),) * 2)

        self._files, self._entries = {}, {}
        for folder in (self.root, *filter(Path.is_dir, self.root.iterdir())):
            self._entries[folder.stat().st_ino] = _entries(folder)
            self._files |= {path.stat().st_ino: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def _content(self, inode: int, folder: str | None, name: str) -> bytes:
        if inode in self._files:
            return self._files[inode]
        path = self.root / (folder or "") / name
        written = path.read_bytes() if path.is_file() else b""
        return written[: self._scheduler.random.randrange(len(written) + 1)]


def _entries(folder: Any) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def no_space() -> OSError:
    """Return the error of a full disk."""
    return OSError(errno.ENOSPC, "No space left on device")


def failing() -> OSError:
    """Return the error of a failing disk."""
    return OSError(errno.EIO, "Input/output error")
