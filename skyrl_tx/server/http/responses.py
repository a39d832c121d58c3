"""Encodes stored results as responses of `retrieve_future`.

The Accept header of the client decides between protobuf and JSON.
"""

import math
from dataclasses import asdict
from itertools import groupby
from typing import cast

import msgspec
import numpy as np
from fastapi import Response
from msgspec import UNSET

from skyrl_tx.contract import codec, results
from skyrl_tx.contract.arrays import Cells, Float32Array, NumberArray
from skyrl_tx.server.http.body import PROTOBUF
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.tensors import batch_to_proto, to_proto

_OUTPUT_TYPE = "ArrayRecord"
_NOT_COMPUTED = -99999.0
_STOP_REASONS: dict[results.StopReason, wire_pb2.StopReason] = {
    "stop": wire_pb2.STOP_REASON_STOP,
    "length": wire_pb2.STOP_REASON_LENGTH,
}


def make_result_response(result: results.Result, accept: str) -> Response:
    """Encode a result.

    A failed request also gets status 200: the SDK would poll again after any other status.
    """
    if PROTOBUF in accept:
        if isinstance(result, results.ForwardBackwardOutput):
            return Response(encode_pass(result).SerializeToString(), media_type=PROTOBUF)
        if isinstance(result, results.SampleOutput):
            return Response(encode_sample(result).SerializeToString(), media_type=PROTOBUF)
    return Response(msgspec.json.encode(result_to_json(result)), media_type="application/json")


def encode_pass(output: results.ForwardBackwardOutput) -> wire_pb2.ForwardBackwardOutput:
    """Encode the result of a training pass.

    Consecutive datums whose arrays have the same trailing shape share one record.
    """
    message = wire_pb2.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE, metrics=dict(output.metrics))
    for _, group in groupby(output.logprobs, key=lambda array: array.shape[1:]):
        run = [*group]
        record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(run))
        record.fields["logprobs"].CopyFrom(batch_to_proto(run))
    return message


def encode_sample(output: results.SampleOutput) -> wire_pb2.SampleResponse:
    """Encode the result of a sample request. Fields that the client did not request are absent."""
    prompt = output.prompt
    message = wire_pb2.SampleResponse(prompt_cache_hit_tokens=prompt.cache_hit_tokens)

    # The sampled sequences.
    for sequence in output.sequences:
        part = message.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens.tobytes(),
            logprobs=sequence.logprobs.tobytes(),
        )
        if sequence.topk is not None:
            part.topk_sampled_logprobs.CopyFrom(_encode_topk(sequence.topk))

    # What the client asked about the prompt.
    if prompt.logprobs is not None:
        message.prompt_logprobs = prompt.logprobs.tobytes()
    if prompt.topk is not None:
        message.topk_prompt_logprobs.CopyFrom(_encode_topk(prompt.topk))
    if prompt.targets is not None:
        message.target_prompt_logprobs.CopyFrom(to_proto(prompt.targets, output.target_cells))
    if prompt.alt_tokens is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(to_proto(prompt.alt_tokens.token_ids))
        message.prompt_alt_tokens.logprobs.CopyFrom(to_proto(prompt.alt_tokens.logprobs))
    return message


def result_to_json(result: results.Result) -> dict[str, object]:
    """Convert a result to a JSON object. The key `error` exists only in failures.

    A kind without a case below becomes an object with its fields, and with the kind of the request
    as `type`.
    """
    match result:
        case results.Failure():
            return {"error": result.message, "category": result.category.value}

        case results.ForwardBackwardOutput():
            outputs = [{"logprobs": _tensor_to_json(logprobs)} for logprobs in result.logprobs]
            return {
                "loss_fn_output_type": _OUTPUT_TYPE,
                "loss_fn_outputs": outputs,
                "metrics": _metrics_to_json(result.metrics),
            }
        case results.OptimStepOutput():
            return {"type": "optim_step", "metrics": _metrics_to_json(result.metrics)}

        case results.SaveWeightsOutput():
            if result.kind == "weights":
                return {"type": "save_weights", "path": result.path}
            if result.kind == "external_weights":
                return {"type": "save_weights_external", "path": result.path, "size_bytes": result.size_bytes}
            return {
                "type": "save_weights_for_sampler",
                "path": result.path,
                "sampling_session_id": result.sampling_session_id,
            }

        case results.SampleOutput():
            return _sample_to_json(result)
        case _:
            return {"type": codec.get_kind(result).removesuffix("_output"), **asdict(result)}


