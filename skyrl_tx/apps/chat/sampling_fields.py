"""Convert the fields of a request to sampling parameters.

They say how tokens are drawn, which text a sample has to match, and when a sample stops.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from msgspec import UNSET, UnsetType

from skyrl_tx.apps.chat.grammar_checks import check_constraint
from skyrl_tx.apps.chat.schemas import GenerationFields, ResponseFormat, StructuredOutputs
from skyrl_tx.apps.chat.service import ChatService, Limits
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.numbers import check_number
from skyrl_tx.contract.requests import MAX_LOGIT_BIAS, Constraint, SamplingControls, SamplingParams
from skyrl_tx.server.routes.sampling import check_stops
from skyrl_tx.server.submission.validation import choose_seed, quote_value, require

_MAX_DIGITS = 10
"""Token ids have at most this many digits."""
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The kind of constraint of each field of `structured_outputs`."""
_MAX_CHOICES = 1000


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
    """Convert the fields of a request to sampling parameters. Absent fields get OpenAI's defaults.

    A `seed` of -1 draws one, as in vLLM and llama.cpp. `max_tokens_name` and `stop_name` are the
    names of these fields in the request. Raises UserError, with the name of the field, for an
    invalid value.
    """
    # How tokens are drawn
    if max_tokens is not None:
        check_number(max_tokens_name, max_tokens, field="max_tokens")
    temperature = 1.0 if temperature is None else temperature
    top_p = 1.0 if top_p is None else top_p
    top_k = top_k or -1
    check_number("temperature", temperature)
    check_number("top_p", top_p)
    check_number("top_k", top_k)

    # When a sample stops
    strings = [stop] if isinstance(stop, str) else stop or []
    require(all(strings), f"{stop_name}: a stop string must not be empty", field=stop_name)
    tokens = stop_token_ids or []
    check_stops(strings, tokens, stop_name, "stop_token_ids")

    return SamplingParams(
        seed=choose_seed(None if seed == -1 else seed, "seed"),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token_ids=tuple(tokens),
        stop_strings=tuple(strings),
        eos_stops=not ignore_eos,
    )


def add_stop_token(service: ChatService, params: SamplingParams) -> SamplingParams:
    """Add the tokenizer's EOS token to sampling parameters. Has no effect if the client set `ignore_eos`."""
    token = service.text.eos_token_id
    if token is None or not params.eos_stops or token in params.stop_token_ids:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, token))


