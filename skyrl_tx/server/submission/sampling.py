"""Translates sample requests from the wire format to the request types of `skyrl_tx.contract`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skyrl_tx.contract import requests
from skyrl_tx.contract.arrays import Int64Array
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.contract.numbers import check_number
from skyrl_tx.server.schemas.training import AsampleRequest, TensorData, WireSamplingParams
from skyrl_tx.server.submission.submission import Submission
from skyrl_tx.server.submission.tensors import DenseBudget, cells_from_json, from_json
from skyrl_tx.server.submission.training import tokens_from_json
from skyrl_tx.server.submission.validation import choose_seed, quote_value, require

_TARGETS = "target_prompt_logprobs"


def translate_sample(
    request: AsampleRequest,
    sampler: SamplerId | None,
    sequence_ids: Sequence[str],
    max_dense_bytes: int,
    logprobs: requests.SampledLogprobs = "tempered",
) -> Submission:
    """Translate a sample request. Draws the seed if the client sent none.

    `logprobs` says which log-probabilities the sample reports: "tempered" ones, of the distribution
    that tokens are drawn from, or "raw" ones, before temperature and penalties.
    """
    check_number("num_samples", request.num_samples)

    sample = requests.Sample(
        prompt=tokens_from_json(request.prompt, "prompt"),
        num_samples=request.num_samples,
        sampler=sampler,
        params=_read_params(request.sampling_params),
        options=_read_options(request, max_dense_bytes),
        sequence_ids=tuple(sequence_ids),
        is_recorded=bool(request.record_stability_info),
    )

    # A request with the same id is compared with this one as the client sent it: without the sampler, the ids and
    # the seed that the server adds.
    as_sent = replace(sample, sampler=None, sequence_ids=())
    sample = replace(sample, params=set_logprobs(sample.params, logprobs))
    if request.sampling_params.seed is None:
        as_sent = replace(as_sent, params=replace(as_sent.params, seed=0))
    return Submission.from_request(sample, as_sent=as_sent)


def set_logprobs(params: requests.SamplingParams, kind: requests.SampledLogprobs) -> requests.SamplingParams:
    """Return `params` with the kind of log-probabilities to report."""
    return replace(params, raw_logprobs=True) if kind == "raw" else params


def _read_params(params: WireSamplingParams) -> requests.SamplingParams:
    where = "sampling_params"
    check_number(f"{where}.top_k", params.top_k)
    stop_strings, stop_token_ids = _split_stops(params.stop)
    return requests.SamplingParams(
        seed=choose_seed(params.seed, f"{where}.seed"),
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
        eos_stops=params.stop is None or len(stop_strings) + len(stop_token_ids) > 0,
    )


def _split_stops(stop: str | list[int] | list[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split `stop` into strings and token ids.

    An empty list has neither. Then nothing stops a sample early, not even EOS.
    """
    given = [stop] if isinstance(stop, str) else stop or []
    strings = tuple(part for part in given if isinstance(part, str))
    token_ids = tuple(part for part in given if isinstance(part, int))
    check_stops(strings, token_ids, "sampling_params.stop", "sampling_params.stop")
    return strings, token_ids


def check_stops(strings: Sequence[str], token_ids: Sequence[int], where: str, where_tokens: str) -> None:
    """Raise UserError for too many or too long stop strings, or for invalid stop tokens."""
    for given, limit, what, field in (
        (len(strings), requests.MAX_STOP_STRINGS, "strings", where),
        (len(token_ids), requests.MAX_STOP_TOKENS, "tokens", where_tokens),
    ):
        require(given <= limit, f"{field} has {given} {what}: must have at most {limit}", field=field)
    for index, text in enumerate(strings):
        require(
            len(text) <= requests.MAX_STOP_CHARS,
            f"{where}[{index}] {quote_value(text)} has {len(text)} characters: "
            f"must have at most {requests.MAX_STOP_CHARS}",
            field=where,
        )
    for index, token in enumerate(token_ids):
        check_number(f"{where_tokens}[{index}]", token, field="stop_token")


def _read_options(request: AsampleRequest, max_dense_bytes: int) -> requests.PromptOptions:
    last_n, targets = request.prompt_logprobs_last_n, request.target_prompt_logprobs
    require(
        last_n is None or bool(request.prompt_logprobs),
        f"prompt_logprobs_last_n {quote_value(last_n)}: needs prompt_logprobs",
    )
    return requests.PromptOptions(
        logprobs=bool(request.prompt_logprobs),
        last_n=last_n,
        topk=request.topk_prompt_logprobs or 0,
        sample_topk=request.topk_sample_logprobs or 0,
        target_tokens=None if targets is None else _read_targets(targets, max_dense_bytes),
        target_cells=None if targets is None else cells_from_json(targets, _TARGETS),
        alt_tokens_k=request.prompt_alt_tokens_k or 0,
    )


def _read_targets(targets: TensorData, max_dense_bytes: int) -> Int64Array:
    """Read the targets as int64 [T-1, K]. Cells that a sparse tensor does not list are -1."""
    array = from_json(targets, DenseBudget(max_dense_bytes), _TARGETS, fill=-1)
    require(array.dtype.kind == "i" and array.ndim == 2, f"{_TARGETS}: must be a matrix of int64, not {array.dtype}")
    return array.astype(np.int64)
