"""A PostgreSQL server for tests, in a temporary directory, reachable by a Unix socket only."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from skyrl_tx.store.database import Store
from tests.support.client_environments import UnavailableEnvironment
from tests.support.old_schemas import ALL_TABLES

_USER = "skyrl"
PASSWORD = "secret-password"
"""Part of every URL; no output may contain it."""
_TEMPLATE = "template_skyrl"
_PORT = 5432  # only part of the socket's name
_UNTIL_INPUT_ENDS = 'exec 3<&0; "$@" <&- & read _ <&3; kill -QUIT $!; wait $!'
"""Runs a command until the process that started it ends, even if that process is killed."""
_SETTINGS = ("listen_addresses=", "max_connections=200", "shared_buffers=32MB")
_NOT_DURABLE = ("fsync=off", "full_page_writes=off")
"""Faster; tests kill processes, not the machine."""


def find_binaries() -> Path:
    """Return the directory of `initdb` and `postgres`; raises UnavailableEnvironment."""
    installed = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True
    )
    on_path = shutil.which("initdb")
    for directory in [*installed, *([Path(on_path).parent] if on_path else [])]:
        if (directory / "initdb").is_file() and (directory / "postgres").is_file():
            return directory
    raise UnavailableEnvironment("no PostgreSQL server is installed: apt-get install postgresql")


class PostgresqlServer:
    """A running server; leaving the context stops it and removes its data."""

    def __init__(self, *, is_durable: bool = False) -> None:
        """Initialize and start the server; with `is_durable`, commits wait for the disk as in production."""
        self._settings = _SETTINGS if is_durable else (*_SETTINGS, *_NOT_DURABLE)
        self._binaries = find_binaries()
        self._home = Path(tempfile.mkdtemp(prefix="skyrl_tx-pg-"))
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = _find_unprivileged_user()
            self._as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self._home, user.pw_uid, user.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

        try:
            self._call("initdb", "--no-sync", "--auth=trust", f"--username={_USER}", "--encoding=UTF8", "--locale=C")
            self.start()
            with closing(Store.open(self._home / "data_dir", role="tool", url=self._create(_TEMPLATE, "template1"))):
                pass  # opening created the tables
        except BaseException:
            self.close()
            raise

    def new_database(self, *, empty: bool = False) -> str:
        """Create a database, with our tables unless `empty`; return its URL."""
        return self._create(f"test_{secrets.token_hex(6)}", "template0" if empty else _TEMPLATE)

    def clear(self, url: str) -> None:
        """Truncate our tables and end all connections to a database; faster than creating another one."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            tables = ", ".join(name for metadata in ALL_TABLES for name in metadata.tables)
            connection.execute(f"TRUNCATE {tables} RESTART IDENTITY".encode())
            connection.execute("INSERT INTO answer_counter (id, value) VALUES (1, 0)")

    def administrator(self) -> psycopg.Connection:
        """Connect as superuser."""
        return psycopg.connect(host=str(self._home), port=_PORT, user=_USER, dbname="postgres", autocommit=True)

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        settings = [word for setting in self._settings for word in ("-c", setting)]

        with (self._home / "log").open("ab") as log:
            server = [self._binaries / "postgres", "-D", self._data, "-k", self._home, "-p", str(_PORT), *settings]
            process = self._process = subprocess.Popen[bytes](
                ["sh", "-c", _UNTIL_INPUT_ENDS, "sh", *server],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._home,
                process_group=0,
                **self._as_user,
            )

        end = time.monotonic() + 30

        while True:
            try:
                return self.administrator().close()
            except psycopg.OperationalError as error:
                if process.poll() is not None or time.monotonic() > end:
                    log_text = (self._home / "log").read_text(errors="replace")
                    raise UnavailableEnvironment(f"PostgreSQL does not start: {error}\n{log_text[-2000:]}") from error
                time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server and all connections immediately, as a crash of its machine does."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None

    def close(self) -> None:
        """Stop the server and remove its data."""
        self.stop()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _create(self, name: str, template: str) -> str:
        with self.administrator() as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'.encode())
        return f"postgresql://{_USER}:{PASSWORD}@/{name}?host={self._home}&port={_PORT}"

    def _call(self, program: str, *arguments: str) -> None:
        command = [self._binaries / program, "-D", self._data, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self._home, **self._as_user, env={"PATH": ""}
        )
        if done.returncode:
            raise UnavailableEnvironment(f"{program} failed: {(done.stderr or done.stdout).strip()[-500:]}")


def _find_unprivileged_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise UnavailableEnvironment("PostgreSQL does not run as root, and there is no user `postgres` or `nobody`")
