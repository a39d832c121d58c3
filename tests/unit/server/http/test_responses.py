"""Responses as the installed SDK reads them."""

import json
from typing import Any

import numpy as np
import pytest
from tinker.lib._pydantic_conv import deserialize_json_response
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import OptimStepResponse

from skyrl_tx.contract import codec, results
from skyrl_tx.contract.arrays import Cells
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ModelId, SamplingSessionId
from skyrl_tx.server.http import responses
from skyrl_tx.server.http.responses import (
    encode_pass,
    encode_sample,
    estimate_response_bytes,
    make_result_response,
)

PROTOBUF = "application/x-protobuf"
CELLS = Cells(crow=np.array([0, 3]), columns=np.array([3, 1, 0]))
"""One sparse row with cells in unsorted columns."""


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def test_logprobs_of_all_shapes_keep_their_order() -> None:
    logprobs = (floats(-1, -2), np.full((3, 2), -0.5, np.float32), np.full((1, 2), -0.25, np.float32), floats(-3))
    output = results.ForwardBackwardOutput(logprobs=logprobs, metrics={"loss:sum": 1.5})
    read = deserialize_forward_backward_output(encode_pass(output).SerializeToString())
    assert read.metrics == {"loss:sum": 1.5}
    assert len(read.loss_fn_outputs) == 4
    for record, expected in zip(read.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(record["logprobs"].to_numpy(), expected)


def test_sample_round_trips() -> None:
    topk = results.TopK(
        token_ids=np.array([[0, 0], [5, 6]], np.int32), logprobs=np.array([[-99999, -99999], [-1, -2]], np.float32)
    )
    output = results.SampleOutput(
        sequences=(
            results.SampledSequence(
                tokens=np.array([5, 6], np.int32), logprobs=floats(-1, -2), stop_reason="stop", topk=topk
            ),
            results.SampledSequence(tokens=np.array([7], np.int32), logprobs=floats(-3), stop_reason="length"),
        ),
        prompt=results.PromptResult(
            logprobs=floats(np.nan, -0.5),
            topk=topk,
            targets=np.array([[0, -1.5, -9, 0]], np.float32),
            alt_tokens=results.TopK(token_ids=np.array([[3]], np.int32), logprobs=np.array([[-4]], np.float32)),
            cache_hit_tokens=1,
        ),
        target_cells=CELLS,
    )
    read = deserialize_sample_response(encode_sample(output).SerializeToString())
    assert [(sequence.tokens, sequence.logprobs) for sequence in read.sequences] == [([5, 6], [-1, -2]), ([7], [-3])]
    assert [sequence.stop_reason for sequence in read.sequences] == ["stop", "length"]
    assert read.prompt_logprobs == [None, -0.5]
    assert read.topk_prompt_logprobs == [None, [(5, -1.0), (6, -2.0)]]

    targets = read.target_prompt_logprobs
    assert targets is not None and (targets.shape, list(targets.data)) == ([1, 4], [0, -1.5, 0])
    assert (targets.sparse_crow_indices, targets.sparse_col_indices) == ([0, 3], [3, 1, 0])
    assert read.prompt_alt_tokens is not None and read.prompt_alt_tokens.tokens.shape == [1, 1]
    assert read.prompt_cache_hit_tokens == 1


def test_fields_that_were_not_requested_are_absent() -> None:
    sequence = results.SampledSequence(tokens=np.array([7], np.int32), logprobs=floats(-3), stop_reason="length")
    message = encode_sample(results.SampleOutput(sequences=(sequence,)))
    assert [field.name for field, _ in message.ListFields()] == ["sequences"]


@pytest.mark.parametrize("accept", [PROTOBUF, "application/json"])
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (results.Failure(message="no", category=ErrorCategory.USER), {"error": "no", "category": "user"}),
        (results.CreateModelOutput(model_id=ModelId("m")), {"type": "create_model", "model_id": "m"}),
        (results.OptimStepOutput(metrics={"a:mean": 1.0}), {"type": "optim_step", "metrics": {"a:mean": 1.0}}),
        (results.SaveWeightsOutput(kind="weights", path="tinker://p"), {"type": "save_weights", "path": "tinker://p"}),
        (
            results.SaveWeightsOutput(kind="sampler_weights", sampling_session_id=SamplingSessionId("s")),
            {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": "s"},
        ),
        (
            results.LoadWeightsOutput(path="tinker://p", model_id=ModelId("m")),
            {"type": "load_weights", "path": "tinker://p", "model_id": "m"},
        ),
        (results.UnloadModelOutput(model_id=ModelId("m")), {"type": "unload_model", "model_id": "m"}),
    ],
)
def test_other_results_are_json_for_any_accept_header(result: Any, expected: dict[str, Any], accept: str) -> None:
    response = make_result_response(result, accept)
    assert response.status_code == 200 and response.media_type == "application/json"
    assert json.loads(bytes(response.body)) == expected


def test_old_clients_get_passes_and_samples_in_json() -> None:
    passed = results.ForwardBackwardOutput(logprobs=(floats(-0.5),), metrics={"loss:sum": 1.0})
    assert json.loads(bytes(make_result_response(passed, "application/json").body)) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": [-0.5], "dtype": "float32", "shape": [1]}}],
        "metrics": {"loss:sum": 1.0},
    }
    sequence = results.SampledSequence(tokens=np.array([7], np.int32), logprobs=floats(-3), stop_reason="length")
    sampled = results.SampleOutput(sequences=(sequence,), prompt=results.PromptResult(logprobs=floats(np.nan, -0.5)))
    assert json.loads(bytes(make_result_response(sampled, "").body)) == {
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [7], "logprobs": [-3.0]}],
        "prompt_cache_hit_tokens": 0,
        "prompt_logprobs": [None, -0.5],
    }


