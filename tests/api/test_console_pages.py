"""Pages of the console for unknown addresses, for a session with many samplers, and for a reply that waits."""

import time
from collections.abc import Iterator

import pytest
from sqlmodel import Session

from skyrl_tx.apps.console.health import describe_wait
from skyrl_tx.contract.ids import SamplingSessionId
from skyrl_tx.store import sessions
from skyrl_tx.store.tables import SamplingSessionRow
from tests.support.console_world import ConsoleWorld, console_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as world:
        world.key("root", "admin")
        yield world


def test_an_unknown_address_is_a_page_for_browsers_and_json_for_programs(world: ConsoleWorld) -> None:
    html = {"Accept": "text/html,application/xhtml+xml"}
    with world.browser() as browser:
        page = browser.client.get("/overwiev", headers=html)
        assert page.status_code == 404 and "there is no page" in page.text and 'href="/overview"' in page.text
        assert browser.client.get("/overwiev").json() == {"detail": "Not Found"}
        for path, status in (("/v1/nothing", 404), ("/api/v1/nothing", 404), ("/logout", 405)):
            answer = browser.client.get(path, headers={**html, "X-API-Key": world.key("ann")})
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), path
        assert browser.client.post("/overwiev", headers=html).json() == {"detail": "Not Found"}


def test_the_playground_learns_what_a_reply_waits_for(world: ConsoleWorld) -> None:
    assert "compiles a program" in describe_wait("step_sample (compiling)") and describe_wait("step_sample") == ""
    with world.browser(world.key("ann")) as ann, world.browser() as stranger:
        assert ann.get("/console/data/engine").json()["detail"]
        assert stranger.get("/console/data/engine").status_code == 401


def test_a_session_shows_its_newest_samplers_and_all_on_request(world: ConsoleWorld) -> None:
    def add(tx: Session) -> str:
        session_id = sessions.create(tx, owner="ann", now=time.time())
        tx.flush()
        for number in range(10):
            name = SamplingSessionId(f"{session_id}:sample:{number}")
            row = SamplingSessionRow(
                sampling_session_id=name,
                session_id=session_id,
                base_model="fake",
                created_at=100.0 + number,
                last_used_at=100.0,
            )
            tx.add(row)
        return session_id

    session_id = world.server.store.write(add)
    with world.browser(world.key("ann")) as ann:
        few, everything = (ann.get(f"/sessions/{session_id}{query}").text for query in ("", "?samplers=all"))
    assert few.count(":sample:") == 8 and "Show all 10 samplers" in few and ":sample:9" in few
    assert everything.count(":sample:") == 10 and "Show all" not in everything
