"""Check the parameters of a sample against the capabilities of the backend."""

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import FieldError, UserError
from skyrl_tx.contract.numbers import check_number
from skyrl_tx.contract.requests import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingControls,
    SamplingParams,
)

CONTROL_NUMBERS = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
"""The fields of `SamplingControls` that are numbers."""


def check_params(params: SamplingParams, capabilities: Capabilities) -> None:
    """Check everything about `params` except `max_tokens`.

    Raises UserError, which names the field.
    """
    vocab_size = capabilities.vocab_size
    if params.controls:
        _check_controls(params, params.controls, capabilities)

    # Distribution.
    for name in ("temperature", "top_p", "top_k"):
        check_number(f"sampling_params.{name}", getattr(params, name))

    # Log-probabilities. Both kinds are equal unless the distribution changes.
    kind = params.logprobs_kind
    if (params.temperature not in (0, 1) or params.controls) and kind not in capabilities.sampled_logprobs:
        offered = " and ".join(sorted(capabilities.sampled_logprobs)) or "no"
        raise UserError(
            f"sampled_logprobs {kind!r} is not offered at temperature {params.temperature}: this server's samples have "
            f"{offered} log-probabilities; see --sampled-logprobs and the session metadata skyrl_tx.sampled_logprobs"
        )

    # Stop strings and tokens.
    if (count := len(params.stop_strings)) > MAX_STOP_STRINGS:
        raise UserError(f"sampling_params.stop has {count} strings: must have at most {MAX_STOP_STRINGS}")
    if (count := len(params.stop_token_ids)) > MAX_STOP_TOKENS:
        raise UserError(f"sampling_params.stop has {count} tokens: must have at most {MAX_STOP_TOKENS}")
    if (longest := max(map(len, params.stop_strings), default=0)) > MAX_STOP_CHARS:
        raise UserError(
            f"sampling_params.stop contains a string of {longest} characters: must have at most {MAX_STOP_CHARS}"
        )
    if "" in params.stop_strings:
        raise UserError("sampling_params.stop contains an empty string")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"sampling_params.stop: token {token} is outside the vocabulary of {vocab_size} tokens")


def _check_controls(params: SamplingParams, controls: SamplingControls, capabilities: Capabilities) -> None:
    for name in controls.list_used():
        if name not in capabilities.sampling_controls:
            raise FieldError(f"{name} is not supported by the backend of this server", name)

    # Numbers.
    for name in CONTROL_NUMBERS:
        check_number(name, getattr(controls, name))
    if params.max_tokens is not None and controls.min_tokens > params.max_tokens:
        raise FieldError(
            f"min_tokens {controls.min_tokens} must not be greater than max_tokens {params.max_tokens}", "min_tokens"
        )

    # Bias.
    if (count := len(controls.logit_bias)) > MAX_LOGIT_BIAS:
        raise FieldError(f"logit_bias has {count} entries: must have at most {MAX_LOGIT_BIAS}", "logit_bias")
    for token, bias in controls.logit_bias:
        if not 0 <= token < capabilities.vocab_size:
            raise FieldError(
                f"logit_bias: token {token} is outside the vocabulary of {capabilities.vocab_size} tokens", "logit_bias"
            )
        check_number(f"logit_bias[{token}]", bias, field="logit_bias")
