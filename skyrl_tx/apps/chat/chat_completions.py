"""OpenAI's chat completions: a conversation in, a message out."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from fastapi import Request, Response

from skyrl_tx.apps.chat import calls, logprobs, prompts, sampling_fields
from skyrl_tx.apps.chat.generation import Delta, Generation
from skyrl_tx.apps.chat.message import MessageParser, Part
from skyrl_tx.apps.chat.openai_schemas import ChatCompletionRequest
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.reasoning import Piece
from skyrl_tx.apps.chat.responses import json_response, usage_of
from skyrl_tx.apps.chat.server_sent_events import DONE, EventStream, event
from skyrl_tx.apps.chat.service import ChatRequest, ChatService, with_stop_token
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.server.context import Call
from skyrl_tx.server.submission.validation import require, shown


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked request."""

    request: ChatCompletionRequest
    prompt: ChatPrompt
    start: ChatRequest


async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    service = calls.service_of(request)

    async def prepare(call: Call) -> _Prepared:
        return await calls.in_thread(_prepare, service, call)

    call, prepared = await calls.received(request, prepare)
    generation = await service.start(call.caller, prepared.start)
    head = {
        "id": calls.new_id("chatcmpl-"),
        "object": "chat.completion.chunk" if prepared.request.stream else "chat.completion",
        "created": calls.now(),
        "model": prepared.request.model,
        "system_fingerprint": service.limits.fingerprint,
    }
    response = _Choices(service, prepared, generation)
    if prepared.request.stream:
        body = calls.error_event("openai", request)
        return EventStream(response.events(head), lambda error: event(body(error)) + DONE, generation.close)
    return await calls.answered(request, response.whole(head), [generation])


def _prepare(service: ChatService, call: Call) -> _Prepared:
    request = call.body.model(ChatCompletionRequest)
    call.check_unknown(request)
    _check(request)
    weights = calls.weights_of(call, request.model)
    limits = service.limits
    top = sampling_fields.top_k_logprobs(request.top_logprobs, "top_logprobs", limits)
    prompt_top = sampling_fields.top_k_logprobs(request.prompt_logprobs, "prompt_logprobs", limits)
    names = "max_completion_tokens", "max_tokens"
    name = names[0] if request.max_completion_tokens is not None else names[1]
    params = sampling_fields.of_openai(request, getattr(request, name), name)
    continues = bool(request.continue_final_message)
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    require(not (continues and generates), "continue_final_message: needs add_generation_prompt false")
    prompt = prompts.render(
        service.text,
        call.settings,
        [prompts.template_message(each, f"messages[{index}]") for index, each in enumerate(request.messages)],
        [prompts.template_tool(tool) for tool in request.tools or []] if request.tool_choice != "none" else [],
        add_generation_prompt=generates,
        continue_final_message=continues,
        variables=_variables(request),
    )
    start = ChatRequest(
        weights=weights,
        prompt=prompt.tokens,
        params=with_stop_token(params, service.text.eos_token_id),
        options=PromptOptions(
            logprobs=request.prompt_logprobs is not None, topk=prompt_top, sample_topk=top if request.logprobs else 0
        ),
        num_samples=sampling_fields.num_samples(request.n),
        is_streamed=bool(request.stream),
        keep_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
    )
    service.check_length(len(start.prompt), params.max_tokens)
    return _Prepared(request, prompt, start)


def _check(request: ChatCompletionRequest) -> None:
    """Raise UserError for what cannot be served."""
    choice = request.tool_choice
    require(
        choice in (None, "auto", "none"),
        f"tool_choice {shown(choice)}: this server supports 'auto' and 'none', because it does not constrain decoding",
    )
    require(request.parallel_tool_calls is not False, "parallel_tool_calls false: decoding is not constrained")
    form = request.response_format
    require(
        form is None or form.type == "text",
        f"response_format.type {shown(form.type if form else None)}: only 'text', because decoding is not constrained",
    )
    require(request.modalities in (None, ["text"]), f"modalities {shown(request.modalities)}: only ['text']")
    require(request.verbosity in (None, "medium"), f"verbosity {shown(request.verbosity)}: is not supported")
    require(not request.top_logprobs or bool(request.logprobs), "top_logprobs: needs logprobs")


def _variables(request: ChatCompletionRequest) -> dict[str, object]:
    """Return the variables of the chat template. `reasoning_effort` "none" turns reasoning off."""
    variables = dict(request.chat_template_kwargs or {})
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        require(name not in variables, f"chat_template_kwargs.{name}: has a field of its own")
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


@dataclass(slots=True)
class _Choice:
    """The state of one choice."""

    parser: MessageParser
    parts: list[Part] = field(default_factory=list[Part])
    tokens: list[int] = field(default_factory=list[int])
    scored: list[logprobs.TokenLogprob] = field(default_factory=list[logprobs.TokenLogprob])
    finish_reason: str | None = None
    num_calls: int = 0

    def finish(self, delta: Delta) -> None:
        """Record how the sample ended. A message with calls that was not cut ends by them."""
        assert delta.finish is not None
        is_call = self.parser.has_calls and delta.finish.reason == "stop"
        self.finish_reason = "tool_calls" if is_call else delta.finish.reason


