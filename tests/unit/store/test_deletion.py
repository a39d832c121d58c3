"""Deleted runs and checkpoints are hidden immediately, restored by `undelete` and removed by `purge`."""

import time
from collections.abc import Sequence

import pytest
from sqlmodel import Session, select

from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, CheckpointPath, ModelId, SessionId
from skyrl_tx.store import checkpoints, futures, models
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import CheckpointRow, ModelRow, ModelStatus

RUN = ModelId("run")


@pytest.fixture
def run(store: Store, session_id: SessionId) -> ModelId:
    """A ready run with the checkpoints `a` and `b`."""

    def work(tx) -> None:
        models.create(
            tx,
            ModelRow(
                model_id=RUN,
                session_id=session_id,
                base_model="base",
                spec=b"s",
                status="ready",
                created_at=1.0,
                last_request_at=1.0,
            ),
        )
        models.put_snapshot(tx, RUN, ArtifactId("art-snapshot"), 1, 1.0)

    store.write(work)
    save(store, "a")
    save(store, "b")
    return RUN


def path(name: str) -> CheckpointPath:
    return CheckpointPath(RUN, CheckpointKind.TRAINING, name)


def save(store: Store, name: str, artifact: str = "", ends: float | None = None) -> None:
    row = CheckpointRow(
        model_id=RUN,
        kind=CheckpointKind.TRAINING,
        name=name,
        artifact_id=ArtifactId(artifact or f"art-{name}"),
        created_at=5.0,
        expires_at=ends,
        size_bytes=7,
        public=True,
    )
    store.write(lambda tx: checkpoints.put(tx, row, overwrite=False))


def visible(store: Store, now: float = 20.0) -> set[str]:
    """Return the checkpoint names in the lists, and check that all lists agree."""

    def read(tx) -> set[str]:
        names = {row.name for row in checkpoints.list_by_run(tx, RUN, now)}
        owned, total = checkpoints.list_owned(tx, "ann", 100, 0, now)
        assert {row.name for row, _ in owned} == names == {n for n in "abc" if checkpoints.get(tx, path(n), now)}
        assert total == len(names) == checkpoints.count(tx, now)[0]
        usage = checkpoints.get_usage_by_owner(tx, "ann", None, now)
        assert sum(stored.num_checkpoints for _, _, stored in usage) == total
        assert list(tx.exec(checkpoints.select_published_runs(now))) == [RUN] * total
        return names

    return store.read(read)


def is_run_visible(store: Store, session_id: SessionId) -> bool:
    def read(tx) -> set[bool]:
        listed, total = models.list_owned(tx, "ann", 10, 0, published_at=20.0)
        assert total == len(listed)
        return {
            models.find(tx, RUN) is not None,
            models.get_owner(tx, RUN) is not None,
            not models.is_deleted(tx, RUN),
            [row.model_id for row in models.list_by_session(tx, session_id)] == [RUN],
            [row.model_id for row in listed] == [RUN],
        }

    (found,) = store.read(read)
    return found


def test_deleted_checkpoint_is_hidden_and_restored(store: Store, run: ModelId) -> None:
    assert store.write(lambda tx: checkpoints.mark_deleted(tx, path("a"), 10.0))
    assert not store.write(lambda tx: checkpoints.mark_deleted(tx, path("a"), 11.0))
    assert visible(store) == {"b"}
    assert "art-a" in (store.read(checkpoints.find_referenced_artifacts) or ())
    assert store.write(lambda tx: checkpoints.purge(tx, 9.9)) == []
    assert store.write(lambda tx: checkpoints.undelete(tx, path("a"))) and visible(store) == {"a", "b"}
    assert not store.write(lambda tx: checkpoints.undelete(tx, path("a")))


def test_purge_removes_what_was_deleted_long_enough_ago(store: Store, run: ModelId) -> None:
    store.write(lambda tx: checkpoints.mark_deleted(tx, path("a"), 10.0))
    assert store.write(lambda tx: checkpoints.purge(tx, 10.0)) == [path("a")]
    assert not store.write(lambda tx: checkpoints.undelete(tx, path("a"))) and visible(store) == {"b"}
    assert "art-a" not in (store.read(checkpoints.find_referenced_artifacts) or ())


