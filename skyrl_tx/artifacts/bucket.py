"""Access to the objects under one URL of S3, Google Cloud Storage, Azure or a directory.

Error texts of obstore may quote requests with credentials, so they are never shown. An error
message contains the operation, the object, and the code of the response.
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
"""Size of a part of an upload or a download. S3 allows 10,000 parts per object."""
_CONCURRENT = 4
"""How many parts of an object are transferred at the same time."""
_PATIENCE_S = 30.0
"""A call that has taken longer than this is not repeated."""
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
    """An object in the object store."""

    path: str
    size_bytes: int
    modified_at: float
    """When the object was written, by the clock of the object store, in seconds since the epoch."""


class Bucket:
    """The objects in an obstore store. All methods raise ArtifactsUnreachable."""

    def __init__(self, store: ObjectStore, name: str, *, patience_s: float = _PATIENCE_S) -> None:
        """Use an obstore store. Messages show `name`, for example the URL of the store.

        A call that takes longer than `patience_s` and then fails is not repeated, because obstore
        has repeated its requests already.
        """
        self._store = store
        self.name = name
        self._patience_s = patience_s

    @classmethod
    def open_url(cls, url: str, *, timeout_s: float | None = None) -> "Bucket":
        """Open a URL.

        Credentials, region and endpoint are read from the provider's usual environment variables.
        With `timeout_s`, calls fail after about this time instead of a minute.
        """
        client: ClientConfig = _CLIENT
        retry: RetryConfig = _RETRY
        patience_s = _PATIENCE_S
        if timeout_s is not None:
            limit = timedelta(seconds=timeout_s)
            client, retry = {"connect_timeout": limit, "timeout": limit}, {"max_retries": 2, "retry_timeout": limit}
            patience_s = 0.0

        if url.startswith("file:"):
            return cls(from_url(url, mkdir=True, automatic_cleanup=True), url)
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            client = {**client, "allow_http": True}
        return _call_with_retries(
            "open",
            url,
            lambda: cls(from_url(url, client_options=client, retry_config=retry), url, patience_s=patience_s),
        )

    def put(self, path: str, content: bytes | Path) -> None:
        """Write an object, in parts if it is large."""
        size, concurrency = _PART_BYTES, _CONCURRENT
        self._call(
            "write", path, lambda: obstore.put(self._store, path, content, chunk_size=size, max_concurrency=concurrency)
        )

    def create(self, path: str, content: bytes) -> bool:
        """Write an object that does not exist yet. Return False if it exists.

        The object may also exist because an earlier attempt of this call succeeded, and only the
        response was lost.
        """

        def create() -> bool:
            try:
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
            except _EXISTS:
                return False
            return True

        return self._call("create", path, create)

    def get(self, path: str) -> bytes | None:
        """Return the content of an object, or None if it does not exist."""

        def get() -> bytes | None:
            try:
                return bytes(obstore.get(self._store, path).bytes())
            except FileNotFoundError as error:
                return _check_bucket_exists(error)

        return self._call("read", path, get)

    def download(self, path: str, target: Path, num_bytes: int) -> bool:
        """Download an object of known size to a new file, in parts.

        Return False if it does not exist.
        """

        def get_range(start: int, end: int) -> bytes | None:
            try:
                return bytes(obstore.get_range(self._store, path, start=start, end=end))
            except FileNotFoundError as error:
                return _check_bucket_exists(error)

        def read(start: int) -> bool:
            end = min(start + _PART_BYTES, num_bytes)
            part = self._call("read", path, lambda: get_range(start, end))
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
        """Return the objects in a folder, or all objects."""

        def read() -> Sequence[StoredObject]:
            return [
                StoredObject(entry["path"], entry["size"], entry["last_modified"].timestamp())
                for page in obstore.list(self._store, folder)
                for entry in page
            ]

        return self._call("list", folder or "all objects", read)

    def get_modification_time(self, path: str) -> float:
        """Return when an object was written, by the clock of the object store."""
        return self._call("read", path, lambda: obstore.head(self._store, path))["last_modified"].timestamp()

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects. Objects that do not exist are ignored."""

        def delete(path: str) -> None:
            try:
                obstore.delete(self._store, path)
            except FileNotFoundError as error:
                _check_bucket_exists(error)

        for path in paths:
            self._call("remove", path, partial(delete, path))

    def probe(self) -> bool:
        """Test the object store: write, list, read and remove a small object.

        Returns whether the store refuses to create an object that exists.
        """
        folder, content = f"probe-{secrets.token_hex(8)}", b"written by skyrl-tx doctor"
        path = f"{folder}/object"
        creates_once = self.create(path, content) and not self.create(path, content)
        is_listed = any(stored.path == path for stored in self.list(folder))
        is_read = self.get(path) == content
        self.delete([path])
        if not (is_listed and is_read):
            raise ArtifactsUnreachable(f"the object store does not list or return {path}, which was just written")
        return creates_once

    def sign_url(self, path: str, ttl_s: float, method: Literal["GET", "HEAD"]) -> str | None:
        """Return a signed URL of an object, or None if the store cannot sign URLs."""
        store = self._store
        if not isinstance(store, (S3Store, GCSStore, AzureStore)):
            return None
        return self._call("sign", path, lambda: obstore.sign(store, method, path, timedelta(seconds=ttl_s)))

    def _call(self, verb: str, path: str, call: Callable[[], T]) -> T:
        return _call_with_retries(verb, path, call, self._patience_s)


def _call_with_retries(verb: str, path: str, call: Callable[[], T], patience_s: float = _PATIENCE_S) -> T:
    """Make a call up to three times and return its result.

    obstore itself does not retry a request if the connection broke during the response. Raises
    ArtifactsUnreachable. It is not chained to the last error of obstore, because a traceback would
    show the text of that error, which may contain credentials.
    """
    started = time.monotonic()
    for is_last in (False, False, True):
        try:
            return call()
        except (exceptions.BaseError, OSError) as error:
            reason = _describe_error(error)
        if is_last or reason == _DENIED or time.monotonic() - started > patience_s:
            break
    raise ArtifactsUnreachable(f"the object store cannot {verb} {path}: {reason}")


def _check_bucket_exists(error: FileNotFoundError) -> None:
    """Raise the error again if the bucket does not exist.

    Return None if only the object is missing.
    """
    if _NO_BUCKET.search(str(error)):
        raise error


def _describe_error(error: Exception) -> str:
    """Return why a request failed, using only known parts of the error's text."""
    text = str(error)
    if match := _CODE.search(text):
        return match[1]
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)):
        return _DENIED
    if match := _KIND.search(text):
        return _REASONS[match[1]]
    if match := _STATUS.search(text):
        return f"status {match[1]}"
    return type(error).__name__
