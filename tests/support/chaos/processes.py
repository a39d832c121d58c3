"""API and engines as processes, each killed by a schedule and restarted immediately.

They are forked from a fork server that has imported everything, so that a start takes milliseconds and hundreds of
kills take minutes. Each process imports the main module again, which must therefore be light.
"""

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from skyrl_tx.process import failpoints
from skyrl_tx.process.failpoints import Point
from tests.support.database_rows import rows

Role = Literal["api", "engine"]
Victim = Literal["api", "engine", "both"]

_PRELOADED = [
    "tests.support.chaos.processes",
    "skyrl_tx.launch.serving",
    "skyrl_tx.testing.fake.backend",
    "skyrl_tx.backends.jax.backend",
]
_POINT_TIMEOUT_S = 4.0
NOT_REACHED = "a crash point not reached in time"
API_POINTS: tuple[Point, ...] = ("store.commit", "store.committed")
_UPLOAD_POINTS = frozenset({"artifact.uploading", "artifact.uploaded", "artifact.committed"})
"""Points of artifacts in an object store, which these runs do not have."""
ENGINE_POINTS: tuple[Point, ...] = tuple(point for point in get_args(Point) if point not in _UPLOAD_POINTS)
_MAX_COUNT = 6
_MAX_COUNT_AT: dict[Point | None, int] = {
    "replay.restored": 1,
    "replay.effect": 3,
    "snapshot.capture": 3,
    "snapshot.written": 3,
    "artifact.collect": 3,
}
"""Largest count at crash points that a short-lived process reaches rarely."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL: when a process reaches `point` for the `nth` time or, if it is None, `after_s` after its start."""

    victim: Victim
    point: Point | None
    nth: int = 1
    after_s: float = 0.0


def random_kills(seed: int, num_kills: int) -> list[Kill]:
    """Return a schedule that mostly kills the engine, 60% at crash points. No point repeats before all were used."""
    dice = random.Random(seed)
    decks: dict[Victim, list[Point]] = {"engine": [], "api": []}
    kills: list[Kill] = []
    for _ in range(num_kills):
        victim: Victim = dice.choices(("engine", "api", "both"), (8, 1, 1))[0]
        point = None
        if victim != "both" and dice.random() < 0.6:
            decks[victim] = decks[victim] or _shuffle(API_POINTS if victim == "api" else ENGINE_POINTS, dice)
            if not any(kill.victim == victim for kill in kills):  # a replay needs an earlier kill
                decks[victim].sort(key=lambda card: not card.startswith("replay"))
            point = decks[victim].pop()
        kills.append(
            Kill(victim, point, dice.randint(1, _MAX_COUNT_AT.get(point, _MAX_COUNT)), dice.uniform(0.05, 0.8))
        )
    return kills


def _shuffle(points: Sequence[Point], dice: random.Random) -> list[Point]:
    return dice.sample(points, len(points))


class ServerProcesses:
    """Runs API and engine until the context is left, each with its own list of kills."""

    def __init__(
        self,
        directory: Path,
        kills: Sequence[Kill],
        api_flags: Sequence[str],
        engine_flags: Sequence[str],
        database_url: str | None = None,
        slowness: float = 1.0,
        num_engines: int = 1,
    ) -> None:
        """Create a data directory in `directory`; all commands get it and their flags.

        `slowness` multiplies all times of the kills, which several engines share out.
        """
        self._slowness = slowness
        self.data_dir = directory / "data"
        self.database_url = database_url
        self.log_path = directory / "log"
        self.done: Counter[tuple[Victim, str]] = Counter()
        """Kills that happened, by process and crash point."""
        self.changed_results = 0
        """Number of stored results that changed after a kill."""
        self._results: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        shared = ["--data-dir", str(self.data_dir), "--log-level", "info"]
        shared += ["--database-url", database_url] if database_url is not None else []
        self._commands: dict[Role, list[str]] = {
            "api": ["api", *shared, "--port", str(self._port), *api_flags],
            "engine": ["engine", *shared, *engine_flags],
        }
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        if num_engines > 1:
            self._commands["engine"] += ["--engines", str(num_engines)]
        self._processes: dict[tuple[Role, int], BaseProcess] = {}
        of_engines = [kill for kill in kills if kill.victim != "api"]
        self._threads = [
            threading.Thread(target=self._run, args=("api", 0, [kill for kill in kills if kill.victim == "api"])),
            *(
                threading.Thread(target=self._run, args=("engine", number, of_engines[number::num_engines]))
                for number in range(num_engines)
            ),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        with self._lock:
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join()
        self._compare_results()

    def _run(self, role: Role, number: int, kills: Sequence[Kill]) -> None:
        left = list(kills)

        while not self._end.is_set():
            kill = left[0] if left else None
            process = self._start(role, number, kill)
            if process is None:
                return
            if kill is None:
                process.join()
                continue
            has_died = self._wait_for_kill(process, kill)
            if self._end.is_set():
                return
            if has_died and process.exitcode != -signal.SIGKILL:
                continue  # it failed to start or exited otherwise; the log has the reason
            left.pop(0)
            point_name = "random time" if kill.point is None else kill.point if has_died else NOT_REACHED
            with self._lock:
                self.done[kill.victim, point_name] += 1
                if not has_died:
                    process.kill()
                if kill.victim == "both":
                    self._processes["api", 0].kill()
            process.join()
            self._compare_results()

    def _start(self, role: Role, number: int, kill: Kill | None) -> BaseProcess | None:
        environment = {failpoints.VARIABLE: f"{kill.point}:{kill.nth}"} if kill and kill.point else {}
        process = self._context.Process(
            target=_run_command, args=(self._commands[role], environment, str(self.log_path))
        )
        with self._lock:
            if self._end.is_set():
                return None
            process.start()
            self._processes[role, number] = process
        return process

    def _wait_for_kill(self, process: BaseProcess, kill: Kill) -> bool:
        """Wait until the kill is due; return whether the process has died."""
        end = time.monotonic() + (_POINT_TIMEOUT_S if kill.point else kill.after_s) * self._slowness
        while time.monotonic() < end and not self._end.is_set():
            process.join(0.05)
            if process.exitcode is not None:
                return True
        return False

    def _compare_results(self) -> None:
        """Count stored results that have changed since the last call."""
        wanted = "SELECT request_id, result FROM requests WHERE result IS NOT NULL"
        found = dict(rows(self.data_dir, self.database_url, wanted))
        with self._lock:
            self.changed_results += sum(found.get(name) != result for name, result in self._results.items())
            self._results = found


def _run_command(arguments: list[str], environment: dict[str, str], log_path: str) -> None:
    """Run one command; the entry point of a process."""
    from tests.support.with_constants import main

    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=0"  # disable huge pages, as a normal start would
    os.environ.update(environment)
    threading.Thread(target=_follow_parent, daemon=True).start()
    raise SystemExit(main(arguments))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
