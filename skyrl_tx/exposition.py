"""Metrics as text, and the Unix socket by which the API reads those of the engine.

The socket is in the data directory and open to its owner alone. It takes one short request, sends one text and closes.
A reader waits for a limited time, whatever the engine does.
"""

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from skyrl_tx.threads import ServiceThread

disable_created_metrics()  # a series of its own for each counter, which no query of ours reads

SOCKET_NAME = "engine-metrics.sock"
END = b"# EOF\n"
"""End mark of a text in OpenMetrics."""
_MAX_ADDRESS_BYTES = 100
"""A little less than the 108 bytes of Linux and the 104 of BSD."""
_CLIENT_TIMEOUT_S = 1.0
_MAX_TEXT_BYTES = 8 * 2**20
_OPENMETRICS, _TEXT = b"openmetrics\n", b"text\n"


def content_type(*, is_openmetrics: bool) -> str:
    """Return the media type of a text."""
    return openmetrics.CONTENT_TYPE_LATEST if is_openmetrics else CONTENT_TYPE_LATEST


def render(registry: CollectorRegistry, *, is_openmetrics: bool) -> bytes:
    """Return all metrics of a registry, without the end mark of OpenMetrics: texts are joined."""
    if not is_openmetrics:
        return generate_latest(registry)
    return openmetrics.generate_latest(registry).removesuffix(END)


@contextmanager
def _address(data_dir: Path) -> Generator[str]:
    """Yield the socket's address, by way of a temporary link where the path is too long for one."""
    path = data_dir / SOCKET_NAME
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="skyrl_tx-") as directory:
        link = Path(directory) / "data"
        link.symlink_to(data_dir.absolute(), target_is_directory=True)
        yield str(link / SOCKET_NAME)


class MetricsSocket:
    """Serves a text to readers, one after the other, on a thread of its own."""

    def __init__(self, data_dir: Path, render: Callable[[bool], bytes]) -> None:
        """Listen. `render(is_openmetrics)` returns the text; it is called on the thread.

        Raises OSError if the socket cannot be made.
        """
        self._path = data_dir / SOCKET_NAME
        self._render = render
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):  # left by a killed engine
                self._path.unlink()
            with _address(data_dir) as address:
                self._socket.bind(address)
            self._path.chmod(0o600)  # no process can connect before `listen`
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._thread = ServiceThread("engine-metrics", self._serve)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and remove the socket."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                raise
            with connection, suppress(OSError):  # the reader has gone, or is slow
                connection.settimeout(_CLIENT_TIMEOUT_S)
                connection.sendall(self._render(connection.recv(len(_OPENMETRICS)) == _OPENMETRICS))


async def read_metrics(data_dir: Path, *, is_openmetrics: bool, timeout_s: float) -> bytes | None:
    """Return the engine's text; None if there is no engine, or if it does not respond in time."""
    try:
        async with asyncio.timeout(timeout_s):
            with _address(data_dir) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=2**16)
            try:
                writer.write(_OPENMETRICS if is_openmetrics else _TEXT)
                text = bytearray()
                while len(text) < _MAX_TEXT_BYTES and (piece := await reader.read(2**16)):
                    text += piece
                return bytes(text) or None
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
