"""The adapters that servers read: one directory of this process, in which each sampler has one."""

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.state_files import CONFIG_FILE, TIED_UNEMBED_MODULE, WEIGHTS_FILE

PREFIX = "skyrl_tx-"
"""How the names of our adapters on servers begin."""
_LOCK = "lock"
_TIED = TIED_UNEMBED_MODULE.rpartition(".")[2]


class AdapterDirectory:
    """A new directory that this process holds a lock of. Those of processes that have ended are removed."""

    def __init__(self, parent: Path | None) -> None:
        """`parent` is a directory that servers see under the same path, None a place for temporary files."""
        self._parent = Path(tempfile.gettempdir()) / f"skyrl_tx-adapters-{os.getuid()}" if parent is None else parent
        self._parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._remove_abandoned()
        name = f"{PREFIX}{secrets.token_hex(6)}"
        hidden = self._parent / f".{name}"  # others see it with its lock only
        hidden.mkdir(mode=0o755)
        self._lock = (hidden / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = hidden.rename(self._parent / name)

    def is_abandoned(self, directory: str) -> bool:
        """Whether a path is that of an adapter of a process that has ended."""
        path = Path(directory)
        return path.parent.parent == self._parent and not path.exists()

    def write(self, name: str, source: Snapshot) -> Path:
        """Write the adapter of a snapshot. Raises UserError if vLLM cannot apply it."""
        directory = self.path / name
        shutil.rmtree(directory, ignore_errors=True)  # what an earlier attempt left
        directory.mkdir(mode=0o755)
        source.write(directory)
        for path in directory.iterdir():
            if path.name in (CONFIG_FILE, WEIGHTS_FILE):
                path.chmod(0o644)  # the servers may run as another user
            else:
                path.unlink()
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        if _TIED in config["target_modules"]:
            raise UserError(
                "lora_config.train_unembed True: samples are drawn by vLLM, which has no adapter of an unembedding "
                "that is tied to the embedding; train with train_unembed False"
            )
        return directory

    def remove(self, name: str) -> None:
        """Remove an adapter, if it is there."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def close(self) -> None:
        """Remove the directory and all adapters in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _remove_abandoned(self) -> None:
        for path in self._parent.glob(f"{PREFIX}*"):
            with suppress(OSError), (path / _LOCK).open("r+") as lock:  # it is in use, or was removed meanwhile
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


class SamplerAdapter:
    """The adapter of one sampler, by a name that no other one ever has. Used by one event loop."""

    def __init__(self, name: str, source: Snapshot, place: AdapterDirectory) -> None:
        self.name = name
        self._source: Snapshot | None = source
        self._place = place
        self._lock = asyncio.Lock()

    async def wait_for_directory(self) -> Path:
        """Return the directory of its files, which are written in another thread first.

        Raises UserError if vLLM cannot apply it, and OSError if it cannot be written now.
        """
        async with self._lock:
            if self._source is not None:
                await asyncio.to_thread(self._place.write, self.name, self._source)
                self._source = None
        return self._place.path / self.name

    async def remove(self) -> None:
        """Remove its files, also those that are being written."""
        async with self._lock:
            await asyncio.to_thread(self._place.remove, self.name)
