"""Every field that the installed SDK may send is known to our schemas."""

import dataclasses
import typing

import pytest
from tinker import types
from tinker.types import (
    create_model_request,
    create_sampling_session_request,
    create_session_request,
    forward_backward_input,
    load_weights_request,
    optim_step_request,
    sample_request,
    save_weights_for_sampler_request,
    save_weights_request,
    session_heartbeat_request,
)
from tinker.types._pydantic_types import datum, model_input, sampling_params, tensor_data

from skyrl_tx.api.schemas import inputs, sampling, service, training, weights
from skyrl_tx.api.schemas.base import WireModel

PAIRS: list[tuple[type, type[WireModel]]] = [
    (create_session_request.CreateSessionRequest, service.CreateSessionRequest),
    (session_heartbeat_request.SessionHeartbeatRequest, service.HeartbeatRequest),
    (create_model_request.CreateModelRequest, training.CreateModelRequest),
    (types.LoraConfig, training.LoraConfig),
    (types.AdamParams, training.AdamParams),
    (forward_backward_input.ForwardBackwardInput, training.PassInput),
    (save_weights_request.SaveWeightsRequest, weights.SaveWeightsRequest),
    (save_weights_for_sampler_request.SaveWeightsForSamplerRequest, weights.SaveWeightsForSamplerRequest),
    (load_weights_request.LoadWeightsRequest, weights.LoadWeightsRequest),
    (create_sampling_session_request.CreateSamplingSessionRequest, sampling.CreateSamplingSessionRequest),
    (sample_request.SampleRequest, sampling.SampleRequest),
    (sampling_params.SamplingParams, sampling.SamplingParams),
    (model_input.ModelInput, inputs.ModelInput),
    (tensor_data.TensorData, inputs.TensorData),
    (datum.Datum, inputs.Datum),
]


def field_names(kind: type) -> set[str]:
    if dataclasses.is_dataclass(kind) and not hasattr(kind, "model_fields"):
        return {field.name for field in dataclasses.fields(kind)}
    return set(kind.model_fields)  # pyright: ignore


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda kind: kind.__name__)
def test_all_fields_of_the_sdk_are_known(theirs: type, ours: type[WireModel]) -> None:
    assert field_names(theirs) <= set(ours.model_fields)


def test_the_fields_of_an_optimizer_step_are_known() -> None:
    sent = optim_step_request.OptimStepRequest(model_id="m", optim_params=types.AdamParams()).model_dump()
    assert set(sent) <= set(training.OptimStepRequest.model_fields)


def test_all_kinds_of_chunks_are_known() -> None:
    chunk_kinds = typing.get_args(typing.get_args(types.ModelInputChunk)[0])
    assert chunk_kinds
    for kind in chunk_kinds:
        assert field_names(kind) <= set(inputs.Chunk.model_fields), kind
