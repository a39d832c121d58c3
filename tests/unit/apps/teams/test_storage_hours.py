"""Hourly checkpoint storage is recorded once per hour for existing checkpoints, and outlives the session."""

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import HOUR_S, RETENTION_S
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, CheckpointPath, ModelId, SessionId
from skyrl_tx.store import checkpoints, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow

NOON = 500_000 * HOUR_S


def save(store: Store, name: str, size: int, *, owner: str = "ann") -> CheckpointPath:
    """Store a checkpoint in a new run. The session is in the project `p`."""

    def work(tx) -> CheckpointPath:
        session_id = sessions.create(tx, owner=owner, project_id="p", now=1.0)
        model_id = ModelId(f"{session_id}:train:0")
        row = ModelRow(
            model_id=model_id, session_id=session_id, base_model="m", spec=b"", created_at=1.0, last_request_at=1.0
        )
        models.create(tx, row)
        path = CheckpointPath(model_id, CheckpointKind.TRAINING, name)
        saved = CheckpointRow(
            model_id=model_id,
            kind=CheckpointKind.TRAINING,
            name=name,
            artifact_id=ArtifactId("a"),
            created_at=1.0,
            size_bytes=size,
        )
        checkpoints.put(tx, saved, overwrite=False)
        return path

    return store.write(work)


def record(store: Store, now: float) -> bool:
    return store.write(lambda tx: usage.record_storage(tx, now))


def read_stored(store: Store, owner: str | None = None, since: float = 0, until: float | None = None):
    hours = store.read(lambda tx: usage.read_storage(tx, owner, since, until))
    return [(hour.hour_at, hour.owner, hour.project_id, hour.num_bytes) for hour in hours]


def test_an_hour_is_recorded_once(store: Store) -> None:
    save(store, "a", 100)
    assert record(store, NOON + 7) and not record(store, NOON + 3599)
    save(store, "b", 5, owner="bob")
    assert read_stored(store) == [(NOON, "ann", "p", 100)]
    assert record(store, NOON + 3600)
    assert sorted(read_stored(store, since=NOON + 3600)) == [
        (NOON + 3600, "ann", "p", 100),
        (NOON + 3600, "bob", "p", 5),
    ]


def test_deleted_and_expired_checkpoints_take_no_storage(store: Store) -> None:
    deleted, expired = save(store, "a", 100), save(store, "b", 10)
    save(store, "c", 1)
    store.write(lambda tx: checkpoints.mark_deleted(tx, deleted, NOON))
    store.write(lambda tx: checkpoints.set_ttl(tx, expired, NOON + 1))
    record(store, NOON + 2)
    assert [size for *_, size in read_stored(store)] == [1]


def test_hours_of_an_owner_and_a_time(store: Store) -> None:
    save(store, "a", 1)
    save(store, "b", 2, owner="bob")
    for hour in range(3):
        record(store, NOON + hour * HOUR_S)
    found = read_stored(store, "bob", NOON + HOUR_S + 5, NOON + 2 * HOUR_S)
    assert found == [(NOON + HOUR_S, "bob", "p", 2)]


def test_hours_stay_after_their_session_and_for_their_retention(store: Store) -> None:
    save(store, "a", 1)
    record(store, NOON)

    def remove(tx) -> None:
        for table in ("checkpoints", "models", "sessions"):
            tx.connection().exec_driver_sql(f"DELETE FROM {table}")

    store.write(remove)
    assert read_stored(store) == [(NOON, "ann", None, 1)]
    save(store, "b", 2)
    record(store, NOON + RETENTION_S + HOUR_S)
    assert [size for *_, size in read_stored(store)] == [2]


def test_a_store_without_checkpoints_records_nothing(store: Store) -> None:
    record(store, NOON)
    assert read_stored(store) == [] and SessionId("s") not in read_stored(store)
