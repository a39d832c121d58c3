"""A database that lost its newest rows, for example in a failover to a lagging replica."""

import asyncio
import threading

import pytest
from sqlmodel import Session, delete, update

from skyrl_tx.contract.ids import SamplingSessionId
from skyrl_tx.server.http.long_poll import ResultWatcher
from skyrl_tx.store import completions
from skyrl_tx.store.tables import AnswerCounterRow, RequestRow
from tests.support.engine_harness import EngineHarness, sample


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_later_completions_are_announced_to_clients_that_saw_the_lost_ones(tmp_path, request, database) -> None:
    url = None if database == "sqlite" else request.getfixturevalue("postgresql_url")
    harness = EngineHarness(tmp_path, database_url=url)
    name = SamplingSessionId(f"{harness.session_id}:sample:0")

    def list_announced(after: int) -> list[completions.SampleCompletion]:
        return harness.api.read(lambda tx: completions.list_by_client(tx, name, 0, after, 10))

    def fail_over(tx: Session) -> None:
        tx.exec(delete(RequestRow))
        tx.exec(update(AnswerCounterRow).values(value=counter))

    counter = harness.api.read(completions.get_last_position)
    seen = [harness.submit(sample(), sampling_session_id=name, seq_id=seq_id) for seq_id in range(3)]
    harness.run(*seen)
    cursor = list_announced(0)[-1].answer_order
    watcher = ResultWatcher(harness.api)
    harness.api.write(fail_over)
    later = harness.submit(sample(), sampling_session_id=name, seq_id=3)

    engine = threading.Thread(target=harness.run, args=(later,))

    async def poll() -> bool:
        watcher.start()
        with watcher.subscribe(later) as notification:
            engine.start()
            return await asyncio.wait_for(notification, 10)

    assert asyncio.run(poll())
    engine.join()
    watcher.close()
    assert [completion.request_id for completion in list_announced(cursor)] == [later]
    harness.close()
