"""Encodes stored results as responses of `retrieve_future`.

The Accept header of the client decides between protobuf and JSON. JSON of long arrays is encoded in
slices, because each call of the encoder holds the interpreter lock, and all other threads wait for
it.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import groupby
from typing import cast

import msgspec
import numpy as np
from fastapi import Response
from msgspec import UNSET, Raw
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from skyrl_tx.contract import codec, results
from skyrl_tx.contract.arrays import Cells, NumberArray
from skyrl_tx.server.http.body import PROTOBUF
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.tensors import batch_to_proto, to_proto

_OUTPUT_TYPE = "ArrayRecord"
_NOT_COMPUTED = -99999.0
_NUMBERS_PER_SLICE = 2**14
_BYTES_PER_SEND = 2**18
_JSON_BYTES_PER_BYTE = 6
"""Upper bound on the JSON of a stored result. A float32 has 4 bytes and up to 24 characters."""
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


def make_list_response(page: BaseModel, *, exclude_none: bool = False) -> Response:
    """Encode a page with long lists. Must be called in a thread.

    FastAPI would encode the page on the event loop, and pydantic would encode it in one call. This
    function encodes one item at a time, so that other threads can run in between.
    """
    encoded: dict[str, object] = {}
    for name, value in page:
        if isinstance(value, list):
            items = (item.model_dump_json(exclude_none=exclude_none) for item in cast(list[BaseModel], value))
            encoded[name] = Raw(f"[{','.join(items)}]".encode())
    rest = page.model_dump(mode="json", exclude={*encoded}, exclude_none=exclude_none)
    return Response(msgspec.json.encode(rest | encoded), media_type="application/json")


def estimate_response_bytes(num_stored: int, accept: str) -> int:
    """Return an upper bound on the size of the response for a stored result, without reading it.

    A protobuf response contains the bytes of the stored arrays, so it has about the same size.
    """
    return num_stored * (2 if PROTOBUF in accept else _JSON_BYTES_PER_BYTE)


class LargeResponse(Response):
    """A response that keeps its memory reserved until the client has received most of the body.

    A client that does not read cannot keep the memory forever, because `Connections` disconnects
    the client.
    """

    def __init__(self, response: Response, reservation: AsyncExitStack) -> None:
        """Send `response`, then end `reservation`."""
        super().__init__(response.body, response.status_code, media_type=response.media_type)
        self._reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body in slices. Each `send` waits until the client has read the earlier ones."""
        async with self._reservation:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            view = memoryview(self.body)
            for start in range(0, len(view), _BYTES_PER_SEND):
                part = bytes(view[start : start + _BYTES_PER_SEND])
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)  # let other requests run
            await send({"type": "http.response.body", "body": b""})


def encode_pass(output: results.ForwardBackwardOutput) -> wire_pb2.ForwardBackwardOutput:
    """Encode the result of a training pass.

    Consecutive datums whose arrays have the same trailing shape share one record.
    """
    message = wire_pb2.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE, metrics=dict(output.metrics))
    for _, group in groupby(output.logprobs, key=lambda array: array.shape[1:]):
        arrays = [*group]
        record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(arrays))
        record.fields["logprobs"].CopyFrom(batch_to_proto(arrays))
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

    A result class without a case below becomes an object with the fields of the result. Its `type`
    is the kind of the request, for example `load_weights` for a `LoadWeightsOutput`.
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
        response["prompt_logprobs"] = _numbers_to_json(prompt.logprobs, has_gaps=True)
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


def _topk_to_json(topk: results.TopK) -> Raw:
    length, k = topk.token_ids.shape

    def encode_rows(start: int, end: int) -> list[list[tuple[int, float | str]] | None]:
        rows: list[list[tuple[int, float | str]] | None] = []
        for token_ids, logprobs in zip(
            topk.token_ids[start:end].tolist(), topk.logprobs[start:end].tolist(), strict=True
        ):
            known = (pair for pair in zip(token_ids, logprobs, strict=True) if pair[1] != _NOT_COMPUTED)
            pairs = [(token_id, _number_to_json(logprob)) for token_id, logprob in known]
            rows.append(pairs or None)
        return rows

    return _encode_in_slices(length, max(_NUMBERS_PER_SLICE // max(k, 1), 1), encode_rows)


def _tensor_to_json(array: NumberArray, cells: Cells | None = None) -> dict[str, object]:
    values = array.reshape(-1) if cells is None else cells.of(array)
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    tensor: dict[str, object] = {"data": _numbers_to_json(values), "dtype": dtype, "shape": list(array.shape)}
    if cells is not None:
        tensor |= {"sparse_crow_indices": cells.crow.tolist(), "sparse_col_indices": cells.columns.tolist()}
    return tensor


def _numbers_to_json(array: NumberArray, *, has_gaps: bool = False) -> Raw:
    """Convert numbers to JSON. With `has_gaps`, NaN marks a token without a logprob and becomes null."""

    def list_numbers(start: int, end: int) -> Sequence[float | str | None]:
        part = array[start:end]
        values = cast(list[float], part.tolist())
        if array.dtype.kind == "f" and not np.isfinite(part).all():
            return [None if has_gaps and math.isnan(value) else _number_to_json(value) for value in values]
        return values

    return _encode_in_slices(len(array), _NUMBERS_PER_SLICE, list_numbers)


def _encode_in_slices(length: int, step: int, list_items: Callable[[int, int], Sequence[object]]) -> Raw:
    """Encode a JSON array of `length` items. `list_items(start, end)` returns [start, end)."""
    parts = [msgspec.json.encode(list_items(start, start + step))[1:-1] for start in range(0, length, step)]
    return Raw(b"[" + b",".join(parts) + b"]")


def _metrics_to_json(metrics: results.Metrics) -> dict[str, float | str]:
    return {name: _number_to_json(value) for name, value in metrics.items()}


def _number_to_json(value: float) -> float | str:
    """Return a number, or its name if JSON cannot represent it, for example "NaN".

    The names come from protobuf's JSON mapping, and all SDK releases read them.
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
