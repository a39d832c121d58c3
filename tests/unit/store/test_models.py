import pytest
from sqlmodel import Session

from skyrl_tx.contract.ids import ArtifactId, ModelId, SessionId
from skyrl_tx.store import models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import ModelRow

MODEL = ModelId("run")


def create(
    store: Store, session_id: SessionId, model_id: ModelId = MODEL, now: float = 1.0, spec: bytes = b"s"
) -> bool:
    row = ModelRow(
        model_id=model_id,
        session_id=session_id,
        base_model="base",
        spec=spec,
        user_metadata={"a": "b"},
        created_at=now,
        last_request_at=now,
    )
    return store.write(lambda tx: models.create(tx, row))


def get(store: Store, model_id: ModelId = MODEL):
    return store.read(lambda tx: models.get(tx, model_id))


def test_create_ignores_an_existing_id(store: Store, session_id: SessionId) -> None:
    assert create(store, session_id, spec=b"first")
    assert not create(store, session_id, spec=b"second")
    row = get(store)
    assert (row.spec, row.status, row.effect_order, row.user_metadata) == (b"first", "creating", 0, {"a": "b"})
    assert store.read(lambda tx: models.get_owner(tx, MODEL)) == "ann"
    assert store.read(lambda tx: models.get_owner(tx, ModelId("none"))) is None


def test_log_sequence_numbers_start_at_one_and_roll_back(store: Store, session_id: SessionId) -> None:
    create(store, session_id)

    def two_then_fail(tx: Session) -> None:
        assert [models.assign_effect_order(tx, MODEL) for _ in range(2)] == [2, 3]
        raise RuntimeError

    assert store.write(lambda tx: models.assign_effect_order(tx, MODEL)) == 1
    with pytest.raises(RuntimeError):
        store.write(two_then_fail)
    assert store.write(lambda tx: models.assign_effect_order(tx, MODEL)) == 2
    assert get(store).effect_order == 2


def test_status_incomplete_gradient_and_last_request(store: Store, session_id: SessionId) -> None:
    create(store, session_id)

    def change(tx: Session) -> None:
        models.set_status(tx, MODEL, "ready")
        models.set_incomplete_gradient(tx, MODEL, "NaN in datum 3")
        models.touch(tx, MODEL, 8.0)
        models.touch(tx, MODEL, 7.0)

    store.write(change)
    row = get(store)
    assert (row.status, row.poisoned_by, row.last_request_at) == ("ready", "NaN in datum 3", 8.0)
    store.write(lambda tx: models.set_incomplete_gradient(tx, MODEL, None))
    assert get(store).poisoned_by is None


@pytest.mark.parametrize(
    "change",
    [
        lambda tx: models.set_status(tx, MODEL, "ready"),
        lambda tx: models.set_incomplete_gradient(tx, MODEL, None),
        lambda tx: models.touch(tx, MODEL, 1.0),
        lambda tx: models.assign_effect_order(tx, MODEL),
    ],
)
def test_changing_an_unknown_model_is_an_error(store: Store, change) -> None:
    with pytest.raises(LookupError, match="no ModelRow has the key 'run'"):
        store.write(change)


def test_live_models(store: Store, session_id: SessionId) -> None:
    for number, status in enumerate(("creating", "ready", "failed", "unloaded")):
        create(store, session_id, ModelId(status), now=float(10 - number))
        store.write(lambda tx, status=status: models.set_status(tx, ModelId(status), status))
    assert [row.model_id for row in store.read(models.list_live)] == ["ready", "creating"]
    assert [row.model_id for row in store.read(lambda tx: models.list_by_session(tx, session_id))] == [
        "unloaded",
        "failed",
        "ready",
        "creating",
    ]


def test_list_of_an_owner_in_pages(store: Store, session_id: SessionId) -> None:
    others = store.write(lambda tx: sessions.create(tx, owner="bob", now=1.0))
    create(store, others, ModelId("theirs"))
    for number in range(3):
        create(store, session_id, ModelId(f"run-{number}"), now=float(number))
    rows, total = store.read(lambda tx: models.list_owned(tx, "ann", 2, 1))
    assert ([row.model_id for row in rows], total) == (["run-1", "run-0"], 3)


def test_requests_do_not_move_runs_between_pages(store: Store, session_id: SessionId) -> None:
    for number in range(4):
        create(store, session_id, ModelId(f"run-{number}"), now=float(number))
    first, _ = store.read(lambda tx: models.list_owned(tx, "ann", 2, 0))
    store.write(lambda tx: models.touch(tx, ModelId("run-0"), 10.0))
    second, _ = store.read(lambda tx: models.list_owned(tx, "ann", 2, 2))
    assert [row.model_id for row in [*first, *second]] == ["run-3", "run-2", "run-1", "run-0"]


def put_snapshot(store: Store, artifact: str, effect_order: int) -> ArtifactId | None:
    return store.write(
        lambda tx: models.put_snapshot(tx, MODEL, ArtifactId(artifact), effect_order, float(effect_order))
    )


def test_a_snapshot_replaces_the_one_before(store: Store) -> None:
    assert store.read(lambda tx: models.get_snapshot(tx, MODEL)) is None
    assert put_snapshot(store, "art-1", 3) is None
    assert put_snapshot(store, "art-2", 5) == "art-1"
    row = store.read(lambda tx: models.get_snapshot(tx, MODEL))
    assert (row.artifact_id, row.effect_order, row.created_at) == ("art-2", 5, 5.0)


def test_an_older_snapshot_is_refused(store: Store) -> None:
    put_snapshot(store, "art-1", 3)
    with pytest.raises(ValueError, match=r"\(log sequence number 2\) is older than the stored one \(3\)"):
        put_snapshot(store, "art-0", 2)
    assert store.read(lambda tx: models.get_snapshot(tx, MODEL)).artifact_id == "art-1"


def test_delete_snapshot(store: Store) -> None:
    put_snapshot(store, "art-1", 3)
    assert store.write(lambda tx: models.delete_snapshot(tx, MODEL)) == "art-1"
    assert store.write(lambda tx: models.delete_snapshot(tx, MODEL)) is None
