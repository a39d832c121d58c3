"""API and engine as two processes of a fork server's, each killed as its list says and started again at once.

A fork of a process that has imported everything is there in milliseconds, so that hundreds of kills take minutes. But
each process imports the main module of the first one again: where that imports much, lives begin late.
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

from skyrl_tx import failpoints
from skyrl_tx.failpoints import Point
from skyrl_tx.testing.database_look import rows

Half = Literal["api", "engine"]
Victim = Literal["api", "engine", "both"]

_PRELOADED = [
    "skyrl_tx.testing.chaos.halves",
    "skyrl_tx.supervisor",
    "skyrl_tx.backends.fake.backend",
    "skyrl_tx.backends.jax.backend",
]
_PATIENCE_S = 4.0
NOT_REACHED = "a place not reached in time"
API_POINTS: tuple[Point, ...] = ("store.commit", "store.committed")
ENGINE_POINTS: tuple[Point, ...] = get_args(Point)
_MOST_TIMES = 6
_FEW_TIMES: dict[Point | None, int] = {
    "replay.restored": 1,
    "replay.effect": 3,
    "snapshot.capture": 3,
    "snapshot.written": 3,
    "artifact.collect": 3,
}
"""Places that a short life comes to less often."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL: at the `nth` time that a process comes to a point, or for None after so many seconds of its life."""

    victim: Victim
    point: Point | None
    nth: int = 1
    after_s: float = 0.0


def random_kills(seed: int, num_kills: int) -> list[Kill]:
    """A schedule: most kills are the engine's; three in five of a half's are at places, once each before any twice."""
    dice = random.Random(seed)
    decks: dict[Victim, list[Point]] = {"engine": [], "api": []}
    kills: list[Kill] = []
    for _ in range(num_kills):
        victim: Victim = dice.choices(("engine", "api", "both"), (8, 1, 1))[0]
        point = None
        if victim != "both" and dice.random() < 0.6:
            decks[victim] = decks[victim] or _shuffled(API_POINTS if victim == "api" else ENGINE_POINTS, dice)
            if not any(kill.victim == victim for kill in kills):  # what is replayed was done before a death
                decks[victim].sort(key=lambda each: not each.startswith("replay"))
            point = decks[victim].pop()
        kills.append(Kill(victim, point, dice.randint(1, _FEW_TIMES.get(point, _MOST_TIMES)), dice.uniform(0.05, 0.8)))
    return kills


def _shuffled(points: Sequence[Point], dice: random.Random) -> list[Point]:
    return dice.sample(points, len(points))


class Halves:
    """Both halves, kept alive until the context is left; a kill list each."""

    def __init__(
        self,
        directory: Path,
        kills: Sequence[Kill],
        api_flags: Sequence[str],
        engine_flags: Sequence[str],
        database_url: str | None = None,
        slowness: float = 1.0,
    ) -> None:
        """Make a data directory in `directory`; both commands get their flags and this directory.

        All that a kill waits for takes `slowness` times as long as it says.
        """
        self._slowness = slowness
        self.data_dir = directory / "data"
        self.database_url = database_url
        self.log_path = directory / "log"
        self.done: Counter[tuple[Victim, str]] = Counter()
        """Kills that happened, by victim and place."""
        self.changed_answers = 0
        """Answers that were not, after a kill, what they had been before it."""
        self._answers: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        shared = ["--data-dir", str(self.data_dir), "--log-level", "info"]
        shared += ["--database-url", database_url] if database_url is not None else []
        self._commands: dict[Half, list[str]] = {
            "api": ["api", *shared, "--port", str(self._port), *api_flags],
            "engine": ["engine", *shared, *engine_flags],
        }
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._lives: dict[Half, BaseProcess] = {}
        self._keepers = [
            threading.Thread(target=self._keep, args=("api", [kill for kill in kills if kill.victim == "api"])),
            threading.Thread(target=self._keep, args=("engine", [kill for kill in kills if kill.victim != "api"])),
        ]

    def __enter__(self) -> Self:
        for keeper in self._keepers:
            keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        with self._lock:
            for life in self._lives.values():
                life.kill()
        for keeper in self._keepers:
            keeper.join()
        self._look_at_answers()

    def _keep(self, half: Half, kills: Sequence[Kill]) -> None:
        left = list(kills)
        while not self._end.is_set():
            kill = left[0] if left else None
            life = self._start(half, kill)
            if life is None:
                return
            if kill is None:
                life.join()
                continue
            has_died = self._let_live(life, kill)
            if self._end.is_set():
                return
            if has_died and life.exitcode != -signal.SIGKILL:
                continue  # it could not start, or ended otherwise: the log says why
            left.pop(0)
            place = "random instant" if kill.point is None else kill.point if has_died else NOT_REACHED
            with self._lock:
                self.done[kill.victim, place] += 1
                if not has_died:
                    life.kill()
                if kill.victim == "both":
                    self._lives["api"].kill()
            life.join()
            self._look_at_answers()

    def _start(self, half: Half, kill: Kill | None) -> BaseProcess | None:
        environment = {failpoints.VARIABLE: f"{kill.point}:{kill.nth}"} if kill and kill.point else {}
        life = self._context.Process(target=_live, args=(self._commands[half], environment, str(self.log_path)))
        with self._lock:
            if self._end.is_set():
                return None
            life.start()
            self._lives[half] = life
        return life

    def _let_live(self, life: BaseProcess, kill: Kill) -> bool:
        """Wait for the moment of the kill; whether the process is dead already."""
        end = time.monotonic() + (_PATIENCE_S if kill.point else kill.after_s) * self._slowness
        while time.monotonic() < end and not self._end.is_set():
            life.join(0.05)
            if life.exitcode is not None:
                return True
        return False

    def _look_at_answers(self) -> None:
        """Compare the answers on disk with those seen before."""
        wanted = "SELECT request_id, result FROM requests WHERE result IS NOT NULL"
        found = dict(rows(self.data_dir, self.database_url, wanted))
        with self._lock:
            self.changed_answers += sum(found.get(name) != result for name, result in self._answers.items())
            self._answers = found


def _live(arguments: list[str], environment: dict[str, str], log_path: str) -> None:
    """Be one half; the first function of its process."""
    from skyrl_tx.cli import main

    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=0"  # as it would be set by a start from nothing
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
