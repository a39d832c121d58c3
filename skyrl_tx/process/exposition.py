"""Export metrics as text.

The API reads the metrics of the engines on this machine through Unix sockets. Each engine has a
socket in the data directory, which only the user of the server can open. The API sends one short
request. The engine answers with one text and closes the connection. The API waits for a limited
time, because the engine may be busy.
"""

import asyncio
import os
import re
import socket
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from skyrl_tx.process.signals import ServiceThread

disable_created_metrics()  # else each counter has a second series, `_created`, which we do not use

_SOCKET_NAME = re.compile(r"engine-metrics(?:-(\d+))?\.sock")
END = b"# EOF\n"
"""End mark of the OpenMetrics format."""
_MAX_ADDRESS_BYTES = 100
"""Maximum length of a socket's path. Linux allows 108 bytes and BSD 104."""
_CLIENT_TIMEOUT_S = 1.0
_MAX_TEXT_BYTES = 8 * 2**20
_OPENMETRICS, _TEXT = b"openmetrics\n", b"text\n"


def get_content_type(*, is_openmetrics: bool) -> str:
    """Return the media type of an export."""
    return openmetrics.CONTENT_TYPE_LATEST if is_openmetrics else CONTENT_TYPE_LATEST


def render(registry: CollectorRegistry, *, is_openmetrics: bool) -> bytes:
    """Return the metrics of a registry as text.

    An OpenMetrics text is returned without its end mark, because the caller joins multiple texts.
    """
    if not is_openmetrics:
        return generate_latest(registry)
    return openmetrics.generate_latest(registry).removesuffix(END)


def get_socket_path(data_dir: Path, number: int = 1) -> Path:
    """Return the path of the socket of an engine."""
    return data_dir / ("engine-metrics.sock" if number == 1 else f"engine-metrics-{number}.sock")


@contextmanager
def _make_address(path: Path) -> Generator[str]:
    """Yield the address of a socket.

    If its path is too long for an address, use a temporary link.
    """
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    with tempfile.TemporaryDirectory(prefix="skyrl_tx-") as directory:
        link = Path(directory) / "data"
        link.symlink_to(path.parent.absolute(), target_is_directory=True)
        yield str(link / path.name)


class MetricsSocket:
    """Serves the metrics of a registry to readers on its own thread, one reader at a time."""

    def __init__(self, path: Path, registry: CollectorRegistry) -> None:
        """Listen at `path`, see `get_socket_path`. Raises OSError if the socket cannot be created."""
        self._path = path
        self._registry = registry
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

        # Create the socket. A killed engine may have left a file.
        try:
            with suppress(FileNotFoundError):
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
            with connection, suppress(OSError):  # the reader has disconnected, or is slow
                connection.settimeout(_CLIENT_TIMEOUT_S)
                is_openmetrics = connection.recv(len(_OPENMETRICS)) == _OPENMETRICS
                connection.sendall(render(self._registry, is_openmetrics=is_openmetrics))


@contextmanager
def serve_http(host: str, port: int, registry: CollectorRegistry) -> Generator[None]:
    """Serve a registry over HTTP at `--metrics-host` and `--metrics-port`. With `port` 0, do nothing.

    Raises OSError with the flags if the port cannot be used.
    """
    if not port:
        yield
        return
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise OSError(f"--metrics-host {host} --metrics-port {port}: {error.strerror or error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def read_metrics(data_dir: Path, *, is_openmetrics: bool, timeout_s: float) -> bytes | None:
    """Return the metrics of the engines that respond in time. None if no engine responds.

    With multiple engines, each series has a label `engine` with the number of the engine.
    """
    sockets = [(match[1] or "1", path) for path in data_dir.iterdir() if (match := _SOCKET_NAME.fullmatch(path.name))]
    sockets.sort(key=lambda number_and_path: int(number_and_path[0]))
    texts = await asyncio.gather(*(_read(path, is_openmetrics, timeout_s) for _, path in sockets))
    text_by_number = {number: text for (number, _), text in zip(sockets, texts, strict=True) if text is not None}
    if len(sockets) > 1 and text_by_number:
        return join_texts(text_by_number)
    return next(iter(text_by_number.values()), None)


def join_texts(texts: Mapping[str, bytes]) -> bytes:
    """Join the metrics of multiple engines.

    Each series gets a label `engine`, and each metric is described once.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # by name: its descriptions, and its series
    described, series = list[str](), list[str]()
    for number, text in texts.items():
        for line in text.decode().splitlines():
            # A description starts a metric. It is dropped if an earlier engine had it.
            if line.startswith("# HELP "):
                is_known = (name := line.split(" ", 3)[2]) in families
                described, series = families.setdefault(name, ([], []))
                described = [] if is_known else described
            if line.startswith("#"):
                described.append(line)

            # A series gets the label `engine`.
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
