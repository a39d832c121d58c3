"""Drawing tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.schemas.inputs import TensorData
from skyrl_tx.api.schemas.sampling import SampleRequest, SamplingParams
from skyrl_tx.api.tensors import DenseBudget, from_json
from skyrl_tx.api.translate.checks import finite, require, seed
from skyrl_tx.api.translate.inputs import tokens_from_json
from skyrl_tx.api.translate.translated import Translated
from skyrl_tx.contract import requests
from skyrl_tx.contract.arrays import Cells, Int64Array
from skyrl_tx.contract.ids import SamplerId

MAX_SAMPLES = 4096
"""Of one prompt: each has a string id in the acknowledgement."""
_MAX_TOP_K = 2**31 - 1


def sample(
    request: SampleRequest, sampler: SamplerId | None, sequence_ids: Sequence[str], max_dense_bytes: int
) -> Translated:
    """Draw from frozen weights; the seed is drawn when the client gave none."""
    require(
        1 <= request.num_samples <= MAX_SAMPLES,
        f"num_samples {shown(request.num_samples)}: must be between 1 and {MAX_SAMPLES}",
    )
    drawn = requests.Sample(
        prompt=tokens_from_json(request.prompt, "prompt"),
        num_samples=request.num_samples,
        sampler=sampler,
        params=_params(request.sampling_params),
        options=_options(request, max_dense_bytes),
        sequence_ids=tuple(sequence_ids),
        is_recorded=bool(request.record_stability_info),
    )
    identity = replace(drawn, sampler=None, sequence_ids=())
    if request.sampling_params.seed is None:
        identity = replace(identity, params=replace(drawn.params, seed=0))
    return Translated(drawn, identity)


def _params(params: SamplingParams) -> requests.SamplingParams:
    where = "sampling_params"
    require(
        params.max_tokens is None or params.max_tokens >= 1,
        f"{where}.max_tokens {shown(params.max_tokens)}: must be at least 1, or absent",
    )
    temperature = finite(params.temperature, f"{where}.temperature")
    require(temperature >= 0, f"{where}.temperature {temperature}: must not be negative")
    require(0 < params.top_p <= 1, f"{where}.top_p {params.top_p}: must be in (0, 1]")
    require(-1 <= params.top_k <= _MAX_TOP_K, f"{where}.top_k {shown(params.top_k)}: must be at least 1, or -1 for off")
    stop_strings, stop_token_ids = _stops(params.stop)
    return requests.SamplingParams(
        seed=seed(params.seed, f"{where}.seed"),
        max_tokens=params.max_tokens,
        temperature=temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
        eos_stops=params.stop is None or len(stop_strings) + len(stop_token_ids) > 0,
    )


def _stops(stop: str | list[int] | list[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split `stop` into strings and token ids; an empty list names neither: then nothing stops."""
    given = [stop] if isinstance(stop, str) else stop or []
    strings = tuple(part for part in given if isinstance(part, str))
    token_ids = tuple(part for part in given if isinstance(part, int))
    for index, text in enumerate(strings):
        require(text != "", f"sampling_params.stop[{index}] '': an empty string would stop at once")
    for index, token in enumerate(token_ids):
        require(0 <= token < 2**31, f"sampling_params.stop[{index}] {shown(token)}: is not a token id")
    return strings, token_ids


def _options(request: SampleRequest, max_dense_bytes: int) -> requests.PromptOptions:
    counts = {
        "topk_prompt_logprobs": request.topk_prompt_logprobs or 0,
        "topk_sample_logprobs": request.topk_sample_logprobs or 0,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k or 0,
    }
    for name, count in counts.items():
        require(0 <= count < 2**31, f"{name} {shown(count)}: must not be negative")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None:
        require(last_n >= 1, f"prompt_logprobs_last_n {shown(last_n)}: must be at least 1")
        require(bool(request.prompt_logprobs), f"prompt_logprobs_last_n {last_n}: needs prompt_logprobs")
    targets = request.target_prompt_logprobs
    return requests.PromptOptions(
        logprobs=bool(request.prompt_logprobs),
        last_n=last_n,
        topk=counts["topk_prompt_logprobs"],
        sample_topk=counts["topk_sample_logprobs"],
        target_tokens=None if targets is None else _targets(targets, max_dense_bytes),
        target_cells=None if targets is None else _cells(targets),
        alt_tokens_k=counts["prompt_alt_tokens_k"],
    )


def _targets(targets: TensorData, max_dense_bytes: int) -> Int64Array:
    where = "target_prompt_logprobs"
    array = from_json(targets, DenseBudget(max_dense_bytes), where, fill=-1)
    require(array.dtype.kind == "i" and array.ndim == 2, f"{where}: must be a matrix of int64, not {array.dtype}")
    return array.astype(np.int64)


def _cells(targets: TensorData) -> Cells | None:
    """Read which cells a sparse tensor lists, once it was found to be one; None for a dense one."""
    if targets.sparse_crow_indices is None or targets.sparse_col_indices is None:
        return None
    crow, columns = targets.sparse_crow_indices, targets.sparse_col_indices
    return Cells(crow=np.array(crow, np.int64), columns=np.array(columns, np.int64))
