"""Pure functions that make requests to vLLM's `/inference/v1/generate` and read its responses (vLLM 0.32).

The endpoint takes and returns token ids. `check_sample` refuses requests that vLLM would not sample as our contract
requires.

Shapes: T tokens of a prompt, N new tokens, K top tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

import numpy as np

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import PromptOptions, SamplingControls
from skyrl_tx.contract.results import PromptResult, StopReason, TopK

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM only logs a warning and raises lower temperatures to the minimum. It refuses temperatures above the maximum."""
_NO_LOGPROB = -99999.0
_DONE = "[DONE]"
CONTROLS = frozenset(field.name for field in fields(SamplingControls))
"""The controls that vLLM gets, see `SamplingControls`."""
_STRUCTURED_OUTPUTS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""vLLM's field of `structured_outputs` for each kind of constraint."""


class WireError(Exception):
    """A response does not have the expected form. The message says what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of a sample: tokens int32 [N], logprobs float32 [N]."""

    tokens: Int32Array
    logprobs: Float32Array
    topk: TopK | None
    stop_reason: StopReason | None


def check_sample(request: SampleRequest, *, allows_filters: bool) -> None:
    """Raise UserError, which names the field, if vLLM would not sample a request as the contract requires.

    With `allows_filters`, requests may have top_k, top_p and min_p: if vLLM returns raw log-probabilities, or if those
    among the remaining tokens are wanted.
    """
    params = request.params
    constraint = params.active_controls.constraint
    if constraint is not None and constraint.kind not in _STRUCTURED_OUTPUTS:
        raise UserError(
            "tool_choice: this server samples with vLLM and cannot force tool calls or constrain replies that begin "
            "with reasoning; use 'auto', or turn reasoning off"
        )
    if params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise UserError(
            f"sampling_params.temperature {params.temperature} must be 0, or from {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE}, because this server samples with vLLM"
        )
    if params.temperature == 0 or allows_filters:
        return  # filters do not change greedy samples

    reason = "because this server samples with vLLM, which would return log-probabilities after the filter"
    if params.top_k > 0:
        raise UserError(f"sampling_params.top_k {params.top_k} must be -1, {reason}")
    if params.top_p < 1:
        raise UserError(f"sampling_params.top_p {params.top_p} must be 1, {reason}")
    if (min_p := params.active_controls.min_p) > 0:
        raise UserError(f"min_p {min_p} must be 0, {reason}")