def convert_openai_fields(
    service: ChatService, request: GenerationFields, max_tokens: int | None, name: str
) -> SamplingParams:
    """Convert the fields of an OpenAI request to sampling parameters, without a constraint.

    `name` is the request's field for `max_tokens`. Raises UserError for a value that is not
    supported.
    """
    require(
        request.best_of in (None, request.n or 1),
        f"best_of {quote_value(request.best_of)}: must be equal to n, which is {request.n or 1}",
        field="best_of",
    )

    params = make_params(
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
    return add_stop_token(service, replace(params, controls=_read_controls(request, max_tokens, name)))


def check_num_samples(n: int | None) -> int:
    """Return the number of samples per prompt, by default 1.

    Raises UserError if it is out of range.
    """
    count = 1 if n is None else n
    check_number("n", count, field="num_samples")
    return count


def check_top_k(value: int | None, name: str, limits: Limits) -> int:
    """Return how many top log-probabilities a field asks for, by default 0.

    Raises UserError if the backend supports fewer.
    """
    count = value or 0
    check_number(name, count, field="topk_logprobs", high=limits.max_topk)
    return count


def _read_controls(request: GenerationFields, max_tokens: int | None, name: str) -> SamplingControls | UnsetType:
    """Return the controls of a request, or UNSET if they change nothing.

    `name` is the request's field for `max_tokens`. The engine compares tokens with the vocabulary.
    Raises UserError, which names the field, for a value out of range.
    """
    for field in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"):
        if (value := getattr(request, field)) is not None:
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


def read_constraint(request: GenerationFields, owner: str) -> Constraint | None:
    """Return the constraint of `response_format` or `structured_outputs` of an owner's request, or None.

    Raises FieldError for a constraint that is malformed, too large or not supported.
    """
    constraint, field = _read_format(request.response_format, owner), "response_format"
    if (outputs := request.structured_outputs) is not None:
        field = "structured_outputs"
        fields = {name.removesuffix("_"): getattr(outputs, name) for name in StructuredOutputs.model_fields}
        given = {name: value for name, value in fields.items() if value is not None}
        for name, value in given.items():
            path = f"{field}.{name}"
            require(
                len(given) == 1 and constraint is None,
                f"{path}: cannot be combined with another constraint; send only one",
                field=path,
            )
            constraint = _read_output(name, value, path, owner)
    return None if constraint is None else replace(constraint, field=field)


def _read_output(name: str, value: object, field: str, owner: str) -> Constraint | None:
    """Return the constraint of one field of `structured_outputs`."""
    if name == "json_object":
        return Constraint(kind="json_schema", text=json.dumps(_ANY_OBJECT)) if value else None
    if name == "json":
        return read_schema(value, field, owner)

    # A regular expression, a grammar, or a list of texts
    if isinstance(value, list):
        choices = cast(list[str], value)
        is_valid = 0 < len(choices) <= _MAX_CHOICES and all(choices)
        require(is_valid, f"{field}: must have 1 to {_MAX_CHOICES} texts that are not empty", field=field)
        value = json.dumps(choices)
    constraint = Constraint(kind=_KINDS[name], text=str(value))
    check_constraint(constraint, field, owner)
    return constraint


def _read_format(form: ResponseFormat | None, owner: str) -> Constraint | None:
    """Return the constraint of `response_format`."""
    if form is None or form.type == "text":
        return None
    match form.type:
        case "json_object":
            return Constraint(kind="json_schema", text=json.dumps(_ANY_OBJECT))

        # A schema is optional, as in OpenAI's API
        case "json_schema":
            field = "response_format.json_schema.schema"
            given = form.json_schema
            require(given is not None, "response_format.json_schema: missing", field="response_format.json_schema")
            schema = None if given is None else given.schema_
            return read_schema(_ANY_OBJECT if schema is None else schema, field, owner)

        case _:
            raise FieldError(
                f"response_format.type {quote_value(form.type)}: must be 'text', 'json_object' or 'json_schema'",
                "response_format.type",
            )


def read_schema(schema: object, field: str, owner: str) -> Constraint:
    """Return the constraint of a JSON schema, which is an object or its text, in a request of an owner.

    Raises FieldError, which names `field`, if the schema is malformed, too large or not supported.
    """
    try:
        value: object = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"{field}: is not valid JSON: {error}", field) from error
    require(isinstance(value, dict), f"{field} {quote_value(value)}: must be a JSON object", field=field)
    constraint = Constraint(kind="json_schema", text=text)
    check_constraint(constraint, field, owner)
    return constraint


def add_constraint(service: ChatService, params: SamplingParams, constraint: Constraint | None) -> SamplingParams:
    """Add a constraint, which has the name of its field in the request, to sampling parameters.

    Raises FieldError if the server cannot constrain samples, or if the sample would not end with
    the text.
    """
    if constraint is None:
        return params
    supported = service.limits.sampling_controls
    require(
        supported is None or "constraint" in supported,
        f"{constraint.field}: the backend of this server cannot constrain samples",
        field=constraint.field,
    )
    require(
        params.eos_stops or bool(params.stop_token_ids),
        "ignore_eos: a constrained sample needs a token that ends it; remove ignore_eos or send stop_token_ids",
        field="ignore_eos",
    )
    return replace(params, controls=replace(params.active_controls, constraint=constraint))
