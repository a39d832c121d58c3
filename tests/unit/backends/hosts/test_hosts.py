"""Fake backends on two hosts, with rank 1 on a thread.

A call has its ordinary result if both hosts do the same. Any difference raises BackendLost.
"""

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from skyrl_tx.backends.hosts import follower, leader, protocol
from skyrl_tx.backends.hosts.follower import Follower
from skyrl_tx.backends.hosts.leader import LeadingBackend
from skyrl_tx.backends.hosts.protocol import LeaderLost, Welcome, connect
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, BlockingBackend, HostRank, Pass
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, CapacityError, MemoryExhausted, UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.testing.backend_driver import WEIGHTS_ONLY, BackendDriver
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.free_ports import free_ports
from tests.support.polling import until

CONFIG = FakeConfig(vocab_size=32, slice_tokens=3)
STEP = OptimizerParams()


class BlockedFake(FakeBackend):
    """A fake backend whose `step_sample` blocks until the test sets `may_continue`."""

    def __init__(self) -> None:
        super().__init__("tiny", CONFIG)
        self.entered, self.may_continue = threading.Event(), threading.Event()

    def step_sample(self) -> list[SampleDelta]:
        self.entered.set()
        assert self.may_continue.wait(60)
        return super().step_sample()


class OtherNumbers(FakeBackend):
    """A fake backend whose `optim_step` returns wrong metrics, as with a broken device."""

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        found = super().optim_step(model_id, params)
        return {**found, "unclipped_grad_l2:mean": found["unclipped_grad_l2:mean"] + 1}


class Failing(FakeBackend):
    """A fake backend whose `optim_step` runs out of memory."""

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        raise MemoryError("no memory here")


class OutOfMemoryFake(FakeBackend):
    """A fake backend whose passes run out of memory once for each plan in `plans`."""

    def __init__(self, *plans: str) -> None:
        super().__init__("tiny", CONFIG)
        self.plans = list(plans)

    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        return OutOfMemoryPass(super().begin_pass(batch, backward=backward), self.plans)


class OutOfMemoryPass(Pass):
    def __init__(self, inner: Pass, plans: list[str]) -> None:
        self.inner, self.plans = inner, plans

    def step(self) -> bool:
        self._raise_next()
        return self.inner.step()

    def results(self) -> list[PassResult]:
        self._raise_next()
        return self.inner.results()

    def abort(self) -> None:
        self.inner.abort()

    def _raise_next(self) -> None:
        if self.plans:
            raise MemoryExhausted("no memory here", plan=self.plans.pop(0))


@dataclass
class Hosts:
    """Rank 0 and rank 1, both started."""

    driver: BackendDriver
    follower: Follower
    connection: socket.socket
    """The follower's connection to rank 0."""
    ended: "queue.Queue[BaseException | None]"
    """The error that ended the follower, or None if it ended normally."""
    lost: "queue.Queue[str]"
    """The reasons that rank 0 would give for ending its process."""
    follower_lost: "queue.Queue[str]"

    def disconnect(self) -> None:
        """Close the connection, as the kernel does when the process of the follower ends."""
        self.connection.shutdown(socket.SHUT_RDWR)


def make_settings(**more: object) -> HostsSettings:
    return HostsSettings.model_validate({"size": 2, "address": f"127.0.0.1:{free_ports()}", "key": "k", **more})


@contextmanager
def two_hosts(
    tmp_path: Path, *, other: AbstractBackend | None = None, own: AbstractBackend | None = None, silence_s: float = 60
) -> Iterator[Hosts]:
    """Start two hosts of fake backends, with `own` on rank 0 and `other` on rank 1."""
    settings = make_settings(silence_s=silence_s)
    lost, follower_lost = queue.Queue[str](), queue.Queue[str]()
    ended, started = queue.Queue[BaseException | None](), queue.Queue[tuple[Follower, socket.socket]]()

    def follow() -> None:
        connection, _ = connect(settings.model_copy(update={"rank": 1}))
        backend = other or FakeBackend("tiny", CONFIG)
        follower = Follower(connection, backend, 1, on_ready=lambda _: None, on_lost=follower_lost.put)
        started.put((follower, socket.socket(fileno=os.dup(connection.fileno()))))
        with connection:
            try:
                follower.run()
            except LeaderLost as error:
                ended.put(error)
            else:
                ended.put(None)

    thread = threading.Thread(target=follow)
    thread.start()
    welcome = Welcome(backend="fake", base_model="tiny", config=b"{}")
    backend = LeadingBackend(own or FakeBackend("tiny", CONFIG), settings, welcome, on_lost=lost.put)

    try:
        driver = BackendDriver(backend, backend.start(), tmp_path)
        follower, handle = started.get(timeout=60)
        with handle:
            yield Hosts(driver, follower, handle, ended, lost, follower_lost)
    finally:
        backend.close()
        thread.join(60)
        assert not thread.is_alive()