class _Choices:
    """The choices of a response."""

    def __init__(self, service: ChatService, prepared: _Prepared, generation: Generation) -> None:
        self._text = service.text
        self._request = prepared.request
        self._prompt = prepared.prompt
        self._generation = generation
        self._top = prepared.request.top_logprobs or 0
        separates = prepared.request.separate_reasoning is not False
        self._choices = [
            _Choice(prepared.prompt.parser(separates_reasoning=separates)) for _ in range(prepared.start.num_samples)
        ]

    async def whole(self, head: Mapping[str, object]) -> Response:
        """Return the response once all samples are complete."""
        async for _, delta in calls.merged([self._generation]):
            choice = self._choices[delta.index]
            choice.parts += choice.parser.feed(delta.text)
            choice.tokens += delta.token_ids.tolist()
            if self._request.logprobs:
                choice.scored += logprobs.of_delta(delta, self._top)
            if delta.finish is not None:
                choice.parts += choice.parser.finish()
                choice.finish(delta)
        return await calls.in_thread(lambda: json_response(self._body(head)))

    def _body(self, head: Mapping[str, object]) -> dict[str, object]:
        body: dict[str, object] = {
            **head,
            "choices": [self._object(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage_of([self._generation], [len(self._prompt.tokens)]),
        }
        return body | self._about_prompt()

    def _about_prompt(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if (k := self._request.prompt_logprobs) is not None:
            tokens = logprobs.of_prompt(self._prompt.tokens, self._generation.prompt_result, k)
            found["prompt_logprobs"] = logprobs.prompt_logprobs(self._text, tokens, k)
        if self._request.return_token_ids:
            found["prompt_token_ids"] = self._prompt.tokens
        return found

    def _object(self, index: int, choice: _Choice) -> dict[str, object]:
        texts = [part for part in choice.parts if isinstance(part, Piece)]
        called = [part for part in choice.parts if not isinstance(part, Piece)]
        content = "".join(piece.text for piece in texts if piece.kind == "content")
        reasoning = "".join(piece.text for piece in texts if piece.kind == "reasoning")
        message: dict[str, object] = {
            "role": "assistant",
            "content": content or (None if called else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if called:
            message["tool_calls"] = [
                {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in called
            ]
        made: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.scored),
            "finish_reason": choice.finish_reason,
        }
        return made | ({"token_ids": choice.tokens} if self._request.return_token_ids else {})

    def _logprobs(self, scored: list[logprobs.TokenLogprob]) -> dict[str, object] | None:
        if not self._request.logprobs:
            return None
        return {"content": logprobs.chat_content(self._text, scored, with_top=self._top > 0), "refusal": None}

    async def events(self, head: Mapping[str, object]) -> AsyncGenerator[bytes]:
        """Yield the chunks of a streamed response."""
        options = self._request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        rest: dict[str, object] = {"usage": None} if with_usage else {}

        def chunk(index: int, delta: Mapping[str, object], **more: object) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            return event({**head, "choices": [choice], **rest})

        for index in range(len(self._choices)):
            yield chunk(index, {"role": "assistant", "content": ""})
        is_first = True
        async for _, delta in calls.merged([self._generation]):
            choice = self._choices[delta.index]
            more = self._about_tokens(delta)
            parts = choice.parser.feed(delta.text)
            if delta.finish is not None:
                parts += choice.parser.finish()
                choice.finish(delta)
            if is_first and (about := self._about_prompt()):
                yield event({**head, "choices": [], **about, **rest})
            is_first = False
            for part in parts:
                yield chunk(delta.index, self._delta(choice, part), **more)
                more = {}
            if delta.finish is not None:
                yield chunk(delta.index, {}, **{**more, "finish_reason": choice.finish_reason})
            elif any(more.values()):
                yield chunk(delta.index, {"content": ""}, **more)
        if with_usage:
            yield event({**head, "choices": [], "usage": usage_of([self._generation], [len(self._prompt.tokens)])})
        yield DONE

    def _about_tokens(self, delta: Delta) -> dict[str, object]:
        """Return what a chunk says of its tokens. Their text may follow in later chunks."""
        more: dict[str, object] = {}
        if self._request.logprobs and len(delta.token_ids):
            more["logprobs"] = self._logprobs(logprobs.of_delta(delta, self._top))
        if self._request.return_token_ids:
            more["token_ids"] = delta.token_ids.tolist()
        return more

    def _delta(self, choice: _Choice, part: Part) -> dict[str, object]:
        if isinstance(part, Piece):
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        function = {"name": part.name, "arguments": part.arguments}
        call = {"index": choice.num_calls, "id": part.call_id, "type": "function", "function": function}
        choice.num_calls += 1
        return {"tool_calls": [call]}
