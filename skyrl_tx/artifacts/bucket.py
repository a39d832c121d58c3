"""Objects under one URL of S3, Google Cloud Storage, Azure or a directory, by way of obstore.

Its errors may quote requests, so their texts are never shown: an error says what was tried, on which object, and the
code of the answer.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store, from_url

from skyrl_tx.artifacts.files import ArtifactsUnreachable

if TYPE_CHECKING:  # their definitions are in stubs only
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")
_PART_BYTES = 16 * 2**20
"""Bytes of one part of an upload or a download. S3 allows 10,000 parts of one object."""
_CONCURRENT = 4
_PATIENCE_S = 30.0
"""Time after which a failed call is not repeated here: obstore has repeated its requests for longer."""
_DENIED = "access denied"
_CLIENT: "ClientConfig" = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRY: "RetryConfig" = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_KIND = re.compile(r"kind: (Connect|Timeout)")
_REASONS = {"Connect": "no connection", "Timeout": "time-out"}
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
_EXISTS = (FileExistsError, exceptions.AlreadyExistsError, exceptions.PreconditionError)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object. `modified_at` is its time of writing by the clock of the object store, in seconds since the epoch."""

    path: str
    size_bytes: int
    modified_at: float


class Bucket:
    """The objects of one store of obstore. All methods raise ArtifactsUnreachable."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        """`name` is shown to people."""
        self._store = store
        self.name = name

    @classmethod
    def open_url(
        cls, url: str, *, client: "ClientConfig | None" = None, retry: "RetryConfig | None" = None
    ) -> "Bucket":
        """Open a URL. Credentials, region and endpoint are read from the provider's usual environment variables."""
        if url.startswith("file:"):
            return cls(from_url(url, mkdir=True, automatic_cleanup=True), url)
        client = _CLIENT if client is None else client
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            client = {**client, "allow_http": True}
        return _call_with_retries(
            "open", url, lambda: cls(from_url(url, client_options=client, retry_config=retry or _RETRY), url)
        )

    def put(self, path: str, content: bytes | Path) -> None:
        """Write an object, in parts if it is large."""
        size, concurrency = _PART_BYTES, _CONCURRENT
        _call_with_retries(
            "write", path, lambda: obstore.put(self._store, path, content, chunk_size=size, max_concurrency=concurrency)
        )

    def create(self, path: str, content: bytes) -> bool:
        """Write an object; return False if it exists already, perhaps because the answer to this call was lost."""

        def create() -> bool:
            try:
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
            except _EXISTS:
                return False
            return True

        return _call_with_retries("create", path, create)

    def get(self, path: str) -> bytes | None:
        """Read an object; None if there is none."""

        def get() -> bytes | None:
            try:
                return bytes(obstore.get(self._store, path).bytes())
            except FileNotFoundError as error:
                return _check_bucket_exists(error)

        return _call_with_retries("read", path, get)

    def download(self, path: str, target: Path, num_bytes: int) -> bool:
        """Read an object of known size into a new file, in ranges; return False if there is no such object."""

        def get_range(start: int, end: int) -> bytes | None:
            try:
                return bytes(obstore.get_range(self._store, path, start=start, end=end))
            except FileNotFoundError as error:
                return _check_bucket_exists(error)

        def read(start: int) -> bool:
            end = min(start + _PART_BYTES, num_bytes)
            part = _call_with_retries("read", path, lambda: get_range(start, end))
            position, left = start, memoryview(part or b"")
            while left:
                written = os.pwrite(descriptor, left, position)
                position, left = position + written, left[written:]
            return part is not None

        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        pool = ThreadPoolExecutor(_CONCURRENT)
        try:
            return all(pool.map(read, range(0, num_bytes, _PART_BYTES)))
        finally:
            pool.shutdown(cancel_futures=True)
            os.close(descriptor)

    def list(self, folder: str | None = None) -> Sequence[StoredObject]:
        """Return the objects in a folder, or all."""

        def read() -> Sequence[StoredObject]:
            return [
                StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
                for page in obstore.list(self._store, folder)
                for each in page
            ]

        return _call_with_retries("list", folder or "all objects", read)

    def get_modification_time(self, path: str) -> float:
        """Return when an object was written, by the clock of the object store."""
        return _call_with_retries("read", path, lambda: obstore.head(self._store, path))["last_modified"].timestamp()

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects, of which some may not exist."""

        def delete(path: str) -> None:
            try:
                obstore.delete(self._store, path)
            except FileNotFoundError as error:
                _check_bucket_exists(error)

        for path in paths:
            _call_with_retries("remove", path, partial(delete, path))

    def probe(self) -> bool:
        """Write, list, read and remove a small object; return whether it could be created once only."""
        folder, content = f"probe-{secrets.token_hex(8)}", b"written by skyrl-tx doctor"
        path = f"{folder}/object"
        creates_once = self.create(path, content) and not self.create(path, content)
        is_listed = any(stored.path == path for stored in self.list(folder))
        is_read = self.get(path) == content
        self.delete([path])
        if not (is_listed and is_read):
            raise ArtifactsUnreachable(f"the object store does not return {path}, which was just written")
        return creates_once

    def sign_url(self, path: str, ttl_s: float, method: Literal["GET", "HEAD"]) -> str | None:
        """Return a signed URL of an object; None if the store has none."""
        store = self._store
        if not isinstance(store, (S3Store, GCSStore, AzureStore)):
            return None
        return _call_with_retries("sign", path, lambda: obstore.sign(store, method, path, timedelta(seconds=ttl_s)))


def _call_with_retries(verb: str, path: str, call: Callable[[], T]) -> T:
    """Return what a call returns, which may run more than once: obstore repeats no request whose answer was cut.

    Errors become ArtifactsUnreachable. They are not chained, because a traceback would show their texts.
    """
    started = time.monotonic()
    for is_last in (False, False, True):
        try:
            return call()
        except (exceptions.BaseError, OSError) as error:
            reason = _describe_error(error)
        if is_last or reason == _DENIED or time.monotonic() - started > _PATIENCE_S:
            break
    raise ArtifactsUnreachable(f"the object store cannot {verb} {path}: {reason}")


def _check_bucket_exists(error: FileNotFoundError) -> None:
    """Return None for an object that does not exist; raise the error again if its bucket does not exist."""
    if _NO_BUCKET.search(str(error)):
        raise error


def _describe_error(error: Exception) -> str:
    """Return why a request failed, from known parts of an error's text."""
    text = str(error)
    if found := _CODE.search(text):
        return found[1]
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)):
        return _DENIED
    if found := _KIND.search(text):
        return _REASONS[found[1]]
    if found := _STATUS.search(text):
        return f"status {found[1]}"
    return type(error).__name__