def test_the_gap_of_a_sample_is_in_json_and_does_not_disturb_an_sdk() -> None:
    gap = results.TrainerGap(mean=0.25, largest=0.5, num_tokens=1)
    sequence = results.SampledSequence(
        tokens=np.array([7], np.int32), logprobs=floats(-3), stop_reason="length", trainer_gap=gap
    )
    output = results.SampleOutput(sequences=(sequence,))
    [part] = json.loads(bytes(make_result_response(output, "application/json").body))["sequences"]
    assert part["trainer_gap"] == {"mean": 0.25, "max": 0.5, "num_tokens": 1}
    [read] = deserialize_sample_response(bytes(make_result_response(output, PROTOBUF).body)).sequences
    assert read.tokens == [7]


def test_non_finite_numbers_round_trip_in_json() -> None:
    """The documented keys are present even after a run has diverged."""
    metrics = {"a:mean": float("nan"), "b:max": float("inf"), "c:min": float("-inf"), "d:sum": 1.5}
    stepped = json.loads(bytes(make_result_response(results.OptimStepOutput(metrics=metrics), PROTOBUF).body))
    assert deserialize_json_response(stepped, OptimStepResponse).metrics == pytest.approx(metrics, nan_ok=True)
    passed = results.ForwardBackwardOutput(logprobs=(floats(-1, np.nan),), metrics=metrics)
    read = deserialize_forward_backward_output(bytes(make_result_response(passed, PROTOBUF).body))
    assert read.metrics == pytest.approx(metrics, nan_ok=True)
    old = json.loads(bytes(make_result_response(passed, "application/json").body))
    assert old["loss_fn_outputs"][0]["logprobs"]["data"] == [-1.0, "NaN"]
    assert old["metrics"] == {"a:mean": "NaN", "b:max": "Infinity", "c:min": "-Infinity", "d:sum": 1.5}
    pair = results.TopK(token_ids=np.array([[3]], np.int32), logprobs=floats(np.nan)[:, None])
    sequence = results.SampledSequence(
        tokens=np.array([7], np.int32), logprobs=floats(np.nan), stop_reason="length", topk=pair
    )
    [drawn] = json.loads(bytes(make_result_response(results.SampleOutput(sequences=(sequence,)), "").body))["sequences"]
    assert drawn["logprobs"] == ["NaN"] and drawn["topk_logprobs"] == [[[3, "NaN"]]]


def test_sparse_targets_round_trip_in_json() -> None:
    targets = np.array([[0, -1.5, -9, 0]], np.float32)
    output = results.SampleOutput(
        sequences=(), prompt=results.PromptResult(targets=targets, cache_hit_tokens=7), target_cells=CELLS
    )
    read = json.loads(bytes(make_result_response(output, "application/json").body))
    assert read["prompt_cache_hit_tokens"] == 7
    assert read["target_prompt_logprobs"] == {
        "data": [0, -1.5, 0],
        "dtype": "float32",
        "shape": [1, 4],
        "sparse_crow_indices": [0, 3],
        "sparse_col_indices": [3, 1, 0],
    }


def test_json_in_slices_is_the_json_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.array([0.5, -1.25, np.nan, -np.inf, 3.0], np.float32)
    tokens = np.arange(10, dtype=np.int32)
    topk = results.TopK(token_ids=tokens.reshape(5, 2), logprobs=np.full((5, 2), -1.5, np.float32))
    sequence = results.SampledSequence(stop_reason="stop", tokens=tokens[:5], logprobs=numbers, topk=topk)
    sampled = results.SampleOutput(sequences=(sequence,), prompt=results.PromptResult(logprobs=numbers))
    bodies: list[bytes] = []
    for step in (2**14, 4, 1):
        monkeypatch.setattr(responses, "_NUMBERS_PER_SLICE", step)
        bodies.append(bytes(make_result_response(sampled, "").body))
    assert bodies[0] == bodies[1] == bodies[2]
    [part] = json.loads(bodies[0])["sequences"]
    assert part["logprobs"] == [0.5, -1.25, "NaN", "-Infinity", 3.0] and len(part["topk_logprobs"]) == 5


def test_the_estimate_is_an_upper_bound() -> None:
    rng = np.random.default_rng(3)
    logprobs = (-rng.random(10_000, np.float32) * 10.0 ** rng.integers(-30, 30, 10_000)).astype(np.float32)
    topk = results.TopK(token_ids=np.full((10_000, 3), 2**31 - 1, np.int32), logprobs=np.stack([logprobs] * 3, axis=1))
    tokens = np.full(10_000, 2**31 - 1, np.int32)
    sequence = results.SampledSequence(stop_reason="length", tokens=tokens, logprobs=logprobs, topk=topk)
    for output in (
        results.SampleOutput(sequences=(sequence,)),
        results.ForwardBackwardOutput(logprobs=(logprobs,), metrics={}),
    ):
        for accept in (PROTOBUF, ""):
            estimate = estimate_response_bytes(len(codec.encode(output)), accept)
            assert len(make_result_response(output, accept).body) <= estimate
