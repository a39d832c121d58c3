"""Constraints of replies: the format of the response, structured outputs, and tool calls that must be made."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from skyrl_tx.apps.chat.call_grammars import WRITERS, GrammarWriter, Tools, write_calls
from skyrl_tx.apps.chat.message import FORMATS, MessageFormat, find_prefilled
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.schemas import ResponseFormat, StructuredOutputs
from skyrl_tx.apps.chat.service import ChatService
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.requests import Constraint, SamplingParams
from skyrl_tx.grammars.grammar import check_constraint, write_grammar, write_rule
from skyrl_tx.server.submission.validation import quote_value, require

_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The kind of constraint of each field of `structured_outputs`."""
_MAX_CHOICES = 1000


def read_constraint(form: ResponseFormat | None, outputs: StructuredOutputs | None, owner: str) -> Constraint | None:
    """Return the constraint of `response_format` or `structured_outputs` of an owner's request, or None.

    Raises FieldError for a constraint that is malformed, too large or not supported.
    """
    constraint = None if form is None else _read_format(form, owner)
    given = {} if outputs is None else {name: value for name, value in outputs.list_given() if value is not None}
    if not given:
        return constraint
    name = next(iter(given))
    field, value = f"structured_outputs.{name}", given[name]
    require(
        len(given) == 1 and constraint is None,
        f"{field}: cannot be combined with another constraint; send only one",
        field=field,
    )
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


def _read_format(form: ResponseFormat, owner: str) -> Constraint | None:
    """Return the constraint of `response_format`."""
    match form.type:
        case "text":
            return None
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


def add_constraint(
    service: ChatService, params: SamplingParams, constraint: Constraint | None, field: str
) -> SamplingParams:
    """Add a constraint, which comes from a field of the request, to sampling parameters.

    Raises FieldError if the server cannot constrain samples, or if the sample would not end with
    the text.
    """
    if constraint is None:
        return params
    supported = service.limits.sampling_controls
    require(
        supported is None or "constraint" in supported,
        f"{field}: the backend of this server cannot constrain samples",
        field=field,
    )
    require(
        params.eos_stops or bool(params.stop_token_ids),
        "ignore_eos: a constrained sample needs a token that ends it; remove ignore_eos or send stop_token_ids",
        field="ignore_eos",
    )
    named = replace(constraint, field=field)
    return replace(params, controls=replace(params.active_controls, constraint=named))


class ReplyConstraint:
    """Makes the constraint of the reply to an owner's chat prompt, which may begin with reasoning."""

    def __init__(self, service: ChatService, prompt: ChatPrompt, owner: str) -> None:
        self._prompt = prompt
        self._owner = owner
        self._template = service.text.template.source
        self._writer = GrammarWriter(service.text.tokenizer.token_to_id)
        names = [name for name, form in FORMATS.items() if form is prompt.form]
        self._form = names[0] if names else ""

    def constrain_content(self, constraint: Constraint) -> Constraint:
        """Return the constraint of a whole reply whose content, after the reasoning, has a constraint."""
        start = self._write_start(is_call=False)
        if not start:
            return constraint
        if constraint.kind != "grammar":
            content = self._writer.add(write_rule(constraint))
            return Constraint(kind="lark", text=self._writer.join(f"{start} {content}"))
        grammars = {"main": self._writer.join(f"{start} @content"), "content": write_grammar(constraint)}
        listed = [{"name": name, "lark_grammar": text} for name, text in grammars.items()]
        return Constraint(kind="lark", text=json.dumps({"grammars": listed}))

    def require_calls(
        self, tools: Sequence[Mapping[str, object]], where: Sequence[str], *, has_one_call: bool
    ) -> Constraint:
        """Return the constraint of a reply that has to call one or multiple of `tools`.

        `where` has the field of the schema of each tool. Raises FieldError if the form of the
        model's tool calls is unknown, or if it cannot enforce a schema.
        """
        require(
            self._form in WRITERS,
            f"tool_choice: this server cannot force tool calls in the format of this model, {self._form or 'unknown'}; "
            "use 'auto'",
            field="tool_choice",
        )
        checked = Tools(tools, where, self._owner)
        calls = write_calls(self._writer, self._form, checked, self._template, has_one_call=has_one_call)
        return Constraint(kind="lark", text=self._writer.join(f"{self._write_start(is_call=True)} {calls}".strip()))

    def _write_start(self, *, is_call: bool) -> str:
        """Return an expression for the reasoning and marks before the content or the calls, possibly empty."""
        form, prompt, writer = self._prompt.form, self._prompt.text, self._writer
        if not isinstance(form, MessageFormat):
            return ""
        prefilled = find_prefilled(form, prompt)
        if form.has_headers:
            require(not prefilled, "continue_final_message: the continued message cannot be constrained")
            channel, message, start = (writer.mark(mark) for mark in ("<|channel|>", "<|message|>", "<|start|>"))
            reasoning = writer.add(f'{channel} "analysis" {message} {writer.text_until("<|end|>")} {start} "assistant"')
            return f"{reasoning}?" + ("" if is_call else f' {channel} "final" {message}')

        # Reasoning that the prompt has begun, or that the model may begin
        blocks = [block for block in form.blocks if block.kind == "reasoning"]
        for block in blocks:
            if prefilled == block.start:
                return f"{writer.text_until(block.ends[0])} SPACE?"
        for block in blocks:
            is_closed = prompt.rstrip().endswith(block.ends[0])
            if block.start in self._template and not is_closed:
                text = writer.add(f"{writer.mark(block.start)} {writer.text_until(block.ends[0])} SPACE?")
                return f"{text}?"
        return ""
