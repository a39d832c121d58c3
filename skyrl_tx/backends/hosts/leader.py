"""Rank 0 of multiple hosts: every call of the backend is made by all hosts, in one order.

`Followers` are the other hosts as rank 0 sees them: their replies to the running call, and which of them are
late or gone.
"""

import inspect
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from skyrl_tx.backends.hosts import calls
from skyrl_tx.backends.hosts.calls import BackendCall, Frame, HostReply, Welcome, decode, get_call_name
from skyrl_tx.backends.hosts.channel import accept_all, listen
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.backend import AbstractBackend, HostRank, Pass, Snapshot
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, MemoryExhausted
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import PassResult
from skyrl_tx.process.signals import ServiceThread

_log = logging.getLogger(__name__)

LOSS_GRACE_S = 5.0
"""Time for the running call of rank 0 to fail by itself when another host has ended."""
FAILURE_GRACE_S = 30.0
"""Time for all hosts to fail in a call when one has failed."""
_CHECK_PERIOD_S = 0.1
_CHECKS_PER_LIMIT = 4


@dataclass(slots=True, kw_only=True)
class _RunningCall:
    """The call that all hosts make now. Times are those in which this process ran."""

    number: int
    call: BackendCall
    is_limited: bool
    own: HostReply | None = None
    """The reply of rank 0, when its call has ended."""
    replies: dict[int, HostReply] = field(default_factory=dict[int, HostReply])
    spent_s: float = 0.0
    """Without what the compiler of rank 0 took."""
    trouble_s: float = 0.0
    """Since a host is known to be gone or to have failed."""


class Followers:
    """The other hosts. A thread receives their replies and keeps the time limits."""

    def __init__(
        self,
        connections: Mapping[int, Connection],
        *,
        silence_s: float,
        is_compiling: Callable[[], bool],
        on_lost: Callable[[str], object],
    ) -> None:
        """`on_lost` ends this process, because a call of rank 0 may never return; it receives the reason.

        It is called on the thread. A call that waits here for other hosts raises BackendLost instead.
        """
        self._connections = dict(connections)
        self._silence_s = silence_s
        self._is_compiling = is_compiling
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._running: _RunningCall | None = None
        self._lost_ranks: list[int] = []
        self._loss_reason = ""
        self._is_closed = False
        self._period_s = min(_CHECK_PERIOD_S, silence_s / _CHECKS_PER_LIMIT)
        self._thread = ServiceThread("hosts", self._receive_replies)
        self._thread.start()

    @property
    def loss_reason(self) -> str:
        """Why the hosts can make no further call; empty while they can."""
        return self._loss_reason

    def begin(self, number: int, call: BackendCall, *, is_limited: bool) -> None:
        """Watch a call, before it is sent."""
        with self._changed:
            self._running = _RunningCall(number=number, call=call, is_limited=is_limited)

    def send(self, data: bytes) -> None:
        """Send a frame to all. Raises BackendLost if one is gone."""
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise self.mark_lost(f"host {rank} has ended: {error.strerror or error}") from error

    def wait_for_replies(self, own: HostReply) -> Mapping[int, HostReply]:
        """Wait for the replies of all to the running call, which has ended here. Raises BackendLost without them."""
        with self._changed:
            running = self._running
            assert running is not None
            running.own = own
            self._changed.wait_for(
                lambda: self._loss_reason or self._lost_ranks or len(running.replies) == len(self._connections)
            )
            self._running = None
            missing = [rank for rank in self._lost_ranks if rank not in running.replies]
        if missing:
            raise self.mark_lost(self._describe_end(missing[0], running))
        if self._loss_reason:
            raise BackendLost(self._loss_reason)
        return running.replies

    def close(self) -> None:
        """Close all connections: the other hosts end."""
        with self._changed:
            self._is_closed = True
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def mark_lost(self, reason: str) -> BackendLost:
        """Make no further call, and return the error to raise."""
        with self._changed:
            self._loss_reason = self._loss_reason or reason
            self._changed.notify_all()
        return BackendLost(self._loss_reason)

    def _receive_replies(self) -> None:
        open_ranks = {connection: rank for rank, connection in self._connections.items()}
        checked_at = time.monotonic()
        while not self._is_closed:
            for connection in wait(list(open_ranks), self._period_s) if open_ranks else ():
                assert isinstance(connection, Connection)
                try:
                    data = connection.recv_bytes()
                except (EOFError, OSError):
                    with self._changed:
                        self._lost_ranks.append(open_ranks.pop(connection))
                        self._changed.notify_all()
                else:
                    self._record_reply(open_ranks[connection], decode(data, HostReply))
            if not open_ranks:
                time.sleep(self._period_s)
            now = time.monotonic()
            self._check_limits(min(now - checked_at, 2 * self._period_s))  # not the time of a stopped process
            checked_at = now

    def _record_reply(self, rank: int, reply: HostReply) -> None:
        with self._changed:
            running = self._running
            if running is not None and reply.number == running.number:
                running.replies[rank] = reply
                self._changed.notify_all()

    def _check_limits(self, elapsed_s: float) -> None:
        """Count time to the running call, and end what exceeds its limit."""
        with self._changed:
            if self._loss_reason or self._is_closed:
                return
            running = self._running
            reason = self._find_loss_reason(running, elapsed_s)
            if not reason:
                return
            self._loss_reason = reason
            self._changed.notify_all()
            is_waiting = running is not None and running.own is not None
        if not is_waiting:
            self._on_lost(reason)

    def _find_loss_reason(self, running: _RunningCall | None, elapsed_s: float) -> str:
        """Return why the hosts are lost, or nothing. Called with the lock."""
        if running is None:
            return f"host {self._lost_ranks[0]} has ended" if self._lost_ranks else ""
        replies = running.replies if running.own is None else {0: running.own, **running.replies}
        failed = next((rank for rank, reply in replies.items() if reply.error), None)
        missing = [rank for rank in self._connections if rank not in replies]
        if self._lost_ranks or failed is not None:
            running.trouble_s += elapsed_s
        if running.own is not None or not self._is_compiling():
            running.spent_s += elapsed_s
        what = f"{get_call_name(running.call)}, call {running.number}"
        if self._lost_ranks and running.trouble_s > LOSS_GRACE_S:
            return self._describe_end(self._lost_ranks[0], running)
        if failed is not None and running.trouble_s > FAILURE_GRACE_S:
            reply = replies[failed]
            others = missing or [0]
            return f"host {failed} raised {reply.error} in {what}, and host {others[0]} did not end: {reply.message}"
        if missing and running.is_limited and running.spent_s > self._silence_s:
            return f"host {missing[0]} has not ended {what} within --step-timeout-s, which is {self._silence_s:g} s"
        return ""

    def _describe_end(self, rank: int, running: _RunningCall) -> str:
        return f"host {rank} has ended during {get_call_name(running.call)}, call {running.number}"


