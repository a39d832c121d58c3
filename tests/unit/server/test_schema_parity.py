"""The schemas cover every field that the installed SDK may send, including nested objects."""

import dataclasses
import importlib
import json
import pkgutil
import re
import typing
from types import ModuleType
from typing import Any

import pytest
import tinker.types
from tinker import types
from tinker.types import optim_step_request, provenance_spans
from tinker.types._pydantic_types import datum, model_input, sampling_params, tensor_data

import skyrl_tx.server.schemas
from skyrl_tx.compose import APPS
from skyrl_tx.launch.command import load_server_extensions
from skyrl_tx.server.app import create_app
from skyrl_tx.server.schemas import training
from skyrl_tx.server.schemas.base import WireModel
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store.database import Store

OUR_NAMES = {
    "SessionHeartbeatRequest": "HeartbeatRequest",
    "FutureRetrieveRequest": "RetrieveFutureRequest",
    "FuturesRetrieveRequest": "RetrieveFuturesRequest",
    "SampleRequest": "AsampleRequest",
}
"""Class names in the SDK and here, where they differ."""

WITHOUT_SCHEMA = {
    "ClientConfigRequest": "client/config",  # accepted in any shape: all clients get the same flags
    "CopyWeightsRequest": "copy_weights",
    "GetBillingUsageRequest": "billing/usage/events",
    "GetCurrentCheckpointStorageUsageRequest": "billing/usage/checkpoints/current",
    "SessionSearchRequest": "sessions/search",
    "TelemetrySendRequest": "telemetry",  # accepted in any shape and discarded
}
"""Requests without a schema and their paths. They are unsupported or use query parameters."""

INSIDE: list[tuple[type, type[WireModel]]] = [
    (types.LoraConfig, training.LoraConfig),
    (types.AdamOptimizerConfig, training.OptimizerConfig),
    (types.AdamParams, training.AdamParams),
    (types.ForwardBackwardInput, training.PassInput),
    (sampling_params.SamplingParams, training.WireSamplingParams),
    (model_input.ModelInput, training.ModelInput),
    (tensor_data.TensorData, training.TensorData),
    (datum.Datum, training.WireDatum),
    (types.CustomLossGraph, training.LossGraph),
    (types.CustomLossNode, training.LossGraphNode),
    (types.CustomLossInput, training.GraphInput),
    (provenance_spans.PromptProvenanceSpan, training.TokenRun),
    (provenance_spans.SampledProvenanceSpan, training.TokenRun),
]


def find_classes(package: ModuleType) -> dict[str, Any]:
    """Return all classes that a package's modules define or import, by name."""
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
    return {name: kind for module in modules for name, kind in vars(module).items() if isinstance(kind, type)}


THEIRS = {name: kind for name, kind in find_classes(tinker.types).items() if name.endswith("Request")}
OURS = {name: kind for name, kind in find_classes(skyrl_tx.server.schemas).items() if issubclass(kind, WireModel)}


def get_fields(kind: Any) -> set[str]:
    if dataclasses.is_dataclass(kind) and not hasattr(kind, "model_fields"):
        return {field.name for field in dataclasses.fields(kind)}
    return set(kind.model_fields)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("data")
    store = Store.open(directory, role="api")
    try:
        app = create_app(ApiSettings(data_dir=directory, base_model="tiny"), store, load_server_extensions(APPS))
        return app.openapi()
    finally:
        store.close()


@pytest.fixture(scope="module")
def routes(document: dict[str, Any]) -> dict[str, Any]:
    return {path.removeprefix("/api/v1/"): operations for path, operations in document["paths"].items()}


def test_openapi_document_describes_bodies(document: dict[str, Any], routes: dict[str, Any]) -> None:
    without = {
        (method, path)
        for path, operations in routes.items()
        for method, operation in operations.items()
        if method in ("post", "put") and "requestBody" not in operation
    }
    free_form = {"client/config", "client/dynamic_config", "telemetry", "auth/token", "/trackio/api/{name}"}
    assert {path for _, path in without} - free_form == {"training_runs/{run_id}/checkpoints/{kind}/{name}/publish"}, (
        "publishing has no body"
    )
    content = routes["forward_backward"]["post"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "application/x-protobuf"}
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert named <= document["components"]["schemas"].keys()
    assert {"AdamParams", "OptimStepRequest", "ChatCompletionRequest"} <= named


def test_sdk_has_requests() -> None:
    assert {"CreateModelRequest", "ForwardBackwardRequest", "SampleRequest", "LoadWeightsRequest"} <= set(THEIRS)


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_schema_has_every_field_of_the_sdk(name: str, routes: dict[str, Any]) -> None:
    ours = OURS.get(OUR_NAMES.get(name, name))
    if ours is not None:
        own = (
            {"optim_params"} if name == "OptimStepRequest" else set[str]()
        )  # sent as one of two other classes, see below
        assert get_fields(THEIRS[name]) - own <= get_fields(ours)
        return
    path = WITHOUT_SCHEMA[name]
    if path in routes and path not in ("client/config", "telemetry"):
        (operation,) = routes[path].values()
        assert get_fields(THEIRS[name]) <= {parameter["name"] for parameter in operation["parameters"]}


@pytest.mark.parametrize(("theirs", "ours"), INSIDE, ids=lambda kind: kind.__name__)
def test_nested_schema_has_every_field_of_the_sdk(theirs: type, ours: type[WireModel]) -> None:
    assert get_fields(theirs) <= get_fields(ours)


def test_optimizer_step_has_every_field_of_the_sdk() -> None:
    sent = optim_step_request.OptimStepRequest(model_id="m", optim_params=types.AdamParams()).model_dump()
    assert set(sent) <= get_fields(training.OptimStepRequest)


def test_chunk_has_every_field_of_the_sdk() -> None:
    chunk_kinds = typing.get_args(typing.get_args(types.ModelInputChunk)[0])
    assert chunk_kinds
    for kind in chunk_kinds:
        assert get_fields(kind) <= get_fields(training.InputChunk), kind


def is_unbounded(schema: dict[str, Any]) -> bool:
    """Return whether a schema accepts unbounded integers.

    Lists are checked when converted to arrays.
    """
    if schema.get("type") == "integer":
        return not schema.keys() & {"maximum", "exclusiveMaximum"}
    return any(is_unbounded(part) for part in schema.get("anyOf", ()))


@pytest.mark.parametrize("name", sorted(OURS))
def test_integers_are_bounded(name: str) -> None:
    fields: dict[str, Any] = OURS[name].model_json_schema().get("properties", {})
    assert [field for field, schema in fields.items() if is_unbounded(schema)] == []
