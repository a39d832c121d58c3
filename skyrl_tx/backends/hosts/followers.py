"""The other hosts as rank 0 knows them: their replies to the running call, and which of them are late or gone."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from skyrl_tx.backends.hosts.calls import Call, Reply, decode, name_of
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.process.threads import ServiceThread

GONE_S = 5.0
"""Time for the running call of rank 0 to fail by itself when another host has ended."""
FAILED_S = 30.0
"""Time for all hosts to fail in a call when one has failed."""
_PERIOD_S = 0.1
_CHECKS_PER_LIMIT = 4


@dataclass(slots=True, kw_only=True)
class _RunningCall:
    """The call that all hosts make now. Times are those in which this process ran."""

    number: int
    call: Call
    is_limited: bool
    own: Reply | None = None
    """The reply of rank 0, when its call has ended."""
    replies: dict[int, Reply] = field(default_factory=dict[int, Reply])
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
        self._gone: list[int] = []
        self._lost = ""
        self._is_closed = False
        self._period_s = min(_PERIOD_S, silence_s / _CHECKS_PER_LIMIT)
        self._thread = ServiceThread("hosts", self._receive)
        self._thread.start()

    @property
    def lost(self) -> str:
        """Why the hosts can make no further call; empty while they can."""
        return self._lost

    def begin(self, number: int, call: Call, *, is_limited: bool) -> None:
        """Watch a call, before it is sent."""
        with self._changed:
            self._running = _RunningCall(number=number, call=call, is_limited=is_limited)

    def send(self, data: bytes) -> None:
        """Send a frame to all. Raises BackendLost if one is gone."""
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise self.lose(f"host {rank} has ended: {error.strerror or error}") from error

    def replies(self, own: Reply) -> Mapping[int, Reply]:
        """Wait for the replies of all to the running call, which has ended here. Raises BackendLost without them."""
        with self._changed:
            running = self._running
            assert running is not None
            running.own = own
            self._changed.wait_for(lambda: self._lost or self._gone or len(running.replies) == len(self._connections))
            self._running = None
            missing = [rank for rank in self._gone if rank not in running.replies]
        if missing:
            raise self.lose(self._end_of(missing[0], running))
        if self._lost:
            raise BackendLost(self._lost)
        return running.replies

    def close(self) -> None:
        """Close all connections: the other hosts end."""
        with self._changed:
            self._is_closed = True
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def lose(self, reason: str) -> BackendLost:
        """Make no further call, and return the error to raise."""
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()
        return BackendLost(self._lost)

    def _receive(self) -> None:
        open_ranks = {connection: rank for rank, connection in self._connections.items()}
        checked_at = time.monotonic()
        while not self._is_closed:
            for connection in wait(list(open_ranks), self._period_s) if open_ranks else ():
                assert isinstance(connection, Connection)
                try:
                    data = connection.recv_bytes()
                except (EOFError, OSError):
                    with self._changed:
                        self._gone.append(open_ranks.pop(connection))
                        self._changed.notify_all()
                else:
                    self._add(open_ranks[connection], decode(data, Reply))
            if not open_ranks:
                time.sleep(self._period_s)
            now = time.monotonic()
            self._check(min(now - checked_at, 2 * self._period_s))  # not the time of a stopped process
            checked_at = now

    def _add(self, rank: int, reply: Reply) -> None:
        with self._changed:
            running = self._running
            if running is not None and reply.number == running.number:
                running.replies[rank] = reply
                self._changed.notify_all()

    def _check(self, elapsed_s: float) -> None:
        """Count time to the running call, and end what exceeds its limit."""
        with self._changed:
            if self._lost or self._is_closed:
                return
            running = self._running
            reason = self._reason(running, elapsed_s)
            if not reason:
                return
            self._lost = reason
            self._changed.notify_all()
            is_waiting = running is not None and running.own is not None
        if not is_waiting:
            self._on_lost(reason)

    def _reason(self, running: _RunningCall | None, elapsed_s: float) -> str:
        """Return why the hosts are lost, or nothing. Called with the lock."""
        if running is None:
            return f"host {self._gone[0]} has ended" if self._gone else ""
        replies = running.replies if running.own is None else {0: running.own, **running.replies}
        failed = next((rank for rank, reply in replies.items() if reply.error), None)
        missing = [rank for rank in self._connections if rank not in replies]
        if self._gone or failed is not None:
            running.trouble_s += elapsed_s
        if running.own is not None or not self._is_compiling():
            running.spent_s += elapsed_s
        what = f"{name_of(running.call)}, call {running.number}"
        if self._gone and running.trouble_s > GONE_S:
            return self._end_of(self._gone[0], running)
        if failed is not None and running.trouble_s > FAILED_S:
            reply = replies[failed]
            others = missing or [0]
            return f"host {failed} raised {reply.error} in {what}, and host {others[0]} did not end: {reply.message}"
        if missing and running.is_limited and running.spent_s > self._silence_s:
            return f"host {missing[0]} has not ended {what} within --step-timeout-s, which is {self._silence_s:g} s"
        return ""

    def _end_of(self, rank: int, running: _RunningCall) -> str:
        return f"host {rank} has ended during {name_of(running.call)}, call {running.number}"
