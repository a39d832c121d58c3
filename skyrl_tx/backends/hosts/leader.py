"""Rank 0 of multiple hosts: send every backend call to all hosts, and compare the results.

`LeadingBackend` is what the engine uses. `Followers` sends frames to the other hosts, collects
their replies, and notices hosts that are late or have ended.
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

from typing_extensions import override

from skyrl_tx.backends.hosts import protocol
from skyrl_tx.backends.hosts.protocol import BackendCall, Frame, HostReply, Welcome, get_call_name
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.backend import AbstractBackend, HostRank, Pass, Snapshot
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, MemoryExhausted
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.results import PassResult
from skyrl_tx.process.signals import ServiceThread

_log = logging.getLogger(__name__)

LOSS_GRACE_S = 5.0
"""How long the running call of rank 0 may continue after another host has ended."""
FAILURE_GRACE_S = 30.0
"""How long a call may continue on the other hosts after one host has raised an error in it."""
_CHECK_PERIOD_S = 0.1
_CHECKS_PER_LIMIT = 4
"""The limits are checked every 0.1 s, or four times within a `silence_s` below 0.4 s."""


@dataclass(slots=True, kw_only=True)
class _RunningCall:
    """The call that all hosts are making.

    Its times do not count pauses of this process, for example while it is stopped with SIGSTOP.
    """

    number: int
    call: BackendCall
    is_limited: bool
    own: HostReply | None = None
    """Rank 0's reply. None while its call is running."""
    replies: dict[int, HostReply] = field(default_factory=dict[int, HostReply])
    """The replies of the other hosts so far, by rank."""
    spent_s: float = 0.0
    """Duration of the call so far, without the time in which rank 0 compiled."""
    trouble_s: float = 0.0
    """Time since a host ended or raised an error."""


