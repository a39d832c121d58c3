"""The routes that each key scope may call, checked for all routes of the OpenAPI document."""

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from skyrl_tx.server.identity.scopes import get_scopes
from skyrl_tx.store import keys
from skyrl_tx.store.tables import KeyScope
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

OPEN = {
    "GET healthz",
    "GET livez",
    "GET trackio/version",
    "GET traces/{session_id}",
    "GET downloads/{run_id}/{kind}/{name}/{form}/{file}",
    "PUT uploads/{upload_id}/{file}",
}
CLIENT = {
    *("POST auth/token", "GET auth/apikey/me", "DELETE auth/apikey/me", "POST telemetry"),
    *("POST client/config", "POST client/dynamic_config", "GET get_server_capabilities"),
    *("GET samplers/{sampler_id}", "POST weights_info"),
}
SAMPLING = {
    *("POST create_session", "POST session_heartbeat", "POST sessions/{session_id}/finish"),
    *("POST create_sampling_session", "POST join_sampling_session", "POST asample"),
    *("POST retrieve_future", "POST retrieve_futures", "POST cancel_future"),
}
OTHER_APIS = {
    *("POST oai/api/v1/completions", "POST oai/api/v1/chat/completions"),
    *("GET oai/api/v1/models", "GET oai/api/v1/models/{model_id}"),
    *("POST anthropic/api/v1/messages", "POST anthropic/api/v1/messages/count_tokens"),
}
CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"
READING = {
    *("GET sessions", "POST sessions/search", "GET sessions/{session_id}", "POST get_info", "GET training_runs"),
    *("GET training_runs/{run_id}", "GET training_runs/{run_id}/checkpoints", "GET checkpoints"),
    *("POST checkpoints/search", "POST search_checkpoints"),
    *(f"GET {CHECKPOINT}/external_weights_urls", f"GET {CHECKPOINT}/archive"),
    *("GET billing/usage/events", "GET billing/usage/checkpoints/current"),
    *("GET sessions/{session_id}/trace_export",),
    *("GET training_runs/{run_id}/metrics", "GET logged_runs", "GET logged_runs/{logged_run_id}/metrics"),
}
CHANGING = {
    *(
        "POST create_model",
        "POST create_custom_loss",
        "POST forward_backward",
        "POST forward",
        "POST optim_step",
        "POST unload_model",
    ),
    *("POST save_weights", "POST save_weights_for_sampler", "POST save_weights_external", "POST load_weights"),
    *("POST copy_weights", "PUT sessions/{session_id}/project", f"DELETE {CHECKPOINT}", f"PUT {CHECKPOINT}/ttl"),
    *(f"POST {CHECKPOINT}/publish", f"DELETE {CHECKPOINT}/publish"),
    *("POST external_weights_upload_start", "POST external_weights_upload_finish"),
    *("POST training_runs/{run_id}/metrics", "PUT logged_runs/{logged_run_id}/training_run"),
    "POST trackio/api/{name}",
}
FOR_ADMINS = {"GET audit"}
ADMITTED: dict[KeyScope, set[str]] = {
    "admin": CLIENT | SAMPLING | READING | CHANGING | OTHER_APIS | FOR_ADMINS,
    "user": CLIENT | SAMPLING | READING | CHANGING | OTHER_APIS,
    "sample": CLIENT | SAMPLING | OTHER_APIS,
    "read": CLIENT | READING,
    "metrics": set(),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    folder: Path = tmp_path_factory.mktemp("stack")
    with live_stack("fake", folder) as stack:
        yield stack


def create_key(stack: LiveStack, scope: KeyScope) -> str:
    key, _ = stack.server.store.write(
        lambda tx: keys.create(tx, owner="ann", scope=scope, name=scope, note="", now=1.0)
    )
    return key


def routes(stack: LiveStack) -> set[str]:
    paths = stack.server.api.app.openapi()["paths"]
    return {
        f"{method.upper()} {path.removeprefix('/api/v1').lstrip('/')}"
        for path, methods in paths.items()
        for method in methods
    }


def test_every_route_has_the_expected_scopes(stack: LiveStack) -> None:
    assert routes(stack) == OPEN | CLIENT | SAMPLING | READING | CHANGING | OTHER_APIS | FOR_ADMINS
    for route in routes(stack) - OPEN:
        name = route.replace("{model_id}", "{model_id:path}")
        assert get_scopes(name) == {scope for scope, admitted in ADMITTED.items() if route in admitted}, route
    assert get_scopes("GET metrics") == {"admin", "user", "metrics"}
    assert get_scopes("POST of_next_year") == {"admin", "user"}, "an unlisted route admits no narrow scope"


@pytest.mark.parametrize("scope", ADMITTED)
def test_every_route_refuses_the_scopes_that_it_does_not_admit(stack: LiveStack, scope: KeyScope) -> None:
    for route in sorted(routes(stack) - OPEN):
        method, path = route.split()
        headers = {"X-API-Key": create_key(stack, scope)}
        filled = path.replace("{", "").replace("}", "")
        prefix = "" if route in OTHER_APIS or filled.startswith("trackio/") else "/api/v1"
        answer = stack.server.client.request(method, f"{prefix}/{filled}", headers=headers)
        is_refused = answer.status_code == HTTPStatus.FORBIDDEN
        assert is_refused == (route not in ADMITTED[scope]), (route, answer.text)
        if is_refused:
            error = answer.json().get("error", {})
            detail = error["message"] if route in OTHER_APIS else answer.json()["detail"]
            name = route.replace("{model_id}", "{model_id:path}")
            assert detail.startswith(f"X-API-Key: a key of scope {scope} does not allow {name}; it")


def test_open_routes_need_no_scope(stack: LiveStack) -> None:
    headers = {"X-API-Key": create_key(stack, "metrics")}
    assert stack.server.client.get("/api/v1/healthz", headers=headers).status_code == HTTPStatus.OK


def test_sampling_key_samples_through_the_sdk_and_changes_nothing(stack: LiveStack) -> None:
    with tinker.ServiceClient(base_url=stack.url, api_key=create_key(stack, "user")) as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        path = training.save_weights_for_sampler("a").result().path
    params = types.SamplingParams(max_tokens=3, seed=1, stop=[])

    with tinker.ServiceClient(base_url=stack.url, api_key=create_key(stack, "sample")) as service:
        for weights in ({"model_path": path}, {"base_model": PUBLIC_NAME}):
            sampler = service.create_sampling_client(**weights).result()
            drawn = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params).result()
            assert len(drawn.sequences[0].tokens) == 3
        with pytest.raises(
            tinker.PermissionDeniedError, match="a key of scope sample does not allow POST create_model"
        ):
            service.create_lora_training_client(PUBLIC_NAME, rank=8).result()
        with pytest.raises(tinker.PermissionDeniedError, match="it needs scope admin or user"):
            tinker.RestClient(
                base_url=stack.url, api_key=create_key(stack, "sample")
            ).delete_checkpoint_from_tinker_path(path).result()


