"""The sampling fields of both APIs as sampling parameters of the contract."""

import math

from skyrl_tx.apps.chat.schemas import GenerationFields
from skyrl_tx.apps.chat.service import Limits
from skyrl_tx.contract.requests import SamplingParams
from skyrl_tx.server.submission.sampling import MAX_INT32, MAX_SAMPLES, check_stops
from skyrl_tx.server.submission.validation import choose_seed, quote_value, require

_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}


def make_params(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    top_k: int | None = None,
    stop: str | list[str] | None = None,
    stop_token_ids: list[int] | None = None,
    ignore_eos: bool = False,
    max_tokens_name: str = "max_tokens",
    stop_name: str = "stop",
) -> SamplingParams:
    """Check and translate; absent fields have OpenAI's defaults. Raises UserError naming the field."""
    require(
        max_tokens is None or 1 <= max_tokens <= MAX_INT32,
        f"{max_tokens_name} {quote_value(max_tokens)}: must be 1 or more",
    )
    temperature = 1.0 if temperature is None else temperature
    require(math.isfinite(temperature) and temperature >= 0, f"temperature {temperature}: must be 0 or more")
    top_p = 1.0 if top_p is None else top_p
    require(0 < top_p <= 1, f"top_p {top_p}: must be greater than 0 and at most 1")
    top_k = top_k or -1
    require(top_k == -1 or 1 <= top_k <= MAX_INT32, f"top_k {quote_value(top_k)}: must be -1, 0 or positive")
    strings = [stop] if isinstance(stop, str) else stop or []
    require(all(strings), f"{stop_name}: a stop string must not be empty")
    tokens = stop_token_ids or []
    check_stops(strings, tokens, stop_name, "stop_token_ids")
    return SamplingParams(
        seed=choose_seed(seed, "seed"),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token_ids=tuple(tokens),
        stop_strings=tuple(strings),
        eos_stops=not ignore_eos,
    )


def convert_openai_fields(request: GenerationFields, max_tokens: int | None, name: str) -> SamplingParams:
    """Translate the fields of an OpenAI request. Raises UserError for a value that is not supported."""
    for field, neutral in _NEUTRAL.items():
        value = getattr(request, field)
        require(value in (None, neutral), f"{field} {quote_value(value)}: this server supports only {neutral}")
    require(not request.logit_bias, f"logit_bias {quote_value(request.logit_bias)}: is not supported")
    require(
        request.best_of in (None, request.n or 1),
        f"best_of {quote_value(request.best_of)}: must equal n, {request.n or 1}",
    )
    return make_params(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        max_tokens_name=name,
    )


def check_num_samples(n: int | None) -> int:
    """Return the number of samples of a request. Raises UserError for none or too many."""
    count = 1 if n is None else n
    require(1 <= count <= MAX_SAMPLES, f"n {quote_value(n)}: must be between 1 and {MAX_SAMPLES}")
    return count


def check_top_k(value: int | None, name: str, limits: Limits) -> int:
    """Return the number of top log-probabilities; 0 without. Raises UserError for more than the backend has."""
    count = value or 0
    require(
        0 <= count <= limits.max_topk,
        f"{name} {quote_value(value)}: must be between 0 and {limits.max_topk} on this server",
    )
    return count
