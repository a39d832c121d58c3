"""Read the fields of an OpenAI request that change the distribution of the next token."""

from collections.abc import Mapping
from typing import Protocol

from msgspec import UNSET, UnsetType

from skyrl_tx.contract.numbers import check_number
from skyrl_tx.contract.requests import MAX_LOGIT_BIAS, SamplingControls
from skyrl_tx.server.submission.validation import quote_value, require

_MAX_DIGITS = 10
"""Token ids have at most this many digits."""


class ControlFields(Protocol):
    """The fields, as in OpenAI's API and in vLLM."""

    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    min_p: float | None
    min_tokens: int | None
    logit_bias: dict[str, float] | None


def read_controls(request: ControlFields, max_tokens: int | None, name: str) -> SamplingControls | UnsetType:
    """Return the controls of a request, or UNSET if they change nothing.

    `name` is the request's field for `max_tokens`. The engine compares tokens with the vocabulary.
    Raises UserError, which names the field, for a value out of range.
    """
    numbers = {
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "min_tokens": request.min_tokens,
    }
    for field, value in numbers.items():
        if value is not None:
            check_number(field, value)
    require(
        max_tokens is None or (request.min_tokens or 0) <= max_tokens,
        f"min_tokens {request.min_tokens}: must not be greater than {name}, which is {max_tokens}",
        field="min_tokens",
    )

    controls = SamplingControls(
        min_p=float(request.min_p or 0),
        presence_penalty=float(request.presence_penalty or 0),
        frequency_penalty=float(request.frequency_penalty or 0),
        repetition_penalty=1.0 if request.repetition_penalty is None else float(request.repetition_penalty),
        min_tokens=request.min_tokens or 0,
        logit_bias=_read_bias(request.logit_bias or {}),
    )
    return controls if controls.list_used() else UNSET


def _read_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    require(
        len(bias) <= MAX_LOGIT_BIAS,
        f"logit_bias has {len(bias)} entries: must have at most {MAX_LOGIT_BIAS}",
        field="logit_bias",
    )
    pairs: list[tuple[int, float]] = []
    for key, value in bias.items():
        # Two texts of the same id, such as "5" and "05", would be two entries for one token
        is_id = key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS and str(int(key)) == key
        require(is_id, f"logit_bias: the key {quote_value(key)} must be a token id", field="logit_bias")
        check_number(f"logit_bias[{key}]", value, field="logit_bias")
        pairs.append((int(key), float(value)))
    return tuple(pairs)
