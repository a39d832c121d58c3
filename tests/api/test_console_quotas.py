"""The page of quotas for a visitor without a key, a user and an admin."""

import time
from collections.abc import Iterator

import pytest

from skyrl_tx.apps.teams import quotas, usage
from skyrl_tx.apps.teams.quotas import Subject
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.store import audit, sessions
from tests.support.console_world import ConsoleWorld, console_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as world:
        world.key("root", "admin")

        def fill(tx) -> None:
            for owner, tokens in (("ann", 48_000_000), ("bob", 500)):
                session_id = sessions.create(tx, owner=owner, now=time.time(), project_id=f"of-{owner}")
                usage.add(tx, owner, session_id, "m", time.time(), (Work(kind="training", tokens=tokens),))
            for subject, name, value in (
                *(("*", "training_tokens_per_day", 200_000_000), ("bob", "training_tokens_per_day", 500)),
                *(("project:*", "checkpoint_bytes", 5 * 10**9), ("ann", "weight", 3)),
            ):
                quotas.put(tx, Subject.parse(subject), name, value, audit.OPERATOR, time.time())

        world.server.store.write(fill)
        yield world


def test_a_user_sees_its_own_quotas_and_weight(world: ConsoleWorld) -> None:
    with world.browser(world.key("ann")) as ann:
        page = ann.get("/quotas").text
    assert "48.0M" in page and "200M" in page and "24 percent used" in page
    assert "project of-ann" in page and "0 B" in page and "5.0 GB" in page
    assert "Your weight is 3" in page
    assert "bob" not in page and 'action="/quotas' not in page and "waits until" not in page


def test_what_is_used_up_waits(world: ConsoleWorld) -> None:
    with world.browser(world.key("bob")) as bob:
        page = bob.get("/quotas").text
    assert "waits until 00:00 UTC" in page and "100 percent used" in page and "Your weight is 1" in page


def test_what_fails_says_so(world: ConsoleWorld) -> None:
    with world.browser(world.key("root", "admin")) as root:
        fields = {"form_token": root.token(), "subject": "bob", "limit": "training_tokens_per_day"}
        assert root.post("/quotas", {**fields, "value": "500", "over": "fail"}).status_code == 303
        assert "fails until 00:00 UTC" in root.get("/quotas").text
        assert root.post("/quotas", {**fields, "value": "500"}).status_code == 303
        assert "waits until 00:00 UTC" in root.get("/quotas").text


def test_an_admin_sets_and_removes_quotas(world: ConsoleWorld) -> None:
    with world.browser(world.key("root", "admin")) as root:
        page = root.get("/quotas").text
        assert "48.0M" in page and "project of-bob" in page and ">weight</code>" in page
        fields = {"form_token": root.token(), "subject": "key:7", "limit": "models_in_training"}
        assert root.post("/quotas", {**fields, "value": "12k"}).status_code == 303
        assert "12k" in root.get("/quotas").text

        for changes, reason in (
            ({"value": "many"}, "must be a whole number"),
            ({"limit": "training_steps", "value": "1"}, "unknown; choose one of"),
            ({"limit": "samples_at_once", "value": "1"}, "this limit no longer exists"),
            ({"subject": "key:x", "value": "1"}, "must be key: and the number"),
            ({"value": "1", "over": "fail"}, "only for the daily limits training_tokens_per_day"),
            ({"value": "1", "over": "queue"}, "must be one of wait, fail"),
        ):
            refused = root.post("/quotas", {**fields, **changes})
            assert refused.status_code == 400 and reason in refused.text

        assert root.post("/quotas/remove", fields).status_code == 303
        assert root.post("/quotas/remove", fields).status_code == 404
        assert "12k" not in root.get("/quotas").text

    entries = [row for row in world.server.store.read(audit.list_entries) if row.details.get("subject") == "key:7"]
    assert [(row.actor, row.details.get("value"), row.details.get("before")) for row in entries] == [
        ("root", 12_000, None),
        ("root", None, 12_000),
    ]


@pytest.mark.parametrize("path", ["/quotas", "/quotas/remove"])
def test_only_an_admin_sets_quotas(world: ConsoleWorld, path: str) -> None:
    fields = {"subject": "ann", "limit": "weight", "value": "9"}
    with world.browser() as stranger:
        assert stranger.post(path, fields).status_code == 401
    with world.browser(world.key("ann")) as ann:
        refused = ann.post(path, {"form_token": ann.token(), **fields})
        assert refused.status_code == 403 and "only admins can" in refused.text
    assert world.server.store.read(quotas.read_rules).weights == {"ann": 3}


def test_without_quotas_the_page_says_so(tmp_path) -> None:
    with console_world(tmp_path) as world, world.browser() as anyone:
        assert "No quotas are set." in anyone.get("/quotas").text
