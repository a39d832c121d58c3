"""The faults of one history: which kinds it has, and when each happens."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyrl_tx.contract.errors import BackendLost
from tests.support.simulation import database, disk
from tests.support.simulation.scheduler import Killed, Process

if TYPE_CHECKING:
    from tests.support.simulation.world import World

KINDS = {
    "kills": "the engine or an API is killed, at a random time or at a failpoint, twice at most",
    "many_kills": "the engine is killed more often than a request may be attempted",
    "stops": "the engine is asked to stop, and a new one starts",
    "device_lost": "a call of the backend raises BackendLost",
    "network": "calls and responses are lost, repeated and delayed",
    "artifact_errors": "writing an artifact fails with ENOSPC or EIO, after a part of a file",
    "power_loss": "the machine loses its power, and files what was not flushed",
    "full_database": "commits fail for a while, because the disk is full: at some time, and after files were written",
    "database_errors": "one read or commit fails with an I/O error; the commit may have happened",
    "watch_errors": "one look for commits of the other process fails with an I/O error",
    "bad_requests": "a pass raises an error, or crashes the engine, whenever it runs",
    "clock_steps": "the wall clock steps, or the machine is suspended",
    "hangs": "a call of the backend does not return",
    "sick_device": "every call of the backend fails, until the process ends",
    "old_database": "the database is replaced by an older copy or an empty one, while the server is stopped",
    "greedy_owner": "one owner sends samples as fast as the admission control lets it",
    "crowd": "one owner has many sessions that sample, another owner has one",
    "pages": "a client reads the list of runs page by page, while they are used",
}


@dataclass(kw_only=True)
class Plan:
    """The choices of one history before it starts."""

    kinds: frozenset[str]
    num_apis: int
    is_supervised_by_api: bool
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    device: dict[str, Any] = field(default_factory=dict[str, Any])
    fault_s: float
    """Faults happen in this time from the start."""
    call_s: float = 0.05
    """The longest time of a call of the device."""

    def has(self, kind: str) -> bool:
        """Whether the history has faults of this kind."""
        return kind in self.kinds

    def __str__(self) -> str:
        return f"{','.join(sorted(self.kinds)) or 'no faults'}; {self.num_apis} APIs; {self.engine}; {self.device}"


_TIMES_S = {"read": 0.004, "committed": 0.004}
"""The longest time of a read and of a commit. The product's loops wait longer after they have worked longer."""
ALONE = ("old_database", "greedy_owner", "crowd", "pages", "clock_steps")
"""Kinds with special clients, or that change the results clients may expect."""


def draw_plan(draw: random.Random, kinds: tuple[str, ...]) -> Plan:
    """Draw a plan with faults of some of these kinds."""
    chosen = frozenset(draw.sample(kinds, min(len(kinds), draw.choice((1, 1, 2, 2, 3)))))
    alone = [kind for kind in sorted(chosen) if kind in ALONE]
    if alone:
        # A poll that is sent again may meet the older database, which does not know its request.
        others = frozenset[str]() if alone[0] == "old_database" else chosen & {"network"}
        chosen = frozenset({alone[0], *others})
    is_supervised_by_api = draw.random() < 0.5
    plan = Plan(
        kinds=chosen,
        num_apis=1 if is_supervised_by_api else draw.choice((1, 1, 2)),
        is_supervised_by_api=is_supervised_by_api,
        engine={
            "gap_timeout_s": draw.choice((0.5, 3.0)),
            "snapshot_interval_s": draw.choice((1.0, 4.0, 60.0)),
            "snapshot_interval_requests": draw.choice((1, 2, 100)),
            "snapshot_max_share": 1.0,
            "housekeeping_interval_s": 20.0,
        },
        device={"max_models": draw.choice((1, 2, 8)), "sample_slots": draw.choice((0, 2)), "max_samplers": 2},
        fault_s=draw.uniform(0.1, 1.2),
    )
    if plan.has("clock_steps"):
        plan.engine |= {"session_timeout_s": 15.0, "session_retention_s": 600.0, "housekeeping_interval_s": 4.0}
        plan.fault_s = 25.0
    if plan.has("greedy_owner"):
        plan.engine |= {"max_queued_sample_bytes": 40_000}
        plan.device |= {"slice_tokens": 1}  # long samples in few slices
        plan.call_s = 0.5
    if plan.has("crowd"):
        plan.device |= {"sample_slots": 1}
    if plan.has("full_database"):
        plan.fault_s += 1.0  # first saves come later than most faults
    if plan.has("hangs"):
        plan.fault_s = 2.0
    return plan


