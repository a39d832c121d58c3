"""Anthropic's Messages API: `POST /messages` and `POST /messages/count_tokens`."""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fastapi import Request, Response

from skyrl_tx.apps.chat import prompts, sampling_fields, schemas
from skyrl_tx.apps.chat.generation import Delta, Finish
from skyrl_tx.apps.chat.message import Part, TextPart
from skyrl_tx.apps.chat.models import find_weights
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.reply import (
    ChatReply,
    JsonObject,
    encode_event,
    get_service,
    make_json_response,
    read_request,
    serve,
)
from skyrl_tx.apps.chat.reply_grammars import ForcedCall, constrain_reply
from skyrl_tx.apps.chat.schemas import CountTokensRequest, MessagesRequest
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.contract.requests import Constraint
from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.submission.validation import quote_value, require
from skyrl_tx.store import sessions

_SIGNATURE = "unsigned"
"""Clients do not send reasoning back in the next request if its signature is empty."""


async def create_message(request: Request) -> Response:
    """Sample the next message of a conversation."""
    return await serve(request, _prepare)


async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    service = get_service(request)

    def count(call: ApiCall) -> int:
        parsed = schemas.parse_request(call, CountTokensRequest)
        find_weights(call, parsed.model)  # raises ApiError 404 if the model does not exist
        return len(_render(service, parsed).tokens)

    _, number = await read_request(request, count)
    return make_json_response({"input_tokens": number})


def _prepare(service: ChatService, call: ApiCall) -> "_Message":
    """Check a request, render its prompt, and return the object that will build the reply.

    Raises ApiError or UserError if the request cannot be served.
    """
    request = schemas.parse_request(call, MessagesRequest)
    for name in ("container", "mcp_servers"):
        require(not getattr(request, name), f"{name}: is not supported", field=name)
    weights = find_weights(call, request.model)
    prompt = _render(service, request)

    # The request for the engine. Clients often send the `max_tokens` of a hosted model.
    params = sampling_fields.make_params(
        max_tokens=service.limit_tokens(len(prompt.tokens), request.max_tokens),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=request.stop_sequences,
        stop_name="stop_sequences",
    )
    params = sampling_fields.add_stop_token(service, params)
    owner = call.caller.owner
    content, forced = _read_output_format(request, owner), _read_forced_call(request)

    prepared = ChatRequest(
        weights=weights,
        prompt=prompt.tokens,
        params=constrain_reply(service, prompt, params, owner, content, forced),
        is_streamed=bool(request.stream),
        delimiters=prompt.delimiters,
        kind=sessions.ANTHROPIC,
    )
    choice = request.tool_choice
    return _Message(
        request.model, prompt, prepared, has_one_call=choice is not None and bool(choice.disable_parallel_tool_use)
    )


def _read_output_format(request: MessagesRequest, owner: str) -> Constraint | None:
    """Return the constraint of `output_config.format` of an owner's request, or None."""
    form, field = None if request.output_config is None else request.output_config.format, "output_config.format"
    if form is None:
        return None
    is_schema = form.type == "json_schema"
    require(is_schema, f"{field}.type {quote_value(form.type)}: must be 'json_schema'", field=f"{field}.type")
    return replace(sampling_fields.read_schema(form.schema_, f"{field}.schema", owner), field=field)


def _read_forced_call(request: MessagesRequest) -> ForcedCall | None:
    """Return which tool calls `tool_choice` demands, or None."""
    choice = request.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return None
    is_known = choice.type == "any" or (choice.type == "tool" and choice.name is not None)
    types = "'auto', 'none', 'any', or 'tool' with a name"
    require(is_known, f"tool_choice.type {quote_value(choice.type)}: must be {types}", field="tool_choice")
    name = choice.name if choice.type == "tool" else None
    return ForcedCall(name, "input_schema", name is not None or bool(choice.disable_parallel_tool_use))


def _render(service: ChatService, request: CountTokensRequest) -> ChatPrompt:
    """Render the prompt of a conversation.

    Raises UserError if the request needs something that is not supported.
    """
    choice, output = request.tool_choice, request.output_config

    # If the conversation ends with a message of the assistant, the model continues this message
    may_call = choice is None or choice.type != "none"
    converted = prompts.convert_anthropic_messages(request.system, request.messages)
    continues = converted[-1]["role"] == "assistant"

    # The reply begins with reasoning only if the client asks for it
    thinks = None if request.thinking is None else request.thinking.type != "disabled"
    variables = prompts.read_variables(
        request.chat_template_kwargs,
        [
            ("enable_thinking", "enable_thinking", request.enable_thinking),
            ("thinking.type", "enable_thinking", thinks),
            ("output_config.effort", "reasoning_effort", None if output is None else output.effort),
        ],
    )

    return prompts.render_prompt(
        service,
        converted,
        prompts.convert_anthropic_tools(request.tools or []) if may_call else [],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables={"enable_thinking": False, **variables},
    )


