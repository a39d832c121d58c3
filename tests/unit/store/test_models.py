import pytest
from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import models, sessions
from skyrl_tx.store.database import Store

MODEL = ModelId("run")


def create(
    store: Store, session_id: SessionId, model_id: ModelId = MODEL, now: float = 1.0, spec: bytes = b"s"
) -> bool:
    return store.write(
        lambda tx: models.create(
            tx,
            model_id=model_id,
            session_id=session_id,
            base_model="base",
            spec=spec,
            user_metadata={"a": "b"},
            now=now,
        )
    )


def get(store: Store, model_id: ModelId = MODEL):
    return store.read(lambda tx: models.get(tx, model_id))


def test_a_model_is_made_once(store: Store, session_id: SessionId) -> None:
    assert create(store, session_id, spec=b"first")
    assert not create(store, session_id, spec=b"second")
    row = get(store)
    assert (row.spec, row.status, row.effect_order, row.user_metadata) == (b"first", "creating", 0, {"a": "b"})
    assert store.read(lambda tx: models.owner(tx, MODEL)) == "ann"
    assert store.read(lambda tx: models.owner(tx, ModelId("none"))) is None


def test_effects_are_numbered_from_one_and_undone_with_their_work(store: Store, session_id: SessionId) -> None:
    create(store, session_id)

    def two_then_fail(tx: Session) -> None:
        assert [models.next_effect(tx, MODEL) for _ in range(2)] == [2, 3]
        raise RuntimeError

    assert store.write(lambda tx: models.next_effect(tx, MODEL)) == 1
    with pytest.raises(RuntimeError):
        store.write(two_then_fail)
    assert store.write(lambda tx: models.next_effect(tx, MODEL)) == 2
    assert get(store).effect_order == 2


def test_status_poison_and_last_request_are_kept(store: Store, session_id: SessionId) -> None:
    create(store, session_id)

    def change(tx: Session) -> None:
        models.set_status(tx, MODEL, "ready")
        models.set_poison(tx, MODEL, "NaN in datum 3")
        models.touch(tx, MODEL, 8.0)
        models.touch(tx, MODEL, 7.0)

    store.write(change)
    row = get(store)
    assert (row.status, row.poisoned_by, row.last_request_at) == ("ready", "NaN in datum 3", 8.0)
    store.write(lambda tx: models.set_poison(tx, MODEL, None))
    assert get(store).poisoned_by is None


@pytest.mark.parametrize(
    "change",
    [
        lambda tx: models.set_status(tx, MODEL, "ready"),
        lambda tx: models.set_poison(tx, MODEL, None),
        lambda tx: models.touch(tx, MODEL, 1.0),
        lambda tx: models.next_effect(tx, MODEL),
    ],
)
def test_changing_a_model_that_is_not_there_is_an_error(store: Store, change) -> None:
    with pytest.raises(LookupError, match="no model 'run'"):
        store.write(change)


def test_live_models_are_those_that_recovery_restores(store: Store, session_id: SessionId) -> None:
    for number, status in enumerate(("creating", "ready", "failed", "unloaded")):
        create(store, session_id, ModelId(status), now=float(10 - number))
        store.write(lambda tx, status=status: models.set_status(tx, ModelId(status), status))
    assert [row.model_id for row in store.read(models.live)] == ["ready", "creating"]
    assert [row.model_id for row in store.read(lambda tx: models.of_session(tx, session_id))] == [
        "unloaded",
        "failed",
        "ready",
        "creating",
    ]


def test_an_owner_sees_their_own_in_pages_with_the_total(store: Store, session_id: SessionId) -> None:
    others = store.write(
        lambda tx: sessions.create(
            tx, owner="bob", tags=[], user_metadata=None, sdk_version=None, project_id=None, display_name=None, now=1.0
        )
    )
    create(store, others, ModelId("theirs"))
    for number in range(3):
        create(store, session_id, ModelId(f"run-{number}"), now=float(number))
    rows, total = store.read(lambda tx: models.list_owned(tx, "ann", 2, 1))
    assert ([row.model_id for row in rows], total) == (["run-1", "run-0"], 3)
