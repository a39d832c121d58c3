"""Pruning of results, tombstones, sampling sessions, runs and sessions, with high-water marks."""

from dataclasses import replace

import pytest
from sqlmodel import Session, select

from skyrl_tx.contract.ids import (
    ArtifactId,
    CheckpointKind,
    ModelId,
    RequestId,
    SamplerId,
    SamplingSessionId,
    SessionId,
)
from skyrl_tx.store import checkpoints, futures, models, pruning, sampling_sessions, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import ConflictingRequest, FutureState, NewRequest, RequestPruned
from skyrl_tx.store.tables import CheckpointRow, ModelRow, PrunedRow, SamplingSessionRow

MODEL = ModelId("run")
SAMPLER = SamplingSessionId("sampling")
CLONE = 7_000_000_000


@pytest.fixture(autouse=True)
def _model(store: Store, session_id: SessionId) -> None:
    """Create a model with a snapshot at log sequence number 10."""

    def make(tx: Session) -> None:
        fields = {"session_id": session_id, "base_model": "b", "spec": b"", "created_at": 1.0, "last_request_at": 1.0}
        models.create(tx, ModelRow(model_id=MODEL, **fields))
        models.put_snapshot(tx, MODEL, "art-1", 10, 1.0)

    store.write(make)


@pytest.fixture
def new(session_id: SessionId) -> NewRequest:
    return to_model(session_id, 1)


def to_model(session_id: SessionId, seq_id: int) -> NewRequest:
    key = f"model/{MODEL}/{seq_id}"
    return NewRequest(
        key=key, kind="model_pass", owner="ann", session_id=session_id, body=b"body", model_id=MODEL, seq_id=seq_id
    )


def to_sampler(session_id: SessionId, seq_id: int) -> NewRequest:
    new = to_model(session_id, seq_id)
    key = f"sample/{SAMPLER}/{seq_id}"
    return replace(new, key=key, kind="sample", model_id=None, sampling_session_id=SAMPLER)


def submit(store: Store, new: NewRequest) -> futures.SubmittedRequest:
    return store.write(lambda tx: futures.submit(tx, new, 1.0))


def state(store: Store, request_id: RequestId) -> FutureState:
    return store.read(lambda tx: futures.get_state(tx, request_id, "ann"))


def submit_and_complete(store: Store, new: NewRequest, effect_order: int | None = None) -> RequestId:
    request_id = submit(store, new).request_id

    def complete(tx: Session) -> None:
        futures.complete(tx, request_id, b"result", failed=False, effect_order=effect_order, now=5.0)

    store.write(complete)
    return request_id


def submit_and_fetch(store: Store, new: NewRequest, effect_order: int | None = None) -> RequestId:
    request_id = submit_and_complete(store, new, effect_order)
    store.write(lambda tx: futures.mark_fetched(tx, [request_id], 100.0))
    return request_id


def prune_results(store: Store, now: float) -> int:
    return store.write(lambda tx: pruning.prune_results(tx, now, retention_s=60.0))


def delete_tombstones(store: Store, now: float) -> int:
    return store.write(lambda tx: pruning.delete_tombstones(tx, now, retention_s=100.0, session_retention_s=1000.0))


def prune(store: Store, now: float = 500.0) -> int:
    prune_results(store, now)
    return delete_tombstones(store, now)


