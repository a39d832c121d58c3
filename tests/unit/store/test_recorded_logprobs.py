import numpy as np

from skyrl_tx.contract.ids import SessionId
from skyrl_tx.store import recorded_logprobs
from skyrl_tx.store.database import Store

DAY = 86_400.0
LOGPROBS = {"seq-0": np.array([-0.5, -1.5], np.float32), "seq-1": np.array([-2.5], np.float32)}


def record(store: Store, session_id: SessionId, now: float = 10.0) -> None:
    store.write(lambda tx: recorded_logprobs.record(tx, session_id, 3, LOGPROBS, now))


def find(
    store: Store, *sequence_ids: str, owner: str = "ann", now: float = 10.0
) -> dict[str, recorded_logprobs.SampledLogprobs]:
    return store.read(lambda tx: recorded_logprobs.find(tx, owner, sequence_ids, now))


def test_records_are_visible_to_their_owner_only(store: Store, session_id: SessionId) -> None:
    record(store, session_id)
    found = find(store, "seq-0", "seq-1", "seq-2")
    assert found.keys() == {"seq-0", "seq-1"}
    assert found["seq-0"].prompt_length == 3
    assert found["seq-0"].logprobs.tolist() == [-0.5, -1.5] and found["seq-0"].logprobs.dtype == np.float32
    assert find(store, "seq-0", owner="bob") == {}


def test_find_more_ids_than_one_batch(store: Store, session_id: SessionId) -> None:
    many = {f"seq-{number}": np.array([-float(number)], np.float32) for number in range(2500)}
    store.write(lambda tx: recorded_logprobs.record(tx, session_id, 1, many, 10.0))
    found = find(store, *many)
    assert {name: row.logprobs[0] for name, row in found.items()} == {name: row[0] for name, row in many.items()}


def test_a_record_survives_a_restart(open_store, session_id: SessionId, store: Store) -> None:
    record(store, session_id)
    store.close()
    assert find(open_store(), "seq-1")["seq-1"].logprobs.tolist() == [-2.5]


def test_use_extends_expiry(store: Store, session_id: SessionId) -> None:
    record(store, session_id, now=0.0)
    store.write(lambda tx: recorded_logprobs.touch(tx, ["seq-0"], DAY))
    store.write(lambda tx: recorded_logprobs.touch(tx, [], DAY))
    assert find(store, *LOGPROBS, now=DAY + 1).keys() == {"seq-0"}, "expired before it was deleted"
    assert store.write(lambda tx: recorded_logprobs.expire(tx, DAY + 1)) == 1
    assert store.write(lambda tx: recorded_logprobs.expire(tx, 2 * DAY)) == 0
    assert find(store, *LOGPROBS, now=2 * DAY).keys() == {"seq-0"}
    assert find(store, *LOGPROBS, now=2 * DAY + 1) == {}


def test_recording_a_sequence_again_replaces_it(store: Store, session_id: SessionId) -> None:
    record(store, session_id)
    record(store, session_id, now=20.0)
    assert find(store, *LOGPROBS, now=20.0 + DAY).keys() == LOGPROBS.keys()
