"""Every route without a key, as another owner and as an admin. A new route must be classified here."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from starlette.routing import BaseRoute, Route

from skyrl_tx.apps.console.site import TABLES
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.server.routes import uploads
from skyrl_tx.store import keys
from skyrl_tx.store.tables import KeyScope
from tests.support.live_api import Server
from tests.support.live_stack import PUBLIC_NAME, live_stack

NO_SUCH_SESSION = "session-" + "0" * 32


def address(path: str) -> str:
    """Return the path of a route. Routes of other protocols have their own prefix."""
    return f"/{path}" if path.startswith(("openapi", "metrics", "trackio/")) else f"/api/v1/{path}"


def window_of_now() -> str:
    """Return a query for the usage of the previous, the current and the next hour."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = hour - timedelta(hours=1), hour + timedelta(hours=2)
    return f"starting_on={start:%Y-%m-%dT%H:00:00Z}&ending_before={end:%Y-%m-%dT%H:00:00Z}"


@dataclass(frozen=True)
class World:
    """A server that requires keys, and the ids of Ann's rows, which replace `{names}` in paths and bodies."""

    server: Server
    names: dict[str, str]

    def key(self, owner: str, scope: KeyScope = "user") -> str:
        made, _ = self.server.store.write(
            lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=1.0)
        )
        return made

    def call(self, key: str | None, method: str, path: str, /, **body: object) -> httpx.Response:
        headers = {} if key is None else {"X-API-Key": key}
        content = json.dumps(body) if body else None
        return self.server.client.request(method, address(path), content=content, headers=headers)

    def about(self, value: Any, session_id: str) -> Any:
        """Replace `{names}` by ids in Ann's session, or in a session that does not exist."""
        if isinstance(value, dict):
            return {name: self.about(part, session_id) for name, part in value.items()}
        if not isinstance(value, str):
            return value
        for name, text in self.names.items():
            value = value.replace("{" + name + "}", text.replace(self.names["session"], session_id))
        return value


@dataclass(frozen=True)
class RowRequest:
    """A request that names one of Ann's rows."""

    route: str
    path: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    is_silent: bool = False
    """If true, the response does not show whether the row exists."""
    admin_status: int = 200
    missing_status: int = 404

    @property
    def method(self) -> str:
        return self.route.split()[0]


