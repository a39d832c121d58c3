"""The share of the database that an owner may store, and what counts for it."""

import pytest

from skyrl_tx.server import stored_bytes
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.stored_bytes import StoredBytes
from skyrl_tx.store.database import Store

MIN_SHARE, MAX_SHARE = 100, 10_000


class World:
    """Stored bytes with a disk and tables that the test controls."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables, self.free_bytes = {"ann": 0}, 10**9
        monkeypatch.setattr(stored_bytes, "_MIN_SHARE", MIN_SHARE)
        monkeypatch.setattr(stored_bytes, "_MAX_SHARE", MAX_SHARE)
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
