"""Each action on checkpoints, projects and keys adds one entry to the audit log, which only admins can read."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime

import httpx
import pytest
import tinker

from skyrl_tx.store import audit, keys
from skyrl_tx.store.tables import AuditRow
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack


@dataclass(frozen=True)
class AuditedServer:
    """A server that requires keys, Ann's training client, and her key."""

    stack: LiveStack
    training: tinker.TrainingClient
    rest: tinker.RestClient
    key: str
    key_id: int
    state: str
    sampler: str

    def call(self, method: str, path: str, **options) -> httpx.Response:
        return self.stack.server.client.request(
            method, f"/api/v1/{path}", headers={"X-API-Key": self.key, "X-Idempotency-Key": "once"}, **options
        )

    def new_entries(self, after: int) -> list[AuditRow]:
        return [row for row in self.stack.server.store.read(audit.list_entries) if (row.position or 0) > after]

    def last(self) -> int:
        rows = self.stack.server.store.read(lambda tx: audit.list_entries(tx, newest_first=True, limit=1))
        return rows[0].position or 0 if rows else 0


def key_for(stack: LiveStack, owner: str) -> tuple[str, int]:
    scope = "admin" if owner == "root" else "user"
    now = datetime.now(UTC).timestamp()
    key, row = stack.server.store.write(
        lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=now)
    )
    assert row.key_id is not None
    return key, row.key_id


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditedServer]:
    with live_stack("fake", tmp_path_factory.mktemp("stack"), has_tokenizer=True) as stack:
        key_for(stack, "root")
        key, key_id = key_for(stack, "ann")
        with tinker.ServiceClient(base_url=stack.url, api_key=key) as service:
            training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
            state = training.save_state("state").result().path
            sampler = training.save_weights_for_sampler("sampler").result().path
            rest = tinker.RestClient(base_url=stack.url, api_key=key)
            yield AuditedServer(stack, training, rest, key, key_id, state, sampler)


