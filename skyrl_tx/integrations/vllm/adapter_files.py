"""The adapter files that vLLM servers read. This process owns one directory, with a subdirectory per sampler."""

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from safetensors.numpy import load_file, save_file

from skyrl_tx.contract.backend import Snapshot
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.state_files import CONFIG_FILE, TIED_UNEMBED_MODULE, WEIGHTS_FILE
from skyrl_tx.contract.state_files import PREFIX as MODULE_PREFIX
from skyrl_tx.weights.nesting import NOT_NESTED, Nesting, find_module_nesting

PREFIX = "skyrl_tx-"
"""The prefix of our adapters' names on the servers."""
_LOCK = "lock"
_TIED = TIED_UNEMBED_MODULE.rpartition(".")[2]


class AdapterDirectory:
    """A new directory for adapters, which this process locks.

    The lock tells other processes that the directory is in use. Directories whose process has ended are removed.
    """

    def __init__(self, parent: Path | None, nesting: Nesting = NOT_NESTED) -> None:
        """Create the directory in `parent`, or in the directory for temporary files if `parent` is None.

        The vLLM servers must see the directory under the same path. `nesting` says how the class of the base model
        names the modules of its text model. vLLM ignores adapters of modules with other names.
        """
        self._nesting = nesting
        self._parent = Path(tempfile.gettempdir()) / f"skyrl_tx-adapters-{os.getuid()}" if parent is None else parent
        self._parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._remove_abandoned()
        name = f"{PREFIX}{secrets.token_hex(6)}"
        hidden = self._parent / f".{name}"  # renamed when it is locked, so that other processes never see it unlocked
        hidden.mkdir(mode=0o755)
        self._lock = (hidden / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = hidden.rename(self._parent / name)

    def is_abandoned(self, directory: str) -> bool:
        """Return whether `directory` belonged to an adapter of a process that has ended. It no longer exists then."""
        path = Path(directory)
        return path.parent.parent == self._parent and not path.exists()

    def write(self, name: str, source: Snapshot) -> Path:
        """Write the adapter of a snapshot and return its directory. Raises UserError if vLLM cannot apply it."""
        # Write the files, replacing what an earlier attempt left.
        directory = self.path / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o755)
        source.write(directory)
        if self._nesting.prefix:
            _rename_modules(directory / WEIGHTS_FILE, self._nesting)
        for path in directory.iterdir():
            if path.name in (CONFIG_FILE, WEIGHTS_FILE):
                path.chmod(0o644)  # the servers may run as another user
            else:
                path.unlink()

        # vLLM has no adapters for a tied unembedding.
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        if _TIED in config["target_modules"]:
            raise UserError(
                "lora_config.train_unembed is True, but this server samples with vLLM, which has no adapters for an "
                "unembedding that is tied to the embedding; train with train_unembed False"
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
            with suppress(OSError), (path / _LOCK).open("r+") as lock:  # another process uses or has removed it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


def _rename_modules(path: Path, nesting: Nesting) -> None:
    tensors = load_file(path)
    renamed = {f"{MODULE_PREFIX}{nesting.add_prefix(name.removeprefix(MODULE_PREFIX))}": name for name in tensors}
    save_file({new: tensors[name] for new, name in renamed.items()}, path, metadata={"format": "pt"})


def read_nesting(base_model: str) -> Nesting:
    """Return how the class of the base model nests the text model.

    The class is in `config.json`. The trainer has already downloaded this file if the base model is a hub id. If there
    is no such file, the text model is not nested.
    """
    directory = Path(base_model).expanduser()
    path = directory / "config.json" if directory.is_dir() else try_to_load_from_cache(base_model, "config.json")
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return NOT_NESTED
    return find_module_nesting(json.loads(Path(path).read_text(encoding="utf-8")))


class SamplerAdapter:
    """The adapter of one sampler, with a unique name on the servers. Belongs to one event loop."""

    def __init__(self, name: str, source: Snapshot, adapter_directory: AdapterDirectory) -> None:
        self.name = name
        self._source: Snapshot | None = source
        self._adapter_directory = adapter_directory
        self._lock = asyncio.Lock()

    async def wait_for_directory(self) -> Path:
        """Return the directory of the adapter's files. The first call writes them in another thread.

        Raises UserError if vLLM cannot apply the adapter, and OSError if the files cannot be written now.
        """
        async with self._lock:
            if self._source is not None:
                await asyncio.to_thread(self._adapter_directory.write, self.name, self._source)
                self._source = None
        return self._adapter_directory.path / self.name

    async def remove(self) -> None:
        """Remove the adapter's files. If another task is writing the files, wait until it has finished."""
        async with self._lock:
            await asyncio.to_thread(self._adapter_directory.remove, self.name)