class TestResults:
    """Results are pruned some time after they were fetched, unless recovery still needs them."""

    @pytest.mark.parametrize("effect_order", [None, 10])
    def test_a_pruned_request_becomes_a_tombstone(self, store, new: NewRequest, effect_order) -> None:
        request_id = submit_and_fetch(store, new, effect_order)
        store.write(lambda tx: futures.mark_fetched(tx, [request_id], 150.0))
        assert prune_results(store, 160.0) == 0
        assert prune_results(store, 161.0) == 1
        assert state(store, request_id).status == "pruned"
        assert submit(store, new) == futures.SubmittedRequest(request_id, is_new=False)
        with pytest.raises(ConflictingRequest):
            submit(store, replace(new, body=b"other"))
        assert store.read(lambda tx: futures.list_pending(tx, 0, 100)) == []

    def test_a_request_after_the_snapshot_stays_until_its_model_ends(self, store, new: NewRequest) -> None:
        request_id = submit_and_fetch(store, new, effect_order=11)
        assert prune_results(store, 1e9) == 0
        assert state(store, request_id).result == b"result"
        store.write(lambda tx: models.set_status(tx, MODEL, "unloaded"))
        assert prune_results(store, 1e9) == 1

    def test_an_unfetched_result_stays_until_its_session_finishes(self, store, new: NewRequest) -> None:
        request_id = submit_and_complete(store, new)
        assert prune_results(store, 1e9) == 0
        store.write(lambda tx: sessions.finish(tx, new.session_id, "success", 200.0))
        assert prune_results(store, 260.0) == 0
        assert prune_results(store, 261.0) == 1
        assert state(store, request_id).status == "pruned"

    def test_the_limit_bounds_each_call(self, store, session_id: SessionId) -> None:
        for seq_id in range(1, 6):
            submit_and_fetch(store, to_model(session_id, seq_id))
        counts = [store.write(lambda tx: pruning.prune_results(tx, 1e9, retention_s=0, limit=2)) for _ in range(4)]
        assert counts == [2, 2, 1, 0]


class TestRequests:
    """Tombstones are deleted later, and a high-water mark remains."""

    @pytest.mark.parametrize("make", [to_model, to_sampler])
    def test_a_deleted_sequence_number_is_refused(self, store, session_id: SessionId, make) -> None:
        gone, kept = make(session_id, 4), make(session_id, 5)
        deleted = submit_and_fetch(store, gone)
        submit_and_complete(store, kept)
        assert prune(store, 200.0) == 0, "the result is pruned, its tombstone stays"
        assert prune(store, 201.0) == 1
        assert state(store, deleted).status == "unknown"
        for body in (b"body", b"other"):
            with pytest.raises(RequestPruned, match=r"/4': its sequence number was used"):
                submit(store, replace(gone, body=body))
        with pytest.raises(RequestPruned):
            submit(store, make(session_id, 3))
        assert submit(store, kept).is_new is False
        assert submit(store, make(session_id, 6)).is_new

    def test_high_water_marks_are_per_sampling_client(self, store, session_id: SessionId) -> None:
        submit_and_fetch(store, to_sampler(session_id, CLONE + 9))
        submit_and_fetch(store, to_sampler(session_id, 0))
        assert prune(store) == 2
        assert submit(store, to_sampler(session_id, 1)).is_new
        with pytest.raises(RequestPruned):
            submit(store, to_sampler(session_id, CLONE + 8))
        assert submit(store, to_sampler(session_id, CLONE + 10)).is_new

    def test_an_older_open_request_stays(self, store, session_id: SessionId) -> None:
        slow = submit(store, to_sampler(session_id, 1)).request_id
        submit_and_fetch(store, to_sampler(session_id, 2))
        prune(store)
        assert submit(store, to_sampler(session_id, 1)) == futures.SubmittedRequest(slow, is_new=False)

    def test_high_water_marks_only_rise(self, store, session_id: SessionId) -> None:
        submit_and_fetch(store, to_model(session_id, 9))
        late = submit_and_complete(store, to_model(session_id, 2))
        prune(store)
        store.write(lambda tx: futures.mark_fetched(tx, [late], 500.0))
        assert prune(store, 1000.0) == 1
        assert store.read(lambda tx: futures.get_high_water_mark(tx, f"model/{MODEL}")) == 9

    def test_last_answered_sequence_number_after_deletion(self, store, session_id: SessionId) -> None:
        submit_and_fetch(store, to_model(session_id, 9), effect_order=3)
        prune(store)
        for kinds in (None, {"optim_step"}):
            assert store.read(lambda tx, kinds=kinds: futures.get_last_answered_seq(tx, MODEL, kinds)) == 9

    def test_requests_without_a_sequence_number_leave_no_mark(self, store, new: NewRequest) -> None:
        for seq_id in (None, 0):
            submit_and_fetch(store, replace(new, key="", seq_id=seq_id))
        assert prune(store) == 2
        assert submit(store, replace(new, key="", seq_id=None)).is_new

    def test_model_creations_stay_until_their_session_expires(self, store, new: NewRequest) -> None:
        submit_and_fetch(store, replace(new, key="create/s/0", kind="create_model", seq_id=0))
        submit_and_fetch(store, replace(new, key="create/s/1", kind="load_weights", seq_id=0))
        submit_and_fetch(store, replace(new, kind="load_weights"))
        assert prune(store, 1000.0) == 1
        assert prune(store, 1002.0) == 2

    def test_a_request_after_the_snapshot_stays(self, store, new: NewRequest) -> None:
        submit_and_fetch(store, new, effect_order=11)
        assert prune(store, 1e9) == 0


