"""Rows about sessions, checkpoints, runs and accounts."""

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any

import httpx
import tinker
from tinker import types

from skyrl_tx.tools.conformance.sampling_rows import wait_for
from skyrl_tx.tools.conformance.server import NUM_TOKENS, RANK, TTL_S, ConformanceTable, Server, Skip, expect

ROWS = ConformanceTable()

_PROJECT = os.environ.get("TINKER_PROJECT_ID", "skyrl-tx-conformance")


@ROWS.row("checkpoints", tokens=2 * NUM_TOKENS)
def resume_weights(server: Server) -> None:
    """Weights without the optimizer resume a run."""
    found, expected = (server.forward(client).metrics["loss:sum"] for client in (server.resume(), server.training))
    server.expect_loss(found, expected)


@ROWS.row("checkpoints", tokens=7 * NUM_TOKENS)
def resume_optimizer(server: Server) -> None:
    """Weights with the optimizer continue a run."""
    first, third = server.resume(), server.resume()
    server.forward_backward(first)
    server.step(first)
    path = first.save_state("middle", ttl_seconds=TTL_S).result().path
    third.load_state_with_optimizer(path).result()  # pyright: ignore[reportDeprecated] (programs still use it)
    losses = list[float]()
    for client in (first, server.resume(path), third):
        server.forward_backward(client)
        server.step(client)
        losses.append(server.forward(client).metrics["loss:sum"])
    server.expect_loss(losses[1], losses[0])
    server.expect_loss(losses[2], losses[0])


@ROWS.row("checkpoints")
def describe(server: Server) -> None:
    """A checkpoint and its run are listed and described."""
    path, run_id, rest = server.start, server.training.model_id, server.rest
    info, run = rest.get_weights_info_by_tinker_path(path).result(), rest.get_training_run_by_tinker_path(path).result()
    found = {(own.base_model, own.lora_rank, own.is_lora) for own in (info, run)}
    expect(found == {(server.base_model, RANK, True)}, f"they are {found}")
    expect(run.last_checkpoint and run.last_checkpoint.tinker_path == path, "last_checkpoint is another one")
    listed = rest.list_user_checkpoints(limit=100).result().checkpoints
    expect(path in {own.tinker_path for own in listed}, "the checkpoint is not in the list")
    runs = rest.list_training_runs(limit=100).result().training_runs
    expect(run_id in {own.training_run_id for own in runs}, "the run is not in the list")


@ROWS.row("checkpoints")
def change_lifetime(server: Server) -> None:
    """The lifetime of a checkpoint can be changed."""
    server.rest.set_checkpoint_ttl_from_tinker_path(server.start, 2 * TTL_S).result()
    expires = _find(server, server.start).expires_at
    left_s = (expires - datetime.now(UTC)).total_seconds() if expires else 0
    expect(1.5 * TTL_S < left_s < 2.5 * TTL_S, f"expires_at is {expires}")


@ROWS.row("checkpoints", is_optional=True)
def publish(server: Server) -> None:
    """A checkpoint can be published and unpublished."""
    server.rest.publish_checkpoint_from_tinker_path(server.start).result()
    found = [_find(server, server.start).public]
    server.rest.unpublish_checkpoint_from_tinker_path(server.start).result()
    found.append(_find(server, server.start).public)
    expect(found == [True, False], f"public is {found[0]}, then {found[1]}")


@ROWS.row("checkpoints", is_optional=True)
def download(server: Server) -> None:
    """Weights can be downloaded in the PEFT format."""
    path = server.training.save_weights_external("external", ttl_seconds=TTL_S).result().path
    urls = server.rest.get_external_weights_urls(path).result().urls
    config = httpx.get(urls["adapter_config.json"], follow_redirects=True).raise_for_status().json()
    expect(config.get("r") == RANK, f"r in adapter_config.json is {config.get('r')}")
    with httpx.stream("GET", urls["adapter_model.safetensors"], follow_redirects=True) as response:
        expect(next(response.iter_bytes(16))[8:9] == b"{", "adapter_model.safetensors has no header")


@ROWS.row("checkpoints", is_optional=True)
def copy(server: Server) -> None:
    """A checkpoint can be copied."""
    path = server.rest.copy_weights(server.start, _PROJECT, ttl_seconds=TTL_S).result()
    server.copies.append(path)
    expect(server.rest.get_weights_info_by_tinker_path(path).result().lora_rank == RANK, "the copy has another rank")