def test_purge_removes_the_oldest_deletions_early_when_space_is_short(store: Store, run: ModelId) -> None:
    for name, at in (("b", 10.0), ("a", 11.0)):
        store.write(lambda tx, name=name, at=at: checkpoints.mark_deleted(tx, path(name), at))
    sizes = store.read(lambda tx: dict(tx.exec(select(CheckpointRow.name, CheckpointRow.size_bytes)).all()))
    assert store.write(lambda tx: checkpoints.purge(tx, 0.0, max_bytes=sum(sizes.values()))) == []
    assert store.write(lambda tx: checkpoints.purge(tx, 0.0, max_bytes=sizes["a"])) == [path("b")]
    assert store.write(lambda tx: checkpoints.purge(tx, 0.0, max_bytes=0)) == [path("a")]


def test_name_of_a_deleted_checkpoint_is_free(store: Store, run: ModelId) -> None:
    store.write(lambda tx: checkpoints.mark_deleted(tx, path("a"), 10.0))
    save(store, "a", "art-new")
    assert visible(store) == {"a", "b"}
    assert not store.write(lambda tx: checkpoints.undelete(tx, path("a"))), "the name was used again"
    with pytest.raises(checkpoints.CheckpointExists):
        save(store, "a")


def test_deleted_checkpoint_expires_as_others(store: Store, run: ModelId) -> None:
    save(store, "c", ends=30.0)
    store.write(lambda tx: checkpoints.mark_deleted(tx, path("c"), 10.0))
    assert store.write(lambda tx: checkpoints.expire(tx, 30.0)) == [path("c")]


def test_deleted_run_is_hidden_with_its_checkpoints_and_restored(
    store: Store, run: ModelId, session_id: SessionId
) -> None:
    store.write(lambda tx: checkpoints.mark_deleted(tx, path("a"), 9.0))
    assert is_run_visible(store, session_id)
    assert store.read(models.count) == 1
    assert store.write(lambda tx: models.mark_deleted(tx, RUN, 10.0)) and store.read(models.count) == 0
    assert not store.write(lambda tx: models.mark_deleted(tx, RUN, 11.0))
    assert not is_run_visible(store, session_id) and visible(store) == set()
    kept = store.read(checkpoints.find_referenced_artifacts)
    assert kept == {"art-a", "art-b", "art-snapshot"}
    assert store.write(lambda tx: models.undelete(tx, RUN)) and is_run_visible(store, session_id)
    assert visible(store) == {"b"}, "`a` was deleted by itself before"
    row = store.read(lambda tx: models.get(tx, RUN))
    assert row is not None and row.status == "ready", "it can be trained on"
    assert not store.write(lambda tx: models.undelete(tx, RUN))


@pytest.mark.parametrize("status", ["ready", "unloaded", "failed"])
def test_purge_removes_a_run_after_its_open_requests(
    store: Store, run: ModelId, session_id: SessionId, status: ModelStatus
) -> None:
    new = futures.NewRequest(
        key="k", kind="optim_step", owner="ann", session_id=session_id, body=b"b", model_id=RUN, seq_id=1
    )
    request_id = store.write(lambda tx: futures.submit(tx, new, 1.0)).request_id
    store.write(lambda tx: models.set_status(tx, RUN, status))
    store.write(lambda tx: models.mark_deleted(tx, RUN, 10.0))
    removed: list[ModelId] = []

    def remove_rows(_tx: Session, model_ids: Sequence[ModelId]) -> None:
        removed.extend(model_ids)

    assert store.write(lambda tx: models.purge(tx, 9.0, remove_rows)) == []
    assert store.write(lambda tx: models.purge(tx, 10.0, remove_rows)) == ([RUN] if status == "ready" else [])
    assert store.write(lambda tx: models.purge(tx, 10.0, remove_rows)) == []
    assert store.read(lambda tx: models.get(tx, RUN)) is not None and not removed, "a request is open"
    store.write(lambda tx: futures.complete(tx, request_id, b"r", failed=True, effect_order=None, now=time.time()))
    assert store.write(lambda tx: models.purge(tx, 10.0, remove_rows)) == []
    assert store.read(lambda tx: models.get(tx, RUN)) is None and not visible(store) and removed == [RUN]