def _sample_to_json(output: results.SampleOutput) -> dict[str, object]:
    # The sampled sequences.
    sequences: list[dict[str, object]] = []
    for sequence in output.sequences:
        part: dict[str, object] = {
            "stop_reason": sequence.stop_reason,
            "tokens": sequence.tokens.tolist(),
            "logprobs": _numbers_to_json(sequence.logprobs),
        }
        if sequence.topk is not None:
            part["topk_logprobs"] = _topk_to_json(sequence.topk)
        if (gap := sequence.trainer_gap) is not UNSET:
            part["trainer_gap"] = {"mean": gap.mean, "max": gap.largest, "num_tokens": gap.num_tokens}
        sequences.append(part)

    # What the client asked about the prompt.
    prompt = output.prompt
    response: dict[str, object] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_cache_hit_tokens": prompt.cache_hit_tokens,
    }
    if prompt.logprobs is not None:
        response["prompt_logprobs"] = _logprobs_to_json(prompt.logprobs)
    if prompt.topk is not None:
        response["topk_prompt_logprobs"] = _topk_to_json(prompt.topk)
    if prompt.targets is not None:
        response["target_prompt_logprobs"] = _tensor_to_json(prompt.targets, output.target_cells)

    if prompt.alt_tokens is not None:
        response["prompt_alt_tokens"] = {
            "tokens": _tensor_to_json(prompt.alt_tokens.token_ids),
            "logprobs": _tensor_to_json(prompt.alt_tokens.logprobs),
        }
    return response


def _encode_topk(topk: results.TopK) -> wire_pb2.TopkLogprobs:
    length, k = topk.token_ids.shape
    return wire_pb2.TopkLogprobs(
        token_ids=topk.token_ids.tobytes(), logprobs=topk.logprobs.tobytes(), k=k, length=length
    )


def _topk_to_json(topk: results.TopK) -> list[list[tuple[int, float | str]] | None]:
    rows: list[list[tuple[int, float | str]] | None] = []
    for token_ids, logprobs in zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True):
        known = (pair for pair in zip(token_ids, logprobs, strict=True) if pair[1] != _NOT_COMPUTED)
        pairs = [(token_id, _number_to_json(logprob)) for token_id, logprob in known]
        rows.append(pairs or None)
    return rows


def _tensor_to_json(array: NumberArray, cells: Cells | None = None) -> dict[str, object]:
    values = array.reshape(-1) if cells is None else cells.of(array)
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    tensor: dict[str, object] = {"data": _numbers_to_json(values), "dtype": dtype, "shape": list(array.shape)}
    if cells is not None:
        tensor |= {"sparse_crow_indices": cells.crow.tolist(), "sparse_col_indices": cells.columns.tolist()}
    return tensor


def _numbers_to_json(array: NumberArray) -> list[float | str]:
    values = cast(list[float | str], array.tolist())
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [_number_to_json(value) for value in cast(list[float], values)]
    return values


def _logprobs_to_json(array: Float32Array) -> list[float | str | None]:
    """Convert logprobs to JSON. NaN marks a token without a logprob and becomes null."""
    return [None if math.isnan(value) else _number_to_json(value) for value in cast(list[float], array.tolist())]


def _metrics_to_json(metrics: results.Metrics) -> dict[str, float | str]:
    return {name: _number_to_json(value) for name, value in metrics.items()}


def _number_to_json(value: float) -> float | str:
    """Return a number, or its name if JSON cannot represent it, for example "NaN".

    The names come from protobuf's JSON mapping, and all SDK releases read them.
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
