"""The simulated machine: API processes, an engine with its supervisor, and the network between them and clients."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from safetensors.numpy import save_file

from skyrl_tx.artifacts import LocalArtifacts
from skyrl_tx.compose import APPS
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.engine.engine import Engine
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.launch import engine_process, supervisor
from skyrl_tx.launch.command import load_engine_extensions
from skyrl_tx.launch.launcher import EngineEnd, EngineLost
from skyrl_tx.launch.supervisor import RestartPolicy
from skyrl_tx.process import failpoints
from skyrl_tx.server import app
from skyrl_tx.server import context as api_context
from skyrl_tx.server.context import ApiContext
from skyrl_tx.server.http.body import BodyLimits
from skyrl_tx.server.identity.authentication import authenticate_request
from skyrl_tx.server.routes import futures as future_routes
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import StoreError, futures
from skyrl_tx.store.database import Store
from tests.support.simulation.database import Database, Dialect, Notifiers
from tests.support.simulation.device import CONFIG, Device
from tests.support.simulation.disk import Disk
from tests.support.simulation.event_loop import EventLoop
from tests.support.simulation.faults import Faults, Plan
from tests.support.simulation.scheduler import Event, Fiber, Process, Scheduler
from tests.support.simulation.substitutes import Standing
from tests.support.simulation.trace import Trace

_MAX_STARTS = 1_000
_IDLE_S = 5.0
"""Period of the product's idle loops, which wait for a notification anyway."""
IDLE_PERIODS = {
    ("skyrl_tx.engine.metrics", "_STATUS_PERIOD_S"): _IDLE_S,
    ("skyrl_tx.engine.activity", "_PERIOD_S"): _IDLE_S,
    ("skyrl_tx.engine.loop", "_MAX_WAIT_S"): _IDLE_S,
    ("skyrl_tx.engine.loop", "_PRUNE_PERIOD_S"): _IDLE_S,
    ("skyrl_tx.server.http.long_poll", "_WAIT_S"): _IDLE_S,
    ("skyrl_tx.store.sqlite", "_POLL_S"): _IDLE_S,
}


_LIMITS = BodyLimits.from_content_type(2**20, "application/json")
_EXTENSIONS = load_engine_extensions(APPS)
_STUCK_S = 15.0
"""Time limit of a call of the device."""
_STOPPED = EngineEnd(message="exited with status 0", is_final=False, is_crash=False)
_KILLED = EngineEnd(message="killed by SIGKILL", is_final=False, is_crash=False, was_killed=True)
_CRASHED = EngineEnd(message="killed by SIGSEGV", is_final=False, is_crash=True)


class Lost(Exception):
    """The connection was lost: the call may have had its effect or not."""