def step_until_lost(hosts: Hosts) -> None:
    """Call `step_sample`, which returns only after the hosts are lost and the test allows it."""
    with pytest.raises(BackendLost):
        hosts.driver.backend.step_sample()


def test_an_error_of_all_hosts_is_an_ordinary_failure(tmp_path):
    with two_hosts(tmp_path) as hosts:
        backend = hosts.driver.backend
        capacity = hosts.driver.capabilities.max_models
        models = [hosts.driver.model(number) for number in range(capacity)]
        with pytest.raises(CapacityError):
            backend.create_model(ModelId("one-too-many"), hosts.driver.spec())
        with pytest.raises(UserError):
            backend.open_snapshot(tmp_path)  # the messages differ: each host reads its own directory
        assert backend.optim_step(models[0], STEP)["step:max"] == 1
    assert hosts.ended.get(timeout=60) is None and hosts.lost.empty()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (OtherNumbers, r"the results of host 1 and host 0 in optim_step, call \d+, differ"),
        (Failing, r"host 1 raised MemoryError: no memory here in optim_step, call \d+, but host 0 returned"),
    ],
)
def test_a_host_that_does_something_else_loses_the_backend(tmp_path, other, message):
    with two_hosts(tmp_path, other=other("tiny", CONFIG)) as hosts:
        model = hosts.driver.model()
        for _ in range(2):  # no call is made after the first error
            with pytest.raises(BackendLost, match=message):
                hosts.driver.backend.optim_step(model, STEP)
    assert isinstance(hosts.ended.get(timeout=60), LeaderLost)


@pytest.mark.parametrize("is_stepped", [True, False])
def test_a_pass_goes_on_with_less_memory_if_all_hosts_ran_out_of_it(tmp_path, is_stepped):
    with two_hosts(tmp_path, own=OutOfMemoryFake("half", "quarter"), other=OutOfMemoryFake("half", "quarter")) as hosts:
        driver = hosts.driver
        running = driver.backend.begin_pass(driver.batch(driver.request(driver.model())), backward=True)
        if is_stepped:
            assert [running.step() for _ in range(4)] == [False, False, False, True]
        assert len(running.results()) == 2
    assert hosts.ended.get(timeout=60) is None and hosts.lost.empty()


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        ((), ("half",), r"host 1 raised MemoryExhausted: no memory here in step_pass, call \d+, but host 0 returned"),
        (("half",), (), r"host 1 returned in step_pass, call \d+, but host 0 raised MemoryExhausted: no memory here"),
        (("half",), ("quarter",), r"the results of host 1 and host 0 in step_pass, call \d+, differ in plan"),
    ],
)
def test_a_host_that_alone_runs_out_of_memory_loses_the_backend(tmp_path, own, other, message):
    with two_hosts(tmp_path, own=OutOfMemoryFake(*own), other=OutOfMemoryFake(*other)) as hosts:
        driver = hosts.driver
        running = driver.backend.begin_pass(driver.batch(driver.request(driver.model())), backward=True)
        for _ in range(2):  # no call is made after the first error
            with pytest.raises(BackendLost, match=message):
                running.step()
    assert isinstance(hosts.ended.get(timeout=60), LeaderLost)


def test_hosts_that_start_differently_are_named_with_what_differs(tmp_path):
    class OtherPackage(FakeBackend):
        def start(self) -> Capabilities:
            return replace(super().start(), fingerprint={"numpy": "1"}, max_models=1)

    with (
        pytest.raises(
            BackendLost, match=r"the results of host 1 and host 0 in start, call \d+, differ in fingerprint, max_models"
        ),
        two_hosts(tmp_path, other=OtherPackage("tiny", CONFIG)),
    ):
        raise AssertionError("started")


def test_a_backend_of_one_host_refuses(tmp_path):
    class SingleHostFake(FakeBackend):
        def join_hosts(self, rank: HostRank) -> None:
            AbstractBackend.join_hosts(self, rank)

    refused = pytest.raises(UserError, match=r"hosts.size 2: this backend computes on one host")
    with refused, two_hosts(tmp_path, own=SingleHostFake("tiny", CONFIG), other=SingleHostFake("tiny", CONFIG)):
        raise AssertionError("started")
    assert BlockingBackend.join_hosts is AbstractBackend.join_hosts


