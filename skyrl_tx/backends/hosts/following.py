"""The other ranks: they make the calls of rank 0 in its order, and reply to each with digests of the result."""

import logging
import queue
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from skyrl_tx.backends.hosts import calls
from skyrl_tx.backends.hosts.calls import AnyCall, Frame
from skyrl_tx.backends.hosts.channel import LeaderLost, connect
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.backends.registry import find_backend
from skyrl_tx.contract.backend import AbstractBackend, HostRank, Pass, Snapshot
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.process.threads import ServiceThread

_MAX_RECEIVED = 8
"""Frames that wait to be read, at most: those of files are large."""
_END_S = 5.0
"""Time for the running call to fail by itself when rank 0 has ended."""

_log = logging.getLogger(__name__)


class Follower:
    """Makes the calls of rank 0 on the backend of this host."""

    def __init__(
        self,
        connection: Connection,
        backend: AbstractBackend,
        rank: int,
        *,
        on_ready: Callable[[Capabilities], object],
        on_lost: Callable[[str], object],
    ) -> None:
        """`on_ready` is called after `start`; `on_lost` ends this process, because its call may never return."""
        self._connection = connection
        self._backend = backend
        self._rank = rank
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._received: queue.Queue[bytes | None] = queue.Queue(_MAX_RECEIVED)
        self._has_ended = threading.Event()
        self._passes: dict[int, Pass] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._files: dict[int, tempfile.TemporaryDirectory[str]] = {}

    def run(self) -> None:
        """Follow until rank 0 closes the backend. Raises LeaderLost if it ends in another way."""
        ServiceThread("leader", self._receive).start()
        try:
            self._follow()
        finally:
            self._has_ended.set()
            for handle in list(self._files):
                self._forget(handle)

    def _follow(self) -> None:
        while True:
            frame: Frame = calls.decode(self._next(), Frame)
            for handle in frame.released:
                self._forget(handle)
            reply = self._reply(frame)
            try:
                self._connection.send_bytes(calls.encode(reply))
            except OSError as error:
                raise LeaderLost(f"host 0 has ended: {error.strerror or error}") from error
            if isinstance(frame.call, calls.Close):
                return

    def _receive(self) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                break
            self._received.put(data)
        with suppress(queue.Full):
            self._received.put(None, timeout=_END_S)
        if not self._has_ended.wait(_END_S):
            self._on_lost("host 0 has ended, and a call of this host does not return")

    def _next(self) -> bytes:
        data = self._received.get()
        if data is None:
            self._has_ended.set()
            raise LeaderLost("host 0 has ended")
        return data

    def _reply(self, frame: Frame) -> calls.Reply:
        files = self._receive_files(frame) if isinstance(frame.call, calls.OpenSnapshot) else None
        try:
            return calls.reply_of(frame.number, self._make(frame.number, frame.call, files))
        except Exception as error:
            _log.debug("%s failed", calls.name_of(frame.call), exc_info=error)
            return calls.reply_of_error(frame.number, error)

    def _make(self, number: int, call: AnyCall, files: Path | None) -> object:
        """Make a call and return its result. Passes and snapshots are no results: they are kept here."""
        backend = self._backend
        match call:
            case calls.Close():
                return backend.close()
            case calls.JoinHosts(size=size, coordinator=coordinator):
                return backend.join_hosts(HostRank(rank=self._rank, size=size, coordinator=coordinator))
            case calls.Start():
                capabilities = backend.start()
                self._on_ready(capabilities)
                return capabilities
            case calls.CheckDevices():
                return backend.check_devices()
            case calls.CreateModel(model_id=model_id, spec=spec):
                return backend.create_model(model_id, spec)
            case calls.DeleteModel(model_id=model_id):
                return backend.delete_model(model_id)
            case calls.BeginPass(examples=examples, backward=backward):
                batch = PreparedModelPassBatch(examples=examples)
                self._passes[number] = backend.begin_pass(batch, backward=backward)
            case calls.StepPass(handle=handle):
                return self._passes[handle].step()
            case calls.FinishPass(handle=handle):
                return self._passes[handle].results()
            case calls.AbortPass(handle=handle):
                return self._passes[handle].abort()
            case calls.OptimStep(model_id=model_id, params=params):
                return backend.optim_step(model_id, params)
            case calls.GradientNorm(model_id=model_id):
                return backend.gradient_norm(model_id)
            case calls.ClearGradient(model_id=model_id):
                return backend.clear_gradient(model_id)
            case calls.Capture(model_id=model_id, parts=parts):
                self._snapshots[number] = backend.capture(model_id, parts)
            case calls.OpenSnapshot():
                assert files is not None
                self._snapshots[number] = backend.open_snapshot(files)
            case calls.Restore(model_id=model_id, spec=spec, handle=handle, parts=parts):
                return backend.restore(model_id, spec, self._snapshots[handle], parts)
            case calls.LoadSampler(sampler=sampler, handle=handle):
                return backend.load_sampler(sampler, self._snapshots[handle])
            case calls.DropSampler(sampler=sampler):
                return backend.drop_sampler(sampler)
            case calls.BeginSample(requests=requests):
                return backend.begin_sample(PreparedSampleBatch(requests=requests))
            case calls.StepSample():
                return backend.step_sample()
            case calls.CancelSample(request_ids=request_ids):
                return backend.cancel_sample(request_ids)
            case calls.EndSample(request_id=request_id, index=index):
                return backend.end_sample(request_id, index)
        return None

    def _receive_files(self, frame: Frame) -> Path:
        """Write the files that follow a frame into a directory, which is removed with the snapshot."""
        assert isinstance(frame.call, calls.OpenSnapshot)
        self._files[frame.number] = tempfile.TemporaryDirectory(prefix="skyrl-tx-snapshot-")
        directory = Path(self._files[frame.number].name)
        for name, size in frame.call.files:
            assert calls.is_inside(name), name
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while file.tell() < size:
                    file.write(self._next())
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
    """Join rank 0 and follow it with the backend that it names, until it closes the backend; see `Follower`.

    Raises UserError if this host cannot join, and LeaderLost.
    """
    connection, welcome = connect(settings)
    with connection:
        spec = find_backend(welcome.backend)
        backend = spec.load()(welcome.base_model, spec.config.model_validate_json(welcome.config))
        Follower(connection, backend, settings.rank, on_ready=on_ready, on_lost=on_lost).run()
