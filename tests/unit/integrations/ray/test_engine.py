"""Placing, starting and stopping the hosts of an engine in a Ray cluster, and the reason it ended."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.backends.hosts.protocol import listen
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.integrations.ray import RaySettings
from skyrl_tx.integrations.ray import engine as engine_module
from skyrl_tx.integrations.ray.engine import (
    EndedHost,
    RayEngine,
    RayHost,
    connect,
    find_cause,
    reserve_ports,
    start_engines,
)
from skyrl_tx.launch.engine_process import EngineLaunch
from skyrl_tx.launch.launcher import EngineEnd, EngineLocation
from skyrl_tx.launch.serving import make_engine_launch
from skyrl_tx.launch.settings import SettingsError
from skyrl_tx.process.setup import CannotServe
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.tools.serve import read_settings
from tests.support.ray_stub import StubActor, StubRay, run

READY = FakeBackend("tiny", FakeConfig()).start()
KILL = EngineEnd(message="killed by SIGKILL", is_final=False, is_crash=False, was_killed=True)
CRASH = EngineEnd(message="killed by SIGSEGV", is_final=False, is_crash=True)
LEADER_LOST = EngineEnd(message="host 0 has ended", is_final=False, is_crash=False)
FOLLOWER_LOST = EngineEnd(message="host 1 has ended", is_final=False, is_crash=True)
NO_DATABASE = EngineEnd(message="database lost", is_final=False, is_crash=False, was_unreachable=True)
RAY = ("--base-model", "fake", "--backend", "fake", "--launcher", "ray")


@pytest.fixture
def launch(tmp_path: Path) -> EngineLaunch:
    return make_engine_launch(read_settings("serve", (*RAY, "--hosts.size", "2", "--data-dir", str(tmp_path))))


def test_all_hosts_start_and_end_together(launch: EngineLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--of-all")

    async def work() -> None:
        ray, ready = StubRay(), asyncio.Queue[Capabilities]()
        engine = RayEngine(ray, launch, {"GPU": 8, "fast": 1})
        living = asyncio.create_task(engine.wait(ready.put_nowait))
        await ray.wait_for_starts(2)
        [group] = ray.groups
        assert group.strategy == "STRICT_SPREAD"
        assert group.bundles == [{"GPU": 8, "fast": 1, "node:10.0.0.9": 0.001}, {"GPU": 8, "fast": 1}]

        zero, one = ray.actors
        assert [zero.options[name] for name in ("num_cpus", "num_gpus", "resources")] == [0, 8, {"fast": 1}]
        assert one.options["scheduling_strategy"].placement_group_bundle_index == 1
        assert zero.launch is not None and one.launch is not None

        first, second = zero.launch.hosts, one.launch.hosts
        assert (first.size, first.rank, first.address) == (2, 0, "10.0.0.0:4000")
        assert second == first.model_copy(update={"rank": 1}) and len(first.key_bytes) == 64
        assert one.launch.environment["XLA_FLAGS"] == "--of-all"

        zero.is_ready.set_result(READY)
        assert await ready.get() == READY
        assert engine.location == EngineLocation("node0", 100, "run0")
        assert "beat" in zero.calls and "beat" in one.calls

        one.finish(KILL)
        zero.finish(FOLLOWER_LOST)
        assert await living == replace(KILL, message="host 1: killed by SIGKILL")
        assert ray.removed == [group] and all("die" in actor.calls for actor in ray.actors)

    run(work)


def test_the_loss_of_the_own_node_ends_the_command(launch: EngineLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BEAT_S", 0.01)

    async def work() -> None:
        ray = StubRay()
        waiting = asyncio.create_task(RayEngine(ray, launch, {"CPU": 1}).wait(lambda _: None))
        await ray.wait_for_starts(2)
        ray.is_node_alive = False
        with pytest.raises(CannotServe, match=r"Ray on this machine has ended.*`ray start`"):
            await waiting

    run(work)


def test_the_loss_of_the_own_node_ends_a_wait_for_actors(launch: EngineLaunch, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "BEAT_S", 0.01)

    async def work() -> None:
        ray, answered = StubRay(), asyncio.Event()
        monkeypatch.setattr(StubActor, "_make", lambda self, name: answered.wait())  # Ray never answers
        waiting = asyncio.create_task(RayEngine(ray, launch, {"CPU": 1}).wait(lambda _: None))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        ray.is_node_alive = False
        with pytest.raises(CannotServe, match="Ray on this machine has ended"):
            await waiting

    run(work)


def test_a_lost_placement_group_ends_the_command(launch: EngineLaunch) -> None:
    def fail() -> bool:
        raise ValueError("Placement group 1\ndoes not exist.")

    async def work() -> None:
        with pytest.raises(CannotServe, match=r"Ray on this machine has ended.*\(Placement group 1 does not exist.\)"):
            await RayEngine(StubRay(is_placed=fail), launch, {"CPU": 1}).wait(lambda _: None)

    run(work)


def test_a_stop_has_a_deadline(launch: EngineLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(engine_module, "_STOP_S", 0.01)
    monkeypatch.setattr(engine_module, "_end_process", ended.set)
    monkeypatch.setattr(engine_module, "connect", lambda _: nullcontext(StubRay()))
    with start_engines(RaySettings(), launch, 2) as starts:
        for start in starts:
            start().request_stop()
        assert ended.wait(10)


def test_a_host_that_goes_on_is_killed_when_another_has_ended(
    launch: EngineLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_OTHERS_S", 0.01)

    async def work() -> None:
        ray = StubRay()
        living = asyncio.create_task(RayEngine(ray, launch, {"CPU": 1}).wait(lambda _: None))
        await ray.wait_for_starts(2)
        ray.actors[1].die()
        end = await living
        assert (end.message, end.was_killed) == ("host 1: its actor has ended: it is dead", True)
        assert ray.actors[0].calls[-2:] == ["kill", "die"], "the process, then its actor"

    run(work)


def test_a_stop_reaches_rank_0_alone(launch: EngineLaunch) -> None:
    async def work() -> None:
        ray, ready = StubRay(), asyncio.Event()
        engine = RayEngine(ray, launch, {"CPU": 1})
        living = asyncio.create_task(engine.wait(lambda _: ready.set()))
        await ray.wait_for_starts(2)
        ray.actors[0].is_ready.set_result(READY)
        await ready.wait()
        engine.request_stop()
        ray.actors[1].finish(LEADER_LOST)
        assert (await living).message == "host 0: stopped"
        assert "stop" not in ray.actors[1].calls

    run(work)


def test_a_stop_ends_hosts_that_are_not_ready_or_not_placed(
    launch: EngineLaunch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "skyrl_tx")

    async def work() -> None:
        ray = StubRay()
        engine = RayEngine(ray, launch, {"CPU": 1})
        living = asyncio.create_task(engine.wait(lambda _: None))
        await ray.wait_for_starts(2)
        engine.request_stop()
        assert (await living).was_killed
        full = StubRay(is_placed=lambda: False)
        waiting = RayEngine(full, launch, {"CPU": 1})
        living = asyncio.create_task(waiting.wait(lambda _: None))
        while "waiting for" not in caplog.text:
            await asyncio.sleep(0)
        waiting.request_stop()
        assert (await living).message == "stopped before it was placed"
        assert full.removed == full.groups and not full.actors

    run(work)
    text = "waiting for 2 nodes with 1 CPU free on each (the Ray cluster has 1 nodes); one of them must be this machine"
    assert text in caplog.text


def test_an_exception_in_an_actor_is_reported_without_its_traceback(launch: EngineLaunch) -> None:
    async def work() -> None:
        ray = StubRay()
        error = ray.exceptions.RayError("Traceback of\nmany lines")
        error.cause = ValueError("no such\nthing")
        ray.fails_to_start = error
        end = await RayEngine(ray, launch, {"CPU": 1}).wait(lambda _: None)
        assert (end.message, end.is_crash) == ("a host cannot start: ValueError: no such thing", False)
        assert ray.removed == ray.groups

    run(work)


def test_another_version_on_a_node_is_refused(launch: EngineLaunch) -> None:
    async def work() -> None:
        end = await RayEngine(StubRay(version="0.0.1"), launch, {"CPU": 1}).wait(lambda _: None)
        assert end.is_final
        assert end.message.startswith(r"host 0, node0 (10.0.0.0), has skyrl_tx 0.0.1, but this machine has ")

    run(work)


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        ([(0, FOLLOWER_LOST), (1, KILL)], KILL),
        ([(1, LEADER_LOST), (0, KILL)], KILL),
        ([(1, LEADER_LOST), (0, CRASH)], CRASH),
        ([(1, CRASH), (0, FOLLOWER_LOST)], CRASH),
        ([(1, LEADER_LOST), (0, NO_DATABASE)], NO_DATABASE),
    ],
)
def test_the_end_that_explains_the_others_is_the_reason(ended: list[tuple[int, EngineEnd]], cause: EngineEnd) -> None:
    found = find_cause([EndedHost(*end) for end in ended], num_hosts=2)
    assert found.message.endswith(f": {cause.message}")
    assert replace(found, message=cause.message) == cause
    assert find_cause([EndedHost(0, cause)], num_hosts=1) == cause


def test_reserved_ports_are_for_those_who_name_them() -> None:
    held = reserve_ports("127.0.0.1")
    first, second = (reserved.getsockname()[1] for reserved in held)
    assert second == first + 1
    with listen(HostsSettings(size=2, address=f"127.0.0.1:{first}")), pytest.raises(OSError, match="in use"):
        socket.socket().bind(("127.0.0.1", second))
    for reserved in held:
        reserved.close()


def test_settings_of_ray_are_checked_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*RAY, "--data-dir", str(tmp_path))
    with monkeypatch.context() as environment:
        environment.setenv("SKYRL_TX_RAY__RESOURCES", '{"TPU": 4}')
        assert read_settings("serve", flags).ray.resources == {"TPU": 4}
    assert read_settings("serve", (*flags, "--ray.resources", '{"GPU": 8}')).ray.resources == {"GPU": 8}
    with pytest.raises(SettingsError, match=r"^--ray.address: Ray Client is not supported"):
        read_settings("serve", (*flags, "--ray.address", "ray://head:10001"))
    with pytest.raises(SettingsError, match=r"^--ray.address: 'head' must be host:port"):
        read_settings("serve", (*flags, "--ray.address", "head"))
    with pytest.raises(SettingsError, match=r"^--ray.resources: GPU: 0 must be above 0"):
        read_settings("serve", (*flags, "--ray.resources", '{"GPU": 0}'))
    with pytest.raises(CannotServe, match=r"^--hosts.rank: --launcher ray sets it"):
        make_engine_launch(read_settings("serve", (*flags, "--hosts.size", "2", "--hosts.rank", "1")))


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in "ray", "ray.util", "ray.util.scheduling_strategies":
        monkeypatch.setitem(sys.modules, module, StubRay())  # type: ignore[arg-type]
    with socket.socket() as held:  # the port is bound, but nothing listens
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        refused = rf"^--ray.address {address}: .*refused; `ray start --head` starts a cluster"
        with pytest.raises(CannotServe, match=refused), connect(RaySettings(address=address)):
            pass


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CannotServe, match=r"pip install 'skyrl-tx-server\[ray\]'"), connect(RaySettings()):
        pass


def test_a_host_ends_when_the_command_does_not_call_it(launch: EngineLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    now, exits = [100.0], asyncio.Queue[int]()
    monkeypatch.setattr(engine_module, "_LOOK_S", 0.0)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(engine_module, "os", SimpleNamespace(_exit=exits.put_nowait, chdir=os.chdir))
    monkeypatch.setattr(engine_module, "EngineProcess", StubProcess)
    context = SimpleNamespace(gcs_address="10.0.0.9:6379")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))

    async def work() -> None:
        host = RayHost(0)
        await host.start(launch, "no directory")
        assert StubProcess.environment == {**launch.environment, "RAY_ADDRESS": "10.0.0.9:6379"}
        now[0] += 59
        await host.beat()
        now[0] += 59
        await asyncio.sleep(0.01)
        assert exits.empty()
        now[0] += 2
        assert await exits.get() == 1
        assert await host.end() == KILL, "the engine process ends before"

    run(work)


class StubProcess:
    """An engine process that runs until it is killed."""

    location = EngineLocation("node0", 100, "run0")

    environment: Mapping[str, str] = {}
    """The environment variables of the most recent process."""

    def __init__(self, launch: EngineLaunch) -> None:
        StubProcess.environment = launch.environment
        self._killed = asyncio.Event()

    async def wait(self, _: object) -> EngineEnd:
        await self._killed.wait()
        return KILL

    def kill(self) -> None:
        self._killed.set()