class TestSamplingSessions:
    """Sampling sessions that can no longer be used are deleted with their clients' high-water marks."""

    @pytest.fixture(autouse=True)
    def _sampling_sessions(self, store: Store, session_id: SessionId) -> None:
        def create(tx: Session) -> None:
            for name, model, sampler in (
                (SAMPLER, MODEL, None),
                ("kept", MODEL, "art-1"),
                ("base", None, None),
                ("inflight", MODEL, None),
            ):
                row = SamplingSessionRow(
                    sampling_session_id=SamplingSessionId(name),
                    session_id=session_id,
                    base_model="b",
                    sampler_id=None if sampler is None else SamplerId(sampler),
                    model_id=model,
                    created_at=1.0,
                    last_used_at=100.0,
                    is_inflight=name == "inflight",
                )
                sampling_sessions.create_session(tx, row)

        store.write(create)

    def delete(self, store: Store, before: float, **limit: int) -> int:
        return store.write(lambda tx: pruning.delete_sampling_sessions(tx, before, **limit))

    def remaining(self, store: Store, session_id: SessionId) -> set[str]:
        return set(store.read(lambda tx: sampling_sessions.list_ids_by_session(tx, session_id)))

    def marks(self, store: Store) -> set[str]:
        return set(store.read(lambda tx: tx.exec(select(PrunedRow.numbered_by)).all()))

    def test_released_sessions_are_deleted_after_their_requests(self, store, session_id: SessionId) -> None:
        submit_and_fetch(store, to_model(session_id, 4))
        for seq_id in (3, CLONE + 9):
            submit_and_fetch(store, to_sampler(session_id, seq_id))
        assert self.delete(store, 1e9) == 0, "its requests are stored"
        assert prune(store) == 3
        assert self.marks(store) == {f"model/{MODEL}", f"sample/{SAMPLER}/0", f"sample/{SAMPLER}/7"}
        assert self.delete(store, 100.0) == 0
        assert self.delete(store, 100.5) == 1
        assert self.remaining(store, session_id) == {"kept", "base", "inflight"}
        assert self.marks(store) == {f"model/{MODEL}"}

    def test_sampling_sessions_of_a_finished_session_are_deleted(self, store, session_id: SessionId) -> None:
        store.write(lambda tx: sessions.record_heartbeat(tx, session_id, 100.0))
        store.write(lambda tx: sessions.finish(tx, session_id, "success", 100.0))
        assert self.delete(store, 100.0) == 0
        assert [self.delete(store, 101.0, limit=3) for _ in range(3)] == [3, 1, 0]
        assert self.remaining(store, session_id) == set()

    def test_deleting_a_run_deletes_the_marks_of_its_samplers(self, store, session_id: SessionId) -> None:
        submit_and_fetch(store, to_sampler(session_id, 3))
        prune(store)
        store.write(lambda tx: models.set_status(tx, MODEL, "unloaded"))
        removed: list[ModelId] = []
        store.write(lambda tx: models.delete(tx, MODEL, lambda _, model_ids: removed.extend(model_ids)))
        assert removed == [MODEL]
        assert self.remaining(store, session_id) == {"base"} and self.marks(store) == set()


