"""How much of the API process and of the database the requests of one owner may use."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from skyrl_tx.server import shares
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.shares import OwnerBudget, Shares, StoredBytes
from skyrl_tx.store.database import Store

MIB = 2**20


def share_bytes(total: int) -> OwnerBudget:
    """Return a budget in which an owner holds at most half."""
    return OwnerBudget(total, per_owner=total // 2, unit="bytes", uncounted=2**16)


class Holder:
    """A request that holds its bytes until it is released."""

    def __init__(self, budget: OwnerBudget, owner: str, num_bytes: int) -> None:
        self.is_in = False
        self._release = asyncio.Event()
        self.task = asyncio.create_task(self._run(budget, owner, num_bytes))

    async def _run(self, budget: OwnerBudget, owner: str, num_bytes: int) -> None:
        async with budget.reserve(owner, num_bytes):
            self.is_in = True
            await self._release.wait()

    async def end(self) -> None:
        self._release.set()
        await self.task
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_an_owner_holds_at_most_half() -> None:
    async def test() -> None:
        budget = share_bytes(100 * MIB)
        ann = [Holder(budget, "ann", 25 * MIB) for _ in range(4)]
        bob = Holder(budget, "bob", 50 * MIB)
        await settle()
        assert [holder.is_in for holder in ann] == [True, True, False, False] and bob.is_in
        await ann[0].end()
        assert [holder.is_in for holder in ann[1:]] == [True, True, False]
        for holder in (*ann[1:], bob):
            await holder.end()

    run(test)


def test_the_owner_who_holds_least_is_next() -> None:
    async def test() -> None:
        budget = share_bytes(100 * MIB)
        first = [Holder(budget, owner, 50 * MIB) for owner in ("ann", "bob")]
        queue = [Holder(budget, "ann", 10 * MIB) for _ in range(20)]
        await settle()
        cleo = Holder(budget, "cleo", 30 * MIB)
        await first[0].end()
        assert cleo.is_in and sum(holder.is_in for holder in queue) == 2, "what is left goes to the others"
        for holder in (*first[1:], cleo, *queue):
            await holder.end()

    run(test)


def test_a_request_beyond_the_budget_runs_alone_and_is_not_delayed_without_end() -> None:
    async def test() -> None:
        budget = share_bytes(100 * MIB)
        small = Holder(budget, "ann", 40 * MIB)
        await settle()
        large = Holder(budget, "bob", 400 * MIB)
        later = Holder(budget, "ann", 5 * MIB)
        await settle()
        assert small.is_in and not large.is_in and not later.is_in
        await small.end()
        assert large.is_in and not later.is_in
        await large.end()
        assert later.is_in
        await later.end()

    run(test)


def test_another_owners_call_is_admitted_while_an_owner_has_its_share() -> None:
    async def test() -> None:
        shares = Shares.divide(num_threads=100, max_body_bytes=400 * MIB)
        budgets = {
            shares.calls: (1, 25),
            shares.heavy_calls: (1, 2),
            shares.lists: (1, 1),
            shares.result_readers: (1, 2),
            shares.weight_files: (1, 2),
            shares.decoded_bodies: (10 * MIB, 100 * MIB),
            shares.result_bytes: (16 * MIB, 64 * MIB),
        }
        for budget, (amount, share) in budgets.items():
            ann = [Holder(budget, "ann", amount) for _ in range(100)]
            await settle()
            assert sum(holder.is_in for holder in ann) * amount == share

            bob = Holder(budget, "bob", amount)
            await settle()
            assert bob.is_in and sum(holder.is_in for holder in ann) * amount == share
            for holder in (bob, *ann):
                await holder.end()
            assert budget.num_reserved == 0

        threads = shares.calls, shares.heavy_calls, shares.lists, shares.result_readers, shares.weight_files
        assert sum(budget.total for budget in threads) < 100, "a thread is left for authentication"

    run(test)


def test_small_bodies_never_wait() -> None:
    async def test() -> None:
        budget = share_bytes(MIB)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(budget.reserve("ann", 10 * MIB))
            for _ in range(1000):
                await stack.enter_async_context(budget.reserve("ann", 2**16))

    run(test)


def test_a_request_without_a_place_gets_a_429_that_the_sdk_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_MAX_WAIT_S", 0.01)

    async def test() -> None:
        budget = share_bytes(MIB)
        async with budget.reserve("ann", MIB):
            with pytest.raises(ApiError, match="'ann' already hold 1048576 bytes") as error:
                async with budget.reserve("ann", MIB):
                    raise AssertionError("there is no place")
        assert error.value.status == 429 and error.value.headers is not None and "Retry-After" in error.value.headers
        async with budget.reserve("ann", MIB):
            pass

    run(test)


def test_a_request_that_is_cancelled_leaves_no_bytes_behind() -> None:
    async def test() -> None:
        budget = share_bytes(MIB)
        first = Holder(budget, "ann", MIB)
        await settle()
        waits = Holder(budget, "ann", MIB)
        await settle()
        waits.task.cancel()
        await asyncio.gather(waits.task, return_exceptions=True)
        await first.end()
        last = Holder(budget, "bob", MIB)
        await settle()
        assert last.is_in

        last.task.cancel()
        await asyncio.gather(last.task, return_exceptions=True)
        again = Holder(budget, "bob", MIB)
        await settle()
        assert again.is_in

        await again.end()

    run(test)


MIN_SHARE, MAX_SHARE = 100, 10_000


class World:
    """Stored bytes with a disk and tables that the test controls."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables, self.free_bytes = {"ann": 0}, 10**9
        monkeypatch.setattr(shares, "_MIN_SHARE", MIN_SHARE)
        monkeypatch.setattr(shares, "_MAX_SHARE", MAX_SHARE)
        monkeypatch.setattr(Store, "get_free_bytes", lambda _: self.free_bytes)
        self.stored = StoredBytes(store, [lambda _: self.tables])

    def count(self, free_bytes: int, **tables: int) -> None:
        self.free_bytes, self.tables = free_bytes, tables
        self.stored.count()

    def may_add(self, owner: str, num_bytes: int) -> bool:
        try:
            self.stored.add(owner, num_bytes)
        except ApiError:
            return False
        return True