def test_a_host_that_stalls_loses_the_backend(tmp_path):
    other = BlockedFake()
    with two_hosts(tmp_path, other=other, silence_s=0.2) as hosts:
        with pytest.raises(BackendLost, match=r"host 1 has not ended step_sample, call \d+ within --step-timeout-s"):
            hosts.driver.backend.step_sample()
        assert hosts.lost.empty(), "rank 0 ends in the ordinary way"
        other.may_continue.set()


def test_a_call_that_returns_on_no_host_ends_the_process(tmp_path):
    """For example, a collective never returns if one host does not join it.

    A host that is still compiling is not treated as hung.
    """

    class Compiling(BlockedFake):
        def is_compiling(self) -> bool:
            return self.compiles

    own, other = Compiling(), BlockedFake()
    own.compiles = True
    with two_hosts(tmp_path, own=own, other=other, silence_s=0.2) as hosts:
        calling = threading.Thread(target=step_until_lost, args=(hosts,))
        calling.start()
        assert own.entered.wait(60) and other.entered.wait(60)
        with pytest.raises(queue.Empty):
            hosts.lost.get(timeout=0.6)

        own.compiles = False
        assert "host 1 has not ended step_sample" in hosts.lost.get(timeout=60)

        own.may_continue.set()
        other.may_continue.set()
        calling.join(60)


def test_a_host_that_dies_during_a_call_loses_the_backend(tmp_path):
    other = BlockedFake()
    with two_hosts(tmp_path, other=other) as hosts:
        raised = queue.Queue[BaseException]()

        def call() -> None:
            try:
                hosts.driver.backend.step_sample()
            except BackendLost as error:
                raised.put(error)

        calling = threading.Thread(target=call)
        calling.start()
        assert other.entered.wait(60)
        hosts.disconnect()
        assert "host 1 has ended during step_sample" in str(raised.get(timeout=60))
        other.may_continue.set()
        calling.join(60)


def test_a_host_that_dies_while_rank_0_is_in_a_call_or_idle_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(leader, "LOSS_GRACE_S", 0.1)
    own = BlockedFake()
    with two_hosts(tmp_path, own=own) as hosts:
        calling = threading.Thread(target=step_until_lost, args=(hosts,))
        calling.start()
        assert own.entered.wait(60)
        hosts.disconnect()
        assert "host 1 has ended during step_sample" in hosts.lost.get(timeout=60)
        own.may_continue.set()
        calling.join(60)

    with two_hosts(tmp_path) as hosts:
        hosts.disconnect()
        assert hosts.lost.get(timeout=60) == "host 1 has ended"
        with pytest.raises(BackendLost, match=r"host 1 has ended"):
            hosts.driver.backend.check_devices()


def test_a_failure_of_one_host_in_a_call_that_others_do_not_leave_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(leader, "FAILURE_GRACE_S", 0.1)

    class FailingSampler(FakeBackend):
        def step_sample(self) -> list[SampleDelta]:
            raise MemoryError("no memory here")

    own = BlockedFake()
    with two_hosts(tmp_path, own=own, other=FailingSampler("tiny", CONFIG)) as hosts:
        calling = threading.Thread(target=step_until_lost, args=(hosts,))
        calling.start()
        reason = hosts.lost.get(timeout=60)
        assert (
            "host 1 raised MemoryError in step_sample" in reason
            and "host 0 is still computing: no memory here" in reason
        )
        own.may_continue.set()
        calling.join(60)


def test_a_follower_ends_with_rank_0_also_from_a_call_that_does_not_return(tmp_path, monkeypatch):
    monkeypatch.setattr(follower, "_SHUTDOWN_GRACE_S", 0.1)
    other = BlockedFake()
    with two_hosts(tmp_path, other=other, silence_s=0.2) as hosts:
        with pytest.raises(BackendLost):
            hosts.driver.backend.step_sample()
        hosts.driver.backend.close()
        assert "a call of this host does not return" in hosts.follower_lost.get(timeout=60)
        other.may_continue.set()
    assert isinstance(hosts.ended.get(timeout=60), LeaderLost)