class TestRunsAndSessions:
    """Ended runs and finished sessions are deleted once nothing refers to them."""

    @pytest.fixture(autouse=True)
    def _ended(self, store: Store, session_id: SessionId) -> None:
        self.removed: list[ModelId] = []

        def end(tx: Session) -> None:
            models.set_status(tx, MODEL, "unloaded")
            models.delete_snapshot(tx, MODEL)
            sessions.finish(tx, session_id, "success", 100.0)

        store.write(end)

    def delete(self, store: Store, before: float = 1e9) -> tuple[int, int]:
        def work(tx: Session) -> tuple[int, int]:
            ended = pruning.delete_ended_models(tx, before, lambda _, model_ids: self.removed.extend(model_ids))
            return ended, pruning.delete_finished_sessions(tx, before)

        return store.write(work)

    def test_an_ended_run_is_deleted_with_its_mark_and_its_session(self, store, session_id: SessionId) -> None:
        submit_and_fetch(store, to_model(session_id, 4))
        assert self.delete(store) == (0, 0), "its request is stored"
        assert prune(store) == 1
        assert self.delete(store, 100.0) == (0, 0), "its session finished at 100"
        assert self.delete(store, 100.5) == (1, 1) and self.removed == [MODEL]
        assert store.read(lambda tx: models.get(tx, MODEL)) is None
        assert store.read(lambda tx: sessions.get(tx, session_id)) is None
        assert store.read(lambda tx: tx.exec(select(PrunedRow.numbered_by)).all()) == []

    @pytest.mark.parametrize("status", ["creating", "ready", "left"])
    def test_a_run_that_has_not_ended_stays(self, store, status) -> None:
        store.write(lambda tx: models.set_status(tx, MODEL, status))
        assert self.delete(store) == (0, 0)

    def test_a_run_with_a_checkpoint_stays_with_its_session(self, store) -> None:
        row = CheckpointRow(
            model_id=MODEL,
            kind=CheckpointKind.TRAINING,
            name="kept",
            artifact_id=ArtifactId("art-1"),
            created_at=1.0,
            size_bytes=1,
        )
        store.write(lambda tx: checkpoints.put(tx, row, overwrite=False))
        assert self.delete(store) == (0, 0)

    def test_a_run_of_an_open_session_stays(self, store, session_id: SessionId) -> None:
        """If it were deleted, its id could be created again."""

        def reopen(tx: Session) -> None:
            row = sessions.get(tx, session_id)
            assert row is not None
            row.finished_at = None

        store.write(reopen)
        assert self.delete(store) == (0, 0)

    def test_a_session_with_a_rejected_creation_stays_until_that_is_deleted(self, store, session_id: SessionId) -> None:
        rejected = replace(to_model(session_id, 0), key=f"create/{session_id}/0", kind="create_model", model_id=None)
        submit_and_fetch(store, rejected)
        assert self.delete(store) == (1, 0)
        assert prune(store, 1e6) == 1
        assert self.delete(store) == (0, 1)


@pytest.mark.parametrize("name", sessions.CHAT_SESSIONS)
def test_results_that_only_an_ended_api_process_could_read_are_pruned(store: Store, new: NewRequest, name: str) -> None:
    chat = store.write(lambda tx: sessions.create(tx, owner="ann", display_name=name, now=1.0))
    direct = store.write(lambda tx: sessions.create(tx, owner="ann", display_name=sessions.DIRECT, now=1.0))
    called = submit(store, to_sampler(chat, 1)).request_id
    for request in (called, submit(store, to_sampler(direct, 3)).request_id):
        store.write(
            lambda tx, request=request: futures.complete(tx, request, b"r", failed=False, effect_order=None, now=5.0)
        )
    assert store.write(lambda tx: pruning.prune_results(tx, 14.0, retention_s=10.0)) == 0
    assert store.write(lambda tx: pruning.prune_results(tx, 16.0, retention_s=10.0)) == 1
    assert store.read(lambda tx: futures.get_state(tx, called, "ann")).status == "pruned"
