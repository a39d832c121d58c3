"""Metrics as text, and the Unix sockets by which the API reads those of the engines of this machine.

A socket is in the data directory and open to its owner alone. It takes one short request, sends one text and closes.
A reader waits for a limited time, whatever the engine does.
"""

import asyncio
import os
import re
import socket
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from skyrl_tx.process.signals import ServiceThread

disable_created_metrics()  # a series of its own for each counter, which no query of ours reads

_SOCKET_NAME = re.compile(r"engine-metrics(?:-(\d+))?\.sock")
END = b"# EOF\n"
"""End mark of a text in OpenMetrics."""
_MAX_ADDRESS_BYTES = 100
"""A little less than the 108 bytes of Linux and the 104 of BSD."""
_CLIENT_TIMEOUT_S = 1.0
_MAX_TEXT_BYTES = 8 * 2**20
_OPENMETRICS, _TEXT = b"openmetrics\n", b"text\n"


def get_content_type(*, is_openmetrics: bool) -> str:
    """Return the media type of a text."""
    return openmetrics.CONTENT_TYPE_LATEST if is_openmetrics else CONTENT_TYPE_LATEST


def render(registry: CollectorRegistry, *, is_openmetrics: bool) -> bytes:
    """Return all metrics of a registry, without the end mark of OpenMetrics: texts are joined."""
    if not is_openmetrics:
        return generate_latest(registry)
    return openmetrics.generate_latest(registry).removesuffix(END)


def get_socket_path(data_dir: Path, number: int = 1) -> Path:
    """Return the socket of the engine with a number."""
    return data_dir / ("engine-metrics.sock" if number == 1 else f"engine-metrics-{number}.sock")


@contextmanager
def _make_address(path: Path) -> Generator[str]:
    """Yield a socket's address, by way of a temporary link where the path is too long for one."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="skyrl_tx-") as directory:
        link = Path(directory) / "data"
        link.symlink_to(path.parent.absolute(), target_is_directory=True)
        yield str(link / path.name)


class MetricsSocket:
    """Serves a text to readers, one after the other, on a thread of its own."""

    def __init__(self, path: Path, render: Callable[[bool], bytes]) -> None:
        """Listen at a `get_socket_path`. `render(is_openmetrics)` returns the text; it is called on the thread.

        Raises OSError if the socket cannot be made.
        """
        self._path = path
        self._render = render
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):  # left by a killed engine
                self._path.unlink()
            with _make_address(path) as address:
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


@contextmanager
def serve_http(host: str, port: int, registry: CollectorRegistry) -> Generator[int]:
    """Serve a registry over HTTP, at a port of an address, and yield the port; 0 stands for any free one.

    Raises OSError if the port cannot be used.
    """
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def read_metrics(data_dir: Path, *, is_openmetrics: bool, timeout_s: float) -> bytes | None:
    """Return the text of the engines that respond in time; None if there is none.

    With several engines each series has a label `engine`, the engine's number.
    """
    sockets = [(match[1] or "1", path) for path in data_dir.iterdir() if (match := _SOCKET_NAME.fullmatch(path.name))]
    sockets.sort(key=lambda each: int(each[0]))
    texts = await asyncio.gather(*(_read(path, is_openmetrics, timeout_s) for _, path in sockets))
    found = {number: text for (number, _), text in zip(sockets, texts, strict=True) if text is not None}
    return join_texts(found) if len(sockets) > 1 and found else next(iter(found.values()), None)


def join_texts(texts: Mapping[str, bytes]) -> bytes:
    """Return the texts of several engines as one: each family once, each series with a label `engine`."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # by name: the lines that describe it, and its series
    described, series = list[str](), list[str]()
    for number, text in texts.items():
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                is_known = (name := line.split(" ", 3)[2]) in families
                described, series = families.setdefault(name, ([], []))
                described = [] if is_known else described
            if line.startswith("#"):
                described.append(line)
            elif line:
                end = line.index(" ")
                start = line.find("{", 0, end)
                series.append(
                    f'{line[:end]}{{engine="{number}"}}{line[end:]}'
                    if start < 0
                    else f'{line[:start]}{{engine="{number}",{line[start + 1 :]}'
                )
    return "".join(f"{line}\n" for lines in families.values() for part in lines for line in part).encode()


async def _read(path: Path, is_openmetrics: bool, timeout_s: float) -> bytes | None:
    try:
        async with asyncio.timeout(timeout_s):
            with _make_address(path) as address:
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
