"""The calls that the SDK makes to a server: all endpoints that it knows, a record, and responses lost on the way.

The endpoints are rows of the table, and of docs/reference/endpoints.md. They were found by running the releases 0.16.1
to 0.38.0 and by reading them; a test compares the paths with the installed SDK.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx

_PREFIX = "/api/v1"

_RUN = "/training_runs/{run_id}"
_CHECKPOINT = _RUN + "/checkpoints/{kind}/{name}"


@dataclass(frozen=True, slots=True)
class SdkEndpoint:
    """A method and path, the releases of the SDK that call it, and which of their calls do.

    The path is below `/api/v1`, with the names of parameters that this server's routes have.
    """

    method: str
    path: str
    releases: str
    callers: str


SDK_ENDPOINTS = (
    SdkEndpoint("POST", "/client/config", "0.18+", "every client, first"),
    SdkEndpoint("POST", "/client/dynamic_config", "0.25+", "every client, again and again"),
    SdkEndpoint("POST", "/auth/token", "0.18+", "every client, before its first call with a key"),
    SdkEndpoint("POST", "/create_session", "all", "the first client of a `ServiceClient`"),
    SdkEndpoint("POST", "/session_heartbeat", "all", "every session, each 10 s"),
    SdkEndpoint("POST", "/sessions/{session_id}/finish", "0.27+", "`ServiceClient.close`"),
    SdkEndpoint("POST", "/telemetry", "all", "every client"),
    SdkEndpoint("GET", "/get_server_capabilities", "all", "`get_server_capabilities`, `tinker model list`"),
    SdkEndpoint("GET", "/healthz", "all", "nothing public"),
    SdkEndpoint("POST", "/create_model", "all", "`create_lora_training_client`"),
    SdkEndpoint("POST", "/get_info", "all", "every training client; `get_tokenizer`"),
    SdkEndpoint("POST", "/forward_backward", "all", "`forward_backward`; `forward` from 0.25"),
    SdkEndpoint("POST", "/forward", "to 0.24", "`forward`"),
    SdkEndpoint("POST", "/optim_step", "all", "`optim_step`"),
    SdkEndpoint("POST", "/save_weights", "all", "`save_state`"),
    SdkEndpoint(
        "POST", "/save_weights_for_sampler", "all", "`save_weights_for_sampler` and `…_and_get_sampling_client`"
    ),
    SdkEndpoint("POST", "/load_weights", "all", "`load_state`, `create_training_client_from_state`"),
    SdkEndpoint("POST", "/save_weights_external", "0.28+", "`save_weights_external`, `tinker checkpoint download`"),
    SdkEndpoint("POST", "/create_custom_loss", "0.36+", "`create_custom_loss`"),
    SdkEndpoint("POST", "/create_sampling_session", "all", "`create_sampling_client`"),
    SdkEndpoint("POST", "/join_sampling_session", "0.33+", "copies of sampling clients in other processes"),
    SdkEndpoint("GET", "/samplers/{sampler_id}", "all", "`create_sampling_client(model_path=…)`, `get_sampler`"),
    SdkEndpoint("POST", "/asample", "all", "`sample`, `compute_logprobs`"),
    SdkEndpoint("POST", "/retrieve_future", "all", "every future"),
    SdkEndpoint("POST", "/retrieve_futures", "0.26+", "sampling clients, one poll for all results"),
    SdkEndpoint("POST", "/cancel_future", "0.26+", "samples that the client gave up"),
    SdkEndpoint("GET", "/training_runs", "all", "`list_training_runs`, `tinker run list`"),
    SdkEndpoint("GET", _RUN, "all", "`get_training_run`, `tinker run info`, resuming recipes"),
    SdkEndpoint("GET", _RUN + "/checkpoints", "all", "`list_checkpoints`"),
    SdkEndpoint("GET", "/checkpoints", "all", "`list_user_checkpoints`, `tinker checkpoint list`"),
    SdkEndpoint("DELETE", _CHECKPOINT, "all", "`delete_checkpoint`, `tinker checkpoint delete`"),
    SdkEndpoint("POST", _CHECKPOINT + "/publish", "all", "`tinker checkpoint publish`"),
    SdkEndpoint("DELETE", _CHECKPOINT + "/publish", "all", "`tinker checkpoint unpublish`"),
    SdkEndpoint("PUT", _CHECKPOINT + "/ttl", "all", "`tinker checkpoint set-ttl`"),
    SdkEndpoint("GET", _CHECKPOINT + "/external_weights_urls", "0.28+", "`tinker checkpoint download`, `push-hf`"),
    SdkEndpoint("GET", _CHECKPOINT + "/archive", "to 0.35", "`get_checkpoint_archive_url`, the cookbook's downloads"),
    SdkEndpoint("POST", "/weights_info", "all", "`get_weights_info_by_tinker_path`"),
    SdkEndpoint("POST", "/copy_weights", "0.26+", "`copy_weights`"),
    SdkEndpoint("GET", "/sessions", "all", "`list_sessions`"),
    SdkEndpoint("GET", "/sessions/{session_id}", "all", "`get_session`"),
    SdkEndpoint("PUT", "/sessions/{session_id}/project", "0.22+", "`assign_session_project`"),
    SdkEndpoint("GET", "/sessions/{session_id}/trace_export", "0.24+", "`tinker session export-trace`"),
    SdkEndpoint("POST", "/sessions/search", "0.36+", "`search_sessions`"),
    SdkEndpoint("GET", "/audit", "0.20+", "`AdminClient.get_audit_log`"),
    SdkEndpoint("GET", "/billing/usage/events", "0.24+", "`AdminClient.get_billing_usage`, `tinker billing usage`"),
    SdkEndpoint("GET", "/billing/usage/checkpoints/current", "0.33+", "`tinker billing checkpoint-storage`"),
    SdkEndpoint("GET", "/auth/apikey/me", "0.30+", "`tinker auth login`"),
    SdkEndpoint("DELETE", "/auth/apikey/me", "0.30+", "`tinker auth logout`"),
    SdkEndpoint("POST", "/unload_model", "to 0.25", "nothing public"),
)
UNVERIFIED_ENDPOINTS = (
    SdkEndpoint("POST", "/external_weights_upload_start", "0.39+", "`external_weights_upload_start`"),
    SdkEndpoint("POST", "/checkpoints/search", "0.39+", "`search_checkpoints`"),
    SdkEndpoint("POST", "/external_weights_upload_finish", "0.39+", "`external_weights_upload_finish`"),
)
"""Endpoints of releases that are known from their reference pages only, and were not run."""


class Call(NamedTuple):
    """A call to the server. The path is below `/api/v1`."""

    method: str
    path: str
    status: int


@dataclass(slots=True)
class Traffic:
    """The calls to one server."""

    url: str
    calls: list[Call] = field(default_factory=list[Call])
    losses: list[str] = field(default_factory=list[str])
    """The paths whose next successful response is replaced by status 503."""

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the calls of all httpx clients of this process to the server."""
        send = httpx.AsyncClient.send

        async def record(client: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
            response = await send(client, request, **options)
            address, found, rest = str(request.url).partition(_PREFIX)
            if not found or httpx.URL(address) != httpx.URL(self.url):
                return response
            path = rest.partition("?")[0]
            self.calls.append(Call(request.method, path, response.status_code))
            if path not in self.losses or not response.is_success:
                return response
            self.losses.remove(path)
            await response.aclose()
            return httpx.Response(HTTPStatus.SERVICE_UNAVAILABLE, request=request, json={"detail": "lost on purpose"})

        httpx.AsyncClient.send = record  # type: ignore[method-assign]
        try:
            yield
        finally:
            httpx.AsyncClient.send = send  # type: ignore[method-assign]

    def count(self, path: str) -> int:
        """Return the number of successful calls of a path so far."""
        return sum(call.path == path and call.status < HTTPStatus.BAD_REQUEST for call in self.calls)
