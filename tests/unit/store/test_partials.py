"""New tokens of streamed samples are written per slice, read by position and removed with the result."""

import time

import numpy as np
from sqlalchemy import event
from sqlmodel import Session

from skyrl_tx.contract.ids import RequestId, SamplingSessionId
from skyrl_tx.contract.results import TopK
from skyrl_tx.store import completions, futures, pruning, sampling_sessions, sessions
from skyrl_tx.store.completions import Partial
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import NewRequest
from skyrl_tx.store.tables import SamplingSessionRow


def partial(name: str, index: int, start: int, *tokens: int, k: int = 0) -> Partial:
    ids = np.array(tokens, np.int32)
    topk = TopK(token_ids=np.tile(ids[:, None], k), logprobs=np.zeros((len(tokens), k), np.float32)) if k else None
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return Partial(
        request_id=RequestId(name), sample_index=index, start=start, tokens=ids, logprobs=logprobs, topk=topk
    )


def test_tokens_are_read_once_in_the_order_of_writing(store: Store) -> None:
    store.write(lambda tx: completions.add_partials(tx, [partial("a", 0, 0, 5, 6), partial("b", 1, 0, 7, k=3)]))
    store.write(lambda tx: completions.add_partials(tx, [partial("a", 0, 2, 8)]))
    rows = store.read(lambda tx: completions.list_partials(tx, 0))
    assert [(row.request_id, row.sample_index, row.start, row.tokens.tolist()) for _, row in rows] == [
        ("a", 0, 0, [5, 6]),
        ("b", 1, 0, [7]),
        ("a", 0, 2, [8]),
    ]
    assert rows[0][1].topk is None and rows[0][1].logprobs.tolist() == [-0.5, -0.5]

    topk = rows[1][1].topk
    assert topk is not None and topk.token_ids.tolist() == [[7, 7, 7]] and topk.logprobs.shape == (1, 3)
    assert [position for position, _ in store.read(lambda tx: completions.list_partials(tx, rows[1][0]))] == [
        rows[2][0]
    ]

    store.write(lambda tx: completions.delete_partials(tx, RequestId("a")))
    assert [row.request_id for _, row in store.read(lambda tx: completions.list_partials(tx, 0))] == ["b"]

    before = rows[-1][0]
    store.write(lambda tx: completions.add_partials(tx, [partial("c", 0, 0, 1)]))
    assert store.read(lambda tx: completions.list_partials(tx, before))[0][0] > before, "positions are not used twice"


def test_a_slice_of_many_samples_takes_few_statements(store: Store) -> None:
    """The driver waits for the interpreter after each statement, and for each row of an `executemany`."""
    inserts: list[tuple[str, bool]] = []

    def write(tx: Session) -> None:
        def record(_connection: object, _cursor: object, statement: str, *rest: object) -> None:
            inserts.append((statement.partition(" VALUES")[0], bool(rest[-1])))

        connection = tx.connection()
        event.listen(connection, "before_cursor_execute", record)
        completions.add_partials(tx, [partial(f"r{n}", n, 3, n, n + 1, k=n % 2) for n in range(600)])
        event.remove(connection, "before_cursor_execute", record)

    store.write(write)
    assert [many for _, many in inserts] == [False] * 3, inserts
    rows = store.read(lambda tx: completions.list_partials(tx, 0))
    assert [(row.request_id, row.sample_index, row.tokens.tolist(), row.topk is None) for _, row in rows] == [
        (f"r{n}", n, [n, n + 1], n % 2 == 0) for n in range(600)
    ]


def test_rows_without_an_open_request_are_pruned(store: Store) -> None:
    now = time.time()

    def submit(tx) -> futures.SubmittedRequest:
        session_id = sessions.create(tx, owner="ann", now=now)
        new = NewRequest(key="", kind="sample", owner="ann", session_id=session_id, body=b"x", is_streamed=True)
        return futures.submit(tx, new, now)

    name = store.write(submit).request_id
    (pending,) = store.read(lambda tx: futures.list_pending(tx, 0, 10))
    assert pending.is_streamed
    store.write(lambda tx: completions.add_partials(tx, [partial(name, 0, 0, 1), partial("gone", 0, 0, 1)]))
    assert store.write(completions.prune_partials) == 1
    store.write(lambda tx: futures.complete(tx, name, b"r", failed=False, effect_order=None, now=now))
    assert store.write(completions.prune_partials) == 1
    assert store.read(lambda tx: completions.list_partials(tx, 0)) == []


def test_unused_sampling_sessions_of_the_server_are_removed(store: Store) -> None:
    now = time.time()

    def create(tx) -> None:
        for number, kind in enumerate((sessions.OPENAI, sessions.ANTHROPIC, "a client's")):
            session_id = sessions.create(tx, owner="ann", display_name=kind, now=now)
            sampling_sessions.create_session(
                tx,
                SamplingSessionRow(
                    sampling_session_id=SamplingSessionId(f"s{number}"),
                    session_id=session_id,
                    base_model="m",
                    created_at=now - 100,
                    last_used_at=now if number == 1 else now - 100,
                ),
            )

    store.write(create)
    assert store.write(lambda tx: pruning.delete_sampling_sessions(tx, now - 50)) == 1
    left = [
        store.read(lambda tx, n=n: sampling_sessions.get(tx, SamplingSessionId(f"s{n}"))) is not None for n in range(3)
    ]
    assert left == [False, True, True]
