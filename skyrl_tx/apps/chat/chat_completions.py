"""OpenAI's chat completions API: `POST /chat/completions`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request, Response

from skyrl_tx.apps.chat import constraints, logprobs, prompts, schemas
from skyrl_tx.apps.chat.generation import Delta
from skyrl_tx.apps.chat.message import MessageParser, Part, TextPart, keep_first_call
from skyrl_tx.apps.chat.models import find_weights
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.reply import JsonObject, OpenAiReply, serve
from skyrl_tx.apps.chat.response_template import TemplateParser
from skyrl_tx.apps.chat.schemas import ChatCompletionRequest
from skyrl_tx.apps.chat.service import ChatRequest, ChatService, add_stop_token
from skyrl_tx.apps.chat.tool_calls import ToolCall
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.submission.validation import quote_value, require


async def create_chat_completion(request: Request) -> Response:
    """Sample the next message of a conversation."""
    return await serve(request, _prepare)


def _prepare(service: ChatService, call: ApiCall) -> "_ChatCompletion":
    """Check a request and render its prompt.

    Raises ApiError or UserError if the request cannot be served.
    """
    request = schemas.parse_request(call, ChatCompletionRequest)
    _check(request)
    weights = find_weights(call, request.model)

    # Log-probabilities and sampling parameters
    top = schemas.check_top_k(request.top_logprobs, "top_logprobs", service.limits)
    prompt_top = schemas.check_top_k(request.prompt_logprobs, "prompt_logprobs", service.limits)
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    params = schemas.convert_openai_fields(request, getattr(request, limit_name), limit_name)

    # Render the prompt
    continues = bool(request.continue_final_message)
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    require(
        not (continues and generates),
        "continue_final_message: cannot be combined with `add_generation_prompt` true; set one of the two",
        field="continue_final_message",
    )

    params = add_stop_token(params, service.text.eos_token_id)
    messages = request.messages
    choice = request.tool_choice
    prompt = prompts.render_prompt(
        service,
        [prompts.convert_openai_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        [tool.original for tool in request.tools or []] if choice != "none" else [],
        add_generation_prompt=generates,
        continue_final_message=continues,
        variables=_read_variables(request),
    )

    # The request for the engine
    prepared = ChatRequest(
        weights=weights,
        prompt=prompt.tokens,
        params=_constrain(service, call.caller.owner, request, prompt, params),
        options=PromptOptions(
            logprobs=request.prompt_logprobs is not None, topk=prompt_top, sample_topk=top if request.logprobs else 0
        ),
        num_samples=schemas.check_num_samples(request.n),
        is_streamed=bool(request.stream),
        keep_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        delimiters=prompt.delimiters,
    )

    service.check_length(len(prompt.tokens), params.max_tokens)
    service.check_num_logprobs([prepared], has_token_logprobs=bool(request.logprobs))
    return _ChatCompletion(service, request, prompt, prepared)


def _constrain(
    service: ChatService, owner: str, request: ChatCompletionRequest, prompt: ChatPrompt, params: SamplingParams
) -> SamplingParams:
    """Add the constraint of `tool_choice`, `response_format` or `structured_outputs`, if there is one."""
    content = constraints.read_constraint(request.response_format, request.structured_outputs, owner)
    field = "response_format" if request.structured_outputs is None else "structured_outputs"
    choice, tools = request.tool_choice, request.tools or []
    if choice in (None, "auto", "none"):
        reply = (
            None if content is None else constraints.ReplyConstraint(service, prompt, owner).constrain_content(content)
        )
        return constraints.add_constraint(service, params, reply, field)

    # The calls that must be made
    require(content is None, f"{field}: cannot be combined with a tool_choice that forces a call", field=field)
    named = None if choice == "required" else _read_named(choice)
    chosen = [index for index, tool in enumerate(tools) if named in (None, tool.function.name)]
    missing = "needs `tools`" if named is None else f"{quote_value(named)} is not in `tools`"
    require(bool(chosen), f"tool_choice: {missing}", field="tool_choice")
    calls = constraints.ReplyConstraint(service, prompt, owner).require_calls(
        [tools[index].original for index in chosen],
        [f"tools[{index}].function.parameters" for index in chosen],
        has_one_call=named is not None or request.parallel_tool_calls is False,
    )
    return constraints.add_constraint(service, params, calls, "tool_choice")


def _read_named(choice: object) -> str:
    """Return the name of the function in a `tool_choice`. Raises UserError for other forms."""
    value = cast(dict[str, object], choice) if isinstance(choice, dict) else {}
    function = value.get("function")
    name = cast(dict[str, object], function).get("name") if isinstance(function, dict) else None
    if value.get("type") == "function" and isinstance(name, str):
        return name
    raise FieldError(
        f"tool_choice {quote_value(choice)}: must be 'auto', 'none', 'required', or an object with the name of a "
        "function",
        "tool_choice",
    )


def _check(request: ChatCompletionRequest) -> None:
    """Raise UserError if a request asks for a feature that this server does not have."""
    require(
        request.modalities in (None, ["text"]),
        f"modalities {quote_value(request.modalities)}: this server supports only ['text']",
        field="modalities",
    )
    verbosity = request.verbosity
    require(verbosity in (None, "medium"), f"verbosity {quote_value(verbosity)}: is not supported", field="verbosity")
    require(
        not request.top_logprobs or bool(request.logprobs),
        "top_logprobs: needs `logprobs` true",
        field="top_logprobs",
    )


def _read_variables(request: ChatCompletionRequest) -> dict[str, object]:
    """Return the variables for the chat template.

    `reasoning_effort` "none" sets `enable_thinking` to False.
    """
    effort = request.reasoning_effort
    variables = prompts.read_variables(
        request.chat_template_kwargs,
        [
            ("reasoning_effort", "reasoning_effort", effort),
            ("enable_thinking", "enable_thinking", request.enable_thinking),
        ],
    )
    return {"enable_thinking": False, **variables} if effort == "none" else variables


@dataclass(slots=True)
class _Choice:
    """One choice of the response while it is being sampled."""

    parser: MessageParser | TemplateParser
    has_one_call: bool = False
    """Tool calls after the first are left out."""
    parts: list[Part] = field(default_factory=list[Part])
    tokens: list[int] = field(default_factory=list[int])
    scored: list[Delta] = field(default_factory=list[Delta])
    """The deltas whose log-probabilities the response has."""
    finish_reason: str | None = None
    num_calls: int = 0
    """How many tool calls the stream has sent."""

    def read(self, delta: Delta) -> list[Part]:
        """Parse the new text and return its parts. With the last delta, set `finish_reason`.

        The reason is "tool_calls" if the message has tool calls and the sample was not cut off by
        `max_tokens`.
        """
        had_calls = self.parser.has_calls
        parts = self.parser.feed(delta.text, is_last=delta.finish is not None)
        if self.has_one_call:
            parts = keep_first_call(parts, had_calls=had_calls)
        if delta.finish is not None:
            is_call = self.parser.has_calls and delta.finish.reason == "stop"
            self.finish_reason = "tool_calls" if is_call else delta.finish.reason
        return parts


class _ChatCompletion(OpenAiReply):
    """Builds the choices of the response. Each sample becomes one message."""

    id_prefix = "chatcmpl-"
    object_names = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: ChatService, request: ChatCompletionRequest, prompt: ChatPrompt, prepared: ChatRequest
    ) -> None:
        super().__init__(service, request, [prepared])
        self._text = service.text
        self._request = request
        self._prompt = prompt
        self._top = request.top_logprobs or 0
        self._has_described_prompt = False
        separates = request.separate_reasoning is not False
        self._choices = [
            _Choice(prompt.create_parser(separates_reasoning=separates), request.parallel_tool_calls is False)
            for _ in range(prepared.num_samples)
        ]

    def add(self, prompt_index: int, delta: Delta) -> None:
        """Collect the parts, tokens and log-probabilities of a choice."""
        choice = self._choices[delta.index]
        choice.parts += choice.read(delta)
        choice.tokens += delta.token_ids.tolist()
        if self._request.logprobs:
            choice.scored.append(delta)

    def make_body(self) -> JsonObject:
        """Return the body of a response that is not streamed."""
        return super().make_body() | self._describe_prompt()

    def _describe_prompt(self) -> JsonObject:
        """Return the prompt's tokens and log-probabilities, if the client asked for them."""
        described: JsonObject = {}
        if (k := self._request.prompt_logprobs) is not None:
            tokens = logprobs.score_prompt(self._prompt.tokens, self.generations[0].prompt_result, k)
            described["prompt_logprobs"] = logprobs.describe_prompt(self._text, tokens, k)
        if self._request.return_token_ids:
            described["prompt_token_ids"] = self._prompt.tokens
        return described

    def make_choices(self) -> list[JsonObject]:
        """Return the choices of a response that is not streamed."""
        return [
            {
                "index": index,
                "message": _make_message(choice.parts),
                "logprobs": self._describe_logprobs(choice.scored) if self._request.logprobs else None,
                "finish_reason": choice.finish_reason,
                **({"token_ids": choice.tokens} if self._request.return_token_ids else {}),
            }
            for index, choice in enumerate(self._choices)
        ]

    def _describe_logprobs(self, deltas: Sequence[Delta]) -> JsonObject:
        slices = logprobs.score_deltas(deltas, self._top)
        return {"content": logprobs.describe_chat(self._text, slices, with_top=self._top > 0), "refusal": None}

    def make_first_events(self) -> Iterator[JsonObject]:
        """Yield an empty message of the assistant for each choice."""
        for index in range(len(self._choices)):
            yield self._make_event(index, {"role": "assistant", "content": ""})

    def _make_event(self, index: int, delta: JsonObject, token_fields: JsonObject | None = None) -> JsonObject:
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.make_chunk([choice | (token_fields or {})])

    def make_events(self, prompt_index: int, delta: Delta) -> Iterator[JsonObject]:
        """Yield an event for each new part of a message.

        The first event also describes the new tokens.
        """
        index, choice = delta.index, self._choices[delta.index]
        parts = choice.read(delta)
        token_fields = self._describe_tokens(delta)

        if not self._has_described_prompt and (prompt_fields := self._describe_prompt()):
            yield self.make_chunk([], prompt_fields)
        self._has_described_prompt = True

        for part in parts:
            yield self._make_event(index, _make_delta(choice, part), token_fields)
            token_fields = {}
        if choice.finish_reason is not None:
            yield self._make_event(index, {}, token_fields | {"finish_reason": choice.finish_reason})
        elif any(token_fields.values()):
            yield self._make_event(index, {"content": ""}, token_fields)

    def _describe_tokens(self, delta: Delta) -> JsonObject:
        """Return the token ids and log-probabilities of a delta, if the client asked for them.

        The text of these tokens may follow in a later event, for example while a character is
        incomplete.
        """
        described: JsonObject = {}
        if self._request.logprobs and len(delta.token_ids):
            described["logprobs"] = self._describe_logprobs([delta])
        if self._request.return_token_ids:
            described["token_ids"] = delta.token_ids.tolist()
        return described


def _make_message(parts: Sequence[Part]) -> JsonObject:
    """Return the message of the assistant, with its reasoning and tool calls."""
    pieces = [part for part in parts if isinstance(part, TextPart)]
    calls = [_make_call(part) for part in parts if not isinstance(part, TextPart)]
    content = "".join(piece.text for piece in pieces if piece.kind == "content")
    reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    message: JsonObject = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _make_delta(choice: _Choice, part: Part) -> JsonObject:
    """Return the `delta` object that adds a part to its message."""
    if isinstance(part, TextPart):
        return {"content" if part.kind == "content" else "reasoning_content": part.text}
    call = {"index": choice.num_calls, **_make_call(part)}
    choice.num_calls += 1
    return {"tool_calls": [call]}


def _make_call(call: ToolCall) -> JsonObject:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