@ROWS.row("checkpoints")
def delete(server: Server) -> None:
    """A deleted checkpoint is gone."""
    path = server.training.save_weights_for_sampler("deleted", ttl_seconds=TTL_S).result().path
    server.rest.delete_checkpoint_from_tinker_path(path).result()
    listed = server.rest.list_checkpoints(server.training.model_id).result().checkpoints
    expect(path not in {own.tinker_path for own in listed}, "it is still listed")


@ROWS.row("checkpoints", is_optional=True)
def search_checkpoints(server: Server) -> None:
    """Checkpoints can be searched (SDK 0.39)."""
    search, request = _find_new(server.rest, "search_checkpoints"), _find_new(types, "CheckpointSearchRequest")
    found = search(request(base_models=[server.base_model])).result().checkpoints
    expect(server.start in {own.tinker_path for own in found}, "the search does not find it")


@ROWS.row("checkpoints", is_optional=True)
def start_upload(server: Server) -> None:
    """An upload of weights can be started (SDK 0.39)."""
    start = _find_new(server.rest, "external_weights_upload_start")
    expect(start(server.base_model, types.LoraConfig(rank=RANK)).result().urls, "there are no URLs")


@ROWS.row("session")
def find_session(server: Server) -> None:
    """A session is found by its id and in the list."""
    session_id = server.training.model_id.partition(":")[0]
    found = server.rest.get_session(session_id).result()
    expect(server.training.model_id in found.training_run_ids, f"its runs are {found.training_run_ids}")
    expect((found.user_metadata or {}).get("purpose") == "conformance", f"its metadata is {found.user_metadata}")
    expect(session_id in server.rest.list_sessions(limit=100).result().sessions, "it is not in the list")


def _search(server: Server, session_id: str) -> bool:
    request = types.SessionSearchRequest(session_id=session_id)
    found = server.rest.search_sessions(request).result()  # pyright: ignore[reportDeprecated] (experimental)
    return [own.session_id for own in found.sessions] == [session_id]


def _get_usage(server: Server) -> object:
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return _admin(server).get_billing_usage(end - timedelta(hours=2), end).result()


_CALLS: dict[str, Callable[[Server, str], object]] = {
    "session: Sessions can be searched": _search,
    "session: A session can move to a project": lambda s, own: s.rest.assign_session_project(own, _PROJECT).result(),
    "session: A trace of a session can be exported": lambda s, own: s.rest.export_session_trace(own).result(),
    "session: The server reports its health": lambda s, _: _get(s, "healthz"),
    "account: Usage of the last hours": lambda s, _: _get_usage(s),
    "account: Current storage of checkpoints": lambda s, _: _admin(s).get_current_checkpoint_storage_usage().result(),
    "account: Audit log of today": lambda s, _: _admin(s).get_audit_log().result(),
    "account: The key is described, as for `tinker auth login`": lambda s, _: _get(s, "auth/apikey/me")["key_id"],
}
"""Calls, with the id of the session, that only have to succeed. If a call returns a bool, it must be true."""


def check_call(call: Callable[[Server, str], object], server: Server) -> None:
    """Make a call with the id of the session."""
    expect(call(server, server.training.model_id.partition(":")[0]) is not False, "the answer is another one")


for _name, _call in _CALLS.items():
    ROWS.row(*_name.split(": ", 1), is_optional=True)(partial(check_call, _call))


@ROWS.row("session")
def heartbeat(server: Server) -> None:
    """Heartbeats are accepted."""
    expect(server.training, "there is no session")
    wait_for(lambda: server.traffic.count("/session_heartbeat") > 0)


def _admin(server: Server) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.traffic.url, api_key=server.api_key)


def _find(server: Server, path: str) -> types.Checkpoint:
    listed = server.rest.list_checkpoints(server.training.model_id).result().checkpoints
    return next(found for found in listed if found.tinker_path == path)


def _get(server: Server, path: str) -> Any:
    """Return the JSON of an address that the SDK has no method for. Raises Skip for a refusal."""

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(timeout=60.0) as client:
            return await client.get(f"{server.traffic.url}/api/v1/{path}", headers={"X-API-Key": server.api_key})

    answer = asyncio.run(get())
    if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        raise Skip("not offered", f"status {answer.status_code}")
    return answer.raise_for_status().json()


def _find_new(place: Any, name: str) -> Any:
    """Return an attribute of a newer SDK. Raises Skip if this SDK does not have it."""
    if not hasattr(place, name):
        raise Skip("not offered", f"tinker {tinker.__version__} has no {name}")
    return getattr(place, name)