def get_checkpoint_route(path: str) -> str:
    """Return the route of a checkpoint."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def publish(place: AuditedServer) -> str:
    place.rest.publish_checkpoint_from_tinker_path(place.state).result()
    return place.state


def unpublish(place: AuditedServer) -> str:
    place.rest.unpublish_checkpoint_from_tinker_path(place.state).result()
    return place.state


def set_ttl(place: AuditedServer) -> str:
    place.rest.set_checkpoint_ttl_from_tinker_path(place.state, 3600).result()
    return place.state


def load(place: AuditedServer) -> str:
    with tinker.ServiceClient(base_url=place.stack.url, api_key=place.key) as service:
        service.create_training_client_from_state(place.state).result()
    return place.state


def sample(place: AuditedServer) -> str:
    with tinker.ServiceClient(base_url=place.stack.url, api_key=place.key) as service:
        sampling = service.create_sampling_client(model_path=place.sampler).result()
        for _ in range(2):  # one entry per sampling client, not per request
            sampling.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=2)).result()
    return place.sampler


def chat(place: AuditedServer) -> str:
    body = {"model": place.sampler, "prompt": [1, 2], "max_tokens": 1}
    answer = place.stack.server.client.post("/v1/completions", json=body, headers={"X-API-Key": place.key})
    assert answer.status_code == 200, answer.text
    return place.sampler


def download(place: AuditedServer) -> str:
    assert place.call("GET", f"{get_checkpoint_route(place.state)}/archive").status_code == 302
    return place.state


def save(place: AuditedServer) -> str:
    return place.training.save_state("second").result().path


def delete(place: AuditedServer) -> str:
    path = place.training.save_state("third").result().path
    place.rest.delete_checkpoint_from_tinker_path(path).result()
    return path


@pytest.mark.parametrize(
    ("act", "event", "details"),
    [
        (publish, "checkpoint_publish", {}),
        (unpublish, "checkpoint_unpublish", {}),
        (set_ttl, "checkpoint_ttl_set", {"ttl_seconds": 3600}),
        (load, "checkpoint_read", {"purpose": "load"}),
        (sample, "checkpoint_read", {"purpose": "sample"}),
        (chat, "checkpoint_read", {"purpose": "sample"}),
        (download, "checkpoint_read", {"purpose": "download"}),
        (save, "checkpoint_create", {}),
        (delete, "checkpoint_delete", {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_act_on_a_checkpoint_leaves_one_entry(place: AuditedServer, act, event: str, details: dict) -> None:
    before = place.last()
    path = act(place)
    found = [row for row in place.new_entries(before) if row.event == event]
    assert len(found) == 1
    (row,) = found
    assert (row.actor, row.path) == ("ann", path)
    assert row.key_id == (None if act is chat else place.key_id) or row.key_id == place.key_id
    assert details.items() <= row.details.items()


def test_a_copy_is_a_read_and_a_new_checkpoint_once(place: AuditedServer) -> None:
    before = place.last()
    body = {"source_path": place.state, "destination_project_id": "p"}
    first = place.call("POST", "copy_weights", json=body)
    again = place.call("POST", "copy_weights", json=body)
    assert first.status_code == 200 and first.json() == again.json()
    read, created = place.new_entries(before)
    assert (read.event, read.path, read.details) == ("checkpoint_read", place.state, {"purpose": "copy"})
    assert (created.event, created.path) == ("checkpoint_create", first.json()["tinker_path"])


def test_projects_and_keys(place: AuditedServer) -> None:
    before, session_id = place.last(), place.training.model_id.partition(":")[0]
    assert place.call("PUT", f"sessions/{session_id}/project", json={"project_id": "p"}).status_code == 200
    key, key_id = key_for(place.stack, "bob")
    answer = place.stack.server.client.delete("/api/v1/auth/apikey/me", headers={"X-API-Key": key})
    assert answer.status_code == 204
    assigned, revoked = place.new_entries(before)
    assert assigned.event == "project_session_assigned" and assigned.details["project_id"] == "p"
    assert (revoked.event, revoked.actor, revoked.details["key"]) == ("organization_key_revoked", "bob", key_id)


def test_a_refused_act_leaves_no_entry(place: AuditedServer) -> None:
    before = place.last()
    key, _ = key_for(place.stack, "eve")
    for method, path in (
        ("POST", f"{get_checkpoint_route(place.state)}/publish"),
        ("DELETE", get_checkpoint_route(place.state)),
    ):
        answer = place.stack.server.client.request(method, f"/api/v1/{path}", headers={"X-API-Key": key})
        assert answer.status_code == 404
    assert place.new_entries(before) == []


def test_the_sdk_reads_the_log_of_a_day_and_of_a_resource(place: AuditedServer) -> None:
    admin = tinker.AdminClient(base_url=place.stack.url, api_key=key_for(place.stack, "root")[0])
    entries = admin.get_audit_log().result(timeout=300).entries
    assert [entry.timestamp for entry in entries] == sorted(entry.timestamp for entry in entries)
    saved = next(entry for entry in entries if entry.event == "checkpoint_create")
    assert saved.event_details["actor"] == "ann" and saved.tinker_path == saved.event_details["tinker_path"]
    assert saved.model_id == place.training.model_id
    only = admin.get_audit_log("organizations").result(timeout=300).entries
    assert {entry.event.partition("_")[0] for entry in only} <= {"organization"}
    assert admin.get_audit_log(day=date(2025, 1, 15)).result(timeout=300).entries == []


def test_other_owners_are_refused(place: AuditedServer) -> None:
    answer = place.call("GET", "audit")
    assert answer.status_code == 403 and "it needs scope admin" in answer.text


@pytest.mark.parametrize("query", ["event_type=cats", "day=tomorrow", "day=9999-12-31"])
def test_wrong_queries_are_refused_by_name(place: AuditedServer, query: str) -> None:
    key, _ = key_for(place.stack, "root")
    answer = place.stack.server.client.get(f"/api/v1/audit?{query}", headers={"X-API-Key": key})
    assert answer.status_code in (400, 422) and query.partition("=")[0] in answer.text