OPEN = {
    "GET openapi.json",  # describes the software, without user data
    "GET metrics",  # needs no key from this machine, see tests/unit/server/test_monitoring.py
    "GET healthz",
    "GET livez",
    "GET trackio/version",
    "GET traces/{session_id}",  # the URL is signed
    "GET downloads/{run_id}/{kind}/{name}/{form}/{file:path}",  # the URL is signed
    "PUT uploads/{upload_id}/{file}",  # the URL is signed
}
PAGES = {
    *("GET /", "GET /login", "POST /login", "POST /logout", "GET /console/static/{digest}/{name:path}"),
    *(f"{method} {path}" for table in TABLES for method, path, _ in table.routes),
    *("POST /console/chat", "POST /console/render", "POST /console/score"),
}
"""Pages and routes of the console, which `test_console_access` and `test_playground` test."""
COMMON = {
    *("POST auth/token", "GET auth/apikey/me", "DELETE auth/apikey/me"),
    *("POST client/config", "POST client/dynamic_config", "GET get_server_capabilities", "POST telemetry"),
    *("POST create_session", "POST create_custom_loss"),
    *("GET {path:path}", "POST {path:path}", "PUT {path:path}"),
    *("DELETE {path:path}", "PATCH {path:path}", "POST trackio/api/{name}"),
}
"""Routes that send the same response to every caller with a key."""
UPLOADS = {"POST external_weights_upload_start"}
"""Creates an upload of the caller; `tests/api/test_uploads.py` tests it."""
FOR_ADMINS = {"GET audit"}
"""Routes for admins only; `tests/api/test_audit.py` tests them."""
OTHER_APIS = {
    *("POST completions", "POST chat/completions", "GET models", "GET models/{model_id:path}"),
    *("POST messages", "POST messages/count_tokens"),
}
"""Other prefixes of the OpenAI and Anthropic endpoints; `test_chat.py` tests the owners of the rows they use."""
PREFIXES = "/oai/api/v1", "/anthropic/api/v1", "/api/v1", "/v1"
LISTS = {
    "GET sessions": "sessions?access_scope=accessible",
    "GET training_runs": "training_runs?access_scope=accessible",
    "GET checkpoints": "checkpoints",
    "GET logged_runs": "logged_runs?access_scope=accessible",
    "GET billing/usage/events": "billing/usage/events?" + window_of_now(),
    "GET billing/usage/checkpoints/current": "billing/usage/checkpoints/current",
    "POST sessions/search": "sessions/search",
    "POST checkpoints/search": "checkpoints/search",
    "POST search_checkpoints": "search_checkpoints",
}
CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"
THINGS = [
    RowRequest("POST session_heartbeat", body={"session_id": "{session}"}),
    RowRequest("GET sessions/{session_id}", "sessions/{session}"),
    RowRequest("GET sessions/{session_id}/trace_export", "sessions/{session}/trace_export"),
    RowRequest("PUT sessions/{session_id}/project", "sessions/{session}/project", {"project_id": "p"}),
    RowRequest(
        "POST create_model",
        body={
            "session_id": "{session}",
            "model_seq_id": 8,
            "base_model": PUBLIC_NAME,
            "lora_config": {"rank": 8},
        },
    ),
    RowRequest("POST get_info", body={"model_id": "{run}"}),
    RowRequest("POST forward_backward", body={"model_id": "{run}", "seq_id": 101}),
    RowRequest("POST forward", body={"model_id": "{run}", "seq_id": 102}),
    RowRequest("POST optim_step", body={"model_id": "{run}", "seq_id": 103}),
    RowRequest("POST save_weights", body={"model_id": "{run}", "seq_id": 104, "path": "x"}),
    RowRequest("POST save_weights_for_sampler", body={"model_id": "{run}", "seq_id": 105, "path": "x"}),
    RowRequest("POST save_weights_external", body={"model_id": "{run}", "seq_id": 106, "path": "x"}),
    RowRequest("POST load_weights", body={"model_id": "{run}", "seq_id": 107, "path": "{state}"}),
    RowRequest("POST load_weights", body={"session_id": "{session}", "model_seq_id": 9, "path": "{state}"}),
    RowRequest("POST weights_info", body={"tinker_path": "{state}"}),
    RowRequest("POST copy_weights", body={"session_id": "{session}", "model_seq_id": 10, "source_path": "{state}"}),
    RowRequest(
        "POST create_sampling_session",
        body={"session_id": "{session}", "sampling_session_seq_id": 9, "base_model": PUBLIC_NAME},
    ),
    RowRequest("POST join_sampling_session", body={"sampling_session_id": "{sampling}"}),
    RowRequest("GET samplers/{sampler_id}", "samplers/{sampling}"),
    RowRequest("POST asample", body={"sampling_session_id": "{sampling}", "seq_id": 9}),
    RowRequest(
        "POST retrieve_future", body={"request_id": "{request}"}, missing_status=410
    ),  # the same status as for a pruned future
    RowRequest(
        "POST retrieve_futures",
        body={"target": {"type": "sampling_session", "sampling_session_id": "{sampling}"}, "timeout": 0},
    ),
    RowRequest("POST cancel_future", body={"request_id": "{request}"}, is_silent=True, admin_status=400),
    RowRequest("GET training_runs/{run_id}", "training_runs/{run}"),
    RowRequest("GET training_runs/{run_id}/checkpoints", "training_runs/{run}/checkpoints"),
    RowRequest("POST training_runs/{run_id}/metrics", "training_runs/{run}/metrics", {"step": 1, "metrics": {"a": 1}}),
    RowRequest("GET training_runs/{run_id}/metrics", "training_runs/{run}/metrics"),
    RowRequest("GET logged_runs/{logged_run_id}/metrics", "logged_runs/1/metrics"),
    RowRequest(
        "PUT logged_runs/{logged_run_id}/training_run", "logged_runs/1/training_run", {"training_run_id": "{run}"}
    ),
    RowRequest(f"POST {CHECKPOINT}/publish", "training_runs/{run}/checkpoints/weights/state/publish"),
    RowRequest(f"DELETE {CHECKPOINT}/publish", "training_runs/{run}/checkpoints/weights/state/publish"),
    RowRequest(f"PUT {CHECKPOINT}/ttl", "training_runs/{run}/checkpoints/weights/state/ttl", {"ttl_seconds": 7200}),
    RowRequest(
        f"GET {CHECKPOINT}/external_weights_urls",
        "training_runs/{run}/checkpoints/external_weights/external/external_weights_urls",
    ),
    RowRequest(f"GET {CHECKPOINT}/archive", "training_runs/{run}/checkpoints/weights/state/archive", admin_status=302),
    RowRequest(f"DELETE {CHECKPOINT}", "training_runs/{run}/checkpoints/external_weights/external", admin_status=204),
    RowRequest("POST external_weights_upload_finish", body={"upload_id": "{upload}"}, admin_status=400),
    RowRequest("POST unload_model", body={"model_id": "{run}", "seq_id": 110}),
    RowRequest("POST sessions/{session_id}/finish", "sessions/{session}/finish", {"reason": {"type": "success"}}),
]