def test_reading_key_lists_and_downloads(stack: LiveStack) -> None:
    with tinker.ServiceClient(base_url=stack.url, api_key=create_key(stack, "user")) as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        path = training.save_weights_external("b").result().path
    rest = tinker.RestClient(base_url=stack.url, api_key=create_key(stack, "read"))
    listed = rest.list_user_checkpoints().result().checkpoints
    assert path in {checkpoint.tinker_path for checkpoint in listed}

    urls = rest.get_external_weights_urls(path).result().urls
    assert httpx.get(urls["adapter_config.json"]).status_code == HTTPStatus.OK
    with pytest.raises(tinker.PermissionDeniedError, match="scope read does not allow"):
        rest.publish_checkpoint_from_tinker_path(path).result()
    with (
        pytest.raises(tinker.PermissionDeniedError, match="scope read does not allow POST create_session"),
        tinker.ServiceClient(base_url=stack.url, api_key=create_key(stack, "read")) as service,
    ):
        service.create_sampling_client(base_model=PUBLIC_NAME).result()


@pytest.mark.parametrize(("scope", "is_accepted"), [("read", True), ("sample", False)])
def test_delegated_access_takes_a_key_that_allows_to_read_weights(
    stack: LiveStack, scope: KeyScope, is_accepted: bool
) -> None:
    with tinker.ServiceClient(base_url=stack.url, api_key=create_key(stack, "user")) as service:
        path = service.create_lora_training_client(PUBLIC_NAME, rank=8).result().save_state(scope).result().path
    bob, _ = stack.server.store.write(lambda tx: keys.create(tx, owner="bob", scope="user", name="b", note="", now=1.0))
    with tinker.ServiceClient(base_url=stack.url, api_key=bob) as service:
        load = service.create_training_client_from_state(path, weights_access_token=create_key(stack, scope))
        if is_accepted:
            assert load.result() is not None
        else:
            with pytest.raises(tinker.RequestFailedError, match="scope sample may not read weights"):
                load.result()