class Network:
    """Delays, and chances of loss and repetition."""

    def __init__(self, draw: random.Random, *, is_bad: bool) -> None:
        self._draw = draw
        self._loss = draw.choice((0.0, 0.05, 0.2)) if is_bad else 0.0
        self._repeat = draw.choice((0.1, 0.3)) if is_bad else 0.0
        self._delay_s = draw.choice((0.1, 1.0)) if is_bad else 0.01

    def delay_s(self) -> float:
        """Draw the delay of a message."""
        return self._draw.random() ** 3 * self._delay_s

    def is_lost(self) -> bool:
        """Draw whether a message is lost."""
        return self._loss > 0 and self._draw.random() < self._loss

    def is_repeated(self) -> bool:
        """Draw whether a message arrives twice."""
        return self._repeat > 0 and self._draw.random() < self._repeat

    def heal(self) -> None:
        """Be perfect from now on."""
        self._loss = self._repeat = 0.0
        self._delay_s = 0.01


class Faults:
    """Makes faults happen. Each method is called where one may."""

    def __init__(self, world: "World", plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._scheduler = world.scheduler
        self._draw = draw = world.scheduler.random
        self.network = Network(draw, is_bad=plan.has("network"))
        self.is_stopped = False
        self.num_disk_errors = 0
        self.hung: Process | None = None
        self.hung_at: float | None = None
        self.sick_at: float | None = None
        self._sick: Process | None = None
        self._is_full = False
        self._countdowns: dict[str, int] = {}
        self._arm(draw)

    def _arm(self, draw: random.Random) -> None:
        if self._plan.has("device_lost"):
            self._countdowns["device"] = draw.randrange(1, 25)
        if self._plan.has("hangs"):
            self._countdowns["hang"] = draw.randrange(1, 20)
        if self._plan.has("sick_device"):
            self._countdowns["sick"] = draw.randrange(2, 20)
        if self._plan.has("artifact_errors"):
            self._countdowns["disk"] = draw.randrange(1, 14)
        if self._plan.has("database_errors"):
            self._countdowns[draw.choice(("read", "commit", "committed"))] = draw.randrange(1, 50)
        if self._plan.has("full_database"):
            self._countdowns["fill"] = draw.randrange(1, 5)
        if self._plan.has("watch_errors"):
            self._countdowns["look"] = draw.randrange(1, 30)
        if self._plan.has("kills") and draw.random() < 0.6:
            self._countdowns["failpoint"] = draw.randrange(1, 50)

    def _strikes(self, what: str) -> bool:
        """Count one call at a place; return whether its fault happens now."""
        left = self._countdowns.get(what)
        if left is None or self.is_stopped:
            return False
        self._countdowns[what] = left - 1
        return left == 1

    def run(self) -> None:
        """Cause the faults that happen at a time; on a fiber of the world."""
        draw, world = self._draw, self._world
        timed: list[Callable[[], None]] = []
        if self._plan.has("kills"):
            timed += [self._kill_any] * draw.choice((1, 1, 2))
        if self._plan.has("stops"):
            timed.append(self._stop_engine)
        if self._plan.has("power_loss"):
            timed.append(self._lose_power)
        if self._plan.has("full_database"):
            timed += [self._fill, self._empty]
        if self._plan.has("clock_steps"):
            timed.append(self._step_clock)
        start = self._scheduler.monotonic
        times = sorted(draw.uniform(0.05, self._plan.fault_s) for _ in timed)
        if self._plan.has("clock_steps"):
            times[-1] = draw.uniform(18.0, 24.0)
        for at, cause in zip(times, timed, strict=True):
            self._scheduler.sleep(start + at - self._scheduler.monotonic)
            cause()
        while self._plan.has("many_kills") and not self.is_stopped and world.num_engines < draw.choice((5, 6, 7)):
            self._scheduler.sleep(draw.uniform(0.3, 0.8))
            self._kill_engine()
        self._scheduler.sleep(max(0.0, start + self._plan.fault_s - self._scheduler.monotonic))

    def stop(self) -> None:
        """Cause no more faults."""
        self.is_stopped = True
        self._is_full = False
        self.network.heal()

    def _kill_engine(self) -> None:
        if self._world.engine is not None and not self._world.engine.process.is_dead:
            self._world.trace(f"FAULT kills {self._world.engine.process.name}")
            self._scheduler.end(self._world.engine.process)

    def _kill_any(self) -> None:
        target = self._draw.choice(("engine", "engine", "api", "both"))
        if target != "api":
            self._kill_engine()
        if target != "engine":
            api = self._draw.choice(self._world.apis)
            self._world.trace(f"FAULT kills {api.process.name}")
            self._scheduler.end(api.process)

    def _stop_engine(self) -> None:
        if self._world.engine is not None:
            self._world.trace("FAULT stops the engine")
            self._world.engine.request_stop()

    def _lose_power(self) -> None:
        world = self._world
        world.trace("FAULT power loss")
        self._kill_engine()
        processes = [api.process for api in world.apis]
        for process in processes:
            self._scheduler.end(process)
        if world.engine is not None:
            processes.append(world.engine.process)
        for process in processes:
            self._scheduler.bury(process)
        world.disk.lose_power()

    def _fill(self) -> None:
        self._world.trace("FAULT the database's disk is full")
        self._is_full = True

    def _empty(self) -> None:
        self._is_full = False

    def _fill_for_a_while(self) -> None:
        """Fill the disk until an operator has made space. The files of a save or snapshot took what was left."""
        self._fill()
        self._countdowns["fill"] = self._draw.randrange(1, 5)

        def make_space() -> None:
            self._scheduler.sleep(self._draw.uniform(0.05, 0.5))
            self._empty()

        self._scheduler.spawn(make_space, process=self._scheduler.world, name="operator")

    def _step_clock(self) -> None:
        seconds = self._draw.choice((-20.0, 30.0, 400.0, 3600.0, 8 * 86_400.0))
        self._world.trace(f"FAULT the wall clock steps by {seconds} s")
        self._scheduler.wall_offset += seconds

    def use_database(self, point: str) -> None:
        """Fail a read, a commit or a look at the database, or do nothing."""
        process = self._scheduler.current.process
        if process is self._scheduler.world:
            return
        if process.is_dead:
            raise Killed(process.name)
        if point in _TIMES_S:
            self._scheduler.monotonic += self._draw.random() * _TIMES_S[point]
        if self._is_full and point == "commit" and self._draw.random() < 0.8:
            raise database.full_disk()
        if point == "look" and not process.name.startswith("api"):
            return
        if self._strikes(point):
            self._world.trace(f"FAULT I/O error of the database: {point}")
            raise database.disk_error()

    def use_disk(self, point: str) -> None:
        """Fail a write or a flush of an artifact, or do nothing."""
        if self._scheduler.current.process.is_dead:
            raise Killed(self._scheduler.current.process.name)
        if point == "write" and self._strikes("fill"):
            self._fill_for_a_while()
        if self._strikes("disk"):
            self.num_disk_errors += 1
            error = self._draw.choice((disk.no_space, disk.failing))()
            self._world.trace(f"FAULT {point} of an artifact: {error}")
            if self._draw.random() < 0.7:
                self._countdowns["disk"] = self._draw.choice((1, 2, 5, 12))
            raise error

    def use_device(self, call: str) -> None:
        """Take the time of one call of the backend. It may fail, or not return."""
        self._scheduler.sleep(self._draw.random() ** 2 * self._plan.call_s)
        process = self._scheduler.current.process
        if self._strikes("device"):
            self._world.trace(f"FAULT the device is lost in {call}")
            raise BackendLost("the simulated device is lost")
        if self._strikes("hang"):
            self._world.trace(f"FAULT {call} hangs")
            self.hung, self.hung_at = process, self._scheduler.monotonic
            self._scheduler.park()
        if self._strikes("sick"):
            self._world.trace(f"FAULT the device is sick from {call} on")
            self._sick, self.sick_at = process, self._scheduler.monotonic
        if self._sick is process:
            raise RuntimeError("INTERNAL: the simulated device is sick")

    def reach(self, point: str) -> None:
        """Stand for `failpoint`: kill the process, or do nothing."""
        process = self._scheduler.current.process
        if not point.startswith("store"):  # no other process runs during a transaction
            self._scheduler.pause()
        if self._strikes("failpoint"):
            self._world.trace(f"FAULT kills {process.name} at {point}")
            self._scheduler.kill(process)
