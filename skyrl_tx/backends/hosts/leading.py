"""Rank 0 of several hosts: every call of the backend is made by all hosts, in one order."""

import logging
import socket
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from skyrl_tx.backends.hosts import calls
from skyrl_tx.backends.hosts.calls import Call, Frame, Welcome
from skyrl_tx.backends.hosts.channel import accept_all, listen
from skyrl_tx.backends.hosts.followers import Followers
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.backend import AbstractBackend, HostRank, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch, PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, MemoryExhausted
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta

T = TypeVar("T")

_log = logging.getLogger(__name__)


class LeadingBackend(AbstractBackend):
    """The backend of rank 0 as the engine sees it.

    A call is sent to the other hosts, made here, and returns when all hosts have returned the same: no result reaches
    the engine that another host did not compute. If all raise the same type of error, it is an ordinary failure.
    Whatever else happens ends in BackendLost.
    """

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self,
        own: AbstractBackend,
        settings: HostsSettings,
        welcome: Welcome,
        *,
        on_lost: Callable[[str], object],
    ) -> None:
        """`own` is the backend of this host. See `Followers` for `on_lost`."""
        self._own = own
        self._settings = settings
        self._welcome = welcome
        self._on_lost = on_lost
        self._followers: Followers | None = None
        self._listener: socket.socket | None = None
        self._num_calls = 0
        self._released: deque[int] = deque()  # appended to by the garbage collector, on any thread

    # Life cycle

    def start(self) -> Capabilities:
        """See AbstractBackend. Waits for all hosts first."""
        self._listener = listen(self._settings)
        with self._listener:
            connections = accept_all(self._listener, self._settings, self._welcome)
        self._followers = Followers(
            connections,
            silence_s=self._settings.silence_s,
            is_compiling=self._own.is_compiling,
            on_lost=self._on_lost,
        )
        size, coordinator = self._settings.size, self._settings.coordinator
        rank = HostRank(rank=0, size=size, coordinator=coordinator)
        join = calls.JoinHosts(size=size, coordinator=coordinator)
        self._make(join, lambda: self._own.join_hosts(rank), is_limited=False)
        found = self._make(calls.Start(), self._own.start, is_limited=False)
        _log.info("%d hosts have started", size)
        return found

    def close(self) -> None:
        """See AbstractBackend."""
        followers, self._followers = self._followers, None
        if followers is None:
            self._own.close()
            return
        try:
            if not followers.lost:
                with suppress(BackendLost):
                    self._call(followers, calls.Close(), self._own.close)
        finally:
            followers.close()

    def check_devices(self) -> None:
        """See AbstractBackend."""
        self._make(calls.CheckDevices(), self._own.check_devices)

    def is_compiling(self) -> bool:
        """See AbstractBackend. Of this host."""
        return self._own.is_compiling()

    def meters(self) -> Meters:
        """See AbstractBackend. Of this host."""
        return self._own.meters()

    def fingerprint_changes(self) -> Mapping[str, str]:
        """See AbstractBackend."""
        return self._own.fingerprint_changes()

    def text_of(self, tokens: list[int]) -> str:
        """See AbstractBackend."""
        return self._own.text_of(tokens)

    # Training

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        """See AbstractBackend."""
        self._make(calls.CreateModel(model_id=model_id, spec=spec), lambda: self._own.create_model(model_id, spec))

    def delete_model(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._make(calls.DeleteModel(model_id=model_id), lambda: self._own.delete_model(model_id))

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        """See AbstractBackend."""
        call = calls.BeginPass(examples=batch.examples, backward=backward)
        own: list[Pass] = []
        self._make(call, lambda: own.append(self._own.begin_pass(batch, backward=backward)))
        found = _LeadingPass(self._make, own[0], self._num_calls)
        weakref.finalize(found, self._released.append, self._num_calls).atexit = False
        return found

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """See AbstractBackend."""
        call = calls.OptimStep(model_id=model_id, params=params)
        return self._make(call, lambda: self._own.optim_step(model_id, params))

    def gradient_norm(self, model_id: ModelId) -> float | None:
        """See AbstractBackend."""
        return self._make(calls.GradientNorm(model_id=model_id), lambda: self._own.gradient_norm(model_id))

    def clear_gradient(self, model_id: ModelId) -> None:
        """See AbstractBackend."""
        self._make(calls.ClearGradient(model_id=model_id), lambda: self._own.clear_gradient(model_id))

    # State

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        """See AbstractBackend."""
        ordered = tuple(sorted(parts))
        call = calls.Capture(model_id=model_id, parts=ordered)
        return self._snapshot(call, lambda: self._own.capture(model_id, ordered))

    def open_snapshot(self, directory: Path) -> Snapshot:
        """See AbstractBackend. The other hosts get the files from here, so that they need not share a directory."""
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = tuple((path.relative_to(directory).as_posix(), path.stat().st_size) for path in paths)
        call = calls.OpenSnapshot(files=files)
        chunks = (chunk for path, (_, size) in zip(paths, files, strict=True) for chunk in _chunks(path, size))
        return self._snapshot(call, lambda: self._own.open_snapshot(directory), chunks)

    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        """See AbstractBackend."""
        ordered, snapshot = tuple(sorted(parts)), _leading(source)
        call = calls.Restore(model_id=model_id, spec=spec, handle=snapshot.handle, parts=ordered)
        self._make(call, lambda: self._own.restore(model_id, spec, snapshot.own, ordered))

    # Sampling

    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        """See AbstractBackend."""
        snapshot = _leading(source)
        call = calls.LoadSampler(sampler=sampler, handle=snapshot.handle)
        self._make(call, lambda: self._own.load_sampler(sampler, snapshot.own))

    def drop_sampler(self, sampler: SamplerId) -> None:
        """See AbstractBackend."""
        self._make(calls.DropSampler(sampler=sampler), lambda: self._own.drop_sampler(sampler))

    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        """See AbstractBackend."""
        self._make(calls.BeginSample(requests=batch.requests), lambda: self._own.begin_sample(batch))

    def step_sample(self) -> list[SampleDelta]:
        """See AbstractBackend."""
        return self._make(calls.StepSample(), self._own.step_sample)

    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        """See AbstractBackend."""
        ordered = tuple(sorted(request_ids))
        self._make(calls.CancelSample(request_ids=ordered), lambda: self._own.cancel_sample(ordered))

    def end_sample(self, request_id: RequestId, index: int) -> None:
        """See AbstractBackend."""
        call = calls.EndSample(request_id=request_id, index=index)
        self._make(call, lambda: self._own.end_sample(request_id, index))

    # Calls

    def _snapshot(self, call: Call, own: Callable[[], Snapshot], chunks: Iterator[bytes] | None = None) -> Snapshot:
        made: list[Snapshot] = []
        self._make(call, lambda: made.append(own()), chunks)
        snapshot = _LeadingSnapshot(made[0], self._num_calls)
        weakref.finalize(snapshot, self._released.append, self._num_calls).atexit = False
        return snapshot

    def _make(
        self, call: Call, own: Callable[[], T], chunks: Iterator[bytes] | None = None, *, is_limited: bool = True
    ) -> T:
        """Make a call on all hosts and return its result."""
        followers = self._followers
        assert followers is not None, "the backend is not started"
        if followers.lost:
            raise BackendLost(followers.lost)
        return self._call(followers, call, own, chunks, is_limited=is_limited)

    def _call(
        self,
        followers: Followers,
        call: Call,
        own: Callable[[], T],
        chunks: Iterator[bytes] | None = None,
        *,
        is_limited: bool = True,
    ) -> T:
        self._num_calls += 1
        number = self._num_calls
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        followers.begin(number, call, is_limited=is_limited)
        followers.send(calls.encode(Frame(number=number, released=released, call=call)))  # type: ignore[arg-type]
        try:
            for chunk in chunks or ():
                followers.send(chunk)
        except OSError as error:
            raise followers.lose(f"host 0 cannot read what it sends in {calls.name_of(call)}: {error}") from error
        error: Exception | None = None
        result: T | None = None
        try:
            result = own()
            reply = calls.reply_of(number, result)
        except Exception as raised:
            error, reply = raised, calls.reply_of_error(number, raised)
        for rank, other in sorted(followers.replies(reply).items()):
            if differing := calls.difference(rank, call, other, reply):
                raise followers.lose(differing) from error
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


class _LeadingPass(Pass):
    """A pass of all hosts. Rank 0 lets it go on with less memory when all hosts are out of it at the same place."""

    def __init__(self, make: Callable[..., object], own: Pass, handle: int) -> None:
        self._make = make
        self._own = own
        self._handle = handle

    def step(self) -> bool:
        """See Pass."""
        try:
            return bool(self._make(calls.StepPass(handle=self._handle), self._own.step))
        except MemoryExhausted as error:
            _note_retry(error)
            return False

    def results(self) -> list[PassResult]:
        """See Pass."""
        while True:
            try:
                found = self._make(calls.FinishPass(handle=self._handle), self._own.results)
            except MemoryExhausted as error:
                _note_retry(error)
            else:
                assert isinstance(found, list)
                return found

    def abort(self) -> None:
        """See Pass."""
        self._make(calls.AbortPass(handle=self._handle), self._own.abort)


class _LeadingSnapshot(Snapshot):
    """A snapshot of all hosts; rank 0 writes it."""

    def __init__(self, own: Snapshot, handle: int) -> None:
        self.own = own
        self.handle = handle

    def write(self, directory: Path) -> None:
        """See Snapshot."""
        self.own.write(directory)


def _note_retry(error: MemoryExhausted) -> None:
    _log.warning("all hosts ran out of memory in the same call; all go on with %s: %s", error.plan, error)


def _leading(source: Snapshot) -> _LeadingSnapshot:
    assert isinstance(source, _LeadingSnapshot), "the snapshot is of another backend"
    return source


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises OSError if it has become shorter."""
    with path.open("rb") as file:
        for start in range(0, size, calls.CHUNK_BYTES):
            chunk = file.read(min(calls.CHUNK_BYTES, size - start))
            if len(chunk) != min(calls.CHUNK_BYTES, size - start):
                raise OSError(f"{path} has changed")
            yield chunk