class Followers:
    """The connections to the other hosts. A thread receives replies and checks the time limits."""

    def __init__(
        self,
        connections: Mapping[int, Connection],
        *,
        silence_s: float,
        is_compiling: Callable[[], bool],
        on_lost: Callable[[str], object],
    ) -> None:
        """Start the thread.

        `silence_s` limits how long a host may take for a call. `on_lost` is called on the thread,
        with the reason, if a host is lost while rank 0 computes. That call may never return, so
        `on_lost` must end this process. If rank 0 only waits for replies, `wait_for_replies` raises
        BackendLost instead.
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
        """Why the hosts can make no more calls. Empty while they can."""
        return self._loss_reason

    def begin(self, number: int, call: BackendCall, *, is_limited: bool) -> None:
        """Start to watch a call.

        Must be called before the call is sent. `is_limited`: whether `silence_s` applies.
        """
        with self._changed:
            self._running = _RunningCall(number=number, call=call, is_limited=is_limited)

    def send(self, data: bytes) -> None:
        """Send data to all hosts. Raises BackendLost if a host has closed its connection."""
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise self.mark_lost(f"host {rank} has ended: {error.strerror or error}") from error

    def wait_for_replies(self, own: HostReply) -> Mapping[int, HostReply]:
        """Wait until all hosts have replied to the running call. `own` is the reply of rank 0.

        Raises BackendLost if a host ends first, or if a time limit is exceeded.
        """
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
        """Close all connections. The other hosts then end."""
        with self._changed:
            self._is_closed = True
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def mark_lost(self, reason: str) -> BackendLost:
        """Refuse further calls, and return the error that the caller raises.

        The first reason counts.
        """
        with self._changed:
            self._loss_reason = self._loss_reason or reason
            self._changed.notify_all()
        return BackendLost(self._loss_reason)

    def _receive_replies(self) -> None:
        open_ranks = {connection: rank for rank, connection in self._connections.items()}
        checked_at = time.monotonic()
        while not self._is_closed:
            # Receive replies, and notice closed connections.
            for connection in wait(list(open_ranks), self._period_s) if open_ranks else ():
                assert isinstance(connection, Connection)
                try:
                    data = connection.recv_bytes()
                except (EOFError, OSError):
                    with self._changed:
                        self._lost_ranks.append(open_ranks.pop(connection))
                        self._changed.notify_all()
                else:
                    self._record_reply(open_ranks[connection], protocol.decode(data, HostReply))
            if not open_ranks:
                time.sleep(self._period_s)

            # A longer interval means that this process was stopped: do not count it.
            now = time.monotonic()
            self._check_limits(min(now - checked_at, 2 * self._period_s))
            checked_at = now

    def _record_reply(self, rank: int, reply: HostReply) -> None:
        with self._changed:
            running = self._running
            if running is not None and reply.number == running.number:
                running.replies[rank] = reply
                self._changed.notify_all()

    def _check_limits(self, elapsed_s: float) -> None:
        """Add the elapsed time to the running call, and report lost hosts if it exceeds a limit."""
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
        """Return why the hosts are lost; empty if they are not. The caller holds the lock."""
        if running is None:
            return f"host {self._lost_ranks[0]} has ended" if self._lost_ranks else ""

        replies = running.replies if running.own is None else {0: running.own, **running.replies}
        failed = next((rank for rank, reply in replies.items() if reply.error), None)
        missing = [rank for rank in self._connections if rank not in replies]

        # Count the time. Compilation on rank 0 may take much longer than a call.
        if self._lost_ranks or failed is not None:
            running.trouble_s += elapsed_s
        if running.own is not None or not self._is_compiling():
            running.spent_s += elapsed_s

        # A host has ended, has failed, or is late.
        call_text = f"{get_call_name(running.call)}, call {running.number}"
        if self._lost_ranks and running.trouble_s > LOSS_GRACE_S:
            return self._describe_end(self._lost_ranks[0], running)
        if failed is not None and running.trouble_s > FAILURE_GRACE_S:
            reply, late = replies[failed], missing[0] if missing else 0
            return (
                f"host {failed} raised {reply.error} in {call_text}, and {FAILURE_GRACE_S:g} s later host {late} is "
                f"still computing: {reply.message}"
            )
        if missing and running.is_limited and running.spent_s > self._silence_s:
            return (
                f"host {missing[0]} has not ended {call_text} within --step-timeout-s, which is {self._silence_s:g} s"
            )
        return ""

    def _describe_end(self, rank: int, running: _RunningCall) -> str:
        return f"host {rank} has ended during {get_call_name(running.call)}, call {running.number}"


def _make_collective_method(name: str) -> Callable[..., Any]:
    """Return a method of `AbstractBackend` that makes the call on all hosts."""
    signature = inspect.signature(getattr(AbstractBackend, name))

    def method(self: "LeadingBackend", *args: Any, **kwargs: Any) -> Any:
        _, *arguments = signature.bind(self, *args, **kwargs).arguments.items()
        return self._make_call(name, getattr(self._own, name), **dict(arguments))  # pyright: ignore[reportPrivateUsage]

    method.__name__, method.__doc__ = name, f"Make `AbstractBackend.{name}` on all hosts."
    return method


class LeadingBackend(AbstractBackend):
    """The backend that the engine of rank 0 uses.

    A call is sent to the other hosts, then made here. It returns when all hosts have replied with
    the same hashes, so the engine never sees a result that another host did not compute. If all
    hosts raise the same class of error, that error is raised. If the replies differ, or a host is
    lost, BackendLost is raised.
    """

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self,
        own: AbstractBackend,
        settings: HostsSettings,
        welcome: Welcome,
        *,
        on_lost: Callable[[str], object],
    ) -> None:
        """Store the arguments. `own` is the backend of this host. See `Followers` for `on_lost`."""
        self._own = own
        self._settings = settings
        self._welcome = welcome
        self._on_lost = on_lost
        self._followers: Followers | None = None
        self._listener: socket.socket | None = None
        self._num_calls = 0
        self._released: deque[int] = deque()  # the garbage collector appends to it, on any thread

    # Life cycle

    @override
    def start(self) -> Capabilities:
        """Wait until all hosts have joined, then start the backend on all of them."""
        self._listener = protocol.listen(self._settings)
        with self._listener:
            connections = protocol.accept_all(self._listener, self._settings, self._welcome)

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

    @override
    def close(self) -> None:
        followers, self._followers = self._followers, None
        if followers is None:
            self._own.close()
            return
        try:
            if not followers.loss_reason:
                with suppress(BackendLost):
                    self._send_call(followers, protocol.CALLS["close"](), self._own.close)
        finally:
            followers.close()

    # Calls of this host only

    @override
    def is_compiling(self) -> bool:
        return self._own.is_compiling()

    @override
    def meters(self) -> Meters:
        return self._own.meters()

    @override
    def fingerprint_changes(self) -> Mapping[str, str]:
        return self._own.fingerprint_changes()

    @override
    def text_of(self, tokens: list[int]) -> str:
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

    @override
    def open_snapshot(self, directory: Path) -> Snapshot:
        """Open a snapshot on all hosts.

        Rank 0 sends them the files, so the hosts need no shared directory.
        """
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = tuple((path.relative_to(directory).as_posix(), path.stat().st_size) for path in paths)
        chunks = (chunk for path, (_, size) in zip(paths, files, strict=True) for chunk in _read_chunks(path, size))
        call = protocol.OpenSnapshot(files=files)
        return self._send_call(self._live_followers(), call, lambda: self._own.open_snapshot(directory), chunks)

    def _make_call(self, name: str, own: Callable[..., Any], *, is_limited: bool = True, **arguments: Any) -> Any:
        """Make a call on all hosts and return its result. `own` makes it on this host."""
        followers = self._live_followers()

        # Sort collections. Sets have a different order on each host, and no call depends on an order.
        in_order = {
            parameter: tuple(sorted(value)) if isinstance(value, Set | list | tuple) else value
            for parameter, value in arguments.items()
        }

        # The other hosts get numbers of passes and snapshots; rank 0 has the objects.
        sent = {key: value.handle if isinstance(value, _LeadingSnapshot) else value for key, value in in_order.items()}
        here = {key: value.own if isinstance(value, _LeadingSnapshot) else value for key, value in in_order.items()}
        here.pop("handle", None)  # `own` is a method of the pass
        return self._send_call(followers, protocol.CALLS[name](**sent), lambda: own(**here), is_limited=is_limited)

    def _live_followers(self) -> Followers:
        """Return the other hosts. Raises BackendLost if one of them is lost."""
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
        """Send a call and the `chunks` of its files, make it here, and compare all replies."""
        # Send the call.
        self._num_calls += 1
        number = self._num_calls
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        followers.begin(number, call, is_limited=is_limited)
        followers.send(protocol.encode(Frame(number=number, released=released, call=call)))
        try:
            for chunk in chunks or ():
                followers.send(chunk)
        except OSError as error:
            raise followers.mark_lost(
                f"host 0 cannot read the files that it sends in {get_call_name(call)}: {error}"
            ) from error

        # Make the call here. Passes and snapshots are not compared: the other hosts reply None for
        # theirs.
        error: Exception | None = None
        result: Any = None
        try:
            result = own()
            is_kept = isinstance(result, Pass | Snapshot)
            reply = protocol.make_reply(number, None if is_kept else result)
        except Exception as raised:
            error, is_kept, reply = raised, False, protocol.make_error_reply(number, raised)

        # Compare the replies.
        for rank, other in sorted(followers.wait_for_replies(reply).items()):
            if differing := protocol.describe_difference(rank, call, other, reply):
                raise followers.mark_lost(differing) from error
        if error is not None:
            raise error
        return self._wrap_handle(result, number) if is_kept else result

    def _wrap_handle(self, own: Pass | Snapshot, number: int) -> Pass | Snapshot:
        """Return a pass or a snapshot that stands for the objects of all hosts.

        When rank 0 drops it, the next frame tells the other hosts to drop theirs.
        """
        leading = _LeadingPass(self._make_call, own, number) if isinstance(own, Pass) else _LeadingSnapshot(own, number)
        weakref.finalize(leading, self._released.append, number).atexit = False
        return leading


class _LeadingPass(Pass):
    """A pass that runs on all hosts.

    If all hosts run out of memory in the same call and choose the same smaller plan, the pass
    continues with it.
    """

    def __init__(self, make: Callable[..., Any], own: Pass, handle: int) -> None:
        self._make_call = make
        self._own = own
        self._handle = handle

    @override
    def step(self) -> bool:
        try:
            return bool(self._make_call("step_pass", self._own.step, handle=self._handle))
        except MemoryExhausted as error:
            _log_retry(error)
            return False

    @override
    def results(self) -> list[PassResult]:
        while True:
            try:
                results = self._make_call("finish_pass", self._own.results, handle=self._handle)
            except MemoryExhausted as error:
                _log_retry(error)
            else:
                assert isinstance(results, list)
                return results

    @override
    def abort(self) -> None:
        self._make_call("abort_pass", self._own.abort, handle=self._handle)


class _LeadingSnapshot(Snapshot):
    """A snapshot that exists on all hosts. Only rank 0 writes it."""

    def __init__(self, own: Snapshot, handle: int) -> None:
        self.own = own
        self.handle = handle

    @override
    def write(self, directory: Path) -> None:
        self.own.write(directory)


def _log_retry(error: MemoryExhausted) -> None:
    _log.warning("all hosts ran out of memory in the same call and continue with %s: %s", error.plan, error)


def _read_chunks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file in chunks.

    Raises OSError if the file has become shorter.
    """
    with path.open("rb") as file:
        for start in range(0, size, protocol.CHUNK_BYTES):
            chunk = file.read(min(protocol.CHUNK_BYTES, size - start))
            if len(chunk) != min(protocol.CHUNK_BYTES, size - start):
                raise OSError(f"{path} has changed: it is shorter than {size} bytes")
            yield chunk