def _make_controls(controls: SamplingControls) -> dict[str, Any]:
    """Return vLLM's fields for the controls that change something. It has the same names and definitions."""
    used = {name: getattr(controls, name) for name in controls.list_used()}
    constraint = used.pop("constraint", None)
    if constraint is not None:
        is_json = constraint.kind in ("json_schema", "choice")
        value = json.loads(constraint.text) if is_json else constraint.text
        used["structured_outputs"] = {_STRUCTURED_OUTPUTS[constraint.kind]: value}
    if controls.logit_bias:
        used["logit_bias"] = {str(token): bias for token, bias in controls.logit_bias}
    return used


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of one sample, from 0 to 2**63 - 1. It is a hash, so similar seeds give unrelated samples."""
    text = f"{seed % 2**64}:{index}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def make_sample_body(
    request: SampleRequest, index: int, *, model: str, eos_token_ids: Sequence[int], stream_tokens: int
) -> dict[str, Any]:
    """Return the body of the request that streams one sample."""
    params, num_top = request.params, request.options.sample_topk
    stops = list(dict.fromkeys([*params.stop_token_ids, *(eos_token_ids if params.eos_stops else ())]))
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": derive_seed(params.seed, index),
        "stop_token_ids": stops,
        # Otherwise vLLM would also stop at the end tokens in the files of the model.
        "ignore_eos": True,
        # vLLM counts the sampled token, even if it is among the top tokens.
        "logprobs": num_top + 1 if num_top else 0,
        "detokenize": False,
        "stream_interval": stream_tokens,
    }
    if params.temperature > 0 and params.top_k > 0:
        sampling["top_k"] = params.top_k
    if params.temperature > 0 and params.top_p < 1:
        sampling["top_p"] = params.top_p
    sampling |= _make_controls(params.active_controls)
    return _make_body(request, model, sampling) | {"stream": True}


def make_prompt_body(request: SampleRequest, *, model: str) -> dict[str, Any]:
    """Return the body of the request for the log-probabilities of a prompt. vLLM must draw one token."""
    sampling = {
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "prompt_logprobs": request.options.topk,
        "detokenize": False,
    }
    return _make_body(request, model, sampling)


def _make_body(request: SampleRequest, model: str, sampling: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "token_ids": request.prompt.tolist(), "sampling_params": sampling}
    if request.cache_scope:
        body["cache_salt"] = blake2b(request.cache_scope.encode(), digest_size=16).hexdigest()
    return body


def read_event(line: str, num_top: int) -> TokenChunk | None:
    """Return the tokens of one line of an event stream, or None if the line has no tokens.

    Raises WireError if the line reports an error of the server or does not have the expected form.
    """
    if not line.startswith("data:") or (text := line[5:].strip()) == _DONE:
        return None

    try:
        content = json.loads(text)
        if "error" in content:
            raise WireError(f"the server reports an error: {_read_error_message(content)}")
        if not content["choices"]:
            return None

        [choice] = content["choices"]
        tokens = np.array(choice["token_ids"] or [], np.int32)
        entries = (choice["logprobs"] or {}).get("content") or []
        if len(entries) != tokens.size:
            raise WireError(f"{tokens.size} tokens have {len(entries)} log-probabilities")
        return TokenChunk(
            tokens=tokens,
            logprobs=np.array([entry["logprob"] for entry in entries], np.float32),
            topk=_read_topk([entry["top_logprobs"] for entry in entries], num_top) if num_top else None,
            stop_reason=_read_stop_reason(choice["finish_reason"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"an event has an unexpected form ({type(error).__name__}: {error}): {text[:200]}") from error


def _read_stop_reason(reason: str | None) -> StopReason | None:
    match reason:
        case None | "stop" | "length":
            return reason
        case _:  # "abort" when a server is stopped, or "error"
            raise WireError(f"the server ended the sample with finish_reason {reason!r}")


def _read_topk(rows: Sequence[Sequence[Mapping[str, Any]]], count: int) -> TopK:
    ids = np.zeros((len(rows), count), np.int32)
    logprobs = np.full((len(rows), count), _NO_LOGPROB, np.float32)
    for index, row in enumerate(rows):
        best = sorted(row, key=lambda entry: (-entry["logprob"], entry["token_id"]))[:count]
        ids[index, : len(best)] = [entry["token_id"] for entry in best]
        logprobs[index, : len(best)] = [entry["logprob"] for entry in best]
    return TopK(token_ids=ids, logprobs=logprobs)


def read_prompt_result(content: Mapping[str, Any], prompt: Int32Array, options: PromptOptions) -> PromptResult:
    """Return the log-probabilities of a prompt [T]. Raises WireError if they do not have the expected form."""
    # Read the log-probabilities of each token.
    start = 1 if options.last_n is None else max(1, prompt.size - options.last_n)
    logprobs = np.full(prompt.size, np.nan, np.float32)
    rows: list[list[dict[str, Any]]] = []
    try:
        entries = content["prompt_logprobs"]
        if len(entries) != prompt.size:
            raise WireError(f"a prompt of {prompt.size} tokens has {len(entries)} log-probabilities")
        for position in range(start, prompt.size):
            row = {int(token): entry["logprob"] for token, entry in entries[position].items()}
            logprobs[position] = row[int(prompt[position])]
            rows.append([{"token_id": token, "logprob": logprob} for token, logprob in row.items()])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"prompt_logprobs have an unexpected form ({type(error).__name__}: {error})") from error

    # Add the top tokens.
    topk = None
    if options.topk:
        best = _read_topk(rows, options.topk)
        ids = np.zeros((prompt.size, options.topk), np.int32)
        values = np.full((prompt.size, options.topk), _NO_LOGPROB, np.float32)
        ids[start:], values[start:] = best.token_ids, best.logprobs
        topk = TopK(token_ids=ids, logprobs=values)
    return PromptResult(logprobs=logprobs if options.logprobs else None, topk=topk)


def read_error(text: str) -> str:
    """Return the message of an error response, or its first 300 characters if it has none."""
    try:
        return _read_error_message(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(text.split())[:300]


def _read_error_message(content: Mapping[str, Any]) -> str:
    return " ".join(str(content["error"]["message"]).split())[:1000]
