"""Run the backend on the ranks other than 0.

Each of these ranks repeats the backend calls of rank 0 on its own backend, in the same order. It
answers each call with hashes of the result.
"""

import logging
import queue
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from skyrl_tx.backends.hosts import protocol
from skyrl_tx.backends.hosts.protocol import BackendCall, Frame, LeaderLost, connect
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.backends.registry import find_backend, start_backend
from skyrl_tx.contract.backend import AbstractBackend, Pass, Snapshot
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.process.signals import ServiceThread

_MAX_QUEUED_FRAMES = 8
"""How many received frames may wait.
The limit bounds memory, because frames with file contents have up to 8 MiB."""
_SHUTDOWN_GRACE_S = 5.0
"""How long the running call may continue after rank 0 has ended, before `on_lost` is called."""

_log = logging.getLogger(__name__)


class Follower:
    """Repeat the backend calls of rank 0 on the backend of this host.

    One thread receives frames, and the thread of `run` makes the calls. So this host notices that
    rank 0 has ended even if a call never returns.
    """

    def __init__(
        self,
        connection: Connection,
        backend: AbstractBackend,
        rank: int,
        *,
        on_ready: Callable[[Capabilities], object],
        on_lost: Callable[[str], object],
    ) -> None:
        """Store the arguments.

        `on_ready` is called when the backend has started. `on_lost` is called with the reason if
        rank 0 has ended and the running call does not return. It must end this process.
        """
        self._connection = connection
        self._backend = backend
        self._rank = rank
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._frames: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED_FRAMES)
        self._is_done = threading.Event()
        self._passes: dict[int, Pass] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._files: dict[int, tempfile.TemporaryDirectory[str]] = {}

    def run(self) -> None:
        """Make calls until rank 0 closes the backend.

        Raises LeaderLost if rank 0 ends before that.
        """
        ServiceThread("leader", self._receive_frames).start()
        try:
            self._follow()
        finally:
            self._is_done.set()
            for handle in list(self._files):
                self._forget(handle)

    def _follow(self) -> None:
        while True:
            frame: Frame = protocol.decode(self._get_frame(), Frame)
            for handle in frame.released:
                self._forget(handle)
            reply = self._make_reply(frame)
            try:
                self._connection.send_bytes(protocol.encode(reply))
            except OSError as error:
                raise LeaderLost(f"rank 0 has ended: {error.strerror or error}") from error
            if protocol.get_call_name(frame.call) == "close":
                return

    def _receive_frames(self) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                break
            self._frames.put(data)
        with suppress(queue.Full):
            self._frames.put(None, timeout=_SHUTDOWN_GRACE_S)
        if not self._is_done.wait(_SHUTDOWN_GRACE_S):
            self._on_lost("rank 0 has ended, but a call of this host does not return")

    def _get_frame(self) -> bytes:
        data = self._frames.get()
        if data is None:
            self._is_done.set()
            raise LeaderLost("rank 0 has ended")
        return data

    def _make_reply(self, frame: Frame) -> protocol.HostReply:
        files = self._receive_files(frame) if isinstance(frame.call, protocol.OpenSnapshot) else None
        try:
            return protocol.make_reply(frame.number, self._make_call(frame.number, frame.call, files))
        except Exception as error:
            _log.debug("%s failed", protocol.get_call_name(frame.call), exc_info=error)
            return protocol.make_error_reply(frame.number, error)

    def _make_call(self, number: int, call: BackendCall, files: Path | None) -> object:
        """Make a call and return its result.

        A `Pass` or a `Snapshot` is stored under the number of the frame, and None is returned.
        """
        name = protocol.get_call_name(call)
        arguments: dict[str, Any] = {field: getattr(call, field) for field in call.__struct_fields__}

        # Arguments that differ between hosts.
        match name:
            case "join_hosts":
                arguments["rank"] = replace(arguments["rank"], rank=self._rank)
            case "restore" | "load_sampler":
                arguments["source"] = self._snapshots[arguments["source"]]
            case "open_snapshot":
                arguments = {"directory": files}
            case _:
                pass

        if name in protocol.PASS_METHODS:
            target, name = self._passes[arguments.pop("handle")], protocol.PASS_METHODS[name]
        else:
            target = self._backend
        result = getattr(target, name)(**arguments)

        if isinstance(result, Pass):
            self._passes[number] = result
            return None
        if isinstance(result, Snapshot):
            self._snapshots[number] = result
            return None
        if isinstance(result, Capabilities):
            self._on_ready(result)
        return result

    def _receive_files(self, frame: Frame) -> Path:
        """Write the file contents that follow a frame to a temporary directory, and return it.

        The directory is removed when rank 0 releases the snapshot.
        """
        assert isinstance(frame.call, protocol.OpenSnapshot)
        self._files[frame.number] = tempfile.TemporaryDirectory(prefix="skyrl-tx-snapshot-")
        directory = Path(self._files[frame.number].name)
        for name, size in frame.call.files:
            assert protocol.is_inside(name), name
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while file.tell() < size:
                    file.write(self._get_frame())
        return directory

    def _forget(self, handle: int) -> None:
        self._passes.pop(handle, None)
        self._snapshots.pop(handle, None)
        files = self._files.pop(handle, None)
        if files is not None:
            files.cleanup()


def follow(
    settings: HostsSettings, *, on_ready: Callable[[Capabilities], object], on_lost: Callable[[str], object]
) -> None:
    """Join rank 0 and make its calls until it closes the backend.

    Rank 0 chooses the backend and its settings. See `Follower` for `on_ready` and `on_lost`.

    Raises:
        UserError: If this host cannot join.
        LeaderLost: If rank 0 ends before it closes the backend.
    """
    connection, welcome = connect(settings)
    with connection:
        spec = find_backend(welcome.backend)
        config = spec.config.model_validate_json(welcome.config)
        backend = start_backend(welcome.backend, spec, welcome.base_model, config)
        Follower(connection, backend, settings.rank, on_ready=on_ready, on_lost=on_lost).run()
