"""What is forgotten, when, and what is then said of it."""

from dataclasses import replace

import pytest
from sqlmodel import Session, select

from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.store import futures, models, pruning, samplers, sessions, snapshots
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import ConflictingRequest, FutureState, NewRequest
from skyrl_tx.store.pruning import RequestForgotten
from skyrl_tx.store.removal import remove_run
from skyrl_tx.store.tables import PrunedRow, SamplingSessionRow

MODEL = ModelId("run")
SAMPLER = SamplingSessionId("sampling")
CLONE = 7_000_000_000


@pytest.fixture(autouse=True)
def _model(store: Store, session_id: SessionId) -> None:
    """A model with a snapshot that contains ten effects."""

    def make(tx: Session) -> None:
        fields = {"session_id": session_id, "base_model": "b", "spec": b"", "user_metadata": None, "now": 1.0}
        models.create(tx, model_id=MODEL, **fields)
        snapshots.put(tx, MODEL, "art-1", 10, 1.0)

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


def submit(store: Store, new: NewRequest) -> futures.Submitted:
    return store.write(lambda tx: futures.submit(tx, new, 1.0))


def state(store: Store, request_id: RequestId) -> FutureState:
    return store.read(lambda tx: futures.result(tx, request_id, "ann"))


def answered(store: Store, new: NewRequest, effect_order: int | None = None) -> RequestId:
    request_id = submit(store, new).request_id

    def answer(tx: Session) -> None:
        futures.complete(tx, request_id, b"result", failed=False, effect_order=effect_order, now=5.0)

    store.write(answer)
    return request_id


def fetched(store: Store, new: NewRequest, effect_order: int | None = None) -> RequestId:
    request_id = answered(store, new, effect_order)
    store.write(lambda tx: futures.mark_fetched(tx, [request_id], 100.0))
    return request_id


def forget_results(store: Store, now: float) -> int:
    return store.write(lambda tx: pruning.forget_results(tx, now, retention_s=60.0))


def forget_requests(store: Store, now: float) -> int:
    return store.write(lambda tx: pruning.forget_requests(tx, now, retention_s=100.0, session_retention_s=1000.0))


def forget(store: Store, now: float = 500.0) -> int:
    forget_results(store, now)
    return forget_requests(store, now)


class TestResults:
    """Fetched long enough ago, and needed by no recovery."""

    @pytest.mark.parametrize("effect_order", [None, 10])
    def test_an_answer_that_a_snapshot_covers_goes_but_stays_known(self, store, new: NewRequest, effect_order) -> None:
        request_id = fetched(store, new, effect_order)
        store.write(lambda tx: futures.mark_fetched(tx, [request_id], 150.0))
        assert forget_results(store, 160.0) == 0
        assert forget_results(store, 161.0) == 1
        assert state(store, request_id).status == "pruned"
        assert submit(store, new) == futures.Submitted(request_id, is_new=False)
        with pytest.raises(ConflictingRequest):
            submit(store, replace(new, body=b"other"))
        assert store.read(lambda tx: futures.pending(tx, 0, 100)) == []

    def test_an_effect_beyond_the_snapshot_stays_until_its_model_is_gone(self, store, new: NewRequest) -> None:
        request_id = fetched(store, new, effect_order=11)
        assert forget_results(store, 1e9) == 0
        assert state(store, request_id).result == b"result"
        store.write(lambda tx: models.set_status(tx, MODEL, "unloaded"))
        assert forget_results(store, 1e9) == 1

    def test_what_was_not_fetched_stays_until_its_session_has_finished(self, store, new: NewRequest) -> None:
        request_id = answered(store, new)
        assert forget_results(store, 1e9) == 0
        store.write(lambda tx: sessions.finish(tx, new.session_id, "success", 200.0))
        assert forget_results(store, 260.0) == 0
        assert forget_results(store, 261.0) == 1
        assert state(store, request_id).status == "pruned"

    def test_no_more_than_was_asked_for_at_once(self, store, session_id: SessionId) -> None:
        for seq_id in range(1, 6):
            fetched(store, to_model(session_id, seq_id))
        counts = [store.write(lambda tx: pruning.forget_results(tx, 1e9, retention_s=0, limit=2)) for _ in range(4)]
        assert counts == [2, 2, 1, 0]