def _make_collective_method(name: str) -> Callable[..., Any]:
    """Return a method of `AbstractBackend` that makes its call on all hosts."""
    signature = inspect.signature(getattr(AbstractBackend, name))

    def method(self: "LeadingBackend", *args: Any, **kwargs: Any) -> Any:
        _, *arguments = signature.bind(self, *args, **kwargs).arguments.items()
        return self._make_call(name, getattr(self._own, name), **dict(arguments))  # pyright: ignore[reportPrivateUsage]

    method.__name__, method.__doc__ = name, f"Make `AbstractBackend.{name}` on all hosts."
    return method


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
        self._make_call("join_hosts", self._own.join_hosts, is_limited=False, rank=rank)
        capabilities = self._make_call("start", self._own.start, is_limited=False)
        _log.info("%d hosts have started", size)
        return capabilities

    def close(self) -> None:
        """See AbstractBackend."""
        followers, self._followers = self._followers, None
        if followers is None:
            self._own.close()
            return
        try:
            if not followers.loss_reason:
                with suppress(BackendLost):
                    self._send_call(followers, calls.CALLS["close"](), self._own.close)
        finally:
            followers.close()

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

    # Calls of all hosts

    check_devices: Any = _make_collective_method("check_devices")
    create_model: Any = _make_collective_method("create_model")
    delete_model: Any = _make_collective_method("delete_model")
    begin_pass: Any = _make_collective_method("begin_pass")
    optim_step: Any = _make_collective_method("optim_step")
    gradient_norm: Any = _make_collective_method("gradient_norm")
    clear_gradient: Any = _make_collective_method("clear_gradient")
    capture: Any = _make_collective_method("capture")
    restore: Any = _make_collective_method("restore")
    load_sampler: Any = _make_collective_method("load_sampler")
    drop_sampler: Any = _make_collective_method("drop_sampler")
    begin_sample: Any = _make_collective_method("begin_sample")
    step_sample: Any = _make_collective_method("step_sample")
    cancel_sample: Any = _make_collective_method("cancel_sample")
    end_sample: Any = _make_collective_method("end_sample")

    def open_snapshot(self, directory: Path) -> Snapshot:
        """See AbstractBackend. The other hosts get the files from here, so that they need not share a directory."""
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = tuple((path.relative_to(directory).as_posix(), path.stat().st_size) for path in paths)
        chunks = (chunk for path, (_, size) in zip(paths, files, strict=True) for chunk in _read_chunks(path, size))
        call = calls.OpenSnapshot(files=files)
        return self._send_call(self._live_followers(), call, lambda: self._own.open_snapshot(directory), chunks)

    def _make_call(self, name: str, own: Callable[..., Any], *, is_limited: bool = True, **arguments: Any) -> Any:
        """Make a call on all hosts and return its result."""
        followers = self._live_followers()
        in_order = {
            # Sets have a different order on each host.
            parameter: tuple(sorted(value)) if isinstance(value, Set | list | tuple) else value
            for parameter, value in arguments.items()
        }
        sent = {key: value.handle if isinstance(value, _LeadingSnapshot) else value for key, value in in_order.items()}
        here = {key: value.own if isinstance(value, _LeadingSnapshot) else value for key, value in in_order.items()}
        here.pop("handle", None)  # of a pass, which rank 0 has itself
        return self._send_call(followers, calls.CALLS[name](**sent), lambda: own(**here), is_limited=is_limited)

    def _live_followers(self) -> Followers:
        """Return the other hosts. Raises BackendLost if one is lost."""
        followers = self._followers
        assert followers is not None, "the backend is not started"
        if followers.loss_reason:
            raise BackendLost(followers.loss_reason)
        return followers

    def _send_call(
        self,
        followers: Followers,
        call: BackendCall,
        own: Callable[[], Any],
        chunks: Iterator[bytes] | None = None,
        *,
        is_limited: bool = True,
    ) -> Any:
        """Send a call, make it here, and compare the replies."""
        self._num_calls += 1
        number = self._num_calls
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        followers.begin(number, call, is_limited=is_limited)
        followers.send(calls.encode(Frame(number=number, released=released, call=call)))
        try:
            for chunk in chunks or ():
                followers.send(chunk)
        except OSError as error:
            raise followers.mark_lost(
                f"host 0 cannot read what it sends in {calls.get_call_name(call)}: {error}"
            ) from error

        # The call of this host. Its passes and snapshots are not results: the other hosts have their own.
        error: Exception | None = None
        result: Any = None
        try:
            result = own()
            is_kept = isinstance(result, Pass | Snapshot)
            reply = calls.make_reply(number, None if is_kept else result)
        except Exception as raised:
            error, is_kept, reply = raised, False, calls.make_error_reply(number, raised)

        for rank, other in sorted(followers.wait_for_replies(reply).items()):
            if differing := calls.describe_difference(rank, call, other, reply):
                raise followers.mark_lost(differing) from error
        if error is not None:
            raise error
        return self._wrap_handle(result, number) if is_kept else result

    def _wrap_handle(self, own: Pass | Snapshot, number: int) -> Pass | Snapshot:
        """Return a pass or a snapshot of all hosts, which the other hosts drop after it is dropped here."""
        kept = _LeadingPass(self._make_call, own, number) if isinstance(own, Pass) else _LeadingSnapshot(own, number)
        weakref.finalize(kept, self._released.append, number).atexit = False
        return kept