class _Exchange:
    """One call on its way, and its response."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._caller: Fiber = scheduler.current
        self.response: tuple[int, Any] | None = None
        self.is_lost = False

    def reply(self, status: int, body: Any) -> None:
        self.response = status, body
        self._scheduler.wake(self._caller, on=self)

    def lose(self) -> None:
        self.is_lost = True
        self._scheduler.wake(self._caller, on=self)

    def wait(self, timeout_s: float) -> tuple[int, Any]:
        if self.response is None and not self.is_lost:
            self._scheduler.park(timeout_s, on=self)
        if self.response is None:
            raise Lost
        return self.response


class Api:
    """One API process."""

    def __init__(self, world: "World", number: int) -> None:
        self._world = world
        self.number = number
        self.process = Process(f"api{number}")
        self.process.on_death.append(self._on_death)
        self.context: ApiContext | None = None
        self._store: Store | None = None
        self._loop: EventLoop | None = None
        self._exchanges: dict[_Exchange, None] = {}
        world.scheduler.spawn(self._start, process=self.process, name=f"{self.process.name}/main")

    def _start(self) -> None:
        world = self._world
        world.trace("starts")
        try:
            self._store = Store.open(world.data_dir, role="api")
            self.context = app.create_context(world.api_settings, self._store)
        except StoreError as error:
            world.trace(f"cannot start: {error}")
            world.scheduler.kill(self.process)
        assert self.context is not None
        self._loop = EventLoop(world.scheduler, self.process, world.on_thread_error)
        self._loop.call_soon(self.context.results.start)
        if world.plan.is_supervised_by_api and self.number == 0:
            self._loop.call_soon(self._supervise)

    def _supervise(self) -> None:
        assert self._loop is not None and self._store is not None
        self._world.supervise(self._loop, self._store, self.process)

    def _on_death(self) -> None:
        self._world.trace(f"{self.process.name} dies")
        for exchange in list(self._exchanges):
            exchange.lose()
        self._world.restart_later(self)

    def receive(
        self, exchange: _Exchange, key: str, route: Callable[..., Any], body: Any, path: dict[str, Any]
    ) -> None:
        """Handle a call on a new fiber, or on the event loop if it is a long poll."""
        if self.process.is_dead or self._loop is None or self.context is None:
            exchange.lose()
            return
        self._exchanges[exchange] = None
        request = self._request(key, body)
        if route is future_routes.retrieve_future:
            handle = self._poll(exchange, request)
            self._loop.call_soon(lambda: asyncio.ensure_future(handle, loop=self._loop))
        else:
            self._world.scheduler.spawn(
                lambda: self._handle(exchange, request, route, path),
                process=self.process,
                name=f"{self.process.name}/{route.__name__}",
            )

    def _request(self, key: str, body: Any) -> Request:
        headers = {"x-api-key": key, "content-type": "application/json"}
        if isinstance(body, dict) and "idempotency_key" in body:
            headers["x-idempotency-key"] = body.pop("idempotency_key")
        raw = json.dumps(body).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        assert self.context is not None
        state = SimpleNamespace(context=self.context, authenticator=self.context.authenticator, logged_at={})
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/v1",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "app": SimpleNamespace(state=state),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        return Request(scope, receive)

    def _handle(self, exchange: _Exchange, request: Request, route: Callable[..., Any], path: dict[str, Any]) -> None:
        try:
            caller = _run(authenticate_request(request))
            call = _run(api_context._read_call(request, caller, _LIMITS))
            self._world.scheduler.pause()
            found = route(call=call, **path)
            if isinstance(found, Response):
                value = json.loads(bytes(found.body))
            else:
                value = found.model_dump(mode="json", exclude_none=True) if isinstance(found, BaseModel) else found
            status = 200
        except Exception as error:
            response = _run(app._handle_error(request, error))
            status, value = response.status_code, json.loads(bytes(response.body) or b"{}")
        self._exchanges.pop(exchange, None)
        exchange.reply(status, value)

    async def _poll(self, exchange: _Exchange, request: Request) -> None:
        try:
            response: Response = await future_routes.retrieve_future(request)
        except Exception as error:
            response = await app._handle_error(request, error)
        self._exchanges.pop(exchange, None)
        exchange.reply(response.status_code, json.loads(bytes(response.body)))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that does not wait."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


class EngineProcess:
    """The engine as its supervisor sees it, see `skyrl_tx.launch.engine_process.EngineProcess`."""

    def __init__(self, world: "World", loop: EventLoop, parent: Process) -> None:
        self._world = world
        self._loop = loop
        self._records_crashes = not world.plan.is_supervised_by_api
        world.num_engines += 1
        self.pid = world.num_engines
        self.process = Process(f"engine{self.pid}")
        self.process.on_death.append(lambda: self._end(_KILLED))
        parent.on_death.append(lambda: world.scheduler.end(self.process))
        self.stop = Event(world.scheduler)
        self.store: Store | None = None
        self._ended: asyncio.Future[EngineEnd] = loop.create_future()
        self._on_ready: Callable[[Any], None] = lambda _: None
        world.engine = self
        world.scheduler.spawn(self._run, process=self.process, name=f"{self.process.name}/main")

    async def wait(self, on_ready: Callable[[Any], None]) -> EngineEnd:
        self._on_ready = on_ready
        return await self._ended

    def request_stop(self) -> None:
        self.stop.set()
        if self.store is not None:
            self.store.wake()

    def kill(self) -> None:
        self._world.scheduler.kill(self.process)

    def crash(self) -> None:
        """End the process as an invalid memory access would.

        An engine without a supervisor has no parent that sees the crash, and the request would be retried
        forever. In that case the device is lost instead.
        """
        if self._records_crashes:
            raise BackendLost("the device was lost")
        self._end(_CRASHED)
        self._world.scheduler.kill(self.process)

    def _run(self) -> None:
        world = self._world
        world.trace("starts")

        try:
            try:
                self.store = engine_process.open_store(world.engine_settings, self.stop)  # pyright: ignore

                try:
                    device = Device(CONFIG.model_copy(update=world.plan.device), world.faults.use_device, self.crash)
                    artifacts = LocalArtifacts(world.disk.root)
                    engine = Engine(world.engine_settings, device, self.store, artifacts, extensions=_EXTENSIONS)
                    engine.run(
                        self.stop,  # pyright: ignore
                        lambda ready: self._loop.call_soon(self._on_ready, ready),
                        self._on_stuck,
                    )
                finally:
                    self.store.close()
            except (BackendLost, StoreError) as error:
                raise EngineLost(f"backend or database lost: {error}") from error
        except Exception as error:
            if not isinstance(error, EngineLost):
                world.on_thread_error(f"{self.process.name}/main", error)
            end = EngineEnd.from_error(error)
            if end.is_crash and self._records_crashes and self.store is not None:
                with contextlib.suppress(StoreError):
                    self._record_crash()
            self._end(dataclasses.replace(end, is_final=False))
        else:
            self._end(_STOPPED)

        world.scheduler.kill(self.process)

    def _on_stuck(self, reason: str) -> None:
        if self._records_crashes and self.store is not None:
            with contextlib.suppress(StoreError):
                self.store.write_soon(lambda tx: futures.record_engine_end(tx, is_crash=True)).result(2.0)
        self._end(EngineEnd(message=reason, is_final=False, is_crash=True))
        self._world.scheduler.kill(self.process)

    def _record_crash(self) -> None:
        """Count a crash as `engine_process.run_in_foreground` does, where no API supervises the engine."""
        store = engine_process.open_store(self._world.engine_settings, self.stop)  # pyright: ignore
        store.write(lambda tx: futures.record_engine_end(tx, is_crash=True))
        store.close()

    def _end(self, end: EngineEnd) -> None:
        if not self._ended.done():
            self._world.trace(f"{self.process.name} ends: {end.message}")
            self._loop.call_soon(self._set_end, end)

    def _set_end(self, end: EngineEnd) -> None:
        if not self._ended.done():
            self._ended.set_result(end)


class World:
    """One history's machine."""

    def __init__(self, scheduler: Scheduler, shared: Database, directory: Path, plan: Plan, trace: Trace) -> None:
        self.scheduler = scheduler
        self.database = shared
        self.plan = plan
        self.trace = trace
        self.data_dir = directory
        directory.mkdir(mode=0o700)
        (directory / "artifacts").mkdir(mode=0o700)
        (directory / "signing.key").touch(mode=0o600)
        (directory / "signing.key").write_bytes(bytes(32))
        self.faults = Faults(self, plan)
        self.disk = Disk(
            directory / "artifacts", scheduler, self.faults.use_disk, may_lose_power=plan.has("power_loss")
        )
        self.notifiers = Notifiers(scheduler, self.faults.use_database)
        shared.connection.watch = self.faults.use_database
        self.engine_settings = EngineSettings(
            data_dir=directory, base_model="tiny", step_timeout_s=_STUCK_S, compile_timeout_s=_STUCK_S, **plan.engine
        )
        self.api_settings = ApiSettings(
            data_dir=directory, base_model="tiny", retrieve_hold_s=8.0, engine_silence_s=12.0, host="0.0.0.0"
        )
        self.apis: list[Api] = []
        self.engine: EngineProcess | None = None
        self.num_engines = 0
        self.is_over = False
        self._supervisor: Process | None = None
        self.thread_errors: list[str] = []

    @property
    def substitutes(self) -> list[tuple[object, object]]:
        """The world's substitutes, each with the real object."""
        system = Standing(
            os,
            open=self.disk.open,
            fsync=self.disk.fsync,
            utime=self.disk.utime,
            _exit=lambda status: self.scheduler.kill(self.scheduler.current.process),
            kill=lambda pid, number: self.scheduler.kill(self.scheduler.current.process),
        )
        return [
            (os, system),
            (shutil, Standing(shutil, rmtree=self.disk.rmtree)),
            (save_file, self.disk.save_file),
            (failpoints.failpoint, self.faults.reach),
            *self.database.substitutes,
        ]

    def dialect(self, *_: object) -> Dialect:
        """Stand for the function that chooses the kind of database."""
        return Dialect(self.notifiers, self.database, self.data_dir)

    def start(self) -> None:
        """Start all processes."""
        self.apis = [Api(self, number) for number in range(self.plan.num_apis)]
        if not self.plan.is_supervised_by_api:
            process = self._supervisor = Process("supervisor")
            loop = EventLoop(self.scheduler, process, self.on_thread_error)
            loop.call_soon(lambda: self.supervise(loop, None, process))

    def supervise(self, loop: EventLoop, store: Store | None, parent: Process) -> None:
        """Keep an engine running, with the product's supervisor."""

        def record_end(end: EngineEnd, since: float) -> bool:
            if store is None:
                return True
            store.write(lambda tx: futures.record_engine_end(tx, is_crash=end.is_crash))
            return store.read(lambda tx: futures.has_answered_since(tx, since))

        supervised = supervisor.EngineSupervisor(
            lambda: EngineProcess(self, loop, parent),  # pyright: ignore
            RestartPolicy(_MAX_STARTS),
            on_ready=lambda _: None,
            record_end=record_end,
        )

        async def run() -> None:
            try:
                await supervised.run()
            except Exception as error:
                self.trace(f"the supervisor ends: {error}")
                self.scheduler.kill(parent)

        loop.create_task(run())

    def restart_later(self, api: Api) -> None:
        """Start an API process again after its death."""
        if self.is_over:
            return

        def restart() -> None:
            self.scheduler.sleep(self.scheduler.random.uniform(0.2, 2.0))
            self.scheduler.bury(api.process)
            while self.is_engine_ending(api.process):
                self.scheduler.sleep(0.1)
            if not self.is_over:
                self.apis[api.number] = Api(self, api.number)

        self.scheduler.spawn(restart, process=self.scheduler.world, name="operator")

    def is_engine_ending(self, process: Process) -> bool:
        """Whether fibers of an engine that died with this API process are still ending."""
        engine = self.engine
        return (
            self.plan.is_supervised_by_api
            and engine is not None
            and engine.process.is_dead
            and bool(engine.process.fibers)
        )

    def call(self, key: str, route: Callable[..., Any], body: Any = None, **path: Any) -> tuple[int, Any]:
        """Send one call to any API process, over a network that may lose or repeat it. Raises Lost."""
        scheduler, network = self.scheduler, self.faults.network
        api = self.apis[scheduler.random.randrange(len(self.apis))]
        scheduler.sleep(network.delay_s())
        if network.is_lost():
            scheduler.sleep(1.0)
            raise Lost
        if network.is_repeated():
            repeated = _Exchange(scheduler)
            self.apis[scheduler.random.randrange(len(self.apis))].receive(repeated, key, route, _copy(body), path)
        exchange = _Exchange(scheduler)
        api.receive(exchange, key, route, _copy(body), path)
        status, answer = exchange.wait(60.0)
        scheduler.sleep(network.delay_s())
        if network.is_lost():
            raise Lost
        return status, answer

    def on_thread_error(self, name: str, error: BaseException) -> None:
        """Record the error that ended a thread of the product."""
        self.trace(f"thread {name} ends: {type(error).__name__}: {error}")
        self.thread_errors.append(f"{name}: {error!r}")

    def end(self) -> None:
        """Kill everything."""
        self.is_over = True
        self.faults.stop()
        processes = [api.process for api in self.apis]
        if self.engine is not None:
            processes.append(self.engine.process)
        for process in processes:
            self.scheduler.end(process)
            self.scheduler.bury(process)
        self.end_supervisor()
        while len(self.scheduler.world.fibers) > 1:
            self.scheduler.sleep(0.1)

    def end_supervisor(self) -> None:
        """Kill the supervisor that runs alone."""
        if self._supervisor is not None:
            self.scheduler.end(self._supervisor)
            self.scheduler.bury(self._supervisor)
            self._supervisor = None


def _copy(body: Any) -> Any:
    return dict(body) if isinstance(body, dict) else body
