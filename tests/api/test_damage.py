"""A result that the disk changed is not served; its client is told."""

import pytest
from sqlmodel import Session, col, select

from skyrl_tx.store.tables import RequestRow
from skyrl_tx.testing.live_api import Server


@pytest.mark.usefixtures("engine")
def test_a_damaged_result_is_a_failure_of_the_server(server: Server) -> None:
    asked = server.post("optim_step", model_id=server.model(), adam_params={})
    assert "error" not in server.result(asked)

    def flip(tx: Session) -> None:
        row = tx.exec(select(RequestRow).where(col(RequestRow.request_id) == asked.json()["request_id"])).one()
        assert row.result is not None
        row.result = row.result[:-1] + bytes([row.result[-1] ^ 1])

    server.store.write(flip)
    told = server.result(asked)
    assert told["category"] == "server"
    assert asked.json()["request_id"] in str(told["error"]) and "is damaged" in str(told["error"])