class TestRequests:
    """Their rows go too, and a mark stays."""

    @pytest.mark.parametrize("make", [to_model, to_sampler])
    def test_a_forgotten_number_is_refused_and_the_next_is_not(self, store, session_id: SessionId, make) -> None:
        gone, kept = make(session_id, 4), make(session_id, 5)
        forgotten = fetched(store, gone)
        answered(store, kept)
        assert forget(store, 200.0) == 0, "the result went, the request is known for longer"
        assert forget(store, 201.0) == 1
        assert state(store, forgotten).status == "unknown"
        for body in (b"body", b"other"):
            with pytest.raises(RequestForgotten, match=r"/4': its number is used up"):
                submit(store, replace(gone, body=body))
        with pytest.raises(RequestForgotten):
            submit(store, make(session_id, 3))
        assert submit(store, kept).is_new is False
        assert submit(store, make(session_id, 6)).is_new

    def test_clients_of_one_sampling_session_count_apart(self, store, session_id: SessionId) -> None:
        fetched(store, to_sampler(session_id, CLONE + 9))
        fetched(store, to_sampler(session_id, 0))
        assert forget(store) == 2
        assert submit(store, to_sampler(session_id, 1)).is_new
        with pytest.raises(RequestForgotten):
            submit(store, to_sampler(session_id, CLONE + 8))
        assert submit(store, to_sampler(session_id, CLONE + 10)).is_new

    def test_an_older_open_request_stays_itself(self, store, session_id: SessionId) -> None:
        slow = submit(store, to_sampler(session_id, 1)).request_id
        fetched(store, to_sampler(session_id, 2))
        forget(store)
        assert submit(store, to_sampler(session_id, 1)) == futures.Submitted(slow, is_new=False)

    def test_a_mark_only_rises(self, store, session_id: SessionId) -> None:
        fetched(store, to_model(session_id, 9))
        late = answered(store, to_model(session_id, 2))
        forget(store)
        store.write(lambda tx: futures.mark_fetched(tx, [late], 500.0))
        assert forget(store, 1000.0) == 1
        assert store.read(lambda tx: pruning.mark(tx, f"model/{MODEL}")) == 9

    def test_the_engine_still_knows_where_a_model_stands(self, store, session_id: SessionId) -> None:
        fetched(store, to_model(session_id, 9), effect_order=3)
        forget(store)
        for kinds in (None, {"optim_step"}):
            assert store.read(lambda tx, kinds=kinds: futures.last_answered_seq(tx, MODEL, kinds)) == 9

    def test_a_request_without_a_number_leaves_no_mark(self, store, new: NewRequest) -> None:
        for seq_id in (None, 0):
            fetched(store, replace(new, key="", seq_id=seq_id))
        assert forget(store) == 2
        assert submit(store, replace(new, key="", seq_id=None)).is_new

    def test_what_made_a_model_stays_until_its_session_is_over(self, store, new: NewRequest) -> None:
        fetched(store, replace(new, key="create/s/0", kind="create_model", seq_id=0))
        fetched(store, replace(new, key="create/s/1", kind="load_weights", seq_id=0))
        fetched(store, replace(new, kind="load_weights"))
        assert forget(store, 1000.0) == 1
        assert forget(store, 1002.0) == 2

    def test_an_effect_beyond_the_snapshot_stays(self, store, new: NewRequest) -> None:
        fetched(store, new, effect_order=11)
        assert forget(store, 1e9) == 0


class TestSamplingSessions:
    """They go when nobody can sample from them, with the marks of all their clients."""

    @pytest.fixture(autouse=True)
    def _begun(self, store: Store, session_id: SessionId) -> None:
        def begin(tx: Session) -> None:
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
                samplers.create_session(tx, row)

        store.write(begin)

    def gone(self, store: Store, before: float, **limit: int) -> int:
        return store.write(lambda tx: pruning.forget_sampling_sessions(tx, before, **limit))

    def left(self, store: Store, session_id: SessionId) -> set[str]:
        return set(store.read(lambda tx: samplers.ids_of_session(tx, session_id)))

    def marks(self, store: Store) -> set[str]:
        return set(store.read(lambda tx: tx.exec(select(PrunedRow.numbered_by)).all()))

    def test_what_was_let_go_goes_with_its_marks_once_its_requests_have(self, store, session_id: SessionId) -> None:
        fetched(store, to_model(session_id, 4))
        for seq_id in (3, CLONE + 9):
            fetched(store, to_sampler(session_id, seq_id))
        assert self.gone(store, 1e9) == 0, "its requests are known"
        assert forget(store) == 3
        assert self.marks(store) == {f"model/{MODEL}", f"sample/{SAMPLER}/0", f"sample/{SAMPLER}/7"}
        assert self.gone(store, 100.0) == 0
        assert self.gone(store, 100.5) == 1
        assert self.left(store, session_id) == {"kept", "base", "inflight"}
        assert self.marks(store) == {f"model/{MODEL}"}

    def test_all_of_a_session_that_ended_goes(self, store, session_id: SessionId) -> None:
        store.write(lambda tx: sessions.heartbeat(tx, session_id, 100.0))
        store.write(lambda tx: sessions.finish(tx, session_id, "success", 100.0))
        assert self.gone(store, 100.0) == 0
        assert [self.gone(store, 101.0, limit=3) for _ in range(3)] == [3, 1, 0]
        assert self.left(store, session_id) == set()

    def test_a_run_that_is_removed_takes_the_marks_of_its_samplers_along(self, store, session_id: SessionId) -> None:
        fetched(store, to_sampler(session_id, 3))
        forget(store)
        store.write(lambda tx: models.set_status(tx, MODEL, "unloaded"))
        store.write(lambda tx: remove_run(tx, MODEL))
        assert self.left(store, session_id) == {"base"} and self.marks(store) == set()
