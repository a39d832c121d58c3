"""Waking the other process: a Unix datagram socket per role in the data directory, one empty datagram a ring."""

import os
import select
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

_MAX_ADDRESS_BYTES = 100  # sockaddr_un holds 104 on macOS, 108 on Linux


class Doorbell:
    """One's own bell, and the cord of the peer's."""

    def __init__(self, data_dir: Path, *, own: str, peer: str) -> None:
        self._resources = ExitStack()
        folder = self._short(data_dir, f"{max(own, peer, key=len)}.bell")
        self._own = str(folder / f"{own}.bell")
        self._peer = str(folder / f"{peer}.bell")
        self._socket = self._resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.setblocking(False)
        with suppress(FileNotFoundError):
            os.unlink(self._own)  # left by a killed process; the role's lock says that none lives
        self._socket.bind(self._own)
        self._resources.callback(self._unlink)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def _short(self, folder: Path, name: str) -> Path:
        """The folder under a path that fits in a socket's address."""
        if len(os.fsencode(folder / name)) <= _MAX_ADDRESS_BYTES:
            return folder
        link = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="skyrl_tx-"))) / "data"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        return link

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._own)

    def ring_peer(self) -> None:
        """Wake the peer, if it lives."""
        self._ring(self._peer)

    def peer_lives(self) -> bool:
        """Whether some process listens for the peer's bell."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as cord:
            try:
                cord.connect(self._peer)
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True

    def ring_own(self) -> None:
        """Wake this process's own `wait`."""
        self._ring(self._own)

    def _ring(self, address: str) -> None:
        # No peer: nobody to wake. A full buffer: it has been rung. Whatever else: the slow fallback still works,
        # and the commit that this announces is done and must not look like a failure.
        with suppress(OSError):
            self._socket.sendto(b"", address)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ring; all rings up to now count as one."""
        rung = bool(self._poll.poll(max(0.0, timeout_s) * 1000))
        with suppress(BlockingIOError):
            while rung:
                self._socket.recv(1)
        return rung

    def close(self) -> None:
        """Take the bell down."""
        self._resources.close()