@pytest.fixture
def world(store: Store, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(store, monkeypatch)


def test_an_owner_beyond_its_share_is_refused_and_no_other_owner(world: World) -> None:
    world.count(10**9, ann=MAX_SHARE - 10)
    assert world.may_add("ann", 10) and world.may_add("bob", MAX_SHARE)
    with pytest.raises(
        ApiError, match=r"metrics of ann take 10,000 bytes .* an owner may store 10,000 bytes"
    ) as raised:
        world.stored.add("ann", 1)
    assert (raised.value.status, raised.value.reason) == (429, "stored_bytes")
    world.count(10**9, ann=5)
    assert world.may_add("ann", 1), "what was removed no longer counts"


def test_calls_count_until_the_tables_are_counted(world: World) -> None:
    world.count(10**9)
    assert [world.may_add("ann", 4000) for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("tables", "share"),
    [({}, 1000), ({"ann": 50}, 1025), ({"ann": 400}, 1200), ({"ann": 400, "bob": 600, "eve": 100}, 1033)],
)
def test_owners_that_store_much_share_the_disk_and_leave_a_share_free(
    world: World, tables: dict[str, int], share: int
) -> None:
    world.count(2000, **tables)
    assert not world.may_add("new", share + 1) and world.may_add("new", share)


def test_every_owner_may_store_a_little_on_a_full_disk(world: World) -> None:
    world.count(0, ann=50)
    assert world.may_add("ann", MIN_SHARE - 50) and not world.may_add("ann", 1)