class _Message(ChatReply):
    """Builds the message that answers a request, whole or as a stream of events.

    A request has one prompt, so the argument `prompt_index` of the methods is always 0.
    """

    api = "anthropic"

    def __init__(self, model: str, prompt: ChatPrompt, prepared: ChatRequest, *, has_one_call: bool) -> None:
        """With `has_one_call`, tool calls after the first are left out."""
        super().__init__([prepared], is_streamed=prepared.is_streamed)
        self._reader = prompt.create_reader(has_one_call=has_one_call)
        self._finish = Finish("length")
        self._block_index = 0
        self._block_kind: str | None = None
        """The kind of the content block that is open in the stream, or None."""
        self._common_fields: JsonObject = {
            "id": f"msg_{secrets.token_hex(14)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def _read(self, delta: Delta) -> list[Part]:
        """Return the new parts of the message. Records how the sample finished."""
        self._finish = delta.finish or self._finish
        return self._reader.read(delta)

    def make_body(self, samples: Sequence[tuple[int, Delta]]) -> JsonObject:
        """Return the body of a response that is not streamed."""
        content = _make_blocks([part for _, delta in samples for part in self._read(delta)])
        return {**self._common_fields, "content": content, **self._describe_stop(), "usage": self._count_usage()}

    def _describe_stop(self) -> JsonObject:
        if self._finish.reason == "length":
            reason = "max_tokens"
        elif self._finish.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._reader.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._finish.stop_string}

    def _count_usage(self) -> JsonObject:
        (generation,) = self.generations
        cached = generation.prompt_result.cache_hit_tokens
        return {
            "input_tokens": len(self.requests[0].prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_tokens,
        }

    def make_first_events(self) -> Iterator[JsonObject]:
        """Yield `message_start`."""
        empty: JsonObject = {
            "content": list[object](),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._count_usage(),
        }
        yield {"type": "message_start", "message": {**self._common_fields, **empty}}

    def make_events(self, prompt_index: int, delta: Delta) -> Iterator[JsonObject]:
        """Yield a delta event for each new part.

        A tool call, or a part of a different kind than the previous part, opens a new content
        block.
        """
        for part in self._read(delta):
            kind = part.kind if isinstance(part, TextPart) else "tool"
            if kind != self._block_kind or kind == "tool":
                yield from self._close_block()
                self._block_kind = kind
                yield {"type": "content_block_start", "index": self._block_index, "content_block": _open_block(part)}
            yield {"type": "content_block_delta", "index": self._block_index, "delta": _make_delta(part)}

    def _close_block(self) -> Iterator[JsonObject]:
        if self._block_kind == "reasoning":
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            yield {"type": "content_block_delta", "index": self._block_index, "delta": signature}
        if self._block_kind is not None:
            yield {"type": "content_block_stop", "index": self._block_index}
            self._block_kind = None
            self._block_index += 1

    def make_last_events(self) -> Iterator[JsonObject]:
        """Yield the events that close the last block and the message."""
        yield from self._close_block()
        yield {"type": "message_delta", "delta": self._describe_stop(), "usage": self._count_usage()}
        yield {"type": "message_stop"}

    def encode(self, event: JsonObject) -> bytes:
        """Encode an event. Its name in the stream is its `type`."""
        return encode_event(event, str(event["type"]))


def _open_block(part: Part) -> JsonObject:
    """Return an empty content block for the kind of a part."""
    if not isinstance(part, TextPart):
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _make_delta(part: Part) -> JsonObject:
    """Return the `delta` object that adds a part to its content block."""
    if not isinstance(part, TextPart):
        return {"type": "input_json_delta", "partial_json": part.arguments}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


def _make_blocks(parts: Sequence[Part]) -> list[JsonObject]:
    """Return the content blocks of a message.

    Consecutive pieces of the same kind are joined into one block.
    """
    blocks: list[JsonObject] = []
    last: Part | None = None
    for part in parts:
        if not isinstance(part, TextPart):
            blocks.append({**_open_block(part), "input": json.loads(part.arguments)})
        else:
            name = "thinking" if part.kind == "reasoning" else "text"
            if not isinstance(last, TextPart) or last.kind != part.kind:
                blocks.append(_open_block(part))
            blocks[-1][name] = f"{blocks[-1][name]}{part.text}"
            if name == "thinking":
                blocks[-1]["signature"] = _SIGNATURE
        last = part
    return blocks
