"""One history: a world, its clients and faults, and the checks at its end."""

import gc
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_tx.contract.ids import ArtifactId
from skyrl_tx.server.context import ApiContext
from tests.support.simulation import scenarios
from tests.support.simulation.clients import Client, Sent, train
from tests.support.simulation.database import Database
from tests.support.simulation.faults import draw_plan
from tests.support.simulation.oracle import Oracle
from tests.support.simulation.scheduler import Scheduler
from tests.support.simulation.substitutes import install_substitutes
from tests.support.simulation.trace import Trace
from tests.support.simulation.world import IDLE_PERIODS, World

SETTLE_S = 60.0
"""Virtual time after the last fault in which every request must have its result."""
_CHECK_S = 1.0
_GC_EVERY = 100
_MOST_SICK_FAILURES = 8
_REPORTED_AFTER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one history."""

    seed: int
    violations: list[str]
    trace_hash: str
    plan: str
    lines: list[str]
    num_requests: int
    num_faults: int
    num_engines: int
    virtual_s: float


class History:
    """The state that clients, faults and checks share."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[str] = []
        self.clients: list[Client] = []
        self.acknowledged: list[tuple[Client, Sent]] = []
        self.artifacts: dict[str, ArtifactId] = {}
        """The artifact of each checkpoint at the end."""

    def violate(self, message: str) -> None:
        """Record a violation."""
        self.world.trace(f"VIOLATION {message}")
        self.violations.append(message)

    def add_client(self, owner: str, program: Callable[[Client], None]) -> Client:
        """Start a client."""
        client = Client(self, owner, len(self.clients))
        self.clients.append(client)
        client.start(program)
        return client

    def wait_for_clients(self, limit_s: float) -> bool:
        """Wait until all clients have all results; record what is missing after the limit."""
        scheduler = self.world.scheduler
        end = scheduler.monotonic + limit_s
        while not all(client.is_done for client in self.clients):
            if self.violations:
                return False
            if scheduler.monotonic >= end:
                self._record_waiting(limit_s)
                return False
            scheduler.sleep(_CHECK_S)
        return not self.violations

    def _record_waiting(self, limit_s: float) -> None:
        for client in self.clients:
            waiting = [sent for sent in client.all_sent() if not sent.is_done.is_set()]
            if not client.is_done and not waiting:
                self.violate(f"{client.name} waits {limit_s:.0f} s after the last fault")
            for sent in waiting[:3]:
                stored = self.world.database.rows(
                    "SELECT status, attempts FROM requests WHERE request_id = ?", sent.request_id
                )
                self.violate(
                    f"{client.name}: {sent.kind} {sent.seq_id} has no result {limit_s:.0f} s after the last "
                    f"fault; stored as {stored}"
                )

    def run(self) -> None:
        """Run the clients and the faults, then check."""
        world, plan = self.world, self.world.plan
        world.start()
        scenario = next((scenarios.ALONE[kind] for kind in sorted(plan.kinds) if kind in scenarios.ALONE), None)
        if scenario is not None:
            scenario(self)
            return
        draw = world.scheduler.random
        for number in range(draw.choice((1, 1, 1, 1, 1, 2, 2, 3))):
            self.add_client(("ann", "bob", "ann")[number], train)
        world.faults.run()
        self._check_hang()
        world.trace("no more faults")
        world.faults.stop()
        if self.wait_for_clients(SETTLE_S):
            if plan.has("sick_device"):
                scenarios.check_recovery_of_device(self, _MOST_SICK_FAILURES)
            self.note_artifacts()

    def note_artifacts(self) -> None:
        """Read which artifact each checkpoint names."""
        for model_id, kind, name, artifact_id in self.world.database.rows(
            "SELECT model_id, kind, name, artifact_id FROM checkpoints"
        ):
            self.artifacts[f"tinker://{model_id}/{kind}/{name}"] = ArtifactId(artifact_id)

    def _check_hang(self) -> None:
        """A call that does not return must be reported, or have ended."""
        world, scheduler = self.world, self.world.scheduler
        hung = world.engine
        if world.faults.hung_at is None or hung is None or hung.process is not world.faults.hung:
            return
        scheduler.sleep(world.faults.hung_at + _REPORTED_AFTER_S - scheduler.monotonic)
        contexts = [api.context for api in world.apis if api.context is not None]
        if world.engine is hung and contexts and not _read_reported_state(contexts[0]):
            self.violate(
                f"a call of the backend hangs for {_REPORTED_AFTER_S:.0f} s, and the server reports no problem"
            )


def _read_reported_state(context: ApiContext) -> str | None:
    """Return what the API tells clients about the engine's state."""
    report = context.engine.read_report()
    return report.problem or report.activity


class Simulator:
    """Runs histories one after the other in this process."""

    def __init__(self, *, is_plain: bool = False) -> None:
        """`is_plain`: execute every statement through SQLAlchemy, see `statements`."""
        self._directory = Path(
            tempfile.mkdtemp(prefix="skyrl-tx-simulation-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self._num_run = 0
        gc.disable()  # a collection in the middle of a history would take time, and end coroutines of killed processes
        scheduler = Scheduler(0)
        with install_substitutes(scheduler, on_error=lambda *_: None, own=[], names={}):
            self._database = Database(is_plain=is_plain)
        gc.freeze()

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, seed: int, kinds: Sequence[str], *, is_traced: bool = False) -> Outcome:
        """Run the history of a seed with faults of some of these kinds."""
        scheduler = Scheduler(seed)
        plan = draw_plan(random.Random(f"plan {seed}"), tuple(kinds))
        trace = Trace(directory=str(self._directory), is_kept=is_traced)
        trace.where = lambda: f"{scheduler.monotonic - 10_000:9.4f} {scheduler.current.name}:"
        directory = self._directory / "data"
        self._database.reset()
        world = World(scheduler, self._database, directory, plan, trace)
        history = History(world)
        names = {**IDLE_PERIODS, ("skyrl_tx.store.database", "_make_dialect"): world.dialect}

        try:
            with (
                warnings.catch_warnings(),
                install_substitutes(scheduler, on_error=world.on_thread_error, own=world.substitutes, names=names),
            ):
                warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of killed processes
                history.run()
                world.end()
                for client in history.clients:
                    scheduler.end(client.process)
                    scheduler.bury(client.process)

            for error in world.thread_errors:
                history.violate(f"a thread of the product ended: {error}")
            if not history.violations:
                for client in history.clients:
                    for finding in Oracle(history, client).findings():
                        history.violate(finding)
        finally:
            shutil.rmtree(directory)
            self._num_run += 1
            if self._num_run % _GC_EVERY == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of killed processes
                    gc.collect()

        return Outcome(
            seed=seed,
            violations=history.violations,
            trace_hash=trace.hash,
            plan=str(plan),
            lines=trace.lines,
            num_requests=sum(len(client.all_sent()) for client in history.clients),
            num_faults=trace.num_faults,
            num_engines=world.num_engines,
            virtual_s=scheduler.monotonic - 10_000,
        )
