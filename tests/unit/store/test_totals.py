"""The bytes that each owner stores in the database."""

from skyrl_tx.store import futures, pruning, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.totals import count_stored_bytes


def test_requests_results_and_metadata_count_for_their_owner(store: Store) -> None:
    def count(owner: str) -> int:
        return store.read(count_stored_bytes)[owner]

    session_id = store.write(lambda tx: sessions.create(tx, owner="ann", now=1.0, user_metadata={"k": "x" * 5000}))
    assert 5000 < count("ann") < 6000 and count("bob") == 0
    empty = count("ann")
    new = NewRequest(key="k", kind="sample", owner="ann", session_id=session_id, body=b"b" * 300)
    request_id = store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id
    assert count("ann") == empty + 300
    store.write(lambda tx: futures.complete(tx, request_id, b"r" * 20, failed=False, effect_order=None, now=2.0))
    assert count("ann") == empty + 320

    store.write(lambda tx: futures.mark_fetched(tx, [request_id], 3.0))
    assert count("ann") == empty + 320, "a result counts until it is removed"
    store.write(lambda tx: pruning.prune_results(tx, 100.0, retention_s=1.0))
    assert count("ann") == empty
