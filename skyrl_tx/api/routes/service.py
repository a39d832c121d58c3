"""Flags, capabilities, health, telemetry."""

from http import HTTPStatus
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Response

from skyrl_tx.api.context import ApiContext, Incoming, parts_of
from skyrl_tx.api.schemas.service import (
    CapabilitiesAnswer,
    ClientConfigAnswer,
    DynamicConfigAnswer,
    HealthAnswer,
    SupportedModel,
    TelemetryAnswer,
)
from skyrl_tx.store import engine_state

router = APIRouter()


@router.post("/client/config")
def client_config(call: Incoming) -> ClientConfigAnswer:
    """Flags, the same for all: each release takes those that it knows, and these suit every release."""
    return ClientConfigAnswer()


@router.post("/client/dynamic_config")
def dynamic_config(call: Incoming) -> DynamicConfigAnswer:
    """Flags that may change while a client runs."""
    return DynamicConfigAnswer()


@router.get("/get_server_capabilities")
def capabilities(call: Incoming) -> CapabilitiesAnswer:
    """Which base models there are; the context length once the engine has said it."""
    state = call.store.read(engine_state.get)
    context_length = None if state is None else cast(int | None, state.capabilities.get("max_context_length"))
    names = call.settings.offered_names
    return CapabilitiesAnswer(
        supported_models=[SupportedModel(model_name=name, max_context_length=context_length) for name in names]
    )


@router.get("/healthz", response_model_exclude_none=True)
def health(parts: Annotated[ApiContext, Depends(parts_of)], response: Response) -> HealthAnswer:
    """Whether work is being done, for whoever asks; the API half is up when this answers at all."""
    trouble = parts.engine.trouble()
    if trouble is None:
        return HealthAnswer(status="ok")
    response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return HealthAnswer(status="waiting", detail=trouble)


@router.post("/telemetry")
def telemetry(call: Incoming) -> TelemetryAnswer:
    """Take telemetry of any shape and drop it; a client in trouble waits for this answer."""
    return TelemetryAnswer()