class _LeadingPass(Pass):
    """A pass of all hosts. Rank 0 lets it go on with less memory when all hosts are out of it at the same place."""

    def __init__(self, make: Callable[..., Any], own: Pass, handle: int) -> None:
        self._make_call = make
        self._own = own
        self._handle = handle

    def step(self) -> bool:
        """See Pass."""
        try:
            return bool(self._make_call("step_pass", self._own.step, handle=self._handle))
        except MemoryExhausted as error:
            _log_retry(error)
            return False

    def results(self) -> list[PassResult]:
        """See Pass."""
        while True:
            try:
                found = self._make_call("finish_pass", self._own.results, handle=self._handle)
            except MemoryExhausted as error:
                _log_retry(error)
            else:
                assert isinstance(found, list)
                return found

    def abort(self) -> None:
        """See Pass."""
        self._make_call("abort_pass", self._own.abort, handle=self._handle)


class _LeadingSnapshot(Snapshot):
    """A snapshot of all hosts; rank 0 writes it."""

    def __init__(self, own: Snapshot, handle: int) -> None:
        self.own = own
        self.handle = handle

    def write(self, directory: Path) -> None:
        """See Snapshot."""
        self.own.write(directory)


def _log_retry(error: MemoryExhausted) -> None:
    _log.warning("all hosts ran out of memory in the same call; all go on with %s: %s", error.plan, error)


def _read_chunks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises OSError if it has become shorter."""
    with path.open("rb") as file:
        for start in range(0, size, calls.CHUNK_BYTES):
            chunk = file.read(min(calls.CHUNK_BYTES, size - start))
            if len(chunk) != min(calls.CHUNK_BYTES, size - start):
                raise OSError(f"{path} has changed")
            yield chunk