def test_the_followers_get_the_files_of_snapshots_and_drop_them_with_rank_0(tmp_path, monkeypatch):
    """The files are sent in frames of 100 bytes.

    The other host does not need rank 0's directory.
    """
    monkeypatch.setattr(protocol, "CHUNK_BYTES", 100)
    with two_hosts(tmp_path) as hosts:
        driver, follower = hosts.driver, hosts.follower
        model, copy = driver.model(steps=1), driver.new_id()
        directory = tmp_path / "files"
        (directory / "below").mkdir(parents=True)
        driver.backend.capture(model, ALL_PARTS).write(directory)
        (directory / "below" / "empty").touch()
        opened = driver.backend.open_snapshot(directory)
        (own,) = follower._files.values()
        sent = {path.relative_to(own.name): path.read_bytes() for path in Path(own.name).rglob("*") if path.is_file()}

        assert sent == {
            path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()
        }

        driver.backend.restore(copy, driver.spec(), opened, ALL_PARTS)
        assert driver.state_of(copy) == driver.state_of(model)

        del opened
        driver.backend.check_devices()
        assert not follower._snapshots and not follower._files and not Path(own.name).exists()


def test_a_file_that_becomes_shorter_while_it_is_sent_loses_the_backend(tmp_path, monkeypatch):
    with two_hosts(tmp_path) as hosts:
        file = tmp_path / "file"
        file.write_bytes(b"12345")
        encode = protocol.encode

        def encode_and_cut(message: protocol.Frame) -> bytes:
            file.write_bytes(b"123")
            return encode(message)

        monkeypatch.setattr(protocol, "encode", encode_and_cut)
        with pytest.raises(
            BackendLost, match=r"host 0 cannot read the files that it sends in open_snapshot: .*file has changed"
        ):
            hosts.driver.backend.open_snapshot(tmp_path)
        monkeypatch.undo()


def test_passes_end_on_all_hosts(tmp_path):
    with two_hosts(tmp_path) as hosts:
        driver = hosts.driver
        model = driver.model()
        running = driver.backend.begin_pass(driver.batch(driver.request(model)), backward=True)
        running.step()
        assert len(hosts.follower._passes) == 1
        running.abort()
        del running
        assert driver.backend.optim_step(model, STEP)["unclipped_grad_l2:mean"] == 0
        assert not hosts.follower._passes


def test_a_host_joins_only_with_the_key_the_version_and_the_size_of_rank_0(tmp_path, monkeypatch):
    settings = make_settings()
    welcome = Welcome(backend="fake", base_model="tiny", config=b"{}")
    joined = queue.Queue[object]()
    with closing(protocol.listen(settings)) as listener:
        accepting = threading.Thread(target=lambda: joined.put(protocol.accept_all(listener, settings, welcome)))
        accepting.start()
        with socket.create_connection(settings.host_and_port):
            pass  # a connection without a handshake, for example a port probe

        with pytest.raises(UserError, match=r"hosts.key: host 0 at 127.0.0.1:.* has a different key"):
            connect(settings.model_copy(update={"rank": 1, "key": SecretStr("other")}))
        with pytest.raises(
            UserError, match=r"refuses this host: its hosts.size is 3, but the hosts.size of host 0 is 2"
        ):
            connect(settings.model_copy(update={"rank": 1, "size": 3}))

        with (
            monkeypatch.context() as patched,
            pytest.raises(UserError, match=r"its hosts.rank is 0, but host 0 waits for ranks 1 to 1"),
        ):
            patched.setattr(protocol, "_RETRY_S", 0)
            connect(settings)
        connection, found = connect(settings.model_copy(update={"rank": 1}))
        accepting.join(60)
        (own,) = joined.get(timeout=60).values()  # type: ignore[attr-defined]
        assert found == welcome

        connection.close()
        own.close()


def test_a_host_waits_for_rank_0(tmp_path):
    settings = make_settings(rank=1)
    found = queue.Queue[object]()
    joining = threading.Thread(target=lambda: found.put(connect(settings)[0]))
    joining.start()
    with closing(protocol.listen(settings)) as listener:
        joined = protocol.accept_all(listener, settings, Welcome(backend="fake", base_model="tiny", config=b"{}"))
    joining.join(60)
    found.get(timeout=60).close()  # type: ignore[attr-defined]
    joined[1].close()


def test_an_address_that_is_not_of_this_machine_is_named():
    with pytest.raises(UserError, match=r"hosts.address 192.0.2.1:7700: "):
        protocol.listen(HostsSettings(size=2, address="192.0.2.1:7700"))


def test_a_snapshot_is_kept_by_the_followers_as_long_as_by_rank_0(tmp_path):
    with two_hosts(tmp_path) as hosts:
        model = hosts.driver.model(steps=1)
        kept = hosts.driver.backend.capture(model, WEIGHTS_ONLY)
        hosts.driver.backend.delete_model(model)
        assert until(lambda: len(hosts.follower._snapshots)) == 1
        hosts.driver.backend.load_sampler(hosts.driver.new_id(), kept)  # type: ignore[arg-type]
