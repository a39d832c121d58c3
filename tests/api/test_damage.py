"""The server reports an error if a result in the database has a flipped bit."""

import zlib

import pytest
from sqlmodel import Session, col, select

from skyrl_tx.store.tables import RequestRow
from tests.support.live_api import Server


@pytest.mark.usefixtures("engine")
def test_damaged_result_is_a_server_error(server: Server) -> None:
    submitted = server.post("optim_step", model_id=server.model(), adam_params={})
    assert "error" not in server.result(submitted)

    def flip(tx: Session) -> None:
        row = tx.exec(select(RequestRow).where(col(RequestRow.request_id) == submitted.json()["request_id"])).one()
        assert row.result is not None
        row.result = row.result[:-1] + bytes([row.result[-1] ^ 1])

    server.store.write(flip)
    failure = server.result(submitted)
    assert failure["category"] == "server"
    assert submitted.json()["request_id"] in str(failure["error"]) and "is damaged" in str(failure["error"])


@pytest.mark.usefixtures("engine")
def test_result_of_a_newer_release_is_a_server_error(server: Server) -> None:
    submitted = server.post("optim_step", model_id=server.model(), adam_params={})
    assert "error" not in server.result(submitted)

    def replace(tx: Session) -> None:
        row = tx.exec(select(RequestRow).where(col(RequestRow.request_id) == submitted.json()["request_id"])).one()
        row.result, row.result_crc = b"unknown form", zlib.crc32(b"unknown form")

    server.store.write(replace)
    failure = server.result(submitted)
    assert failure["category"] == "server" and "its stored result cannot be read: unreadable record" in failure["error"]
