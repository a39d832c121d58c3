"""Requests to vLLM's `/inference/v1/generate` and what comes back, as pure functions.

The endpoint takes and returns token ids (vLLM 0.32). What our contract needs and vLLM does not have is refused by name.

Shapes: T tokens of a prompt, N new tokens, K likeliest tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from skyrl_tx.contract.arrays import Float32Array, Int32Array
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.contract.results import PromptResult, StopReason, TopK

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower temperatures to the first, and only logs it; it refuses those above the second."""
_NO_LOGPROB = -99999.0
_DONE = "[DONE]"


class WireError(Exception):
    """A response is not of the form that is expected; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of a sample: tokens int32 [N], logprobs float32 [N]."""

    tokens: Int32Array
    logprobs: Float32Array
    topk: TopK | None
    stop_reason: StopReason | None


def check_sample(request: SampleRequest, *, renormalizes: bool) -> None:
    """Raise UserError, naming the field, for a request that vLLM would not sample as the contract says.

    With `renormalizes`, filters are allowed.
    """
    params = request.params
    if params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise UserError(
            f"sampling_params.temperature {params.temperature} must be 0, or from {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE}: samples are drawn by vLLM"
        )
    if params.temperature == 0 or renormalizes:
        return  # greedy: filters change nothing
    reason = "samples are drawn by vLLM, whose log-probabilities would be those after the filter"
    if params.top_k > 0:
        raise UserError(f"sampling_params.top_k {params.top_k}: {reason}; it must be -1")
    if params.top_p < 1:
        raise UserError(f"sampling_params.top_p {params.top_p}: {reason}; it must be 1")


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of one sample, from 0 to 2**63 - 1: near seeds and indices share no draws."""
    text = f"{seed % 2**64}:{index}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def make_sample_body(
    request: SampleRequest, index: int, *, model: str, eos_token_ids: Sequence[int], stream_tokens: int
) -> dict[str, Any]:
    """Return the body that streams one sample."""
    params, num_top = request.params, request.options.sample_topk
    stops = list(dict.fromkeys([*params.stop_token_ids, *(eos_token_ids if params.eos_stops else ())]))
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": derive_seed(params.seed, index),
        "stop_token_ids": stops,
        # vLLM would add the end tokens of the model's own files.
        "ignore_eos": True,
        # The sampled token counts as one, also where it is among the likeliest.
        "logprobs": num_top + 1 if num_top else 0,
        "detokenize": False,
        "stream_interval": stream_tokens,
    }
    if params.temperature > 0 and params.top_k > 0:
        sampling["top_k"] = params.top_k
    if params.temperature > 0 and params.top_p < 1:
        sampling["top_p"] = params.top_p
    return _make_body(request, model, sampling) | {"stream": True}


def make_prompt_body(request: SampleRequest, *, model: str) -> dict[str, Any]:
    """Return the body that asks for the log-probabilities of a prompt. vLLM must draw a token, which is ignored."""
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
    """Return the tokens of one line of an event stream, None for a line without tokens.

    Raises WireError if it is an error of the server or has another form.
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
        case _:  # "abort" when a server stops, "error"
            raise WireError(f"the server ended the sample: {reason}")


def _read_topk(rows: Sequence[Sequence[Mapping[str, Any]]], count: int) -> TopK:
    ids = np.zeros((len(rows), count), np.int32)
    logprobs = np.full((len(rows), count), _NO_LOGPROB, np.float32)
    for place, row in enumerate(rows):
        best = sorted(row, key=lambda entry: (-entry["logprob"], entry["token_id"]))[:count]
        ids[place, : len(best)] = [entry["token_id"] for entry in best]
        logprobs[place, : len(best)] = [entry["logprob"] for entry in best]
    return TopK(token_ids=ids, logprobs=logprobs)


def read_prompt_result(content: Mapping[str, Any], prompt: Int32Array, options: PromptOptions) -> PromptResult:
    """Return the results about a prompt [T]. Raises WireError if they are not of the expected form."""
    start = 1 if options.last_n is None else max(1, prompt.size - options.last_n)
    logprobs = np.full(prompt.size, np.nan, np.float32)
    rows: list[list[dict[str, Any]]] = []
    try:
        found = content["prompt_logprobs"]
        if len(found) != prompt.size:
            raise WireError(f"a prompt of {prompt.size} tokens has {len(found)} log-probabilities")
        for place in range(start, prompt.size):
            row = {int(token): entry["logprob"] for token, entry in found[place].items()}
            logprobs[place] = row[int(prompt[place])]
            rows.append([{"token_id": token, "logprob": logprob} for token, logprob in row.items()])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"prompt_logprobs have an unexpected form ({type(error).__name__}: {error})") from error
    topk = None
    if options.topk:
        best = _read_topk(rows, options.topk)
        ids = np.zeros((prompt.size, options.topk), np.int32)
        values = np.full((prompt.size, options.topk), _NO_LOGPROB, np.float32)
        ids[start:], values[start:] = best.token_ids, best.logprobs
        topk = TopK(token_ids=ids, logprobs=values)
    return PromptResult(logprobs=logprobs if options.logprobs else None, topk=topk)


def read_error(text: str) -> str:
    """Return the message of an error response, or the beginning of its text."""
    try:
        return _read_error_message(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(text.split())[:300]


def _read_error_message(content: Mapping[str, Any]) -> str:
    return " ".join(str(content["error"]["message"]).split())[:1000]
