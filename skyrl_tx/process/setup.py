"""Set up a server process: common settings, logging, sockets, and resource limits."""

import gc
import json
import logging
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from skyrl_tx.process.text import make_line, make_visible

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

LOG_FIELDS = "request_id", "session_id", "model_id", "owner"
"""Names of the fields that callers may pass as `extra` of a log line."""
OPEN_FILES = 65_536
"""Enough for tens of thousands of long polls.

A higher limit would slow the start of child processes.
"""


class CannotServe(Exception):
    """The server cannot start or continue. The message is for the operator."""


class CommonSettings(BaseModel):
    """Base class of `ApiSettings` and `EngineSettings`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data_dir: Path
    """Directory of the database and all weights."""
    database_url: SecretStr | None = None
    """Database other than a file in --data-dir: postgresql://user:password@host/name.
    Prefer the environment variable for a URL with a password."""
    artifacts: str | None = None
    """Object store of the weights: s3://bucket/prefix, gs://…, az://container/prefix or file:///directory.
    Credentials are read from the provider's environment variables. Default: a directory in
    --data-dir.
    """
    max_artifact_cache_bytes: int = Field(default=64 * 2**30, ge=0)
    """Disk space for copies of weights in an object store.

    Copies in use are kept even if they exceed it.
    """
    base_model: str
    """Hub id or local directory of the model to serve."""
    served_model_name: str | None = None
    """Name of the model for clients; default: the value of --base-model."""

    @field_validator("base_model")
    @classmethod
    def _strip_slash(cls, name: str) -> str:
        """Remove slashes at the end, which shells add to directories. They would be part of the name."""
        return name.rstrip("/") or name

    @property
    def store_url(self) -> str | None:
        """The URL of the database, including its password."""
        return None if self.database_url is None else self.database_url.get_secret_value()


class JsonFormatter(logging.Formatter):
    """Writes a JSON object per line: `ts` in UTC, `level`, `process`, `logger`, `message`.

    The object also has the `LOG_FIELDS` that the caller passed as `extra`, and a traceback as
    `exception`.
    """

    converter = time.gmtime

    def __init__(self, role: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line of JSON."""
        line = {
            "ts": f"{self.formatTime(record, self.datefmt)}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        about = {name: getattr(record, name) for name in LOG_FIELDS if getattr(record, name, None) is not None}
        if "model_id" in about:
            about.setdefault("session_id", str(about["model_id"]).partition(":")[0])  # SESSION:train:NUMBER
        line |= about
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Writes a line per record, for example `2026-01-31T12:00:00.123Z INFO engine message`.

    Text of clients, for example a path, cannot add a line or control the terminal: hidden
    characters and newlines in a message are replaced, and a traceback's further lines are indented.
    """

    converter = time.gmtime

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {role} %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format a record without its traceback."""
        return make_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Format a traceback."""
        return make_visible(super().formatException(ei)).replace("\n", "\n  ")


def configure_logging(role: str, level: LogLevel = "info", log_format: LogFormat = "text") -> None:
    """Send the log of this process to stderr. Libraries log only warnings and errors.

    The format is `TextFormatter` or `JsonFormatter`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else TextFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("skyrl_tx").setLevel(level.upper())
    logging.captureWarnings(True)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    A server calls this first, so that nothing expensive starts if the port is taken. Raises
    CannotServe with the address if the server cannot listen there.
    """
    # Create the socket. asyncio disables Nagle's algorithm for accepted connections only if the
    # protocol is given. With Nagle's algorithm, each response body would wait up to 40 ms for a
    # delayed acknowledgement.
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = candidates[0]
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise CannotServe(f"--host {host}: {error.strerror or error}") from error

    # Bind and listen. SO_REUSEADDR allows a restart while old connections are in TIME_WAIT.
    # Listening now, not later in uvicorn, makes the bind of a second server fail.
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"cannot listen on {host}:{port}: {error.strerror}; is another server running? --port takes another port"
        ) from error
    return listener


def check_certificate(certfile: Path | None, keyfile: Path | None) -> None:
    """Raise CannotServe with the flag if the server cannot use the certificate and key.

    Without files the server uses plain HTTP.
    """
    # Both files must be readable.
    if certfile is None:
        if keyfile is not None:
            raise CannotServe("--ssl-keyfile needs the certificate of the key: --ssl-certfile")
        return
    for setting, path in ("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise CannotServe(f"{setting} {path}: {error.strerror}") from error

    # OpenSSL must be able to load them, without a password.
    def refuse_password() -> str:
        raise CannotServe(f"--ssl-keyfile {keyfile or certfile}: the key is encrypted; decrypt it with `openssl pkey`")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CannotServe(f"--ssl-keyfile {keyfile}: not the key of the certificate in {certfile}") from error
        flags = f"--ssl-certfile {certfile}" + (f", --ssl-keyfile {keyfile}" if keyfile else "")
        raise CannotServe(f"{flags}: no certificate with its private key in PEM ({error.reason or error})") from error


def get_url(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL at which clients on this machine reach a listening socket."""
    bound_host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound_host, str(bound_host))
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def raise_file_limit() -> None:
    """Raise the limit of open files to `OPEN_FILES`, or to the hard limit.

    Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def tune_interpreter(*, full_collection_after: int) -> None:
    """Make pauses of threads shorter.

    Cyclic garbage collections become rarer, and exclude all existing objects. A full collection
    runs after `full_collection_after` smaller collections. With ten thousand queued requests, it
    takes 0.1 s or more, and delays the response that is being written.

    A thread computes for at most 1 ms while other threads wait for the interpreter. With Python's
    default of 5 ms, a call or a transaction waits about ten times that long while one thread
    computes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, full_collection_after)
    sys.setswitchinterval(0.001)


def enable_huge_pages(environment: MutableMapping[str, str]) -> bool:
    """Let processes that start with `environment` use huge pages. Returns True if that changed it.

    On CPU, XLA allocates the temporary memory of each micro-batch with malloc and frees it
    afterwards. With pages of 4 KB, page faults took a fifth of the time of training in
    measurements. glibc reads its tunables when a process starts (GNU C library manual, "Memory
    Allocation Tunables"). A value that the user has set is kept. Other C libraries ignore the
    variable, and operating systems other than Linux are left alone.
    """
    present = environment.get("GLIBC_TUNABLES", "")
    if not sys.platform.startswith("linux") or "glibc.malloc.hugetlb" in present:
        return False
    environment["GLIBC_TUNABLES"] = f"{present}:glibc.malloc.hugetlb=1".removeprefix(":")
    return True


def restart_with_huge_pages() -> None:
    """Start this process again with huge pages, unless it has them.

    A program must call this first.
    """
    if enable_huge_pages(os.environ):
        os.execv(sys.executable, sys.orig_argv)
