"""Anthropic's Messages API: a conversation in, content blocks out."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import Request, Response

from skyrl_tx.apps.chat import calls, prompts, sampling_fields
from skyrl_tx.apps.chat.anthropic_schemas import CountTokensRequest, MessagesRequest
from skyrl_tx.apps.chat.conversation import template_messages, template_tools
from skyrl_tx.apps.chat.generation import Delta, Finish, Generation
from skyrl_tx.apps.chat.message import MessageParser, Part
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.reasoning import Piece
from skyrl_tx.apps.chat.responses import json_response
from skyrl_tx.apps.chat.server_sent_events import EventStream, event
from skyrl_tx.apps.chat.service import ChatRequest, ChatService, ContextTooLong, with_stop_token
from skyrl_tx.server.context import Call
from skyrl_tx.server.submission.validation import require, shown
from skyrl_tx.store import sessions


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked request."""

    request: MessagesRequest
    prompt: ChatPrompt
    start: ChatRequest


async def messages(request: Request) -> Response:
    """Continue a conversation."""
    service = calls.service_of(request)

    async def prepare(call: Call) -> _Prepared:
        return await calls.in_thread(_prepare, service, call)

    call, prepared = await calls.received(request, prepare)
    generation = await service.start(call.caller, prepared.start)
    reply = _Reply(prepared, generation)
    if prepared.request.stream:
        body = calls.error_event("anthropic", request)
        return EventStream(reply.events(), lambda error: event(body(error), "error"), generation.close)
    return await calls.answered(request, reply.whole(), [generation])


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation as a prompt."""
    service = calls.service_of(request)

    def count(call: Call) -> int:
        wanted = call.body.model(CountTokensRequest)
        call.check_unknown(wanted)
        calls.weights_of(call, wanted.model)
        return len(_rendered(service, call, wanted).tokens)

    async def prepare(call: Call) -> int:
        return await calls.in_thread(count, call)

    _, number = await calls.received(request, prepare)
    return json_response({"input_tokens": number})


def _prepare(service: ChatService, call: Call) -> _Prepared:
    request = call.body.model(MessagesRequest)
    call.check_unknown(request)
    for name in ("container", "mcp_servers"):
        require(not getattr(request, name), f"{name}: is not supported")
    weights = calls.weights_of(call, request.model)
    prompt = _rendered(service, call, request)
    limit = service.limits.max_context_length
    max_tokens = request.max_tokens
    if limit is not None:
        if len(prompt.tokens) >= limit:
            raise ContextTooLong(len(prompt.tokens), None, limit)
        max_tokens = min(max_tokens, limit - len(prompt.tokens))  # clients ask for as much as hosted models have
    params = sampling_fields.sampling_params(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=request.stop_sequences,
        stop_token_ids=None,
        ignore_eos=False,
        stop_name="stop_sequences",
    )
    start = ChatRequest(
        weights=weights,
        prompt=prompt.tokens,
        params=with_stop_token(params, service.text.eos_token_id),
        is_streamed=bool(request.stream),
        kind=sessions.ANTHROPIC,
    )
    return _Prepared(request, prompt, start)


def _rendered(service: ChatService, call: Call, request: CountTokensRequest) -> ChatPrompt:
    """Return the prompt of a conversation. Raises UserError for what cannot be served."""
    choice = request.tool_choice
    require(
        choice is None or choice.type in ("auto", "none"),
        f"tool_choice.type {shown(choice.type if choice else None)}: this server supports 'auto' and 'none', because "
        "decoding is not constrained",
    )
    output = request.output_config
    require(output is None or output.format is None, "output_config.format: decoding is not constrained")
    may_call = choice is None or choice.type != "none"
    converted = template_messages(request.system, request.messages)
    continues = converted[-1]["role"] == "assistant"
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    return prompts.render(
        service.text,
        call.settings,
        converted,
        template_tools(request.tools or []) if may_call else [],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables={"enable_thinking": thinks},
    )


class _Reply:
    """The message of a response."""

    def __init__(self, prepared: _Prepared, generation: Generation) -> None:
        self._generation = generation
        self._num_prompt = len(prepared.prompt.tokens)
        self._parser: MessageParser = prepared.prompt.parser(separates_reasoning=True)
        self._head: Mapping[str, object] = {
            "id": calls.new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": prepared.request.model,
        }

    async def whole(self) -> Response:
        """Return the response once the sample is complete."""
        parts: list[Part] = []
        finish = Finish("length")
        async for _, delta in calls.merged([self._generation]):
            parts += self._parts(delta)
            finish = delta.finish or finish
        content = _blocks(parts)
        return json_response({**self._head, "content": content, **self._stop(finish), "usage": self._usage()})

    def _parts(self, delta: Delta) -> list[Part]:
        return self._parser.feed(delta.text) + (self._parser.finish() if delta.finish is not None else [])

    def _stop(self, finish: Finish) -> dict[str, object]:
        if finish.reason == "length":
            reason = "max_tokens"
        elif finish.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": finish.stop_string}

    def _usage(self) -> dict[str, object]:
        cached = self._generation.prompt_result.cache_hit_tokens
        return {
            "input_tokens": self._num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._generation.num_tokens,
        }

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of a streamed response."""
        empty: dict[str, object] = {
            "content": list[object](),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        yield _named({"type": "message_start", "message": {**self._head, **empty}})
        index, kind = -1, None
        finish = Finish("length")
        async for _, delta in calls.merged([self._generation]):
            finish = delta.finish or finish
            for part in self._parts(delta):
                is_text = isinstance(part, Piece)
                if kind is None or not is_text or kind != part.kind:
                    if kind is not None:
                        yield _named({"type": "content_block_stop", "index": index})
                    index, kind = index + 1, part.kind if is_text else "tool"
                    yield _named({"type": "content_block_start", "index": index, "content_block": _opened(part)})
                yield _named({"type": "content_block_delta", "index": index, "delta": _changed(part)})
        if kind is not None:
            yield _named({"type": "content_block_stop", "index": index})
        yield _named({"type": "message_delta", "delta": self._stop(finish), "usage": self._usage()})
        yield _named({"type": "message_stop"})


def _named(data: Mapping[str, object]) -> bytes:
    return event(data, str(data["type"]))


def _opened(part: Part) -> dict[str, object]:
    """Return a content block as it begins."""
    if not isinstance(part, Piece):
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _changed(part: Part) -> dict[str, object]:
    """Return what a part adds to its block."""
    if not isinstance(part, Piece):
        return {"type": "input_json_delta", "partial_json": part.arguments}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


def _blocks(parts: Sequence[Part]) -> list[dict[str, object]]:
    """Return the content blocks of a whole message: adjacent texts of one kind are one block."""
    blocks: list[dict[str, object]] = []
    last: Part | None = None
    for part in parts:
        if not isinstance(part, Piece):
            blocks.append({**_opened(part), "input": json.loads(part.arguments)})
        else:
            name = "thinking" if part.kind == "reasoning" else "text"
            if not isinstance(last, Piece) or last.kind != part.kind:
                blocks.append(_opened(part))
            blocks[-1][name] = f"{blocks[-1][name]}{part.text}"
        last = part
    return blocks