def start_upload(server: Server, owner: str) -> str:
    """Start an upload without files. The fake backend has no base model whose files imply a size."""
    unfinished = uploads.Uploads(server.settings)
    with patch.object(uploads, "call_child", lambda _: '{"max_bytes": 1}'):
        started = unfinished.start(
            owner=owner, key_id=1, base_model=PUBLIC_NAME, lora=LoraSpec(rank=2, seed=0), project_id=None, ttl_s=3600.0
        )
    return started[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with live_stack("fake", tmp_path_factory.mktemp("stack"), failed_key_limit=0) as stack:
        server = stack.server
        world = World(server, {})
        ann = world.key("ann")
        server.client.headers["X-API-Key"] = ann
        session = server.session()
        run = server.model(session)

        saved = server.post("save_weights", model_id=run, seq_id=1, path="state")
        state = str(server.result(saved)["path"])
        server.result(server.post("save_weights_for_sampler", model_id=run, seq_id=2, path="sampler"))
        server.result(server.post("save_weights_external", model_id=run, seq_id=3, path="external"))
        sampling = server.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=PUBLIC_NAME
        )
        logged = server.post(f"training_runs/{run}/metrics", step=1, metrics={"reward": 0.5})
        assert logged.json() == {"is_new": True}

        upload = start_upload(server, "ann")
        del server.client.headers["X-API-Key"]
        world.names.update(
            upload=upload,
            session=session,
            run=run,
            state=state,
            sampler=f"tinker://{run}/sampler_weights/sampler",
            sampling=sampling.json()["sampling_session_id"],
            request=saved.json()["request_id"],
        )
        yield world


def list_routes(routes: Iterable[BaseRoute], *, is_included: bool = False) -> Iterator[str]:
    """Yield the names of all routes.

    Included routers are nested in some FastAPI releases and flattened in other releases.
    """
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from list_routes(router.routes, is_included=True)
        else:
            assert isinstance(route, Route), f"unknown kind of route: {route}"
            for method in (route.methods or set()) - {"HEAD"}:
                prefix = next((candidate for candidate in PREFIXES if route.path.startswith(f"{candidate}/")), "")
                name = f"{method} {route.path}"
                # Pages have the paths of Tinker's console; some differ from API routes only by the
                # prefix.
                yield (
                    name
                    if name in PAGES and not is_included
                    else f"{method} {route.path.removeprefix(prefix).lstrip('/')}"
                )


def test_every_route_is_classified(world: World) -> None:
    classes = [OPEN, COMMON, UPLOADS, FOR_ADMINS, OTHER_APIS, PAGES, set(LISTS), {thing.route for thing in THINGS}]
    assert sum(map(len, classes)) == len(set().union(*classes)), "a route has one class"
    assert set(list_routes(world.server.api.app.routes)) == set().union(*classes)


@pytest.mark.parametrize("route", sorted(OPEN))
def test_open_routes_need_no_key(world: World, route: str) -> None:
    method, path = route.split()
    assert world.server.client.request(method, address(path)).status_code not in (401, 404)


@pytest.mark.parametrize("route", sorted(COMMON | UPLOADS | FOR_ADMINS | set(LISTS)))
@pytest.mark.parametrize("key", [None, "tml-unknown", "eyJhbGciOiJub25lIn0.e30.", "nonsense"])
def test_unauthenticated_caller_gets_401(world: World, route: str, key: str | None) -> None:
    method, path = route.split()
    answer = world.call(key, method, path)
    assert answer.status_code == 401 and "X-API-Key" in answer.json()["detail"]
    assert ("invalid_token" in answer.headers["www-authenticate"]) == (key is not None and key[:4] != "tml-")


@pytest.mark.parametrize("route", sorted(COMMON))
def test_common_routes_show_no_data_of_other_owners(world: World, route: str) -> None:
    method, path = route.split()
    for key in (world.key("bob"), world.key("root", "admin")):
        answer = world.call(key, method, path)
        assert answer.status_code in (200, 204, 404) and world.names["session"] not in answer.text
        if answer.status_code == 404:
            detail = answer.json()["detail"]
            assert "has no endpoint" in detail or "does not evaluate custom losses" in detail


@pytest.mark.parametrize("route", sorted(LISTS))
def test_lists_contain_only_visible_rows(world: World, route: str) -> None:
    method, body = route.split()[0], {"owner": {"type": "accessible"}} if "search" in route else {}
    bob, root = (
        world.call(key, method, LISTS[route], **body) for key in (world.key("bob"), world.key("root", "admin"))
    )
    assert bob.status_code == root.status_code == 200
    assert "ann" not in bob.text and world.names["session"] not in bob.text
    assert route == "GET checkpoints" or "ann" in root.text or world.names["session"] in root.text


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.route)
def test_rows_of_another_owner_return_404(world: World, thing: RowRequest) -> None:
    ann, missing = world.names["session"], NO_SUCH_SESSION
    path = thing.path or thing.route.split()[1]
    body = world.about(thing.body, ann)
    assert world.call(None, thing.method, world.about(path, ann), **body).status_code == 401
    bob = world.key("bob")
    refused = world.call(bob, thing.method, world.about(path, ann), **body)
    unknown = world.call(bob, thing.method, world.about(path, missing), **world.about(thing.body, missing))
    assert refused.status_code == unknown.status_code == (200 if thing.is_silent else thing.missing_status)
    assert refused.text.replace(ann, missing) == unknown.text or "{request}" in str(thing.body)
    admitted = world.call(world.key("root", "admin"), thing.method, world.about(path, ann), **body)
    assert admitted.status_code == thing.admin_status, admitted.text
